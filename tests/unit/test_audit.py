"""The audit of a run's records finds what it is there for."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from dapo_megatron.config.load import load_config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.rollout.journal import Journal
from dapo_megatron.rollout.records import RECORDS, Records, read_records
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.work import load_data
from tests.chaos.audit import audit, lost_seconds
from tests.rollouts import work_of
from tests.unit.config_helpers import write_config, write_model

VERSION = 3
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of two steps."""
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "model")
    config = load_config(write_config(folder), ["rollout.dynamic_sampling=false"])
    records = Records(folder / "run" / "rollouts")
    for state in ("started", "joining", "ready"):
        records.add("server", id="0", state=state, reason="", version=VERSION if state == "ready" else None, at=1.0)

    async def sample() -> None:
        work = await work_of(config, load_data(config, Tokenizer(config.model.path), None), "12", VERSION)
        for step in (1, 2):
            await work.sample(step, VERSION, VERSION, Progress())

    asyncio.run(sample())
    records.close()
    return records.path.parent


def test_a_sound_run_passes(sound: Path) -> None:
    assert audit(sound) == []


def numbers(lines: Lines, kind: str, **members: Any) -> list[int]:
    """Places of records of a kind with these members."""
    return [
        place
        for place, line in enumerate(lines)
        if line["kind"] == kind and all(line[name] == value for name, value in members.items())
    ]


def drop(kind: str, **members: Any) -> Callable[[Lines], None]:
    return lambda lines: lines.pop(numbers(lines, kind, **members)[0])  # type: ignore[return-value]


def double(kind: str, **members: Any) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        place = numbers(lines, kind, **members)[0]
        lines.insert(place, lines[place])

    return change


def put(kind: str, changes: dict[str, Any], **members: Any) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        place = numbers(lines, kind, **members)[0]
        lines[place] = lines[place] | changes

    return change


def not_ready(lines: Lines) -> None:
    lines.insert(numbers(lines, "begin")[0], {"kind": "server", "id": "0", "state": "joining", "version": None})


def older(lines: Lines) -> None:
    lines.append({"kind": "server", "id": "0", "state": "ready", "version": VERSION - 1})


def broken_chain(lines: Lines) -> None:
    place = numbers(lines, "attempt")[0]
    attempt = lines[place]
    cut = attempt | {"ended": "removed", "tokens_after": attempt["tokens_after"] - 1}
    lines.insert(place, cut)
    lines[place + 1] = attempt | {"request": f"{attempt['request'].rpartition('-')[0]}-2", "tokens_before": 0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop("answer", draw=2, index=0), "draw 2: an answer is missing"),
        (double("answer", draw=2), "draw 2: an answer is there twice"),
        (
            put("answer", {"versions": [[VERSION - 1, 2]]}, draw=1),
            f"draw 1: an answer has weights [[{VERSION - 1}, 2]]",
        ),
        (
            put("answer", {"versions": [[VERSION + 1, 2]]}, draw=1),
            f"draw 1: an answer has weights [[{VERSION + 1}, 2]]",
        ),
        (put("answer", {"versions": [[VERSION, 1]]}, draw=1), "draw 1: weight versions do not cover an answer"),
        (put("answer", {"digest": "00"}, draw=1), "draw 1: the batch has other answers than were recorded"),
        (drop("outcome", draw=3), "draw 3 has 1 draws and 0 outcomes"),
        (drop("outcome", draw=3), "draw 3 is lost"),
        (double("outcome", draw=3), "draw 3 is taken 2 times"),
        (put("outcome", {"outcome": "surplus"}, draw=1), "draw 1 is lost"),
        (put("outcome", {"outcome": "all_wrong"}, draw=1), "the batch has the draws [0, 1, 2, 3], kept were [0, 2, 3]"),
        (put("draw", {"draw": 0}, draw=5), "draw 0 is of two prompts"),
        (drop("batch", step=2), "step 2: 0 batches"),
        (put("batch", {"digest": "00"}, step=2), "step 2: the batch is not the one that was recorded"),
        (put("batch", {"responses": 3}, step=2), "step 2: the batch is not the one that was recorded"),
        (drop("attempt", draw=4), "draw 4: an answer was never finished by a server"),
        (put("attempt", {"ended": "failed"}, draw=4), "draw 4: an answer was never finished by a server"),
        (put("attempt", {"tokens_before": 9}, draw=4), "lost tokens"),
        (broken_chain, "went on with 0 tokens, it had 1"),
        (not_ready, "an answer of draw 0 was finished by 0, which is not ready"),
        (older, f"server 0 went back to version {VERSION - 1}"),
    ],
)
def test_what_is_wrong_is_found(sound: Path, tmp_path: Path, change: Callable[[Lines], None], told: str) -> None:
    folder = tmp_path / "rollouts"
    shutil.copytree(sound, folder)
    lines = list(read_records(folder))
    change(lines)
    (folder / RECORDS).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert any(told in sentence for sentence in audit(folder)), audit(folder)


def test_a_batch_with_another_answer_is_found(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    shutil.copytree(sound, folder)
    journal = Journal(folder)
    header, tokens = journal.read(2)
    tokens.response_tokens[0] += np.int32(1)
    journal.write(header, tokens)
    assert "step 2: the batch is not the one that was recorded" in audit(folder)
    assert any("the batch has other answers than were recorded" in sentence for sentence in audit(folder))


def test_older_weights_pass_where_they_are_allowed(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    shutil.copytree(sound, folder)
    lines = list(read_records(folder))
    for line in lines:
        line |= {"oldest": VERSION - 1} if line["kind"] == "begin" else {}
    (folder / RECORDS).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert audit(folder) != []
    assert audit(folder, staleness=1) == []


def test_lost_seconds_are_those_without_usable_weights(tmp_path: Path) -> None:
    records = Records(tmp_path)
    story = [(0, "a", "ready"), (0, "b", "ready"), (10, "a", "removed"), (12, "b", "removed"), (13, "a", "joining")]
    story += [(15, "a", "ready"), (15, "a", "ready"), (20, "b", "ready")]
    records.add("server", id="a", state="started", reason="", version=None, at=-30)
    for at, id, state in story:
        records.add("server", id=id, state=state, reason="", version=None, at=at)
    assert lost_seconds(tmp_path) == {"a": 5.0, "b": 8.0, "all": 3.0}
