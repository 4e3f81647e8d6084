"""Anybody's tars: whatever names, notes and damage they come with, every reader of them ends with rows or a sentence."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import DataError
from core.images import encode_jpeg
from dedup.config import DedupConfig
from dedup.keep import run as dedup
from ingest.adopt import run as adopt
from ingest.config import AdoptConfig
from report.audit import run as audit
from report.config import AuditConfig
from shardkit.foreign import open_foreign

JPEG = encode_jpeg(np.full((64, 48, 3), 90, np.uint8), 90)


def _write(folder: Path, members: list[tuple[str, bytes]]) -> Path:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "00000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return folder / "00000.tar"


def _audited(shards: Path, work: Path) -> int:
    return int(audit(AuditConfig(folder=str(shards)))["pairs"]["rows"])


def _compared(shards: Path, work: Path) -> int:
    work.mkdir()
    pq.write_table(pa.table({"caption": ["one two three four five"]}), work / "captions.parquet")
    settings = {"captions": str(work / "captions.parquet"), "policy": "text", "workers": 1}
    return int(dedup(DedupConfig(work=str(work), against=(str(shards),), **settings))["against"][0]["items"])  # type: ignore[arg-type]


def _adopted(shards: Path, work: Path) -> int:
    return int(adopt(AdoptConfig(work=str(work), shards=str(shards), workers=1))["pairs"])


def _opened(shards: Path, work: Path) -> int:
    return sum(shard.samples for shard in open_foreign(str(shards))[1])


READERS = (_audited, _compared, _adopted, _opened)


@pytest.mark.parametrize("reader", READERS)
def test_odd_names_and_notes_cost_no_sample(tmp_path: Path, reader: Callable[[Path, Path], int]) -> None:
    notes = [
        b'{"caption": "half a pair \\ud800", "uid": "u\\ud800", "sha256": "\\udfff", "url": "http://x/\\ud800"}',
        b'{"caption": "half a pair \xed\xa0\x80"}',
        b'{"width": true, "height": true}',
        b'{"width": 1' + b"0" * 30 + b', "height": 64}',
        b'{"width": -5, "height": 0}',
        b'{"width": 64.5, "height": NaN}',
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b"",
    ]
    members = [
        (f"k{i}.{ending}", data)
        for i, one in enumerate(notes)
        for ending, data in (("jpg", JPEG), ("txt", b"w"), ("json", one))
    ]
    members += [(f"\udcff{i}.{ending}", data) for i in (0, 1) for ending, data in (("JPG", JPEG), ("Txt", b"w"))]
    members += [(f"\udcfe2.{ending}", data) for ending, data in (("jpg", JPEG), ("txt", b"w"))]
    _write(tmp_path / "tars", members)
    assert reader(tmp_path / "tars", tmp_path / "work") == len(notes) + 3


@pytest.mark.parametrize("damage", ["header", "cut", "no end", "text", "empty"])
def test_a_damaged_tar_is_never_taken_for_a_shorter_one(tmp_path: Path, damage: str) -> None:
    path = _write(tmp_path / "tars", [(f"{i}.{end}", d) for i in range(3) for end, d in (("jpg", JPEG), ("txt", b"w"))])
    whole = path.read_bytes()
    second = whole.index(b"1.jpg")
    path.write_bytes({
        "header": whole[: second + 148] + b"9" + whole[second + 149 :], "cut": whole[:-12_000], "no end": whole[:second],
        "text": b"hello" * 500, "empty": b"",
    }[damage])  # fmt: skip
    for i, reader in enumerate((_audited, _compared, _opened)):
        with pytest.raises(DataError, match=r"00000\.tar"):
            reader(tmp_path / "tars", tmp_path / f"work{i}")
    summary = adopt(AdoptConfig(work=str(tmp_path / "adopted"), shards=str(tmp_path / "tars"), workers=1))
    assert summary["outcomes"]["truncated"] == 1
