"""Which servers a push reaches when some fail, with servers, pushers and probes that follow a script."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.config.load import load_config
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.rollout.requests import Server
from dapo_megatron.sync.pusher import Member
from dapo_megatron.sync.server_admin import OtherBytesError, ServerError
from dapo_megatron.trainer import weights
from dapo_megatron.trainer.probe import Gap
from dapo_megatron.trainer.weights import BLAMELESS_FAILURES, WeightSync
from tests.unit.config_helpers import write_config, write_model


def server(id: str, life: int = 0) -> Server:
    return Server(id, f"http://{id}", "token", life)


class Script:
    """The rollouts, all pushers and the probe at once. `log` is what was asked of them, in order.

    The next of `failures` is raised by the next push to servers, if it is not None.
    """

    def __init__(self, servers: str) -> None:
        self.there = {id: server(id) for id in servers}
        self.failures: list[Exception | None] = []
        self.log: list[Any] = []
        self.silent: set[str] = set()
        self.gap = Gap(0.01, 0.0)
        self.pushers = 0

    # rollouts

    def begin_push(self, push: int, version: int) -> None:
        self.log.append(("begin", push, version))

    def servers_for_push(self, push: int, attempt: int) -> Sequence[Server]:
        return tuple(self.there.values())

    def push_failed(self, push: int, attempt: int, id: str, reason: str) -> None:
        self.log.append(("failed", push, attempt, id))
        self.there.pop(id, None)

    def push_done(self, push: int, attempt: int, seconds: float) -> None:
        assert seconds >= 0
        self.log.append(("done", push, attempt))

    def admitted(self, number: int, version: int, ids: Sequence[str], failed: dict[str, str]) -> None:
        self.log.append(("admitted", number, version, "".join(ids), failed))

    # a probe

    def gaps(self, servers: Sequence[Server], version: int) -> dict[str, Gap]:
        self.log.append(("gaps", "".join(s.id for s in servers), version))
        return {s.id: self.gap for s in servers if s.id not in self.silent}

    def check(self, gaps: dict[str, Gap], before: float | None) -> None:
        self.log.append(("check", "".join(gaps), before))


def probe(ids: str, version: int, before: float | None = 0.01) -> list[Any]:
    """What a probe leaves in a log."""
    return [("gaps", ids, version), ("check", ids, before)]


class Pusher:
    def __init__(self, script: Script) -> None:
        self.script, self.number, self.members = script, script.pushers, ""
        script.pushers += 1

    def connect(self, members: Sequence[Member]) -> None:
        self.members = "".join(member.id for member in members)
        self.script.log.append(("connect", self.number, self.members))

    def push(self, version: int, *, held: bool = False) -> None:
        self.script.log.append(("push", self.number, self.members, version, held))
        if self.script.failures and (error := self.script.failures.pop(0)) is not None:
            self.members = ""  # as the groups of a push that failed
            raise error

    def close(self) -> None:
        self.script.log.append(("close", self.number))


MakeSync = Callable[..., tuple[WeightSync, Script]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSync:
    write_model(tmp_path / "model")

    def make(servers: str, *overrides: str, rank: int = 0) -> tuple[WeightSync, Script]:
        script = Script(servers)
        monkeypatch.setattr(weights, "proved_plan", lambda *_: None)
        monkeypatch.setattr(weights, "new_pusher", lambda *_: Pusher(script))
        monkeypatch.setattr(weights, "Probe", lambda *_: script)
        policy: Any = SimpleNamespace(layout=SimpleNamespace(rank=rank, world_size=2), arch=None, chunks=[])
        config = load_config(write_config(tmp_path), overrides)
        return WeightSync(config, policy, script, []), script  # type: ignore[arg-type]

    return make


def test_groups_are_built_when_the_servers_change_and_not_before(make: MakeSync) -> None:
    sync, script = make("ab")
    sync.push(1)
    sync.push(2)
    assert script.log == [
        ("begin", 0, 1),
        ("connect", 0, "ab"),
        ("push", 0, "ab", 1, False),
        *probe("ab", 1, None),
        ("done", 0, 0),
        ("begin", 1, 2),
        ("push", 0, "ab", 2, False),
        ("done", 1, 0),
    ]
    script.log.clear()
    script.there["a"] = server("a", life=1)  # it was lost and came back, at the same address
    sync.push(3)
    assert script.log[1:] == [
        ("connect", 0, "ab"),
        ("push", 0, "ab", 3, False),
        *probe("a", 3),  # before it gets an answer
        ("done", 2, 0),
    ]
    script.there["c"] = server("c")
    sync.push(4)
    assert ("connect", 0, "abc") in script.log
    missed = script.there.pop("c")
    sync.push(5)
    script.there["c"] = missed
    sync.push(6)
    assert script.log[-3:] == [*probe("c", 6), ("done", 5, 0)]
    sync.__exit__()
    assert script.log[-1] == ("close", 0)


def test_a_server_that_fails_is_left_out_and_the_rest_get_the_weights(make: MakeSync) -> None:
    sync, script = make("abc")
    script.failures = [ServerError("late", server("b").url), ServerError("gone", server("a").url)]
    sync.push(1)
    assert script.log == [
        ("begin", 0, 1),
        ("connect", 0, "abc"),
        ("push", 0, "abc", 1, False),
        ("failed", 0, 0, "b"),
        ("connect", 0, "ac"),
        ("push", 0, "ac", 1, False),
        ("failed", 0, 1, "a"),
        ("connect", 0, "c"),
        ("push", 0, "c", 1, False),
        *probe("c", 1, None),
        ("done", 0, 2),
    ]


def test_the_last_server_may_fail_too(make: MakeSync) -> None:
    sync, script = make("a")
    script.failures = [ServerError("gone", server("a").url)]
    sync.push(1)
    assert script.log[-2:] == [("failed", 0, 0, "a"), ("done", 0, 1)]
    script.log.clear()
    sync.push(2)
    assert script.log == [("begin", 1, 2), ("done", 1, 0)]


def test_a_failure_that_is_no_servers_is_tried_again_a_few_times(make: MakeSync) -> None:
    sync, script = make("ab")
    script.failures = [ServerError("somebody")] * (BLAMELESS_FAILURES - 1)
    sync.push(1)
    assert script.log[-1] == ("done", 0, BLAMELESS_FAILURES - 1)
    assert script.log.count(("connect", 0, "ab")) == BLAMELESS_FAILURES  # the groups were gone
    assert set(script.there) == {"a", "b"}
    script.failures = [ServerError("somebody")] * BLAMELESS_FAILURES
    with pytest.raises(ServerError, match="somebody"):
        sync.push(2)


def test_other_bytes_than_were_sent_end_the_run(make: MakeSync) -> None:
    sync, script = make("ab")
    script.failures = [OtherBytesError("tensor x arrived with another hash", server("b").url)]
    with pytest.raises(OtherBytesError, match="tensor x"):
        sync.push(1)
    assert not any(entry[0] == "failed" for entry in script.log)
    script.failures = [OtherBytesError("tensor x arrived with another hash", server("b").url)]
    with pytest.raises(OtherBytesError, match="tensor x"):
        sync.admit(Admission(0, (server("b"),)), 1)


def test_other_ranks_do_the_same_and_tell_nobody(make: MakeSync, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, script = make("ab", rank=1)
    lists = [(server("a"), server("b")), (server("a"),)]
    monkeypatch.setattr(script, "servers_for_push", lambda push, attempt: lists[attempt])
    script.failures = [ServerError("late", server("b").url)]
    sync.push(1)
    assert script.log == [
        ("connect", 0, "ab"),
        ("push", 0, "ab", 1, False),
        ("connect", 0, "a"),
        ("push", 0, "a", 1, False),
        *probe("a", 1, None),
    ]


@pytest.mark.parametrize(
    ("overrides", "held"),
    [
        ([], False),
        (["rollout.pipeline=async"], False),
        (["rollout.pipeline=async", "fleet.on_push=keep"], True),
    ],
)
def test_the_fleet_holds_answers_under_way_where_it_was_asked_to(
    make: MakeSync, overrides: list[str], held: bool
) -> None:
    """But not at the start, when all weights have the same version, nor in an admission, when others go on."""
    sync, script = make("a", *overrides)
    sync.verify(0)
    assert [entry[4] for entry in script.log if entry[0] == "push"] == [False] * 4
    script.log.clear()
    sync.push(1)
    sync.admit(Admission(0, (server("c"),)), 1)
    assert [entry[4] for entry in script.log if entry[0] == "push"] == [held, False]


def test_servers_are_probed_as_often_as_was_asked(make: MakeSync) -> None:
    sync, script = make("ab", "fleet.probe_every=2")
    sync.verify(0)
    script.log.clear()
    for version in range(1, 6):
        sync.push(version)
    assert [entry[1:] for entry in script.log if entry[0] == "gaps"] == [("ab", 2), ("ab", 4)]
    assert [entry[1] for entry in script.log if entry[0] == "check"] == ["ab", "ab"]
    assert [entry[0] for entry in script.log[3:8]] == ["begin", "push", "gaps", "check", "done"]  # nothing else runs
    script.there["c"] = server("c")
    script.log.clear()
    for version in range(6, 8):
        sync.push(version)
    assert [entry[1:] for entry in script.log if entry[0] == "gaps"] == [("abc", 6)]


@pytest.mark.parametrize("version", [0, 1])
def test_a_server_that_answers_no_probe_fails_the_push(make: MakeSync, version: int) -> None:
    sync, script = make("ab")
    script.silent = {"b"}
    if version:
        sync.push(version)
    else:
        sync.verify(version)
    assert script.log[:9] == [
        ("begin", 0, version),
        ("connect", 0, "ab"),
        ("push", 0, "ab", version, False),
        ("gaps", "ab", version),
        ("check", "a", None),
        ("failed", 0, 0, "b"),
        ("connect", 0, "a"),
        ("push", 0, "a", version, False),
        *([("done", 0, 1)] if version else [("gaps", "a", version)]),
    ]


def test_noise_is_taken_back_when_the_probe_fails(make: MakeSync, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, script = make("a")
    restored: list[Any] = []
    monkeypatch.setattr(sync, "_add_noise", lambda: "kept")
    monkeypatch.setattr(sync, "_restore", restored.append)

    def check(gaps: dict[str, Gap], before: float | None) -> None:
        if before is not None:
            raise RuntimeError("differ")

    monkeypatch.setattr(script, "check", check)
    with pytest.raises(RuntimeError, match="differ"):
        sync.verify(0)
    assert restored == ["kept"]


class Turns:
    """Notes which servers sleep."""

    def __init__(self, *_: object) -> None:
        self.log: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Callable[[Sequence[Server]], None]:
        return lambda servers: self.log.append((name, "".join(f"{s.id}{s.life}" for s in servers)))


def test_colocated_servers_that_come_back_sleep_with_the_others(
    make: MakeSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    monkeypatch.setattr(weights, "Turns", lambda *_: turns)
    sync, _ = make("ab", "fleet.mode=colocated")
    sync.push(0)
    sync.begin_training()
    sync.push(1)
    sync.admit(Admission(0, (server("b", life=1),)), 1)
    sync.begin_training()
    assert turns.log == [
        ("take_weights", "a0b0"),
        ("generate", "a0b0"),
        ("train", "a0b0"),
        ("take_weights", "a0b0"),
        ("generate", "a0b0"),
        ("take_weights", "b1"),
        ("generate", "b1"),
        ("train", "a0b1"),
    ]


def test_a_server_that_is_admitted_has_left_the_groups_it_was_in(make: MakeSync) -> None:
    sync, script = make("ab")
    sync.push(1)
    sync.admit(Admission(0, (server("a"),)), 1)
    script.log.clear()
    sync.push(2)
    assert ("connect", 0, "ab") in script.log


def test_the_start_compares_noisy_weights_with_the_first_gap(make: MakeSync) -> None:
    sync, script = make("ab")
    sync.verify(7)
    assert [entry[0] for entry in script.log if entry[0] in ("push", "gaps", "check")] == [
        "push",
        "gaps",
        "check",
        "push",
        "push",
        "gaps",
        "check",
        "push",
    ]
    assert [entry[2] for entry in script.log if entry[0] == "check"] == [None, 0.01]
    assert [entry[1] for entry in script.log if entry[0] == "begin"] == [0, 1, 2, 3]
    script.gap = Gap(0.5, 0.5)
    sync.admit(Admission(0, (server("c"),)), 8)
    assert ("check", "c", 0.01) in script.log  # against the start's
    sync.admit(Admission(1, (server("d"),)), 8)
    assert ("check", "d", 0.01) in script.log


def test_an_admission_has_groups_of_its_own(make: MakeSync) -> None:
    sync, script = make("ab")
    sync.push(1)
    script.log.clear()
    sync.admit(Admission(3, (server("c"), server("d"))), 1)
    assert script.log == [
        ("connect", 1, "cd"),
        ("push", 1, "cd", 1, False),
        ("close", 1),
        ("gaps", "cd", 1),
        ("check", "cd", 0.01),
        ("admitted", 3, 1, "cd", {}),
    ]
    script.log.clear()
    sync.push(2)
    assert script.log[1] == ("push", 0, "ab", 2, False)  # those of the others are still there


def test_a_server_that_fails_its_admission_is_told_and_the_others_wait_for_another(make: MakeSync) -> None:
    sync, script = make("ab")
    script.failures = [ServerError("late", server("d").url)]
    sync.admit(Admission(0, (server("c"), server("d"))), 1)
    assert script.log[-1] == ("admitted", 0, 1, "", {"d": "late"})
    script.failures = [ServerError("somebody")]
    sync.admit(Admission(1, (server("c"), server("d"))), 1)
    assert script.log[-1] == ("admitted", 1, 1, "", {"c": "somebody", "d": "somebody"})
    script.silent = {"d"}
    sync.admit(Admission(2, (server("c"), server("d"))), 1)
    assert script.log[-1] == ("admitted", 2, 1, "c", {"d": "it did not answer the probe"})


def test_without_servers_nothing_is_pushed(make: MakeSync, tmp_path: Path) -> None:
    sync, script = make("", f"rollout.replay={tmp_path}")
    sync.push(1)
    sync.verify(1)
    sync.__exit__()
    assert script.log == []
