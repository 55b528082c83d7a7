"""Asynchrony on the trainer's side: what is begun ahead, how old tokens may be, what a killed run loses."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dapo_megatron.config.run import Config
from dapo_megatron.monitoring.monitor import Monitor
from dapo_megatron.rollout.handle import StopRun
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.run_state.checkpoint import load_latest
from dapo_megatron.train import run
from dapo_megatron.trainer.feed import Feed
from dapo_megatron.trainer.learner import Learner
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.staleness import staleness, with_staleness
from dapo_megatron.types import BatchHeader, Int32, TokenBlock
from tests.batches import make_batch, make_config
from tests.training import differing

VOCAB = 151
GROUPS = 4
ADMISSION = Admission(0, ())
PIPELINES: list[dict[str, Any]] = [
    {"pipeline": "sync"},
    {"pipeline": "one_step_off"},
    {"pipeline": "async", "max_staleness": 2},
]
NO_TOKENS = TokenBlock(*(np.zeros(0, np.int32) for _ in range(5)), np.zeros(0, np.float32))


class Servers:
    """A fleet that samples each step's four draws when it is begun, and knows the weights that were pushed last.

    `cursor` counts draws. What a draw becomes depends on its number alone. `skipped` are steps without a group.
    """

    def __init__(self, cursor: int = 0, version: int = 0, skipped: Sequence[int] = ()) -> None:
        self.version, self.cursor, self.skipped = version, cursor, skipped
        self.begun: list[tuple[int, int, int]] = []
        self.batches: dict[int, tuple[BatchHeader, TokenBlock]] = {}
        self.taken: list[int] = []  # draws that were handed over
        self.admitted: list[tuple[Admission, int]] = []
        self.dies_at: int | None = None

    def begin(self, step: int, version: int, trained_version: int) -> None:
        assert version == self.version
        assert step == max(self.batches, default=step - 1) + 1
        self.begun.append((step, version, trained_version))
        header, tokens = make_batch(VOCAB, groups=GROUPS, seed=self.cursor)
        draws = np.arange(self.cursor, self.cursor + GROUPS, dtype=np.int32)
        self.cursor += GROUPS
        header = replace(header, step=step, draws=draws, cursor={"drawn": self.cursor})
        batch = sampled_with(header, version), tokens
        self.batches[step] = (empty(header), NO_TOKENS) if step in self.skipped else batch

    def wait(self, step: int, on_progress: object, on_admission: Callable[[Admission], None]) -> BatchHeader | StopRun:
        on_admission(ADMISSION)
        header = self.batches[step][0]
        self.taken += header.draws.tolist()
        return header

    def tokens(self, step: int, responses: Int32) -> TokenBlock:
        return self.batches[step][1]

    def evaluate(self, name: str, on_progress: object, on_admission: Callable[[Admission], None]) -> dict[str, Any]:
        on_admission(ADMISSION)
        return {"scores": [1.0]}

    def begin_training(self) -> None:
        """None of the servers needs the trainer's memory."""

    def push(self, version: int) -> None:
        if version == self.dies_at:
            raise KeyboardInterrupt
        self.version = version

    def admit(self, admission: Admission, version: int) -> None:
        self.admitted.append((admission, version))


def sampled_with(header: BatchHeader, version: int) -> BatchHeader:
    """All tokens are of this version."""
    present = np.flatnonzero(header.response_lengths).astype(np.int32)
    versions = np.full(len(present), version, np.int32)
    lengths = header.response_lengths[present]
    return replace(header, run_responses=present, run_versions=versions, run_lengths=lengths)


def empty(header: BatchHeader) -> BatchHeader:
    """Without a group."""
    arrays = {f.name: getattr(header, f.name)[:0] for f in fields(header) if hasattr(getattr(header, f.name), "dtype")}
    return replace(header, **arrays)


def make(folder: Path, model: Path, steps: int = 4, **rollout: Any) -> Config:
    rollout = {"prompts_per_step": GROUPS, "samples_per_prompt": 4, "max_tokens": 12} | rollout
    return make_config(
        model,
        run={"dir": str(folder), "steps": steps, "save_every": 2, "export": False},
        rollout=rollout,
        evaluation={"data": {"arithmetic": {}}},
    )


def feed_of(config: Config, servers: Servers, layout: Layout, **changes: int) -> Feed:
    """Without a model: what packs batches is not asked for here."""
    policy: Any = SimpleNamespace(layout=replace(layout, **changes), packing=None)
    return Feed(servers, servers.admit, config, policy, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pipeline", "begun"),
    [
        (PIPELINES[0], [[(1, 0, 0)], [(2, 1, 1)], [(3, 2, 2)], [(4, 3, 3)]]),
        (PIPELINES[1], [[(1, 0, 0), (2, 0, 1)], [(3, 1, 2)], [(4, 2, 3)], []]),
        (PIPELINES[2], [[(1, 0, 0), (2, 0, 1), (3, 0, 2)], [(4, 1, 3)], [], []]),
    ],
    ids=lambda value: value["pipeline"] if isinstance(value, dict) else "",
)
def test_what_is_begun_ahead(
    tmp_path: Path, layout: Layout, pipeline: dict[str, Any], begun: list[list[tuple[int, int, int]]]
) -> None:
    """Each step once, none past the last, for the version that it will be trained from."""
    servers = Servers(skipped=range(9))  # empty batches: nothing is packed
    feed = feed_of(make(tmp_path, tmp_path, **pipeline), servers, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dapo_megatron.trainer.feed.load_batch", lambda header, *_: header)
        for step, expected in enumerate(begun, start=1):
            before = len(servers.begun)
            feed.next_batch(step, servers.version)
            assert servers.begun[before:] == expected
            servers.push(servers.version + 1)


def test_other_ranks_begin_nothing(tmp_path: Path, layout: Layout) -> None:
    servers = Servers()
    servers.begin(1, 0, 0)  # rank 0 does
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dapo_megatron.trainer.feed.load_batch", lambda header, *_: header)
        feed_of(make(tmp_path, tmp_path), servers, layout, rank=1).next_batch(1, 0)
    assert servers.begun == [(1, 0, 0)]


def test_servers_that_come_back_get_the_current_weights(tmp_path: Path, layout: Layout) -> None:
    """While a batch is waited for, and an evaluation, on every rank."""
    servers = Servers(version=5, skipped=[1])
    feed = feed_of(make(tmp_path, tmp_path), servers, layout, rank=1)
    servers.begin(1, 5, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dapo_megatron.trainer.feed.load_batch", lambda header, *_: header)
        feed.next_batch(1, 5)
    assert feed.evaluate("after", 6) == {"scores": [1.0]}
    assert servers.admitted == [(ADMISSION, 5), (ADMISSION, 6)]


def test_nothing_is_evaluated_without_held_out_prompts(tmp_path: Path, layout: Layout) -> None:
    config = make(tmp_path, tmp_path)
    config.evaluation.data = None
    servers = Servers()
    assert feed_of(config, servers, layout).evaluate("after", 6) is None
    assert servers.admitted == []


def some_header() -> BatchHeader:
    """Three responses of 4, 0 and 2 tokens; draws 7 and 8."""
    return replace(
        make_batch(VOCAB, groups=2, samples=2)[0],
        step=3,
        groups=np.array([0, 0, 1], np.int32),
        draws=np.array([7, 8], np.int32),
        response_lengths=np.array([4, 0, 2], np.int32),
        truncated=np.zeros(3, bool),
    )


@pytest.mark.parametrize(
    ("runs", "version", "bound", "wrong"),
    [
        ([(0, 4, 4), (2, 4, 2)], 4, 0, None),
        ([(0, 3, 1), (0, 4, 3), (2, 4, 2)], 4, 1, None),
        (
            [(0, 3, 1), (0, 4, 3), (2, 4, 2)],
            4,
            0,
            "response 0 (draw 7) was sampled with … 3 to 4",
        ),
        (
            [(0, 4, 4), (2, 2, 1), (2, 4, 1)],
            4,
            1,
            "response 2 (draw 8) was sampled with … 2 to 4",
        ),
        (
            [(0, 4, 4), (2, 4, 1), (2, 5, 1)],
            4,
            1,
            "response 2 (draw 8) was sampled with … 4 to 5",
        ),
        ([(0, 0, 4)], 0, 2, "response 2 (draw 8) was sampled with … -1 to -1"),
        ([(0, 0, 4), (2, 1, 2)], 1, 5, None),
    ],
)
def test_bound_on_staleness_is_hard(
    runs: list[tuple[int, int, int]], version: int, bound: int, wrong: str | None
) -> None:
    responses, versions, lengths = (np.array(column, np.int32) for column in zip(*runs, strict=True))
    header = replace(some_header(), run_responses=responses, run_versions=versions, run_lengths=lengths)
    if wrong is None:
        assert with_staleness(header, version, bound, None).oldest_in_loss == 0
        return
    with pytest.raises(RuntimeError) as caught:
        with_staleness(header, version, bound, None)
    assert (
        f"step 3: {wrong.replace('…', 'weights of the versions')}; a policy of version {version} is trained on"
        in str(caught.value)
    )
    assert str(caught.value).endswith(f"(rollout.max_staleness is {bound})")


def test_bound_is_checked_on_what_servers_made(tmp_path: Path, layout: Layout) -> None:
    servers = Servers(version=1)
    servers.begin(1, 1, 1)
    header, tokens = servers.batches[1]
    servers.batches[1] = sampled_with(header, 0), tokens
    with pytest.raises(RuntimeError, match=r"step 1: response 0 \(draw 0\) was .* \(rollout.max_staleness is 0\)"):
        feed_of(make(tmp_path, tmp_path), servers, layout, rank=1).next_batch(1, 1)


def test_staleness_is_measured() -> None:
    columns = ([0, 0, 0, 2], [1, 3, 4, 4], [1, 1, 2, 2])
    responses, versions, lengths = (np.array(column, np.int32) for column in columns)
    header = replace(some_header(), run_responses=responses, run_versions=versions, run_lengths=lengths)
    expected = {"staleness": 4 / 6, "staleness_max": 3.0, "off_policy_tokens": 2 / 6, "stale_masked": 0.0}
    assert staleness(header, 4) == pytest.approx(expected)
    found = with_staleness(replace(header, stats={"kept": 2.0}), 4, 3, 1)
    assert found.oldest_in_loss == 3
    assert found.lengths_out_of_loss.tolist() == [1, 0, 0]
    assert found.stats == pytest.approx(expected | {"kept": 2.0, "stale_masked": 1 / 6})
    nothing = empty(make_batch(VOCAB)[0])
    assert all(np.isnan(value) for value in with_staleness(nothing, 4, 0, None).stats.values())


class Trained:
    """A run of the real loop on scripted servers, up to its end or its death."""

    def __init__(self, config: Config, layout: Layout, dies_at: int | None = None, skipped: Sequence[int] = ()) -> None:
        learner = Learner(config, layout)
        self.state, self.policy = load_latest(config, learner.policy), learner.policy
        self.servers = Servers(self.state.cursor.get("drawn", 0), self.state.version, skipped)
        self.servers.dies_at = dies_at
        weights: Any = self.servers
        feed = Feed(weights, self.servers.admit, config, self.policy, lambda *_: None)
        monitor = Monitor(config, config.run.dir, enabled=False)
        self.steps: list[dict[str, float]] = []
        monitor.step = lambda _, metrics: self.steps.append(dict(metrics))  # type: ignore[method-assign]
        try:
            run(config, learner, feed, weights, self.state, monitor)
        except KeyboardInterrupt:
            assert dies_at is not None

    @property
    def trained(self) -> list[int]:
        """Draws of the steps that were finished."""
        return self.servers.taken[: GROUPS * len(self.steps)]


@pytest.mark.parametrize("pipeline", PIPELINES[1:], ids=lambda pipeline: pipeline["pipeline"])
def test_killed_run_goes_on_without_loss(
    tmp_path: Path, layout: Layout, checkpoint: Callable[..., Path], pipeline: dict[str, Any]
) -> None:
    """Law 4: batches that were begun ahead are sampled again; every draw is trained on once, in the order of draws."""
    straight = Trained(make(tmp_path / "straight", checkpoint(), **pipeline), layout)
    assert straight.trained == list(range(4 * GROUPS))
    config = make(tmp_path / "killed", checkpoint(), **pipeline)
    killed = Trained(config, layout, dies_at=3)
    assert len(killed.servers.begun) == min(4, 3 + config.rollout.steps_ahead)
    resumed = Trained(config, layout)
    assert resumed.servers.begun[0] == (3, 2, 2)
    assert killed.trained + resumed.trained == straight.trained
    assert resumed.state.version == straight.state.version == 4
    assert differing(resumed.policy, straight.policy) == []


def test_steps_without_a_group_make_no_version(tmp_path: Path, layout: Layout, checkpoint: Callable[..., Path]) -> None:
    """Later steps are then trained from an older version than they were begun for, and their tokens are younger."""
    config = make(tmp_path, checkpoint(), steps=5, pipeline="async", max_staleness=2)
    done = Trained(config, layout, skipped=[2])
    assert [int(step["skipped"]) for step in done.steps] == [0, 1, 0, 0, 0]
    assert done.servers.begun == [(1, 0, 0), (2, 0, 1), (3, 0, 2), (4, 1, 3), (5, 1, 3)]
    assert [step["staleness_max"] for step in done.steps if not step["skipped"]] == [0, 1, 1, 2]


def test_first_update_starts_on_policy_when_asynchronous(
    tmp_path: Path, layout: Layout, checkpoint: Callable[..., Path]
) -> None:
    """Law 6 holds for tokens of any age: pi_old is recomputed with the weights that the step begins with."""
    done = Trained(make(tmp_path, checkpoint(), steps=3, **PIPELINES[2]), layout)
    assert [step["staleness"] for step in done.steps] == [0, 1, 2]
    assert [step["first_log_ratio"] for step in done.steps] == [0, 0, 0]
