"""Requests, retries, grading: everything between a prompt and its group."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dapo_megatron.config.algorithm import OverlongConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.prompts import Prompts
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.evaluation.evaluate import evaluate
from dapo_megatron.rollout.client import Generated, RequestError
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.generation import GroupGenerator
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.rollout.sampler import GroupFailedError, Progress
from dapo_megatron.rollout.work import Data, RolloutWork
from dapo_megatron.types import Prompt, Sample
from tests.unit.config_helpers import write_config, write_model

SAMPLING = Sampling(max_tokens=8)
PROMPT = Prompt(id=0, token_ids=(1, 2), ground_truth="46")


@dataclass
class ScriptedClient:
    """Answers with `replies` in turn, the last one for ever; an exception is raised."""

    replies: list[Generated | Exception]
    requests: list[str] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    cancelled: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generated:
        reply = self.replies[min(len(self.requests), len(self.replies) - 1)]
        self.requests.append(request_id)
        self.limits.append(sampling.max_tokens)
        try:
            await asyncio.sleep(3600 if reply is HANGS else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(reply, Exception):
            raise reply
        return reply


def reply(text: str, finish_reason: str = "stop") -> Generated:
    """One token a character, as `write_model` makes tokenizers."""
    ids = tuple(63 if character == "\n" else ord(character) - 32 for character in text)
    return Generated(ids, (-0.5,) * len(ids), finish_reason, (3, 3))


HANGS = reply("HANGS")
LOST = RequestError("connection lost")


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
    sample = grader.sample(reply(text), PROMPT)
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
    sample = Grader(tokenizer, "exact", ["\n"], overlong, max_tokens=8).sample(reply(text), PROMPT)
    assert sample.reward == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize(("shift", "limit"), [("before_max", 8), ("past_max", 12)])
def test_answers_may_have_as_many_tokens_as_the_penalty_reaches(
    tokenizer: Tokenizer, tmp_path: Path, shift: str, limit: int
) -> None:
    """In training and in evaluation."""
    overrides = [f"algorithm.overlong.shift={shift}", "algorithm.overlong.cache_tokens=4"]
    config = load_config(write_config(tmp_path), [*overrides, "rollout.dynamic_sampling=false"])
    prompts = Prompts((PROMPT,), duplicates=0, too_long=0)
    data = Data(prompts, prompts, PromptCursor(1, seed=0, shuffle=False, fingerprint=""))
    client = ScriptedClient([reply("46")])
    work = RolloutWork(config, data, tokenizer, Fleet([client], retries=0))
    asyncio.run(work.sample(1, 0, Progress()))
    trained = len(client.requests)
    asyncio.run(work.evaluate(Progress()))
    assert client.limits == [limit] * len(client.requests)
    assert 0 < trained < len(client.requests)


def test_a_failed_request_is_sent_again_to_another_server_under_another_id() -> None:
    broken, sound = ScriptedClient([LOST]), ScriptedClient([reply("46")])
    generated = asyncio.run(Fleet([broken, sound], retries=1, pause=0).generate((1,), SAMPLING, "a", server=0))
    assert generated == reply("46")
    assert (broken.requests, sound.requests) == (["a-0"], ["a-1"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (reply("46", finish_reason="abort"), "ended an answer with 'abort'"),
        (Generated((1, 2), (-0.5,), "stop", (0, 0)), "2 tokens came with 1 log-probs"),
        (LOST, "connection lost"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_asked_for_again_and_then_given_up(
    bad: Generated | Exception, message: str
) -> None:
    client = ScriptedClient([bad, reply("46")])
    assert asyncio.run(Fleet([client], retries=1, pause=0).generate((1,), SAMPLING, "a", server=0)) == reply("46")
    client = ScriptedClient([bad])
    with pytest.raises(RequestError, match=message):
        asyncio.run(Fleet([client], retries=2, pause=0).generate((1,), SAMPLING, "a", server=0))
    assert len(client.requests) == 3


def test_groups_are_placed_on_the_server_with_the_fewest_answers(grader: Grader) -> None:
    clients = [ScriptedClient([reply("46")]) for _ in range(3)]
    generate = GroupGenerator(Fleet(clients, retries=0), grader, SAMPLING)

    async def three_groups() -> None:
        await asyncio.gather(*(generate(PROMPT, 4, lambda sample: None) for _ in range(3)))

    asyncio.run(three_groups())
    assert [len(client.requests) for client in clients] == [4, 4, 4]
    assert len({request for client in clients for request in client.requests}) == 12


def test_a_group_that_loses_a_member_fails_whole_and_its_other_requests_end(grader: Grader) -> None:
    client = ScriptedClient([HANGS, LOST, HANGS])
    fleet = Fleet([client], retries=0)
    with pytest.raises(GroupFailedError, match="connection lost"):
        asyncio.run(GroupGenerator(fleet, grader, SAMPLING)(PROMPT, 3, lambda sample: None))
    assert client.cancelled == 2
    with fleet.place(1) as server:
        assert server == 0


def test_each_answer_is_reported_once(grader: Grader) -> None:
    seen: list[Sample] = []
    client = ScriptedClient([reply("46"), reply("47\n"), reply("4")])
    samples = asyncio.run(GroupGenerator(Fleet([client], 0), grader, SAMPLING)(PROMPT, 3, seen.append))
    assert sorted(map(id, seen)) == sorted(map(id, samples))
    assert sorted(len(sample.token_ids) for sample in samples) == [1, 2, 3]


def test_evaluation_scores_every_problem_and_counts_failures(grader: Grader) -> None:
    problems = [Prompt(id=i, token_ids=(1,), ground_truth=gold) for i, gold in enumerate(["46", "47", "48"])]
    replies = [reply("46"), reply("4", "length"), reply("47"), reply("47"), LOST]
    generate = GroupGenerator(Fleet([ScriptedClient(list(replies))], 0), grader, SAMPLING)
    progress = Progress()
    result = asyncio.run(evaluate(problems, generate, samples=2, max_in_flight=1, progress=progress))
    assert result["scores"] == [0.5, 1.0, 0.0]
    assert result["accuracy"] == pytest.approx(0.5)
    assert (result["problems"], result["failed"], result["answers"]) == (3, 1, 4)
    assert result["truncated"] == 0.25
    assert result["response_length"] == pytest.approx(7 / 4)
    assert (progress.kept, progress.needed, progress.answers) == (3, 3, 4)


def test_an_evaluation_without_any_answer_is_an_error(grader: Grader) -> None:
    generate = GroupGenerator(Fleet([ScriptedClient([LOST])], 0), grader, SAMPLING)
    with pytest.raises(RuntimeError, match="all 1 problems failed"):
        asyncio.run(evaluate([PROMPT], generate, samples=2, max_in_flight=1, progress=Progress()))
