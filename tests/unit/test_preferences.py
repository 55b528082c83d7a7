"""Preference pairs: rows of every layout, what is skipped, and the batches that DPO trains on."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from config_helpers import write_config, write_model

from dapo_megatron.config import preflight as checks
from dapo_megatron.config.data import ArithmeticConfig, DatasetConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.config.preflight import preflight
from dapo_megatron.config.run import Config
from dapo_megatron.data.preferences import PairRow, PairRows, Pairs, generate_pairs, load_pairs, tokenize_pairs, told
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from dapo_megatron.planning.plan import plan
from dapo_megatron.rollout.handle import open_rollouts
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.rollout.offline import Offline, read_pairs

USER = {"role": "user", "content": "HI"}
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
END = ord("A") - 32  # the id of the end-of-sequence token in these tests


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(path: Path, *rows: dict[str, Any]) -> DatasetConfig:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(path))


def load(path: Path, *rows: dict[str, Any], stop: tuple[str, ...] = ()) -> PairRows:
    return load_pairs(write(path, *rows), list(stop))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "A"}))
    return folder


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_texts(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path / name, pair("1 + 1 =", " 2", " 3"), pair("1 + 2 =", " 3", " 2"))
    assert loaded.rows == (PairRow("1 + 1 =", " 2", " 3"), PairRow("1 + 2 =", " 3", " 2"))
    assert not loaded.skipped.total()


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
@pytest.mark.parametrize("prompt", ["HI", [USER], None])
def test_whole_conversations(tmp_path: Path, name: str, prompt: Any) -> None:
    """As in ultrafeedback_binarized, which has the prompt as a text, too."""
    row = pair(prompt, [USER, assistant("YES")], [USER, assistant("NO")])
    assert load(tmp_path / name, row).rows == (PairRow((USER,), "YES", "NO"),)


def test_messages_beside_the_prompt(file: Path) -> None:
    system = {"role": "system", "content": "BE BRIEF"}
    answers = [assistant("YES")], [assistant("NO")]
    assert load(file, pair([USER], *answers)).rows == (PairRow((USER,), "YES", "NO"),)
    assert load(file, pair("HI", *answers)).rows == (PairRow("HI", "YES", "NO"),)
    conversations = [USER, assistant("YES")], [USER, assistant("NO")]
    assert load(file, pair([system], *conversations)).rows == (PairRow((system, USER), "YES", "NO"),)


def test_dialogues_as_texts(file: Path) -> None:
    """As in hh-rlhf."""
    start = "\n\nHuman: A?\n\nAssistant: B\n\nHuman: C?\n\nAssistant:"
    rows = [
        {"chosen": f"{start} YES", "rejected": f"{start} YOU BET"},
        {"chosen": f"{start} YES", "rejected": "\n\nHuman: D?\n\nAssistant: NO"},
        {"chosen": f"{start} YES", "rejected": f"{start} NO\n\nHuman: E?\n\nAssistant: F"},
        {"chosen": start, "rejected": start},
    ]
    loaded = load(file, *rows)
    assert loaded.rows == (PairRow(start, " YES", " YOU BET"),)
    assert loaded.skipped == Counter({"other_prompts": 2, "equal": 1})


def test_rows_without_a_lesson_are_skipped_and_counted(file: Path) -> None:
    good = pair("Q", "YES", "NO")
    bad = pair("Q", "YES", " \n"), pair("Q", "", "NO"), pair("Q", "A", "A")
    rows = [good, good, good, pair("Q", "NO", "YES"), *bad, good]
    loaded = load(file, *rows)
    assert loaded.rows == (PairRow("Q", "YES", "NO"), PairRow("Q", "NO", "YES"))
    assert loaded.skipped == Counter({"duplicate": 3, "empty": 2, "equal": 1})
    assert told(loaded.skipped) == "3 duplicate, 2 empty, 1 equal"


def test_conversations_that_differ_before_the_answer_are_skipped(file: Path) -> None:
    other = {"role": "user", "content": "HO"}
    rows = [{"chosen": [USER, assistant("A")], "rejected": [turn, assistant("B")]} for turn in (USER, other)]
    loaded = load(file, *rows)
    assert loaded.rows == (PairRow((USER,), "A", "B"),)
    assert loaded.skipped["other_prompts"] == 1


def test_answers_are_cut_where_a_server_would_end_them(file: Path) -> None:
    rows = [pair("Q", "1\n2;4", "3;4\n5"), pair("Q", "1;2", "1\n3"), pair("Q", "\n1", "2")]
    loaded = load(file, *rows, stop=("\n", ";"))
    assert loaded.rows == (PairRow("Q", "1", "3"),)
    assert loaded.skipped == Counter({"equal": 1, "empty": 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (pair("Q", "A", None), "has no rejected: it must be a text, or chat messages"),
        (pair("Q", None, "A"), "has no chosen"),
        (pair("Q", "A", [{"role": "assistant"}]), "has no rejected"),
        (pair("Q", [], "A"), "has no chosen"),
        (pair("Q", [USER], [USER, assistant("A")]), "chosen must end with a message of the assistant, not of the user"),
        (pair(None, "A", "B"), "has no prompt: it must be a text or chat messages, unless"),
        (pair("", "A", "B"), "has no prompt"),
        (pair([{"role": "user"}], "A", "B"), "has no prompt"),
        (pair([{"role": "user"}], [USER, assistant("A")], [USER, assistant("B")]), "has no prompt"),
    ],
)
def test_a_row_that_lacks_something_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    write(tmp_path / "pairs.jsonl", row)
    with pytest.raises(UserError, match=rf"row 1 of .*/pairs\.jsonl.*{re.escape(message)}"):
        load_pairs(DatasetConfig(path=str(tmp_path / "pairs.jsonl")), [])


def test_rows_are_counted_with_those_that_are_skipped(file: Path) -> None:
    with pytest.raises(UserError, match=r"row 3 of .*pairs\.jsonl has no rejected"):
        load(file, pair("Q", "A", "B"), pair("Q", "A", "B"), pair("Q", "A", None))


def test_files_that_hold_no_pairs_are_named(file: Path) -> None:
    with pytest.raises(UserError, match=r"pairs\.jsonl has none of the columns prompt, chosen, rejected"):
        load(file, {"question": "Q"})
    file.write_text("")
    with pytest.raises(UserError, match=r"pairs\.jsonl has no rows"):
        load_pairs(DatasetConfig(path=str(file)), [])


def test_the_limit_counts_pairs_that_are_left(file: Path) -> None:
    config = write(
        file, pair("Q", "A", "A"), pair("Q", "A", "B"), pair("Q", "A", "B"), pair("Q", "C", "D"), pair("Q", "E", "F")
    )
    assert [row.chosen for row in load_pairs(config.model_copy(update={"limit": 2}), []).rows] == ["A", "C"]


@pytest.mark.parametrize("task", ["addition", "chain_sum"])
def test_generated_pairs_have_one_number_wrong(task: Any) -> None:
    config = ArithmeticConfig(task=task, problems=200, shots=1, seed=3)
    rows = list(generate_pairs(config))
    assert rows == list(generate_pairs(config))
    assert rows != list(generate_pairs(config.model_copy(update={"seed": 4})))
    offsets, places = Counter[int](), set[int]()
    for row in rows:
        assert isinstance(row.prompt, str)
        question = row.prompt.rpartition("\n")[2]
        right, wrong = ([int(number) for number in text.split(" ")[1:]] for text in (row.chosen, row.rejected))
        assert right[-1] == sum(map(int, question.removesuffix(" =").split(" + ")))
        assert len(wrong) == len(right)
        differences = {place: b - a for place, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b}
        places |= differences.keys()
        offsets.update(differences.values())
        assert len(differences) == 1
        assert min(wrong) >= 0
    assert set(map(abs, offsets)) == set(range(1, 10))
    assert min(offsets) < 0 < max(offsets)
    assert places == ({0} if task == "addition" else {0, 1, 2})


def tokens(rows: PairRows, model: Path, *stop: str, prompt: int = 99, answer: int = 99) -> Pairs:
    return tokenize_pairs(rows, Tokenizer(model), list(stop), max_prompt_tokens=prompt, max_answer_tokens=answer)


def test_answers_end_with_end_of_sequence_or_the_first_stop_string(file: Path, model: Path) -> None:
    rows = load(file, pair("Q", " 12", "3"))
    (found,) = tokens(rows, model).pairs
    assert found.prompt.tolist() == [ord("Q") - 32]
    assert found.chosen.tolist() == [0, 17, 18, END]
    assert found.rejected.tolist() == [19, END]
    (found,) = tokens(rows, model, "\n", ";").pairs
    assert found.rejected.tolist() == [19, 63]
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.path: .* names no end-of-sequence token.*rollout\.stop"):
        tokens(rows, model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert tokens(rows, model).pairs[0].rejected.tolist() == [19, 5]


def test_messages_go_through_the_chat_template_and_answers_do_not(file: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (found,) = tokens(load(file, {"chosen": [USER, assistant("1")], "rejected": [USER, assistant("2")]}), model).pairs
    assert [chr(32 + token) for token in found.prompt] == list("[HI]>")
    assert found.chosen.tolist() == [17, END]


def test_what_is_too_long_is_skipped_and_counted(file: Path, model: Path) -> None:
    rows = load(file, pair("QQQ", "1", "2"), pair("QQ", "111", "2"), pair("QQ", "1", "222"), pair("QQ", "11", "22"))
    found = tokens(rows, model, prompt=2, answer=3)  # the end counts
    assert [p.id for p in found.pairs] == [3]
    assert found.skipped == Counter({"long_prompt": 1, "long_answer": 2})
    with pytest.raises(UserError) as caught:
        tokens(rows, model, prompt=2, answer=2)
    assert str(caught.value) == (
        f"{file}: no pair can be trained on with data.max_prompt_tokens=2 and rollout.max_tokens=2: "
        "1 long prompt, 3 long answer"
    )
    assert rows.skipped.total() == 0  # counted anew each time


def test_the_fingerprint_tells_pairs_apart(file: Path, model: Path) -> None:
    def fingerprint(*rows: dict[str, Any]) -> str:
        return tokens(load(file, *rows), model).fingerprint

    first = fingerprint(pair("Q", "A", "B"), pair("Q", "C", "D"))
    assert first == fingerprint(pair("Q", "A", "B"), pair("Q", "C", "D"))
    others = [
        [pair("Q", "C", "D"), pair("Q", "A", "B")],
        [pair("Q", "B", "A"), pair("Q", "C", "D")],
        [pair("QA", "", "B"), pair("Q", "A", "B"), pair("Q", "C", "DD")],
    ]
    assert len({first, *(fingerprint(*rows) for rows in others)}) == 4


DPO = {
    "algorithm": "dpo",
    "rollout": {"prompts_per_step": 3, "max_tokens": 8},
    "training": {"mini_batch": 6, "micro_batch_tokens": 512},
}


def dpo_config(tmp_path: Path, *overrides: str, **sections: Any) -> Config:
    return load_config(write_config(tmp_path, **DPO | sections), overrides)


def nothing(done: float, total: float, text: str) -> None:
    pass


def no_servers(admission: Admission) -> None:
    raise AssertionError(f"there are no servers, but {admission} came")


def opened(config: Config) -> Offline:
    rollouts = open_rollouts(config, 0, lambda function: function())
    assert isinstance(rollouts, Offline)
    return rollouts


def test_a_batch_is_pairs_the_better_answer_first(tmp_path: Path, model: Path) -> None:
    config = dpo_config(tmp_path)
    pairs = read_pairs(config).pairs
    with opened(config) as rollouts:
        rollouts.wait_ready(nothing)
        assert rollouts.servers_for_push(0, 0) == ()
        rollouts.begin(1, 0, 0)
        header = rollouts.wait(1, nothing, no_servers)
        assert header.groups.tolist() == [0, 0, 1, 1, 2, 2]
        assert header.correct.tolist() == [True, False] * 3
        assert header.rewards.tolist() == [1.0, -1.0] * 3
        assert header.draws.tolist() == [0, 1, 2]
        assert not header.truncated.any()
        assert header.versions.tolist() == [[0, 0]] * 6
        block = rollouts.tokens(1, np.array([1, 4], np.int32))
        first, last = pairs[header.prompt_ids[0]], pairs[header.prompt_ids[2]]
        assert block.prompt_tokens.tolist() == [*first.prompt, *last.prompt]
        assert block.response_tokens.tolist() == [*first.rejected, *last.chosen]
        assert np.isnan(block.rollout_log_probs).all()
        assert rollouts.wait(1, nothing, no_servers) is header
        assert rollouts.evaluate("before", nothing, no_servers) is None
        with pytest.raises(ValueError, match="step 2 is not the one"):
            rollouts.tokens(2, np.array([0], np.int32))
    drawn = [pairs[i] for i in header.prompt_ids]
    lengths = [[len(p.chosen) for p in drawn], [len(p.rejected) for p in drawn]]
    assert header.stats == {
        "drawn": 3.0,
        "kept": 3.0,
        "epoch": 3 / 32,
        "pairs_skipped": 0.0,
        "chosen_length": np.mean(lengths[0]),
        "rejected_length": np.mean(lengths[1]),
        "response_length": np.mean(lengths),
        "response_length_max": float(np.max(lengths)),
    }


def batches(rollouts: Offline, steps: range) -> list[list[int]]:
    return [rollouts.wait(step, nothing, no_servers).prompt_ids.tolist() for step in steps]


def test_every_pair_once_an_epoch_and_again_in_another_order(tmp_path: Path, model: Path) -> None:
    found = batches(opened(dpo_config(tmp_path, "data.train.limit=6")), range(1, 5))
    epochs = [found[0] + found[1], found[2] + found[3]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 2
    assert epochs[0] != epochs[1]
    in_order = batches(opened(dpo_config(tmp_path, "data.train.limit=6", "data.shuffle=false")), range(1, 4))
    assert in_order == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def save(run_dir: Path, step: int, cursor: dict[str, Any]) -> None:
    state = run_dir / f"state/step_{step:06d}"
    state.mkdir(parents=True)
    (state / "manifest.json").write_text("{}")
    (state / "run.json").write_text(json.dumps({"cursor": cursor}))
    (run_dir / "state/latest").write_text(f"{state.name}\n")


def test_a_resumed_run_goes_on_with_the_same_pairs(tmp_path: Path, model: Path) -> None:
    config = dpo_config(tmp_path, "data.train.limit=7")
    whole = opened(config)
    expected = batches(whole, range(1, 7))
    before = opened(config)
    batches(before, range(1, 4))
    save(Path(config.run.dir), 3, before.wait(3, nothing, no_servers).cursor)
    after = opened(config)
    assert batches(after, range(4, 7)) == expected[3:]
    assert after.wait(6, nothing, no_servers).cursor == whole.wait(6, nothing, no_servers).cursor
    assert after.wait(6, nothing, no_servers).draws.tolist() == [15, 16, 17]
    assert after.wait(6, nothing, no_servers).versions.tolist() == [[5, 5]] * 6
    with pytest.raises(UserError, match="the training data changed"):
        opened(dpo_config(tmp_path, "data.train.limit=6"))


def test_ranks_must_read_the_same_pairs(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = write(tmp_path / "pairs.jsonl", pair("Q", "1", "2"), pair("Q", "1", "1"))
    config = dpo_config(tmp_path, data={"train": {"path": rows.path}, "max_prompt_tokens": 4})
    told_by_rank_zero = read_pairs(config).fingerprint
    open_rollouts(config, 1, lambda _: told_by_rank_zero)
    assert not caplog.messages  # rank 0 alone tells
    opened(config)
    assert caplog.messages == [f"{rows.path}: 1 rows are skipped: 1 equal"]
    with pytest.raises(UserError, match=r"data\.train: .* is not the same on all nodes"):
        open_rollouts(config, 1, lambda _: "another")


def test_preflight_checks_pairs_and_nothing_of_the_fleet(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)  # no vLLM
    monkeypatch.setattr(checks, "SAMPLE", 1)
    preflight(dpo_config(tmp_path, "fleet.mode=colocated"), 1)
    rows = write(tmp_path / "pairs.jsonl", pair("QQQQ", "1", "2"), pair("Q", "1", "2"))
    data = {"train": {"path": rows.path}, "max_prompt_tokens": 4}
    preflight(dpo_config(tmp_path, data=data), 1)
    preflight(dpo_config(tmp_path, "data.max_prompt_tokens=1", data=data), 1)  # one fits, after the sample
    with pytest.raises(UserError, match="no pair can be trained on"):
        preflight(dpo_config(tmp_path, "rollout.max_tokens=1", data=data), 1)
    write(tmp_path / "pairs.jsonl", {"prompt": "Q", "chosen": "1"})
    with pytest.raises(UserError, match=r"row 1 of .* has no rejected"):
        preflight(dpo_config(tmp_path, data=data), 1)


def test_plan_tells_that_there_are_no_servers(tmp_path: Path, model: Path) -> None:
    told_plan = plan(dpo_config(tmp_path), 1)
    assert told_plan["rollout servers"] == "none: data.train holds pairs of answers"
    assert told_plan["responses per step"] == "6 = 3 groups x 2 answers"
