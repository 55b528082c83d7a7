"""Loading and tokenising data sets."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_megatron.config.data import DatasetConfig
from dapo_megatron.data.prompts import load_rows, tokenize
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from tests.unit.config_helpers import write_model

CHAT = [{"role": "user", "content": "HELLO"}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def row(prompt: Any, gold: Any = "1") -> dict[str, Any]:
    return {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": gold, "style": "rule"}}


def write(path: Path, rows: list[dict[str, Any]]) -> DatasetConfig:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return DatasetConfig(path=str(path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_of_the_dapo_schema_without_duplicates(tmp_path: Path, name: str) -> None:
    config = write(tmp_path / name, [row(CHAT), row(CHAT), row(CHAT, "2"), row(CHAT)])
    loaded = load_rows(config)
    assert loaded.duplicates == 2
    assert [(r.prompt, r.ground_truth, r.data_source) for r in loaded.rows] == [
        (tuple(CHAT), "1", "s"),
        (tuple(CHAT), "2", "s"),
    ]


def test_the_limit_counts_what_is_left_without_duplicates(tmp_path: Path) -> None:
    config = write(tmp_path / "rows.jsonl", [row("A"), row("A"), row("B"), row("C")])
    limited = load_rows(config.model_copy(update={"limit": 2}))
    assert [r.prompt for r in limited.rows] == ["A", "B"]


@pytest.mark.parametrize("gold", [None, "", "  "])
def test_a_row_without_gold_answer_is_named(tmp_path: Path, gold: str | None) -> None:
    config = write(tmp_path / "rows.jsonl", [row("A"), row("A"), row("B", gold)])
    with pytest.raises(UserError, match=r"row 3 of .*rows\.jsonl has no reward_model\.ground_truth"):
        load_rows(config)


def test_rows_that_lack_the_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1 of .* has no reward_model\.ground_truth"):
        load_rows(write(tmp_path / "rows.jsonl", [{"prompt": "A"}]))
    with pytest.raises(UserError, match=r"row 1 of .* has no prompt"):
        load_rows(write(tmp_path / "other.jsonl", [{"reward_model": {"ground_truth": "1"}}]))


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user"}]])
def test_a_row_without_prompt_is_named(tmp_path: Path, prompt: Any) -> None:
    with pytest.raises(UserError, match=r"row 1 of .* has no prompt"):
        load_rows(write(tmp_path / "rows.jsonl", [row(prompt)]))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for name, content, message in (
        ("empty.jsonl", "", "has no rows"),
        ("broken.jsonl", "{not json\n", "cannot be read"),
        ("rows.csv", "a,b\n", "its name must end in"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=rf"{name}.*{message}"):
            load_rows(DatasetConfig(path=str(tmp_path / name)))
    with pytest.raises(UserError, match="does not exist"):
        load_rows(DatasetConfig(path=str(tmp_path / "missing.parquet")))
    write(tmp_path / "none.parquet", [row("A")])
    pq.write_table(pq.read_table(tmp_path / "none.parquet").slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(UserError, match="has no rows"):
        load_rows(DatasetConfig(path=str(tmp_path / "none.parquet")))


def test_long_prompts_are_skipped_and_counted_and_ids_stay_positions(tmp_path: Path, model: Path) -> None:
    rows = load_rows(write(tmp_path / "rows.jsonl", [row("AB"), row("ABCD"), row("ABC")]))
    prompts = tokenize(rows, Tokenizer(model), max_prompt_tokens=3)
    assert prompts.too_long == 1
    assert [(p.id, len(p.token_ids)) for p in prompts.prompts] == [(0, 2), (2, 3)]
    with pytest.raises(UserError, match=r"every prompt is longer than data\.max_prompt_tokens=1; the shortest has 2"):
        tokenize(rows, Tokenizer(model), max_prompt_tokens=1)


def test_the_fingerprint_tells_data_sets_apart(tmp_path: Path, model: Path) -> None:
    def fingerprint(name: str, *rows: dict[str, Any]) -> str:
        return tokenize(load_rows(write(tmp_path / name, list(rows))), Tokenizer(model), 10).fingerprint

    first = fingerprint("a.jsonl", row("A"), row("B"))
    assert first == fingerprint("b.jsonl", row("A"), row("B"))
    assert first != fingerprint("c.jsonl", row("B"), row("A"))
    assert first != fingerprint("d.jsonl", row("A"), row("B", "2"))


def test_messages_go_through_the_chat_template_and_texts_do_not(model: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        Tokenizer(model).encode_prompts([tuple(CHAT)])
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer(model)
    chat, text = tokenizer.encode_prompts([tuple(CHAT), "HELLO"])
    # The vocabulary has no lower-case letters: "user" is unknown, four blanks.
    assert tokenizer.decode(chat).replace(" ", "") == "[]HELLO>"
    assert tokenizer.decode(text).replace(" ", "") == "HELLO"


def test_answers_end_at_end_tokens_and_tokens_that_hold_a_stop_string(model: Path) -> None:
    newline, equals = 63, ord("=") - 32
    assert Tokenizer(model).end_token_ids(["\n", "="]) == (equals, newline)
    assert Tokenizer(model).end_token_ids([]) == ()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "A"}}))
    assert Tokenizer(model).end_token_ids([]) == (5, 7, ord("A") - 32)


def test_a_missing_or_damaged_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Tokenizer(model)
