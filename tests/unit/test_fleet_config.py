"""Where servers come from: what may be combined."""

import pytest
from pydantic import ValidationError

from dapo_megatron.config.fleet import FleetConfig

URL = "http://10.0.0.7:8000"


def test_managed_is_the_default_and_needs_nothing() -> None:
    assert FleetConfig().mode == "managed"


@pytest.mark.parametrize("source", [{"urls": [URL, "https://node8:443/"]}, {"urls_file": "servers.txt"}])
def test_external_servers_have_addresses(source: dict[str, object]) -> None:
    FleetConfig(mode="external", **source)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"mode": "external"}, "exactly one of `urls`, `urls_file` and `hosts`"),
        ({"mode": "external", "urls": [URL], "urls_file": "f"}, "exactly one of `urls`, `urls_file` and `hosts`"),
        ({"urls": [URL]}, "`urls` is for mode external, not managed"),
        ({"mode": "colocated", "urls_file": "f"}, "`urls_file` is for mode external, not colocated"),
        ({"mode": "slurm"}, "'managed', 'external' or 'colocated'"),
        ({"token_env": "MY TOKEN"}, "should match pattern"),
        ({"first_gpu": -1}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(values: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        FleetConfig.model_validate(values)


@pytest.mark.parametrize("url", ["10.0.0.7:8000", "http://10.0.0.7", "ftp://h:1", "http://h:port", "http://h:1/v1", ""])
def test_addresses_are_http_host_and_port(url: str) -> None:
    with pytest.raises(ValidationError, match="must look like http"):
        FleetConfig(mode="external", urls=[url])
