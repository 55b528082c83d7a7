"""What a probe of servers finds, and what it takes for a fault."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.config.load import load_config
from dapo_megatron.rollout.requests import Server
from dapo_megatron.trainer.probe import PROBE_TOKENS, PROBES, Gap, Probe
from tests.fake_server import VOCABULARY, FakeServer
from tests.unit.config_helpers import write_config, write_model

MakeProbe = Callable[..., Probe]


@pytest.fixture
def make(tmp_path: Path) -> MakeProbe:
    write_model(tmp_path / "model")
    policy: Any = SimpleNamespace(arch=SimpleNamespace(vocab_size=VOCABULARY))
    return lambda *overrides: Probe(load_config(write_config(tmp_path), overrides), policy)


EXACT = ("training.precision=fp32", "fleet.dtype=float32")


@pytest.mark.parametrize("largest", [0.0, 9e-5])
def test_fp32_servers_must_agree_to_the_fourth_digit(make: MakeProbe, largest: float) -> None:
    probe = make(*EXACT)
    probe.check({"a": Gap(0.0, largest)}, before=5.0)
    for wrong in (1.1e-4, math.nan):
        with pytest.raises(
            RuntimeError, match=r"log-probs of server b differ .* by up to (nan|1\.1e-04) \(limit 1e-04"
        ):
            probe.check({"a": Gap(0.0, largest), "b": Gap(0.0, wrong)}, before=5.0)


@pytest.mark.parametrize("overrides", [(), EXACT[1:]])
def test_less_exact_servers_must_not_be_further_off_than_at_the_start(
    make: MakeProbe, overrides: tuple[str, ...]
) -> None:
    probe = make("training.precision=bf16", *overrides)
    probe.check({"a": Gap(0.02, 0.5)}, before=0.0)
    probe.check({"a": Gap(0.15, 0.5)}, before=0.1)
    probe.check({"a": Gap(0.3, 0.5)}, before=None)
    for gap, before in ((0.021, 0.0), (0.151, 0.1), (math.nan, 0.1), (0.301, None), (math.nan, None)):
        with pytest.raises(RuntimeError, match=r"log-probs of server a differ from the trainer's by \S+ on average"):
            probe.check({"a": Gap(gap, gap)}, before)


async def test_servers_are_asked_for_answers_that_do_not_end_early(make: MakeProbe) -> None:
    async with FakeServer("one") as one, FakeServer("two", faults=["500"], stubborn=True) as two:
        gone = Server("three", "http://127.0.0.1:9", "secret")
        answers = await make()._ask([one.server, two.server, gone], one.version)
    assert list(answers) == ["one"]  # the others fail: somebody else sees to them
    assert [len(answer.token_ids) for answer in answers["one"]] == [PROBE_TOKENS] * PROBES
    assert all(body["sampling_params"]["ignore_eos"] for body in one.bodies)
    assert len({body["request_id"] for body in one.bodies}) == PROBES


async def test_another_version_than_was_pushed_is_a_fault(make: MakeProbe) -> None:
    async with FakeServer("one", version=3) as one:
        with pytest.raises(RuntimeError, match=r"server one has weights \[3\] after the push of version 4"):
            await make()._ask([one.server], 4)
