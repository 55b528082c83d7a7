"""Where servers come from: what may be combined."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from dapo_megatron.config.fleet import FleetConfig, expand_hosts, server_urls
from dapo_megatron.errors import UserError

URL = "http://10.0.0.7:8000"


def test_managed_is_the_default_and_needs_nothing() -> None:
    assert FleetConfig().mode == "managed"


@pytest.mark.parametrize(
    "source", [{"urls": [URL, "https://node8:443/"]}, {"urls_file": "servers.txt"}, {"hosts": "gpu[01-02]"}]
)
def test_external_servers_have_addresses(source: dict[str, object]) -> None:
    FleetConfig(mode="external", **source)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"mode": "external"}, "exactly one of `urls`, `urls_file` and `hosts`"),
        ({"mode": "external", "urls": [URL], "urls_file": "f"}, "exactly one of `urls`, `urls_file` and `hosts`"),
        ({"urls": [URL]}, "`urls` is for mode external, not managed"),
        ({"mode": "colocated", "urls_file": "f"}, "`urls_file` is for mode external, not colocated"),
        (
            {"mode": "external", "urls": [URL], "servers": 2},
            r"`servers` \(2\) is for mode managed, and does nothing with",
        ),
        ({"mode": "external", "urls": [URL], "first_gpu": 0}, r"`first_gpu` \(0\) is for mode managed"),
        ({"mode": "external", "urls": [URL], "max_restarts": 0}, r"`max_restarts` \(0\) .* managed and colocated, and"),
        ({"mode": "colocated", "servers": 2}, r"`servers` \(2\) is for mode managed, and does nothing with colocated"),
        ({"mode": "colocated", "first_gpu": 4}, r"`first_gpu` \(4\) is for mode managed"),
        ({"mode": "slurm"}, "'managed', 'external' or 'colocated'"),
        ({"mode": "colocated", "delta_push": True}, "`delta_push` saves nothing with mode colocated"),
        ({"weight_format": "fp8_block", "dtype": "float32"}, "fp8_block needs `dtype` bfloat16 or float16"),
        ({"probe_every": 1, "on_push": "keep"}, "`probe_every` needs `on_push` abort"),
        ({"push_timeout": 541}, "at most 540 seconds: .* in a collective, which fails after 600"),
        ({"token_env": "MY TOKEN"}, "should match pattern"),
        ({"first_gpu": -1}, "greater than or equal to 0"),
        ({"mode": "external", "hosts": "gpu[1-"}, r"hosts: 'gpu\[1-' is no Slurm host list"),
        ({"mode": "external", "urls": [URL], "hosts": "gpu1"}, "exactly one of `urls`, `urls_file` and `hosts`"),
        ({"mode": "external", "urls": [URL], "servers_per_host": 2}, "`servers_per_host` goes with `hosts`"),
    ],
)
def test_what_does_not_fit_together_is_refused(values: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        FleetConfig.model_validate(values)


def test_what_a_configuration_says_is_read_back() -> None:
    """The controller gets one with all its keys, those among them that do nothing in its mode."""
    for fleet in (FleetConfig(mode="external", urls=[URL]), FleetConfig(mode="colocated", max_restarts=1)):
        assert FleetConfig.model_validate_json(fleet.model_dump_json()) == fleet


@pytest.mark.parametrize("url", ["10.0.0.7:8000", "http://10.0.0.7", "ftp://h:1", "http://h:port", "http://h:1/v1", ""])
def test_addresses_are_http_host_and_port(url: str) -> None:
    with pytest.raises(ValidationError, match="must look like http"):
        FleetConfig(mode="external", urls=[url])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login1", "login1"),
        ("a,b.cluster.org", "a b.cluster.org"),
        ("gpu[01-03,07],login1", "gpu01 gpu02 gpu03 gpu07 login1"),
        ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
        ("gpu[098-101]-ib", "gpu098-ib gpu099-ib gpu100-ib gpu101-ib"),
        ("rack[1-2]n[08-09]", "rack1n08 rack1n09 rack2n08 rack2n09"),
        ("10.0.0.[5,7]", "10.0.0.5 10.0.0.7"),
    ],
)
def test_slurm_host_lists(text: str, names: str) -> None:
    assert expand_hosts(text) == names.split()


@pytest.mark.parametrize("text", ["", "a,", "a,,b", "a b", "gpu[", "gpu[]", "gpu[1-]", "gpu[1,]", "gpu[4-1]", "gpu1]"])
def test_other_host_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hosts: "):
        expand_hosts(text)


def test_urls_of_a_fleet(tmp_path: Path) -> None:
    assert server_urls(FleetConfig(servers=3)) == []
    fleet = FleetConfig(mode="external", urls=[URL, f"{URL}/", "https://node8:443"])
    assert server_urls(fleet) == [URL, "https://node8:443"]
    fleet = FleetConfig(mode="external", hosts="gpu[1-2]", servers_per_host=2)
    assert server_urls(fleet) == [f"http://gpu{host}:{port}" for host in (1, 2) for port in (8000, 8001)]
    fleet.port = 9000
    assert server_urls(fleet)[1] == "http://gpu1:9001"
    file = tmp_path / "urls"
    fleet = FleetConfig(mode="external", urls_file=str(file))
    with pytest.raises(UserError, match=r"fleet\.urls_file: .*urls cannot be read: .*No such file"):
        server_urls(fleet)
    file.write_text(f"# two nodes\n\n {URL}/ \n{URL}\nhttp://10.0.0.8:8000\n")
    assert server_urls(fleet) == [URL, "http://10.0.0.8:8000"]
    file.write_text(f"{URL}\n10.0.0.8:8000\n")
    with pytest.raises(UserError, match=r"urls: '10\.0\.0\.8:8000' must look like"):
        server_urls(fleet)


def test_workers_and_source_of_a_fleet() -> None:
    assert FleetConfig(tensor=4, pipeline=2).world_size == 8
    assert FleetConfig().source == "fleet.servers"
    assert FleetConfig(mode="external", hosts="a").source == "fleet.hosts"
    assert FleetConfig(mode="external", urls=[URL]).source == "fleet.urls"
