"""Everything between a prompt and its group: grading, failing, cancelling, the watchdog."""

import asyncio
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dapo_megatron.config.algorithm import OverlongConfig
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.prompts import Prompts
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.evaluation.evaluate import evaluate
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.generation import GroupGenerator
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.members import VersionError
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import AnswerTask, Generated, RequestError, Sampling, Server
from dapo_megatron.rollout.sampler import GroupFailedError, GroupRequest, Progress
from dapo_megatron.rollout.work import Data, RolloutWork
from dapo_megatron.types import Prompt, Sample
from tests.rollouts import said
from tests.scripted_engine import ScriptedEngine
from tests.unit.config_helpers import write_config, write_model
from tests.virtual_time import run_virtually

SAMPLING = Sampling(max_tokens=8)
PROMPT = Prompt(id=0, token_ids=(1, 2), ground_truth="46")
HANGS = said("HANGS")
LOST = RequestError("connection lost")


@dataclass
class Replies:
    """An engine that answers with `replies` in turn, the last one for ever; an exception is raised."""

    grader: Grader
    replies: list[Generated | Exception]
    tasks: list[AnswerTask] = field(default_factory=list)
    cancelled: int = 0

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        reply = self.replies[min(len(self.tasks), len(self.replies) - 1)]
        self.tasks.append(task)
        try:
            await asyncio.sleep(3600 if reply is HANGS else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(reply, Exception):
            raise reply
        return self.grader.sample(reply, task.prompt, task.by_rule)

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None: ...

    def end_step(self, step: int) -> None: ...


def fleet_of(engine: Replies, folder: Path, retries: int = 0) -> Fleet:
    """One server. Call it in the event loop."""
    fleet = Fleet(engine, FleetConfig(request_retries=retries), Records(folder), pause=0)
    fleet.add(Server("s0", "http://s0:1", ""), 3)
    return fleet


def request(size: int, on_answer: Callable[[int, Sample], None] = lambda place, sample: None) -> GroupRequest:
    return GroupRequest(5, PROMPT, size, on_answer, lambda place, part: None)


def answer(engine: Replies, folder: Path, size: int, retries: int = 0) -> tuple[Sample, ...]:
    async def main() -> tuple[Sample, ...]:
        fleet = fleet_of(engine, folder, retries)
        return await GroupGenerator(fleet, SAMPLING, 1e6)(request(size))

    samples: tuple[Sample, ...] = run_virtually(main())
    return samples


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    model = write_model(tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(content | {"decoder": {"type": "Fuse"}}))
    return Tokenizer(model)


@pytest.fixture
def grader(tokenizer: Tokenizer) -> Grader:
    return Grader(tokenizer, "exact", ["\n"], OverlongConfig(cache_tokens=4), max_tokens=8)


@pytest.mark.parametrize(
    ("text", "correct", "reward", "reason"),
    [
        ("46\n", True, 1.0, "correct"),
        (" 46", True, 1.0, "correct"),
        ("46\n7", True, 1.0, "correct"),  # what follows the stop string in the same token is not the answer
        ("47\n", False, -1.0, "wrong"),
        ("\n46", False, -1.0, "no_answer"),
        ("   46\n", True, 1.0 - 0.5, "correct"),  # 6 tokens of 8, cache 4: half of the penalty
    ],
)
def test_an_answer_is_graded_up_to_its_stop_string(
    grader: Grader, text: str, correct: bool, reward: float, reason: str
) -> None:
    sample = grader.sample(said(text), PROMPT)
    assert (sample.correct, sample.reward, sample.reason) == (correct, reward, reason)
    assert len(sample.token_ids) == len(sample.log_probs) == len(text)
    assert sample.versions.tolist() == [3] * len(sample.token_ids)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("46", 1.0 + 0.4 * (1 - 2 / 8)),
        ("47", -1.0),
        ("      46", 1.0),  # L_max itself is free
        ("       46", 1.0 - 0.25 * 0.5 + 0.4 * (1 - 9 / 8)),  # one of the four tokens past it
        ("          47", -1.0 - 0.5),  # all four
    ],
)
def test_length_is_rewarded_as_configured(tokenizer: Tokenizer, text: str, reward: float) -> None:
    overlong = OverlongConfig(cache_tokens=4, factor=0.5, shift="past_max", brevity=0.4)
    sample = Grader(tokenizer, "exact", ["\n"], overlong, max_tokens=8).sample(said(text), PROMPT)
    assert sample.reward == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize(("shift", "limit"), [("before_max", 8), ("past_max", 12)])
def test_answers_may_have_as_many_tokens_as_the_penalty_reaches(
    tokenizer: Tokenizer, grader: Grader, tmp_path: Path, shift: str, limit: int
) -> None:
    """In training and in evaluation, which is graded by the rule alone."""
    overrides = [f"algorithm.overlong.shift={shift}", "algorithm.overlong.cache_tokens=4"]
    config = load_config(write_config(tmp_path), [*overrides, "rollout.dynamic_sampling=false"])
    prompts = Prompts((PROMPT,), duplicates=0, too_long=0)
    data = Data(prompts, prompts, PromptCursor(1, seed=0, shuffle=False, fingerprint=""))
    engine = Replies(grader, [said("46")])

    async def main() -> int:
        fleet = fleet_of(engine, tmp_path)
        work = RolloutWork(config, data, tokenizer, fleet, engine, Records(tmp_path))
        await work.sample(1, 3, 3, Progress())
        trained = len(engine.tasks)
        await work.evaluate(Progress())
        return trained

    trained = asyncio.run(main())
    assert {task.sampling.max_tokens for task in engine.tasks} == {limit}
    assert 0 < trained < len(engine.tasks)
    assert [task.by_rule for task in engine.tasks] == [number >= trained for number in range(len(engine.tasks))]


def test_group_that_loses_a_member_fails_whole_and_its_other_requests_end(grader: Grader, tmp_path: Path) -> None:
    engine = Replies(grader, [HANGS, LOST, HANGS])
    with pytest.raises(GroupFailedError, match="connection lost"):
        answer(engine, tmp_path, 3)
    assert engine.cancelled == 2
    assert [record["ended"] for record in read_records(tmp_path)] == ["failed", "aborted", "aborted"]


def test_failed_answer_is_asked_for_again_under_another_id(grader: Grader, tmp_path: Path) -> None:
    engine = Replies(grader, [LOST, said("46")])
    (sample,) = answer(engine, tmp_path, 1, retries=1)
    assert sample.correct
    assert len({task.request_id for task in engine.tasks}) == 2
    failed, finished = read_records(tmp_path)
    assert (failed["ended"], failed["reason"], failed["tokens_after"]) == ("failed", "connection lost", 0)
    assert (finished["ended"], finished["reason"], finished["tokens_after"]) == ("finished", "stop", 2)
    assert all((record["draw"], record["index"], record["server"]) == (5, 0, "s0") for record in (failed, finished))


def test_pauses_between_attempts_do_not_grow_for_ever(grader: Grader, tmp_path: Path) -> None:
    engine = Replies(grader, [*[LOST] * 1100, said("46")])

    async def main() -> None:
        fleet = Fleet(engine, FleetConfig(request_retries=1100), Records(tmp_path), pause=0.5)
        fleet.add(Server("s0", "http://s0:1", ""), 3)
        await GroupGenerator(fleet, SAMPLING, 1e9)(request(1))
        assert asyncio.get_running_loop().time() < 1100 * (32 + 10)  # and the rest of a suspected server

    run_virtually(main())


def test_each_answer_is_reported_once(grader: Grader, tmp_path: Path) -> None:
    seen: list[tuple[int, Sample]] = []
    engine = Replies(grader, [said("46"), said("47\n"), said("4")])

    async def main() -> tuple[Sample, ...]:
        return await GroupGenerator(fleet_of(engine, tmp_path), SAMPLING, 1e6)(
            request(3, lambda *reported: seen.append(reported))
        )

    samples = asyncio.run(main())
    assert sorted(seen) == list(enumerate(samples))
    assert sorted(len(sample.token_ids) for sample in samples) == [1, 2, 3]


def test_group_goes_on_with_what_an_earlier_attempt_left(grader: Grader, tmp_path: Path) -> None:
    engine = Replies(grader, [said("46")])
    done, begun, seen = grader.sample(said("47"), PROMPT), said("4"), dict[int, Sample]()
    group = GroupRequest(5, PROMPT, 3, seen.__setitem__, lambda place, part: None, {1: done}, {2: begun})

    async def main() -> tuple[Sample, ...]:
        return await GroupGenerator(fleet_of(engine, tmp_path), SAMPLING, 1e6)(group)

    samples = asyncio.run(main())
    assert samples == (seen[0], done, seen[2])
    assert len(seen) == 2
    assert [len(task.so_far.token_ids) for task in engine.tasks] == [0, 1]
    assert {record["index"]: record["tokens_before"] for record in read_records(tmp_path)} == {0: 0, 2: 1}


@pytest.mark.parametrize("resume", [True, False])
def test_cancelled_group_hands_over_what_has_begun_if_it_is_to_be_resumed(tmp_path: Path, resume: bool) -> None:
    parts: dict[int, Generated] = {}
    seen: dict[int, Sample] = {}
    group = GroupRequest(5, Prompt(7, (7,), ""), 20, seen.__setitem__, parts.__setitem__)

    async def main() -> None:
        engine = ScriptedEngine(random.Random(3))
        fleet = Fleet(engine, FleetConfig(), Records(tmp_path), engine.connect)
        server = engine.start("s0", "http://s0:1")
        server.version = 3
        fleet.add(server.server, 3)
        task = asyncio.ensure_future(GroupGenerator(fleet, Sampling(30), 1e6, resume=resume)(group))
        await asyncio.sleep(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not server.running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())
    assert seen
    assert (sorted([*seen, *parts]) == list(range(20))) == resume == bool(parts)
    assert all(len(part.token_ids) and part.finish_reason == "partial" for part in parts.values())
    assert all(set(part.versions.tolist()) == {3} for part in parts.values())


def impossible(answer: Generated) -> Generated:
    """One of weights that no server has had."""
    return replace(answer, versions=answer.versions + 6)


def test_impossible_versions_end_the_run_also_where_the_group_fails_anyway(grader: Grader, tmp_path: Path) -> None:
    engine = Replies(grader, [impossible(said("46")), LOST])
    with pytest.raises(VersionError, match="had weights 3"):
        answer(engine, tmp_path, 2)
    engine = Replies(grader, [LOST, impossible(said("46"))])
    with pytest.raises(VersionError, match="had weights 3"):
        answer(engine, tmp_path, 2)


@pytest.mark.parametrize("resume", [True, False])
def test_impossible_versions_end_the_run_also_where_the_group_is_cancelled(
    grader: Grader, tmp_path: Path, resume: bool
) -> None:
    engine = Replies(grader, [impossible(said("46"))])

    async def main() -> None:
        generate = GroupGenerator(fleet_of(engine, tmp_path), SAMPLING, 1e6, resume=resume)
        group = asyncio.ensure_future(generate(request(1)))
        while not list(read_records(tmp_path)):
            await asyncio.sleep(0)
        group.cancel()  # before the group has seen how its answer ended
        with pytest.raises(VersionError, match="had weights 3"):
            await group

    run_virtually(main())


def test_watchdog_names_what_a_group_waits_for(
    grader: Grader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Replies(grader, [HANGS, said("46"), HANGS])

    async def main() -> None:
        generate = GroupGenerator(fleet_of(engine, tmp_path), SAMPLING, watchdog_after=1000)
        await generate(request(3))

    with caplog.at_level(logging.WARNING):
        run_virtually(main())
    lines = [record.message for record in caplog.records if "not complete" in record.message]
    assert [line.partition(" is not")[0] for line in lines] == ["prompt 0 (draw 5)"] * 3
    assert ["after 1000 s" in lines[0], "after 2000 s" in lines[1], "after 3000 s" in lines[2]] == [True] * 3
    assert "2 of 3 answers are missing: 0 on server s0 with 0 tokens; 2 on server s0" in lines[0]


def test_watchdog_names_answers_that_wait_for_a_server(
    grader: Grader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        fleet = Fleet(Replies(grader, [said("46")]), FleetConfig(), Records(tmp_path))
        task = asyncio.ensure_future(GroupGenerator(fleet, SAMPLING, watchdog_after=10)(request(1)))
        await asyncio.sleep(15)
        task.cancel()

    with caplog.at_level(logging.WARNING):
        run_virtually(main())
    assert "1 of 1 answers are missing: 0 waits for a server with 0 tokens" in caplog.text


def test_evaluation_scores_every_problem_and_counts_failures(grader: Grader, tmp_path: Path) -> None:
    problems = [Prompt(id=i, token_ids=(1,), ground_truth=gold) for i, gold in enumerate(["46", "47", "48"])]
    cut = Generated(*(getattr(said("4"), name) for name in ("token_ids", "log_probs", "versions")), "length")
    engine = Replies(grader, [said("46"), cut, said("47"), said("47"), LOST])
    progress = Progress()

    async def main() -> dict[str, object]:
        generate = GroupGenerator(fleet_of(engine, tmp_path), SAMPLING, 1e6, by_rule=True)
        return await evaluate(problems, generate, samples=2, max_in_flight=1, progress=progress)

    result = asyncio.run(main())
    assert result["scores"] == [0.5, 1.0, 0.0]
    assert result["accuracy"] == pytest.approx(0.5)
    assert (result["problems"], result["failed"], result["answers"]) == (3, 1, 4)
    assert result["truncated"] == 0.25
    assert result["response_length"] == pytest.approx(7 / 4)
    assert (progress.kept, progress.needed, progress.answers) == (3, 3, 4)
    assert not list(read_records(tmp_path))  # of draws alone


def test_an_evaluation_without_any_answer_is_an_error(grader: Grader, tmp_path: Path) -> None:
    async def main() -> None:
        generate = GroupGenerator(fleet_of(Replies(grader, [LOST]), tmp_path), SAMPLING, 1e6)
        await evaluate([PROMPT], generate, samples=2, max_in_flight=1, progress=Progress())

    with pytest.raises(RuntimeError, match="all 1 problems failed"):
        asyncio.run(main())
