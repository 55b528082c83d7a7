"""The file of records: what a crash leaves of it, and a full disk."""

from pathlib import Path

import pytest

from dapo_megatron.rollout import records as module
from dapo_megatron.rollout.records import RECORDS, Records, read_records


def write(folder: Path, *steps: int) -> None:
    records = Records(folder)
    for step in steps:
        records.add("begin", step=step)
    records.close()


@pytest.mark.parametrize("rest", [b"", b"{", b'{"kind":"begin","step":' + b"9" * 100])
@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_a_line_that_a_crash_cut_off_is_not_part_of_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: bytes, block: int
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    write(tmp_path, 1, 2)
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(rest)
    write(tmp_path, 3)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3]


def test_nothing_but_half_a_line(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_bytes(b'{"kind"')
    write(tmp_path, 3)
    assert [record["step"] for record in read_records(tmp_path)] == [3]


def test_half_a_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, line: bytes) -> int:
            return 3

    records = Records(tmp_path)
    records.close()
    monkeypatch.setattr(records, "_file", Full())
    with pytest.raises(OSError, match=r"events.jsonl: 3 of 26 bytes .* is the disk full"):
        records.add("begin", step=1)
