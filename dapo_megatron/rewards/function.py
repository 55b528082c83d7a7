"""Rewards by a user's function: finding it, calling it, and what to make of what it returns."""

import ast
import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.errors import UserError
from dapo_megatron.types import NO_STEPS, Steps

KEY = "data.reward_function"
LARGEST_REWARD = 1e6
"""In size. Sums of larger ones over a batch of tokens could leave the range of fp32."""
ERROR_CHARACTERS = 300
"""Of an error's text, which may hold a whole answer."""


@dataclass(frozen=True)
class Answer:
    """One finished answer of n tokens, as a reward function sees it.

    `text` is what the answer rule judges: without special tokens, up to the first stop string. `token_texts` is the
    text of each token by itself, special ones included; one that holds part of a character has U+FFFD for it.
    `correct` is the verdict of the answer rule (`data.reward`). `finish_reason` is "stop", or "length" where the
    answer was cut off.
    """

    text: str
    token_ids: tuple[int, ...]  # [n]
    token_texts: tuple[str, ...]  # [n]
    prompt_token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str
    correct: bool
    finish_reason: str


RewardFunction = Callable[[Answer], object]
"""Returns one number, a number per token, or pairs (place, number) of steps; see `judge`."""


class BadRewardError(ValueError):
    """A reward function failed, or what it returned is no reward. The text is one line that says why."""


def judge(function: RewardFunction, answer: Answer) -> float | Steps:
    """What `function` says of an answer: a reward of the whole, or process rewards.

    A number is the reward of the whole. One number per token makes every token a step. Pairs (place, number) are the
    rewards of steps that end at the token `place`, from 0, in any order; none at all are allowed.

    Raises:
        BadRewardError: when the function raises, or returns anything else, or a reward that is not finite or larger
            than 1e6 in size.
    """
    try:
        values = np.asarray(function(answer))
    except (Exception, SystemExit) as error:  # whatever a user's code may raise must not end the run
        raise BadRewardError(_one_line(f"{type(error).__name__}: {error}")) from error
    if values.dtype.kind not in "biuf":
        raise BadRewardError(f"returned {values.dtype} of shape {values.shape}, not numbers")
    length, values = len(answer.token_ids), values.astype(np.float64)
    if values.ndim == 0:
        return float(_checked(values))
    if values.size == 0:
        return NO_STEPS
    if values.shape == (length,):
        return Steps(np.arange(length, dtype=np.int32), _checked(values).astype(np.float32))
    if values.ndim == 2 and values.shape[1] == 2:
        return _steps(values[:, 0], _checked(values[:, 1]), length)
    raise BadRewardError(
        f"returned numbers of shape {values.shape} for {length} tokens: return one number, one per token, or pairs "
        "(place, number)"
    )


def _steps(places: NDArray[np.float64], rewards: NDArray[np.float64], length: int) -> Steps:
    wrong = places[~((places >= 0) & (places < length) & (places == np.floor(places)))]
    if len(wrong):
        raise BadRewardError(f"a step ends at {wrong[0]:g}, which is not one of the places 0 to {length - 1}")
    order = np.argsort(places, kind="stable")
    return Steps(places[order].astype(np.int32), rewards[order].astype(np.float32))


def _checked(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    wrong = rewards[~(np.abs(rewards) <= LARGEST_REWARD)]  # NaN too
    if len(wrong):
        raise BadRewardError(f"returned {wrong[0]:g}: a reward is finite and at most {LARGEST_REWARD:g} in size")
    return rewards


def load_function(target: str) -> RewardFunction:
    """Import the function that `target` names: `package.module:function` or `path/to/file.py:function`.

    Raises:
        UserError: when it cannot be imported or is not callable.
    """
    place, name = _parts(target)
    try:
        found = getattr(_import(place), name, None)
    except (Exception, SystemExit) as error:
        raise UserError(_one_line(f"{KEY}: importing {place} failed: {type(error).__name__}: {error}")) from error
    if not callable(found):
        raise UserError(f"{KEY}: {place} has no function {name}")
    if inspect.iscoroutinefunction(found):
        raise UserError(f"{KEY}: {name} of {place} must be a plain function, not `async def`")
    function: RewardFunction = found
    return function


def check_function(target: str) -> None:
    """Check that `target` can be found, from its source and without running it.

    Raises:
        UserError: when there is no such module or file, its syntax is wrong, or nothing in it has the function's name.
    """
    place, name = _parts(target)
    source = Path(place) if _is_file(place) else _source(place)
    if source is None:  # compiled, or a package without a file of its own
        return
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except OSError:
        raise UserError(f"{KEY}: the file {source} cannot be read") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(_one_line(f"{KEY}: {source} is not valid Python: {error}")) from None
    names = set(_names(tree))
    if name not in names and not names & {"*", "__getattr__"}:
        raise UserError(f"{KEY}: {source} defines no {name}")


def _parts(target: str) -> tuple[str, str]:
    place, _, name = target.rpartition(":")
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _import(place: str) -> Any:
    if not _is_file(place):
        return importlib.import_module(place)
    spec = spec_from_file_location(f"reward_function_{Path(place).stem}", place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look a class's module up
    spec.loader.exec_module(module)
    return module


def _source(module: str) -> Path | None:
    """The Python file of a module, found without importing its packages, which would run their code."""
    first, *rest = module.split(".")
    spec = None
    with contextlib.suppress(ValueError):  # what runs as a script has no specification
        spec = find_spec(first)
    spec = spec or PathFinder.find_spec(first, [os.getcwd()])  # a controller has it on its path, a script may not
    for end, _ in enumerate(rest, 2):
        spec = spec and _inside(spec, ".".join(module.split(".")[:end]))
    if spec is None:
        raise UserError(f"{KEY}: there is no module {module}")
    return Path(spec.origin) if spec.origin and _is_file(spec.origin) else None


def _inside(package: ModuleSpec, name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, package.submodule_search_locations or [])


def _names(node: ast.AST) -> Iterator[str]:
    """Names that a module binds outside of functions and classes; "*" for all of another module's."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _names(child)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:ERROR_CHARACTERS]
