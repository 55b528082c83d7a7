"""Pairs of a better and a worse answer to a prompt, from files, the Hugging Face Hub or a generated task, in two steps.

As in `dapo_megatron.data.prompts`, `load_pairs` needs no tokenizer; `tokenize_pairs` makes the pairs that are drawn.
A row has `chosen` and `rejected`, and says what they answer in one of three ways:

    `prompt` is a text or messages; the answers are texts, or a message of the assistant;
    the answers are whole conversations of messages: those before the last are the prompt;
    there is no `prompt`, and the answers are whole dialogues as texts, with turns after "\\n\\nHuman:" and
    "\\n\\nAssistant:": all up to the last of these is the prompt.
"""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from dapo_megatron.config.data import ArithmeticConfig, DatasetConfig
from dapo_megatron.data.arithmetic import generate, wrong_answer
from dapo_megatron.data.prompts import READ_ROWS, content_of, is_message, load_table
from dapo_megatron.data.rows import Content, Message
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from dapo_megatron.types import Int32

COLUMNS = ("prompt", "chosen", "rejected")
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

Fault = Literal["duplicate", "empty", "equal", "other_prompts", "long_prompt", "long_answer"]
"""Why a row is skipped: it was there before; an answer or the prompt is empty; the answers are the same; they answer
different prompts; the prompt or an answer has too many tokens."""


@dataclass(frozen=True)
class PairRow:
    """A prompt, and the better and the worse answer to it, without what ends them."""

    prompt: Content
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PairRows:
    """Pairs of a data set. `source` is its file, Hub name or task, for messages; `skipped` counts the other rows."""

    rows: tuple[PairRow, ...]
    source: str
    skipped: Counter[Fault]


@dataclass(frozen=True, eq=False)
class Pair:
    """A tokenised pair. `id` is its position in the PairRows. Answers end as those of a server do."""

    id: int
    prompt: Int32  # [p]
    chosen: Int32  # [c]
    rejected: Int32  # [r]


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of a data set that can be trained on, in its order, and how many rows were skipped for what."""

    pairs: tuple[Pair, ...]
    source: str
    skipped: Counter[Fault]

    @property
    def fingerprint(self) -> str:
        """Identifies the pairs and their order."""
        digest = hashlib.sha256()
        for pair in self.pairs:
            parts = (pair.prompt, pair.chosen, pair.rejected)
            digest.update(np.array([len(part) for part in parts], np.int32).tobytes())
            digest.update(np.concatenate(parts).tobytes())
        return digest.hexdigest()


def load_pairs(config: DatasetConfig, stop: list[str]) -> PairRows:
    """Load a data set. Answers are cut before the first of the `stop` strings, at which a server would have ended them.

    `config.limit` counts what is left without rows that are skipped here.

    Raises:
        UserError: when it cannot be read or is empty, or when a row lacks an answer or a prompt; the message names the
            source, the row (counted from 1) and the key.
    """
    if config.arithmetic is not None:
        source = f"the generated task {config.arithmetic.task}"
        rows: Iterator[PairRow | Fault] = iter(generate_pairs(config.arithmetic))
    else:
        assert config.path is not None  # the config has exactly one of the two
        source, rows = config.path, _read(config.path, config.split)
    unique: dict[str, PairRow] = {}
    skipped: Counter[Fault] = Counter()
    for row in rows:
        checked = _checked(row, stop) if isinstance(row, PairRow) else row
        if not isinstance(checked, PairRow):
            skipped[checked] += 1
            continue
        content = json.dumps([checked.prompt, checked.chosen, checked.rejected])
        skipped["duplicate"] += content in unique
        unique.setdefault(content, checked)
    if not unique and not skipped.total():
        raise UserError(f"{source} has no rows: a data set needs at least one")
    return PairRows(tuple(unique.values())[: config.limit], source, skipped)


def generate_pairs(config: ArithmeticConfig) -> Iterator[PairRow]:
    """The task's problems with the right answer and one in which a number is a little off, given by the seed."""
    rng = random.Random(f"{config.seed}:wrong")
    for row in generate(config):
        yield PairRow(row.prompt, f" {row.ground_truth}", f" {wrong_answer(row.ground_truth, rng)}")


def tokenize_pairs(
    rows: PairRows, tokenizer: Tokenizer, stop: list[str], *, max_prompt_tokens: int, max_answer_tokens: int
) -> Pairs:
    """Encode every pair and skip those whose prompt or one of whose answers, with its end, has too many tokens.

    Raises:
        UserError: when no pair is left; it tells what became of all rows.
    """
    pairs: list[Pair] = []
    skipped = rows.skipped.copy()
    for pair in _encoded(rows.rows, tokenizer, stop):
        if not len(pair.prompt):
            skipped["empty"] += 1
        elif len(pair.prompt) > max_prompt_tokens:
            skipped["long_prompt"] += 1
        elif max(len(pair.chosen), len(pair.rejected)) > max_answer_tokens:
            skipped["long_answer"] += 1
        else:
            pairs.append(pair)
    if not pairs:
        raise UserError(
            f"{rows.source}: no pair can be trained on with data.max_prompt_tokens={max_prompt_tokens} and "
            f"rollout.max_tokens={max_answer_tokens}: {told(skipped)}"
        )
    return Pairs(tuple(pairs), rows.source, skipped)


def told(skipped: Counter[Fault]) -> str:
    """Rows that were skipped, in words: "3 duplicate, 1 long prompt"."""
    return ", ".join(f"{skipped[fault]} {fault.replace('_', ' ')}" for fault in get_args(Fault) if skipped[fault])


def _encoded(rows: tuple[PairRow, ...], tokenizer: Tokenizer, stop: list[str]) -> Iterator[Pair]:
    """A part at a time: until they are copied, a tokenizer's results take a hundred times their ids."""
    for start in range(0, len(rows), READ_ROWS):
        part = rows[start : start + READ_ROWS]
        prompts = tokenizer.encode_prompts([row.prompt for row in part])
        chosen = tokenizer.encode_answers([row.chosen for row in part], stop)
        rejected = tokenizer.encode_answers([row.rejected for row in part], stop)
        for number, ids in enumerate(zip(prompts, chosen, rejected, strict=True), start=start):
            yield Pair(number, *(np.array(tokens, np.int32) for tokens in ids))


def _checked(row: PairRow, stop: list[str]) -> PairRow | Fault:
    """The row with its answers cut, or what is wrong with them."""
    chosen, rejected = _before(row.chosen, stop), _before(row.rejected, stop)
    if not chosen.strip() or not rejected.strip():
        return "empty"
    return "equal" if chosen == rejected else PairRow(row.prompt, chosen, rejected)


def _before(text: str, stop: list[str]) -> str:
    ends = [position for string in stop if (position := text.find(string)) >= 0]
    return text[: min(ends, default=len(text))]


def _read(path: str, split: str) -> Iterator[PairRow | Fault]:
    """Rows of a file or Hub data set."""
    for number, raw in enumerate(load_table(path, split, COLUMNS), start=1):
        yield _row(raw, f"row {number} of {path}")


def _row(raw: Mapping[str, Any], name: str) -> PairRow | Fault:
    context, chosen = _answer(raw, "chosen", name)
    other_context, rejected = _answer(raw, "rejected", name)
    if context != other_context:
        return "other_prompts"
    prompt = raw.get("prompt")
    if context:
        begun = content_of(prompt, name) if isinstance(prompt, list) and prompt else ()
        assert not isinstance(begun, str)
        return PairRow(context if context[: len(begun)] == begun else begun + context, chosen, rejected)
    if prompt:
        return PairRow(content_of(prompt, name), chosen, rejected)
    return _dialogue(chosen, rejected, name)


def _answer(raw: Mapping[str, Any], key: str, name: str) -> tuple[tuple[Message, ...], str]:
    """The messages before an answer, none where it is a text, and the answer."""
    value = raw.get(key)
    if isinstance(value, str):
        return (), value
    if not isinstance(value, list) or not value or not all(map(is_message, value)):
        raise UserError(f"{name} has no {key}: it must be a text, or chat messages with `role` and `content`")
    messages: list[Message] = [{"role": message["role"], "content": message["content"]} for message in value]
    if messages[-1]["role"] != "assistant":
        raise UserError(f"{name}: {key} must end with a message of the assistant, not of the {messages[-1]['role']}")
    return tuple(messages[:-1]), messages[-1]["content"]


def _dialogue(chosen: str, rejected: str, name: str) -> PairRow | Fault:
    """A row without prompt, whose answers are whole dialogues that differ in the last turn alone."""
    if ASSISTANT not in chosen or ASSISTANT not in rejected:
        raise UserError(
            f"{name} has no prompt: it must be a text or chat messages, unless chosen and rejected hold the whole "
            f"dialogue, as messages or as texts with {ASSISTANT!r}"
        )
    if chosen == rejected:
        return "equal"
    ends = [match.end() for match in re.finditer(ASSISTANT, chosen) if rejected.startswith(chosen[: match.end()])]
    end = max(ends, default=0)
    answers = chosen[end:], rejected[end:]
    if not ends or any(turn in answer for turn in (HUMAN, ASSISTANT) for answer in answers):
        return "other_prompts"
    return PairRow(chosen[:end], *answers)
