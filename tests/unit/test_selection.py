"""Which groups are trained on, and what becomes of the rest: law 7 on a simulated clock, leftovers, arrival."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.history import Running
from dapo_megatron.rollout.leftovers import Leftover, Leftovers
from dapo_megatron.rollout.records import digest
from dapo_megatron.rollout.requests import NOTHING, Generated
from dapo_megatron.rollout.sampler import GroupFailedError, GroupRequest, Progress, SampledBatch, Sampler
from dapo_megatron.types import Prompt, Sample
from tests.virtual_time import run_virtually

SIGMA = 2 / 3  # of the logarithm of lengths
MEAN = float(np.exp(SIGMA**2 / 2))


def part(number: int, versions: Any) -> Generated:
    """The beginning of an answer that spells its number, as many tokens as there are versions."""
    count = len(versions)
    return Generated(
        np.full(count, number, np.int32), np.zeros(count, np.float32), np.array(versions, np.int32), "partial"
    )


def whole(answer: Generated, correct: bool) -> Sample:
    return Sample(
        answer.token_ids, answer.log_probs, "stop", answer.versions, correct, float(correct), score=float(correct)
    )


@dataclass
class Engine:
    """Answers token by token, one a second. The n-th answer of a draw has a length of its own and spells n."""

    length: Callable[[int, int], int]  # of draw and answer
    mixed: Callable[[Prompt], bool] = lambda prompt: True
    fails: Callable[[int], bool] = lambda draw: False
    version: int = 0
    calls: list[GroupRequest] = field(default_factory=list)

    async def generate(self, request: GroupRequest) -> tuple[Sample, ...]:
        self.calls.append(request)
        loop = asyncio.get_running_loop()
        started, begun = loop.time(), self._begun(request)
        left = {n: self.length(request.draw, n) - len(so_far.token_ids) for n, so_far in begun.items()}
        done = dict(request.finished)
        try:
            for number in sorted(left, key=left.__getitem__):
                await asyncio.sleep(started + left[number] - loop.time())
                answer = self._more(begun.pop(number), number, left[number])
                done[number] = whole(answer, number == 0 or not self.mixed(request.prompt))
                request.on_answer(number, done[number])
                if self.fails(request.draw):
                    raise GroupFailedError
        except asyncio.CancelledError:
            for number, so_far in begun.items():
                request.on_partial(number, self._more(so_far, number, int(loop.time() - started)))
            raise
        return tuple(done[number] for number in range(request.size))

    def _begun(self, request: GroupRequest) -> dict[int, Generated]:
        """What there is of each answer that is not finished."""
        ids = {place: sample.token_ids for place, sample in request.finished.items()}
        ids |= {place: part.token_ids for place, part in request.partial.items()}
        assert all(set(spelt.tolist()) == {place} for place, spelt in ids.items()), "an answer changed its place"
        return {n: request.partial.get(n, NOTHING) for n in range(request.size) if n not in request.finished}

    def _more(self, so_far: Generated, number: int, tokens: int) -> Generated:
        versions = np.append(so_far.versions, np.full(tokens, self.version, np.int32))
        return part(number, versions)


def make_sampler(engine: Engine, prompts: int = 50, bound: int = 40, **options: Any) -> Sampler:
    config = RolloutConfig.model_validate(
        {"prompts_per_step": 4, "samples_per_prompt": 2, "max_rounds": None} | options
    )
    data = [Prompt(id=100 + i, token_ids=(i,), ground_truth="") for i in range(prompts)]
    return Sampler(data, PromptCursor(prompts, 1, True, rules=config.history), config, engine.generate, lambda: bound)


# Law 7


def lengths_of(selection: str, in_flight: float, resume: bool = False) -> tuple[list[int], list[int], float]:
    """Of some steps of 100 groups, with `in_flight` x 100 under way: lengths of the kept groups and of all drawn ones,
    and the mean of the metric `length_ratio`."""
    rng = np.random.default_rng(5)
    lengths: dict[int, int] = {}
    drawn: list[int] = []

    def length(draw: int, number: int) -> int:
        """Both answers of a group are as long. A group that begins anew has another length."""
        if number == 0 and not (resume and draw in lengths):
            lengths[draw] = int(100 * rng.lognormal(0, SIGMA))
            drawn.append(lengths[draw])
        return lengths[draw]

    engine = Engine(length)
    kept: list[int] = []
    ratios: list[float] = []
    options = {"prompts_per_step": 100, "selection": selection, "partial_rollouts": "resume" if resume else "requeue"}

    async def steps() -> None:
        sampler = make_sampler(engine, 5000, 5000, **options)
        for _ in range(6):
            # What the forecast believes decides how many are in flight.
            sampler._cursor.history.running = Running(mixed=1e9, groups=in_flight * 1e9)
            batch = await sampler.sample_batch(Progress())
            kept.extend(len(group.samples[0].token_ids) for group in batch.groups)
            ratios.append(batch.stats["length_ratio"])

    run_virtually(steps())
    return kept, drawn, float(np.mean(ratios))


@pytest.mark.parametrize(("in_flight", "resume"), [(1.5, False), (3, False), (3, True)])
def test_kept_groups_are_as_long_as_drawn_ones(in_flight: float, resume: bool) -> None:
    kept, drawn, length_ratio = lengths_of("draw_order", in_flight, resume)
    assert length_ratio == 1
    assert len(kept) == 600
    assert len(drawn) > (len(kept) if resume else in_flight * len(kept))
    assert ks_2samp(kept, drawn).pvalue > 0.05
    assert np.mean(kept) / (100 * MEAN) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("in_flight", "ratio"), [(1.5, 0.61), (2, 0.51), (3, 0.40)])
def test_groups_that_arrive_first_are_short(in_flight: float, ratio: float) -> None:
    kept, drawn, length_ratio = lengths_of("arrival", in_flight)
    assert length_ratio < 0.9
    assert ks_2samp(kept, drawn).pvalue < 1e-9
    assert np.mean(kept) / np.mean(drawn) == pytest.approx(ratio, abs=0.06)


# Arrival


def test_arrival_takes_the_first_that_are_complete_and_puts_the_others_back_in_order() -> None:
    lengths = [50, 9, 50, 50, 3, 5, 7, 1, 20, 6]  # 6 and 9, which begins when 7 ends, are complete at the same time
    engine = Engine(lambda draw, number: lengths[draw % 10], mixed=lambda prompt: prompt.id != 107)
    sampler = make_sampler(engine, 10, prompts_per_step=3, selection="arrival")
    sampler._cursor = PromptCursor(10, seed=1, shuffle=False)
    sampler._cursor.history.running = Running(mixed=1e9, groups=2e9)
    first = run_virtually(sampler.sample_batch(Progress()))
    assert [group.draw for group in first.groups] == [4, 5, 6]
    assert {draw.number: draw.outcome for draw in first.draws} == {
        **dict.fromkeys([0, 1, 2, 3, 8], "aborted"),
        **dict.fromkeys([4, 5, 6], "kept"),
        7: "all_right",
        9: "surplus",
    }
    assert (first.cursor["drawn"], [draw[0] for draw in first.cursor["waiting"]]) == (8, [0, 1, 2, 3])
    second = run_virtually(sampler.sample_batch(Progress()))
    assert [draw.number for draw in second.draws][:6] == [0, 1, 2, 3, 8, 9]
    assert second.groups[0].draw == 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=30),
    st.lists(st.booleans(), min_size=1, max_size=6).filter(any),
    st.sampled_from(["requeue", "resume"]),
    st.sampled_from(["draw_order", "arrival"]),
)
def test_no_draw_is_trained_on_twice_or_lost(
    lengths: list[int], mixed: list[bool], partial_rollouts: str, selection: str
) -> None:
    """Over all steps each draw counts once, and what does not count waits for the next step or was drawn last."""
    engine = Engine(lambda draw, n: lengths[(3 * draw + n) % len(lengths)], lambda p: mixed[p.id % len(mixed)])
    sampler = make_sampler(engine, 11, partial_rollouts=partial_rollouts, selection=selection)
    counted: list[int] = []
    before = 0.0
    for step in range(4):
        engine.version = step
        progress, records = Progress(), Recorded()
        batch: SampledBatch = run_virtually(sampler.sample_batch(progress, max(0, step - 1), records))
        assert [group.draw for group in batch.groups] == sorted(group.draw for group in batch.groups)
        assert all([s.token_ids[0] for s in group.samples] == [0, 1] for group in batch.groups)
        counted += [draw.number for draw in batch.draws if draw.outcome not in ("surplus", "aborted")]
        waiting = [draw[0] for draw in batch.cursor["waiting"]]
        assert sorted(counted + waiting) == list(range(batch.cursor["drawn"]))
        stats = batch.stats
        assert stats["generated_tokens"] == progress.tokens
        records.check(batch, oldest=max(0, step - 1))
        moved = stats["resumed_answers"] + stats["stale_dropped"] + stats["leftovers_discarded"]
        if partial_rollouts == "requeue":
            assert (moved, stats["leftover_answers"]) == (0, 0)
        assert moved <= before
        before = stats["leftover_answers"]


class Recorded:
    """Keeps what a step records."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **members: Any) -> None:
        self.records.append((kind, members))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [members for found, members in self.records if found == kind]

    def check(self, batch: SampledBatch, oldest: int) -> None:
        draws = [(draw.number, draw.prompt.id) for draw in batch.draws]
        assert [(record["draw"], record["prompt"]) for record in self.of("draw")] == draws
        outcomes = {record["draw"]: record["outcome"] for record in self.of("outcome")}
        assert outcomes == {draw.number: draw.outcome for draw in batch.draws}
        for draw in batch.draws:
            answers = [record for record in self.of("answer") if record["draw"] == draw.number]
            assert [record["index"] for record in answers] == [sample.token_ids[0] for sample in draw.answers]
            assert sum(record["carried"] for record in answers) == draw.carried
            for record, sample in zip(answers, draw.answers, strict=True):
                assert record["digest"] == digest(sample.token_ids)
                assert record["tokens"] == sum(count for _, count in record["versions"]) == len(sample.token_ids)
                assert all(version >= oldest for version, _ in record["versions"])


# Leftovers


def resumed(engine: Engine, **options: Any) -> Sampler:
    """Two of four draws are needed; the later two are under way or complete when the step ends."""
    options = {"prompts_per_step": 2, "partial_rollouts": "resume"} | options
    sampler = make_sampler(engine, 9, **options)
    sampler._cursor.history.running = Running(mixed=1e9, groups=2e9)
    return sampler


def test_leftovers_go_on_where_they_were_with_the_versions_they_had() -> None:
    lengths = {(0, 0): 10, (0, 1): 10, (1, 0): 10, (1, 1): 10, (2, 0): 3, (2, 1): 4, (3, 0): 6, (3, 1): 25}
    engine = Engine(lambda draw, number: lengths.get((draw, number), 5))
    sampler = resumed(engine)
    first = run_virtually(sampler.sample_batch(Progress()))
    assert [draw.outcome for draw in first.draws] == ["kept", "kept", "surplus", "aborted", *["surplus"] * 3]
    assert first.stats["leftover_answers"] == 10
    engine.version, engine.calls = 1, []
    second = run_virtually(sampler.sample_batch(Progress(), oldest=0))
    assert [group.draw for group in second.groups] == [2, 3]
    complete, continued = second.groups
    assert [sample.versions.tolist() for sample in complete.samples] == [[0] * 3, [0] * 4]
    assert [sample.versions.tolist() for sample in continued.samples] == [[0] * 6, [0] * 10 + [1] * 15]
    assert 2 not in [request.draw for request in engine.calls]  # complete: nothing is generated
    stats = second.stats
    assert (stats["resumed_answers"], stats["resumed_tokens"]) == (10, 3 + 4 + 6 + 10 + 6 * 5)
    assert stats["tokens/kept"] == 25  # the step finished this one alone
    assert stats["overhead"] == stats["generated_tokens"] / (3 + 4 + 6 + 25)


def test_answers_that_would_be_too_old_begin_anew() -> None:
    engine = Engine(lambda draw, number: 10 if draw < 2 else 25)
    sampler = resumed(engine)
    first = run_virtually(sampler.sample_batch(Progress()))
    left = first.stats["leftover_answers"]
    assert left > 0
    engine.version = 2
    second = run_virtually(sampler.sample_batch(Progress(), oldest=1))
    assert second.stats["stale_dropped"] == left
    assert second.stats["resumed_answers"] == 0
    assert {v for group in second.groups for sample in group.samples for v in sample.versions.tolist()} == {2}


def test_answers_of_a_group_of_another_size_are_dropped() -> None:
    """The first to finish of four answers are short; as a group of two they would be a biased one."""
    engine = Engine(lambda draw, number: 10 * (number + 1))
    adaptive = {"samples_per_prompt": 4, "adaptive_group": {"sizes": [2, 4], "acceptance": 0.3}}
    sampler = resumed(engine, **adaptive)
    first = run_virtually(sampler.sample_batch(Progress()))
    assert first.stats["group_size"] == 4
    second = run_virtually(sampler.sample_batch(Progress()))
    assert second.stats["group_size"] == 2
    assert second.stats["leftovers_discarded"] == first.stats["leftover_answers"] > 0
    assert second.stats["resumed_answers"] == 0


def test_a_failed_group_leaves_nothing_behind() -> None:
    engine = Engine(lambda draw, number: 10 if draw < 2 else 2 + 7 * number, fails=lambda draw: draw >= 2)
    sampler = resumed(engine)
    first = run_virtually(sampler.sample_batch(Progress()))
    assert [draw.outcome for draw in first.draws if draw.number >= 2 and not draw.answers] == []
    assert first.stats["leftover_answers"] == 0


def test_what_has_not_begun_is_no_leftover() -> None:
    kept = Leftovers()
    prompt = Prompt(1, (1,), "")
    kept.keep(7, prompt, 2, Leftover(partial={0: NOTHING}))
    assert kept.end_step()["leftover_answers"] == 0
    assert kept.take(7, prompt, 2, oldest=0).answers == 0


def test_leftovers_of_a_draw_are_taken_once_and_only_by_their_prompt() -> None:
    kept = Leftovers()
    prompt = Prompt(1, (1,), "")
    for draw in (7, 8):
        kept.keep(draw, prompt, 2, Leftover(partial={0: part(0, [3, 4]), 1: part(1, [4, 4])}))
    assert kept.take(7, prompt, 2, oldest=4).tokens == 2
    assert kept.take(7, prompt, 2, oldest=4).answers == 0
    assert kept.take(8, Prompt(2, (1,), ""), 2, oldest=0).answers == 0
    assert kept.end_step() == {
        "resumed_answers": 1,
        "resumed_tokens": 2,
        "stale_dropped": 1,
        "leftovers_discarded": 2,
        "leftover_answers": 0,
    }
    assert kept.end_step()["stale_dropped"] == 0
