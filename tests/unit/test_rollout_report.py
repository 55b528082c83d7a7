"""What a step's draws are counted, costed and recorded as."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config.load import load_config
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.prompts import Prompts
from dapo_megatron.models.flops import forward_flops
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.rollout.jobs import BudgetExhaustedError
from dapo_megatron.rollout.records import digest, read_records
from dapo_megatron.rollout.report import MAX_PROMPT_CHARACTERS, GroupReport, cost_stats, read_groups
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.statistics import COMPLETE, OUTCOMES, Draw, Outcome, batch_stats
from dapo_megatron.rollout.work import Data
from dapo_megatron.types import Prompt, Sample
from tests.rollouts import work_of
from tests.unit.config_helpers import write_config, write_model


def answer(correct: bool, length: int, reason: str = "", finish_reason: str = "stop") -> Sample:
    return Sample(
        token_ids=np.arange(length, dtype=np.int32),
        log_probs=np.zeros(length, np.float32),
        finish_reason=finish_reason,
        versions=np.zeros(length, np.int32),
        correct=correct,
        reward=1.0 if correct else -1.0,
        score=float(correct),
        reason=reason or ("correct" if correct else "wrong"),
    )


def draw(number: int, outcome: Outcome, *answers: Sample, prompt: tuple[int, ...] = (1, 2, 3)) -> Draw:
    return Draw(number, Prompt(100 + number, prompt, f"gold {number}", "source"), outcome, answers)


DRAWS = [
    draw(7, "kept", answer(True, 4), answer(False, 6, finish_reason="length")),
    draw(8, "all_right", answer(True, 5), answer(True, 1)),
    draw(9, "all_wrong", answer(False, 3, "no_answer"), answer(False, 3, "bad_gold")),
    draw(10, "failed", answer(True, 2)),
    draw(11, "surplus", answer(True, 8), answer(False, 1)),
    draw(12, "aborted", answer(False, 9)),
    draw(13, "aborted"),
]


def test_every_outcome_has_its_groups_answers_and_tokens() -> None:
    stats = batch_stats(DRAWS)
    assert [stats[outcome] for outcome in OUTCOMES] == [1, 1, 1, 1, 1, 2]
    assert (stats["drawn"], stats["requeued"], stats["acceptance"]) == (7, 3, 1 / 4)
    assert [stats[f"answers/{outcome}"] for outcome in OUTCOMES] == [2, 2, 2, 1, 2, 1]
    assert [stats[f"tokens/{outcome}"] for outcome in OUTCOMES] == [10, 6, 6, 2, 9, 9]
    assert (stats["generated_tokens"], stats["overhead"]) == (42, 4.2)
    assert (stats["accuracy"], stats["no_answer"], stats["bad_gold"]) == (3 / 6, 1, 1)
    assert (stats["truncated"], stats["response_length"], stats["length_ratio"]) == (0.5, 5, 5 / (22 / 6))


@given(st.lists(st.tuples(st.sampled_from(OUTCOMES), st.lists(st.integers(0, 50), max_size=4)), max_size=30))
def test_nothing_is_lost_and_no_token_is_counted_twice(found: list[tuple[Outcome, list[int]]]) -> None:
    draws = [
        draw(i, outcome, *(answer(False, length) for length in lengths)) for i, (outcome, lengths) in enumerate(found)
    ]
    stats = batch_stats(draws)
    assert stats["drawn"] == sum(stats[outcome] for outcome in (*COMPLETE, "failed", "requeued")) == len(found)
    assert sum(stats[f"tokens/{outcome}"] for outcome in OUTCOMES) == stats["generated_tokens"]
    assert stats["generated_tokens"] == sum(length for _, lengths in found for length in lengths)
    assert sum(stats[f"answers/{outcome}"] for outcome in OUTCOMES) == sum(len(lengths) for _, lengths in found)


def test_operations_and_seconds_go_to_what_they_were_spent_on(tmp_path: Path) -> None:
    arch = architecture_of(write_model(tmp_path / "model"))
    costs = cost_stats(DRAWS, arch, seconds=84.0)
    kept = forward_flops(arch, np.array([3 + 4 - 1, 3 + 6 - 1]), targets=np.array([4, 6]))
    lengths = np.array([4, 6, 5, 1, 3, 3, 2, 8, 1, 9])
    assert costs["flops/kept"] == kept
    assert costs["flops/generated"] == forward_flops(arch, lengths + 2, targets=lengths)
    assert costs["seconds_dropped"] == pytest.approx(84.0 * 32 / 42, abs=1e-12)
    nothing = cost_stats(DRAWS[-1:], arch, seconds=2.0)
    assert nothing == {"flops/generated": 0.0, "flops/kept": 0.0, "seconds_dropped": 2.0}
    assert math.isnan(batch_stats(DRAWS[-1:])["overhead"])


def decode(token_ids: object) -> str:
    return "x" * 3000 if token_ids == (9,) else str(token_ids)


def test_each_group_that_counts_has_a_line(tmp_path: Path) -> None:
    report = GroupReport(tmp_path / "rollouts", decode)
    report.write(3, DRAWS)
    lines = (tmp_path / "rollouts" / "groups_000003.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["draw"], record["verdict"]) for record in records] == [
        (7, "kept"),
        (8, "all_right"),
        (9, "all_wrong"),
        (10, "failed"),
    ]
    assert records[2] == {
        "step": 3,
        "draw": 9,
        "prompt_id": 109,
        "data_source": "source",
        "verdict": "all_wrong",
        "ground_truth": "gold 9",
        "prompt": "(1, 2, 3)",
        "right": 0,
        "answers": 2,
        "tokens": 6,
        "truncated": 0,
        "reasons": {"no_answer": 1, "bad_gold": 1},
    }
    assert records[0]["truncated"] == 1
    assert list(read_groups(tmp_path / "rollouts")) == records


def test_a_step_that_is_sampled_again_replaces_its_lines(tmp_path: Path) -> None:
    report = GroupReport(tmp_path, decode)
    report.write(1, DRAWS[:1])
    report.write(2, DRAWS[1:3])
    GroupReport(tmp_path, decode).write(2, [draw(20, "all_wrong", answer(False, 2), prompt=(9,))])
    records = list(read_groups(tmp_path))
    assert [(record["step"], record["draw"]) for record in records] == [(1, 7), (2, 20)]
    assert len(records[1]["prompt"]) == MAX_PROMPT_CHARACTERS


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    GroupReport(tmp_path, decode).write(1, DRAWS[:1])
    (tmp_path / "groups_000002.jsonl").write_text('{"step": 2}\n{"st')
    with pytest.raises(ValueError, match=r"groups_000002\.jsonl, line 2: not JSON"):
        list(read_groups(tmp_path))


@pytest.mark.parametrize("on_exhausted", ["train_smaller", "stop"])
async def test_a_step_of_the_controller_is_recorded_and_costed(tmp_path: Path, on_exhausted: str) -> None:
    """Also where the run ends for want of mixed groups: then the record says why."""
    write_model(tmp_path / "model")
    overrides = ["rollout.prompts_per_step=2", "rollout.max_rounds=1", f"rollout.on_exhausted={on_exhausted}"]
    config = load_config(write_config(tmp_path), overrides)
    prompts = Prompts(tuple(Prompt(i, (1, 2), "46") for i in range(3)), duplicates=0, too_long=0)
    data = Data(prompts, None, PromptCursor(3, seed=0, shuffle=False))
    work = await work_of(config, data, "47", version=3)
    if on_exhausted == "stop":
        with pytest.raises(BudgetExhaustedError, match="budget of 2 prompts gave 0 of the 2 groups"):
            await work.sample(5, 3, 3, Progress())
    else:
        header, _ = await work.sample(5, 3, 3, Progress())
        arch = architecture_of(config.model.path)
        fed = np.full(8, 2 + 2 - 1)
        assert header.stats["flops/generated"] == forward_flops(arch, fed, targets=np.full(8, 2))
        assert (header.stats["flops/kept"], header.stats["tokens/all_wrong"]) == (0.0, 16.0)
        assert header.stats["seconds_dropped"] == header.stats["seconds"]
    records = list(read_groups(Path(config.run.dir) / "rollouts"))
    assert [(r["step"], r["draw"], r["verdict"], r["reasons"]) for r in records] == [
        (5, 0, "all_wrong", {"no_answer": 4}),
        (5, 1, "all_wrong", {"no_answer": 4}),
    ]


async def test_what_a_step_did_is_recorded(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = load_config(write_config(tmp_path), ["rollout.prompts_per_step=2", "rollout.dynamic_sampling=false"])
    data = Data(Prompts((Prompt(8, (1, 2), "46"),), 0, 0), None, PromptCursor(1, seed=0, shuffle=False))
    _, tokens = await (await work_of(config, data, "47", version=2)).sample(4, 2, 2, Progress())
    begin, *rest = [r for r in read_records(Path(config.run.dir) / "rollouts") if r["kind"] != "attempt"]
    draws, answers, outcomes, (batch,) = rest[:2], rest[2:10], rest[10:12], rest[12:]
    assert begin == {"kind": "begin", "step": 4, "version": 2, "oldest": 2}
    assert draws == [{"kind": "draw", "step": 4, "draw": draw, "prompt": 8} for draw in (0, 1)]
    expected = {"kind": "answer", "step": 4, "tokens": 2, "versions": [[2, 2]], "carried": False}
    expected |= {"digest": (one := digest(tokens.response_tokens[:2])), "finish_reason": "stop"}
    assert sorted(answers, key=lambda answer: (answer["draw"], answer["index"])) == [
        expected | {"draw": draw, "index": index} for draw in (0, 1) for index in range(4)
    ]
    assert outcomes == [{"kind": "outcome", "step": 4, "draw": draw, "outcome": "kept"} for draw in (0, 1)]
    assert batch == {"kind": "batch", "step": 4, "responses": 8, "digest": digest(tokens.response_tokens)}
    assert one != batch["digest"]


async def test_a_token_of_older_weights_than_allowed_ends_the_run(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = load_config(write_config(tmp_path), ["rollout.prompts_per_step=2", "rollout.dynamic_sampling=false"])
    data = Data(Prompts((Prompt(8, (1, 2), "46"),), 0, 0), None, PromptCursor(1, seed=0, shuffle=False))
    with pytest.raises(RuntimeError, match=r"step 4: the answer 0 \(draw 0\) has tokens of version 2.*older than 3"):
        await (await work_of(config, data, "47", version=2)).sample(4, 3, 3, Progress())


def test_answers_of_an_earlier_step_count_in_what_is_trained_and_not_in_what_is_generated() -> None:
    carried = Draw(3, Prompt(1, (1, 2), ""), "kept", (answer(True, 4), answer(False, 8)), carried=1)
    stats = batch_stats([carried])
    assert (stats["generated_tokens"], stats["tokens/kept"], stats["answers/kept"]) == (8, 8, 1)
    assert (stats["overhead"], stats["response_length"], stats["accuracy"]) == (8 / 12, 6, 0.5)
