"""Prompts from files, the Hugging Face Hub or a generated task, in two steps.

`load_rows` needs no tokenizer, so that a run can be refused before any process starts; `tokenize` makes the prompts
that are drawn.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.config.data import DatasetConfig
from dapo_megatron.data.arithmetic import generate
from dapo_megatron.data.rows import Content, Row
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from dapo_megatron.types import Prompt

FILE_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
COLUMNS = ("prompt", "reward_model", "data_source")
READ_ROWS = 1000


@dataclass(frozen=True)
class Rows:
    """A data set without duplicates. `source` is its file, Hub name or task, for messages."""

    rows: tuple[Row, ...]
    source: str
    duplicates: int


@dataclass(frozen=True)
class Prompts:
    """The prompts of a data set that fit, in its order, and how many were too long and skipped."""

    prompts: tuple[Prompt, ...]
    duplicates: int
    too_long: int

    @property
    def fingerprint(self) -> str:
        """Identifies the prompts, their gold answers and their order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.token_ids, prompt.ground_truth]).encode())
        return digest.hexdigest()


def load_rows(config: DatasetConfig) -> Rows:
    """Load a data set and remove duplicates: rows whose prompt and gold answer are both equal.

    Raises:
        UserError: when it cannot be read or is empty, or when a row has no prompt or no gold answer; the message
            names the source and the row (counted from 1, duplicates included).
    """
    if config.arithmetic is not None:
        source, rows = f"the generated task {config.arithmetic.task}", iter(generate(config.arithmetic))
    else:
        assert config.path is not None  # the config has exactly one of the two
        source, rows = config.path, _read(config.path, config.split)
    unique: dict[str, Row] = {}
    duplicates = 0
    for row in rows:
        content = json.dumps([row.prompt, row.ground_truth])
        duplicates += content in unique
        unique.setdefault(content, row)
    if not unique:
        raise UserError(f"{source} has no rows: a data set needs at least one")
    return Rows(tuple(unique.values())[: config.limit], source, duplicates)


def tokenize(rows: Rows, tokenizer: Tokenizer, max_prompt_tokens: int) -> Prompts:
    """Encode every prompt and skip those of more than `max_prompt_tokens` tokens.

    Raises:
        UserError: when a prompt has no tokens, or when every prompt is too long.
    """
    encoded = tokenizer.encode_prompts([row.prompt for row in rows.rows])
    for number, token_ids in enumerate(encoded, start=1):
        if not token_ids:
            raise UserError(f"{rows.source}: prompt {number} (duplicates not counted) is empty")
    prompts = tuple(
        Prompt(i, tuple(token_ids), row.ground_truth, row.data_source)
        for i, (row, token_ids) in enumerate(zip(rows.rows, encoded, strict=True))
        if len(token_ids) <= max_prompt_tokens
    )
    if not prompts:
        shortest = min(map(len, encoded))
        raise UserError(
            f"{rows.source}: every prompt is longer than data.max_prompt_tokens={max_prompt_tokens}; "
            f"the shortest has {shortest} tokens"
        )
    return Prompts(prompts, rows.duplicates, len(encoded) - len(prompts))


def _read(path: str, split: str) -> Iterator[Row]:
    """Rows of a file or Hub data set in the DAPO schema."""
    for number, raw in enumerate(load_table(path, split, COLUMNS), start=1):
        yield _row(raw, f"row {number} of {path}")


def load_table(path: str, split: str, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Raw rows of a file or Hub data set, with those of `columns` that it has.

    `datasets` is loaded here because generated tasks do without it (80 MB and 2 s).

    Raises:
        UserError: when it cannot be read.
    """
    import datasets

    file_format = FILE_FORMATS.get(Path(path).suffix)
    if file_format is None and Path(path).exists():
        raise UserError(f"{path} is not a data set: its name must end in {', '.join(FILE_FORMATS)}")
    if file_format is not None and not Path(path).is_file():
        raise UserError(f"the data file {path} does not exist")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it prints what is raised here as one sentence
    try:
        if file_format is None:
            table = datasets.load_dataset(path, split=split)
        elif _is_empty(Path(path)):  # a puzzling error of `datasets`
            return
        else:
            table = datasets.load_dataset(file_format, data_files=path, split="train")
    except Exception as error:  # `datasets` raises dozens of types, from OSError to its own
        raise UserError(f"the data set {path} cannot be read: {_root_cause(error)}") from error
    present = [name for name in columns if name in table.column_names]
    if not present:
        raise UserError(f"the data set {path} has none of the columns {', '.join(columns)}")
    for batch in table.select_columns(present).iter(batch_size=READ_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _is_empty(path: Path) -> bool:
    from pyarrow import parquet

    return path.stat().st_size == 0 or (path.suffix == ".parquet" and parquet.read_metadata(path).num_rows == 0)


def _root_cause(error: BaseException) -> str:
    """First line of the innermost message: `datasets` wraps what happened in "an error occurred"."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _row(raw: Mapping[str, Any], name: str) -> Row:
    gold = (raw.get("reward_model") or {}).get("ground_truth")
    if isinstance(gold, int) and not isinstance(gold, bool):
        gold = str(gold)
    if not isinstance(gold, str) or not gold.strip():
        raise UserError(f"{name} has no reward_model.ground_truth: each row needs the gold answer as text")
    return Row(content_of(raw.get("prompt"), name), gold, str(raw.get("data_source") or ""))


def content_of(prompt: Any, name: str) -> Content:
    """A row's prompt; `name` is the row's, for the UserError where it is neither a text nor messages."""
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(is_message(message) for message in prompt):
        return tuple({"role": message["role"], "content": message["content"]} for message in prompt)
    raise UserError(f"{name} has no prompt: it must be a text, or chat messages with `role` and `content`")


def is_message(message: Any) -> bool:
    """Whether this is a chat message with `role` and `content` as text."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
