"""Generated tasks whose answers can be checked: few-shot lines of sums.

    12 + 34 = 46          `addition`: two two-digit numbers
    3 + 9 + 4 = 12 16     `chain_sum`: 2 to `terms` digits, all running totals

A problem belongs to the test part if a hash of its numbers says so, in whatever order they stand; so neither the seed
nor the number of problems can move one from one part to the other.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import accumulate, islice

from dapo_megatron.config.data import ArithmeticConfig, Task
from dapo_megatron.data.rows import Row
from dapo_megatron.errors import UserError

Problem = tuple[int, ...]

VALUES = {"addition": range(10, 100), "chain_sum": range(1, 10)}
TEST_PARTS = 4
"""One problem in this many is held out."""

SHOTS_SEED = 99
ENUMERABLE = 1 << 17
"""Up to this many problems of one length are shuffled as a whole; of more, random ones are drawn."""


def generate(config: ArithmeticConfig) -> list[Row]:
    """The first `config.problems` different problems of the configured part, in an order given by the seed.

    The solved examples are training problems, the same for both parts and every seed, and never asked themselves.

    Raises:
        UserError: when the part has fewer problems than asked for, or too few for the solved examples.
    """
    lengths = [2] if config.task == "addition" else list(range(2, config.terms + 1))
    shots = _draw(config.task, lengths, "train", random.Random(SHOTS_SEED), config.shots, excluded=frozenset())
    rng = random.Random(config.seed)
    problems = _draw(config.task, lengths, config.split, rng, config.problems, excluded=frozenset(shots))
    rng.shuffle(problems)
    lead = "".join(f"{_question(shot)} {_answer(shot)}\n" for shot in shots)
    return [Row(lead + _question(p), _answer(p), f"arithmetic/{config.task}") for p in problems]


def wrong_answer(answer: str, rng: random.Random) -> str:
    """`answer` with one of its numbers off by 1 to 9, and not below 0."""
    numbers = [int(number) for number in answer.split()]
    place = rng.randrange(len(numbers))
    right = numbers[place]
    numbers[place] = rng.choice([n for n in range(max(0, right - 9), right + 10) if n != right])
    return " ".join(map(str, numbers))


def _draw(
    task: Task, lengths: list[int], split: str, rng: random.Random, count: int, excluded: frozenset[Problem]
) -> list[Problem]:
    candidates = _alternate([_candidates(VALUES[task], length, rng) for length in lengths])
    usable = (p for p in candidates if _is_held_out(task, p) == (split == "test") and p not in excluded)
    problems = list(islice(usable, count))
    if len(problems) < count:
        raise UserError(f"the {split} part of {task} has only {len(problems)} problems, {count} were asked for")
    return problems


def _alternate(sources: list[Iterator[Problem]]) -> Iterator[Problem]:
    """One problem of each length in turn; a length that is used up is left out from then on."""
    while sources:
        for source in list(sources):
            problem = next(source, None)
            if problem is None:
                sources.remove(source)
            else:
                yield problem


def _candidates(values: range, length: int, rng: random.Random) -> Iterator[Problem]:
    """Different problems of `length` numbers in random order; in a large space they end after an eighth of it,
    because random draws would repeat themselves more and more."""
    space = len(values) ** length
    if space <= ENUMERABLE:
        for index in rng.sample(range(space), space):
            yield _problem(index, values, length)
        return
    seen: set[int] = set()
    while len(seen) < space // 8:
        index = rng.randrange(space)
        if index not in seen:
            seen.add(index)
            yield _problem(index, values, length)


def _problem(index: int, values: range, length: int) -> Problem:
    """The digits of `index` in base len(values), as numbers."""
    return tuple(values[index // len(values) ** position % len(values)] for position in range(length))


def _is_held_out(task: Task, problem: Problem) -> bool:
    digest = hashlib.sha256(f"{task}:{sorted(problem)}".encode()).digest()
    return digest[0] % TEST_PARTS == 0


def _question(problem: Problem) -> str:
    return " + ".join(map(str, problem)) + " ="


def _answer(problem: Problem) -> str:
    """All totals from the second number on; the first number alone is no total."""
    return " ".join(map(str, list(accumulate(problem))[1:]))
