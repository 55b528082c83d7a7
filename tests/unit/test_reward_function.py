"""A user's reward function: found before the run, called with an answer, and never able to end the run."""

import itertools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dapo_megatron.config.algorithm import OverlongConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.config.preflight import preflight
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.prompts import Prompts
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from dapo_megatron.rewards import Answer, BadRewardError, judge
from dapo_megatron.rewards.function import check_function, load_function
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.work import Data
from dapo_megatron.types import Prompt, Sample, Steps
from tests.rollouts import said, work_of
from tests.unit.config_helpers import write_config, write_model

ANSWER = Answer("46", (1, 2, 3), ("4", "6", "\n"), (7, 8), "46", "sums", correct=True, finish_reason="stop")


def returning(value: Any) -> Callable[[Answer], Any]:
    return lambda answer: value


@pytest.mark.parametrize(
    ("value", "reward"),
    [(0.25, 0.25), (-3, -3.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(2.0), 2.0), (1e6, 1e6)],
)
def test_a_number_is_the_reward_of_the_whole(value: Any, reward: float) -> None:
    assert judge(returning(value), ANSWER) == reward


@pytest.mark.parametrize(
    ("value", "places", "rewards"),
    [
        ([0.5, 0, -1], [0, 1, 2], [0.5, 0, -1]),
        (np.array([1, 2, 3], np.float16), [0, 1, 2], [1, 2, 3]),
        ([(2, 0.5)], [2], [0.5]),
        ([(2, 0.5), (0, -0.25), (2, 1)], [0, 2, 2], [-0.25, 0.5, 1]),
        (((0, 1), (1, 2), (2, 3)), [0, 1, 2], [1, 2, 3]),
        ([], [], []),
    ],
)
def test_a_list_is_process_rewards(value: Any, places: list[int], rewards: list[float]) -> None:
    steps = judge(returning(value), ANSWER)
    assert isinstance(steps, Steps)
    np.testing.assert_array_equal(steps.places, np.array(places, np.int32), strict=True)
    np.testing.assert_array_equal(steps.rewards, np.array(rewards, np.float32), strict=True)


async def later(answer: Answer) -> float:
    return 1.0


BAD: list[tuple[Any, str]] = [
    (float("nan"), "returned nan: a reward is finite and at most 1e\\+06 in size"),
    (float("inf"), "returned inf"),
    (1.1e6, "returned 1.1e\\+06"),
    (-1e300, "returned -1e\\+300"),
    ([0.0, float("nan"), 0.0], "returned nan"),
    ([(0, float("-inf"))], "returned -inf"),
    ([1.0, 2.0], r"shape \(2,\) for 3 tokens"),
    ([1.0] * 4, r"shape \(4,\) for 3 tokens"),
    ([(0, 1.0, 2.0)], r"shape \(1, 3\)"),
    ([(3, 1.0)], "ends at 3, which is not one of the places 0 to 2"),
    ([(-1, 1.0)], "ends at -1"),
    ([(0.5, 1.0)], "ends at 0.5"),
    ([(float("nan"), 1.0)], "ends at nan"),
    ([1.0, (1, 2.0)], "ValueError"),
    (None, "returned object"),
    ("1.0", "not numbers"),
    (["1", "2", "3"], "not numbers"),
    ({"reward": 1.0}, "not numbers"),
    (1j, "not numbers"),
    (10**400, "not numbers"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_anything_else_is_a_bad_reward(value: Any, message: str) -> None:
    with pytest.raises(BadRewardError, match=message):
        judge(returning(value), ANSWER)


@pytest.mark.parametrize("error", [ZeroDivisionError("a\nb " + "x" * 1000), SystemExit(3), RecursionError()])
def test_whatever_a_function_raises_is_a_bad_reward(error: BaseException) -> None:
    def function(answer: Answer) -> float:
        raise error

    with pytest.raises(BadRewardError) as caught:
        judge(function, ANSWER)
    text = str(caught.value)
    assert text.startswith(type(error).__name__)
    assert "\n" not in text
    assert len(text) <= 300


def test_interruption_by_the_user_is_none() -> None:
    def function(answer: Answer) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(function, ANSWER)


def test_an_answer_without_tokens() -> None:
    empty = Answer("", (), (), (7,), "46", "", correct=False, finish_reason="stop")
    steps = judge(returning([]), empty)
    assert isinstance(steps, Steps)
    assert len(steps.places) == 0
    with pytest.raises(BadRewardError, match="places 0 to -1"):
        judge(returning([(0, 1.0)]), empty)


# Finding and loading

SOURCE = """
raise_if_run = 1 / 0
import math as imported
from os.path import join as joined
def plain(answer): return 1.0
class Callable_: ...
if True:
    try:
        branch = lambda answer: 0.5
    except ValueError: ...
typed: object = plain
first, second = plain, plain
def outer():
    inner = 1
"""


@pytest.mark.parametrize(
    "name", ["plain", "imported", "joined", "Callable_", "branch", "typed", "first", "second", "raise_if_run"]
)
def test_a_name_is_found_without_running_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "rewards.py").write_text(SOURCE)
    check_function(f"{tmp_path}/rewards.py:{name}")


@pytest.mark.parametrize("name", ["inner", "math", "answer", "missing"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "rewards.py").write_text(SOURCE)
    with pytest.raises(UserError, match=f"data.reward_function: .*rewards.py defines no {name}"):
        check_function(f"{tmp_path}/rewards.py:{name}")


@pytest.mark.parametrize("source", ["from os.path import *", "def __getattr__(name): ..."])
def test_a_file_that_cannot_be_known_passes(tmp_path: Path, source: str) -> None:
    (tmp_path / "rewards.py").write_text(source)
    check_function(f"{tmp_path}/rewards.py:anything")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the working folder, which is not on the path; importing it would fail."""
    folder = tmp_path / "my_rewards_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('was run')")
    (folder / "exact.py").write_text("def reward(answer): return 1.0")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_module_is_found_without_importing_its_package(package: Path) -> None:
    check_function("my_rewards_package.exact:reward")
    check_function("json.decoder:JSONDecoder")
    check_function("dapo_megatron.rewards.registry:grade")
    check_function("math:sqrt")  # has no Python source


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_rewards_package.exact:other", "exact.py defines no other"),
        ("my_rewards_package.missing:reward", "there is no module my_rewards_package.missing"),
        ("my_rewards_package.exact.deeper:reward", "there is no module my_rewards_package.exact.deeper"),
        ("no_such_package.module:reward", "there is no module no_such_package.module"),
        ("missing.py:reward", "the file missing\\.py cannot be read"),
    ],
)
def test_what_is_not_there_is_named(package: Path, target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_function(target)


def test_a_module_of_no_origin_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    with pytest.raises(UserError, match="there is no module made_by_hand"):
        check_function("made_by_hand:reward")


@pytest.mark.parametrize("source", [b"def reward(:", b"x = '\0'", b"\xff\xfe"])
def test_a_file_that_is_not_python_is_refused_in_a_line(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "rewards.py").write_bytes(source)
    with pytest.raises(UserError, match=r"rewards\.py is not valid Python") as caught:
        check_function(f"{tmp_path}/rewards.py:reward")
    assert "\n" not in str(caught.value)


def test_a_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "my rewards.py").write_text(
        "from dataclasses import dataclass\n"
        "from dapo_megatron.rewards import Answer\n"
        "@dataclass\nclass Weights:\n    right: float = 0.75\n"
        "def reward(answer: Answer) -> float:\n    return Weights().right * answer.correct\n"
    )
    target = f"{tmp_path}/my rewards.py:reward"
    check_function(target)
    assert judge(load_function(target), ANSWER) == 0.75


def test_a_module_is_loaded() -> None:
    assert load_function("operator:attrgetter") is __import__("operator").attrgetter


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reward = 1.0", "has no function reward"),
        ("import no_such_module_at_all", "importing .* failed: ModuleNotFoundError"),
        ("raise SystemExit(1)", "failed: SystemExit"),
        ("async def reward(answer): ...", "must be a plain function, not `async def`"),
    ],
)
def test_what_cannot_be_loaded_is_a_user_error(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "rewards.py").write_text(source)
    with pytest.raises(UserError, match=f"data.reward_function: .*{message}"):
        load_function(f"{tmp_path}/rewards.py:reward")


@pytest.mark.parametrize(
    "target", ["rewards", "rewards.py", "a/b.py:", ":f", "a-b:f", "a..b:f", "a:f.g", "a/b:f", "a:1"]
)
def test_a_target_of_another_form_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises((UserError, ValidationError), match=r"neither `package\.module:function` nor"):
        load_config(write_config(tmp_path), [f"data.reward_function='{target}'"])


def test_a_run_with_a_missing_function_does_not_start(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "rewards.py"
    config = load_config(write_config(tmp_path), [f"data.reward_function='{path}:reward'"])
    with pytest.raises(UserError, match="cannot be read"):
        preflight(config, 1)
    path.write_text("def reward(answer): return 1.0")
    preflight(config, 1)


# Grading

PROMPT = Prompt(id=41, token_ids=(7, 8), ground_truth="46", data_source="sums")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One character a token, and nothing between them."""
    model = write_model(tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(content | {"decoder": {"type": "Fuse"}}))
    return Tokenizer(model)


@pytest.fixture
def graded(tokenizer: Tokenizer) -> Callable[[Callable[[Answer], Any]], Sample]:
    """Grades "46 \\n", which is right, by a function. 4 tokens of 5: -0.5 for overlong, and 0.1 for brevity."""
    overlong = OverlongConfig(cache_tokens=2, brevity=0.5)

    def run(function: Callable[[Answer], Any]) -> Sample:
        return Grader(tokenizer, "exact", ["\n"], overlong, 5, function).sample(said("46 \n"), PROMPT)

    return run


def test_a_number_takes_the_place_of_the_rules_reward(graded: Callable[[Callable[[Answer], Any]], Sample]) -> None:
    sample = graded(returning(0.25))
    assert (sample.reward, sample.score) == (pytest.approx(0.25 - 0.5 + 0.1, abs=1e-12), 0.25)
    assert (sample.correct, sample.reason) == (True, "correct")
    assert len(sample.steps.places) == 0


def test_process_rewards_stand_beside_it(graded: Callable[[Callable[[Answer], Any]], Sample]) -> None:
    sample = graded(returning([(3, 2.0), (1, 1.0)]))
    assert (sample.reward, sample.score) == (pytest.approx(1.0 - 0.5 + 0.1, abs=1e-12), 1.0)
    assert (sample.correct, sample.reason) == (True, "correct")
    assert sample.steps.places.tolist() == [1, 3]
    assert sample.steps.rewards.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("function", [returning(float("nan")), returning([1.0]), lambda answer: 1 / 0])
def test_a_bad_reward_counts_as_wrong(
    graded: Callable[[Callable[[Answer], Any]], Sample], function: Callable[[Answer], Any]
) -> None:
    sample = graded(function)
    assert (sample.correct, sample.reward, sample.score, sample.reason) == (False, -1.0 - 0.5, 0.0, "bad_reward")
    assert len(sample.steps.places) == 0


def test_a_function_sees_the_whole_answer(tokenizer: Tokenizer) -> None:
    seen: list[Answer] = []

    def function(answer: Answer) -> float:
        seen.append(answer)
        return 1.0

    Grader(tokenizer, "exact", ["\n"], OverlongConfig(), 8, function).sample(said("46\n7"), PROMPT)
    (answer,) = seen
    assert (answer.text, answer.correct) == ("46", True)
    assert answer.token_texts == ("4", "6", "\n", "7")
    assert list(answer.token_ids) == said("46\n7").token_ids.tolist()
    assert (answer.prompt_token_ids, answer.ground_truth, answer.data_source) == ((7, 8), "46", "sums")
    assert answer.finish_reason == "stop"


def test_ten_failures_of_a_step_are_logged_and_then_a_count(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    grader = Grader(tokenizer, "exact", [], OverlongConfig(), 8, lambda answer: 1 / 0)
    caplog.set_level(logging.WARNING)
    for _ in range(12):
        grader.sample(said("46"), PROMPT)
    grader.end_step(5)
    for _ in range(10):
        grader.sample(said("46"), PROMPT)
    grader.end_step(6)
    lines = [record.getMessage() for record in caplog.records]
    failure = "bad reward of an answer to prompt 41: ZeroDivisionError: division by zero"
    assert lines == [failure] * 10 + ["step 5: 12 bad rewards, of which 10 are shown"] + [failure] * 10
    assert [bool(record.exc_info) for record in caplog.records] == ([True] + [False] * 9) + [False] + (
        [True] + [False] * 9
    )


async def test_a_run_trains_on_process_rewards_and_evaluates_by_the_rule(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    calls = itertools.count()
    config = load_config(write_config(tmp_path), ["rollout.dynamic_sampling=false", "data.reward=exact"])

    def function(answer: Answer) -> list[tuple[int, float]]:
        number = next(calls)
        if number == 5:
            raise RuntimeError("the sixth answer")
        return [(1, number)]

    prompts = Prompts((PROMPT,), duplicates=0, too_long=0)
    data = Data(prompts, prompts, PromptCursor(1, seed=0, shuffle=False, fingerprint=""))
    work = await work_of(config, data, "46", 0, function)
    header, _ = await work.sample(1, 0, 0, Progress())
    answers = config.responses_per_step
    assert header.stats["bad_reward"] == 1
    assert (len(header.step_rewards), len(set(header.step_responses.tolist()))) == (answers - 1, answers - 1)
    assert sorted(header.step_rewards.tolist()) == [n for n in range(answers) if n != 5]
    assert set(header.step_places.tolist()) == {1}
    await work.evaluate(Progress())
    assert next(calls) == answers


@pytest.mark.parametrize("rule", ["dapo", "exact"])
@pytest.mark.parametrize("stop", [[], ["\n"]])
@pytest.mark.parametrize("before", [0, 250, 2000])
@pytest.mark.parametrize("after", [0, 200, 290, 1100])
def test_the_end_of_a_long_answer_is_judged_as_the_whole(
    tokenizer: Tokenizer, rule: str, stop: list[str], before: int, after: int
) -> None:
    text = "7" * before + "\nANSWER: 46\n" + " " * after
    grader = Grader(tokenizer, rule, stop, OverlongConfig(), 9000)
    whole = Grader(tokenizer, rule, stop, OverlongConfig(), 9000, returning(1.0))  # a function sees everything
    sample, expected = grader.sample(said(text), PROMPT), whole.sample(said(text), PROMPT)
    assert (sample.correct, sample.reason) == (expected.correct, expected.reason)
    assert sample.correct == (rule == "dapo" and not stop and after < 288)


def test_an_end_that_is_too_short_is_not_judged_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_megatron.rollout.grader.LAST_TOKENS", 2)
    assert Grader(tokenizer, "dapo", [], OverlongConfig(), 99).sample(said("ANSWER: 46"), PROMPT).correct


def test_a_long_answer_is_not_decoded_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    assert Grader(tokenizer, "dapo", [], OverlongConfig(), 9000).sample(said("7" * 5000 + "ANSWER: 46"), PROMPT).correct
    assert decoded == [1024]
