"""Series and JSONL files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from core.errors import StorageError
from core.metrics import Jsonl, Series


def test_percentiles_and_start_over() -> None:
    series = Series()
    for i in range(101):
        series.add(i / 100)
    taken = series.take()
    assert (taken["n"], taken["p50"], taken["p99"]) == (101, 0.50, 0.99)
    assert abs(taken["sum"] - 50.5) < 1e-9
    assert series.take()["n"] == 0


def test_a_full_disk_is_a_sentence() -> None:
    file = Jsonl(Path("/dev/full"))
    with pytest.raises(StorageError, match=r"cannot write /dev/full: No space left on device; .*same command again"):
        file.append({"step": 1})


def test_rows_are_dropped_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Jsonl(tmp_path / "m.jsonl")
    for step in range(3):
        file.append({"step": step})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(StorageError, match="disk is full"):
        file.keep(lambda row: row["step"] < 1)
    assert [row["step"] for row in file.rows()] == [0, 1, 2]


def test_a_line_cut_short_by_a_kill_is_left_out_and_replaced(tmp_path: Path) -> None:
    file = Jsonl(tmp_path / "m.jsonl")
    for step in range(3):
        file.append({"step": step})
    with file.path.open("a") as raw:
        raw.write('{"step": 3, "lo')
    assert [row["step"] for row in file.rows()] == [0, 1, 2]
    file.keep(lambda row: row["step"] < 2)
    file.append({"step": 2})
    assert [row["step"] for row in file.rows()] == [0, 1, 2]
