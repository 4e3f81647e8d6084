"""Verifying: clean shards pass, and every kind of damage is named with shard, key, uid and reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from core.errors import InputError
from shardkit.config import ShardConfig, VerifyConfig
from shardkit.pack import run as pack
from shardkit.verify import run
from tests.shardkit.parts import World, jpeg, small_world


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = small_world(tmp_path_factory.mktemp("verify"))
    pack(ShardConfig(work=str(world.write()), workers=1, samples_per_shard=15))
    return world.work


@pytest.fixture
def work(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed, tmp_path / "work")
    return tmp_path / "work"


def verify(work: Path, **settings: Any) -> dict[str, Any]:
    return run(VerifyConfig(work=str(work), workers=1, **settings))


def row(work: Path, number: int) -> dict[str, Any]:
    return pq.read_table(work / "shards/samples.parquet").to_pylist()[number]


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("deep", [False, True])
def test_clean_shards_pass(packed: Path, deep: bool) -> None:
    summary = verify(packed, deep=deep)
    assert (summary["samples"], summary["shards"], summary["bad"], summary["exit_code"]) == (52, 5, [], 0)
    assert verify(packed, deep=deep, shards=str(packed / "holdout"))["samples"] == 6


@pytest.mark.parametrize("deep", [False, True])
def test_a_changed_picture_is_named(work: Path, deep: bool) -> None:
    bad = row(work, 7)
    overwrite(work / "shards" / bad["shard"], bad["jpg_offset"] + 100, b"\0\1\2")
    summary = verify(work, deep=deep)
    assert summary["exit_code"] == 5
    assert summary["bad"] == [
        {
            "shard": f"shards/{bad['shard']}", "key": bad["key"], "uid": bad["uid"],
            "reason": "its bytes have changed: the crc32 differs from the index",
        }
    ]  # fmt: skip


def test_a_changed_caption_is_named(work: Path) -> None:
    bad = row(work, 3)
    data = (work / "shards" / bad["shard"]).read_bytes()
    at = data.index(bad["captions"][0].encode(), bad["jpg_offset"])
    overwrite(work / "shards" / bad["shard"], at, b"PICTURE")
    assert [(b["key"], b["reason"]) for b in verify(work)["bad"]] == [
        (bad["key"], "its caption is not the one in the index")
    ]


def test_a_changed_json_is_noticed_by_the_shards_hash(work: Path) -> None:
    data = (work / "shards/00000.tar").read_bytes()
    overwrite(work / "shards/00000.tar", data.index(b'"license"'), b'"LICENSE"')
    assert [(b["key"], b["reason"]) for b in verify(work)["bad"]] == [
        ("", "its sha256 is not the listed one, though pictures and captions are whole: a header or KEY.json changed")
    ]


def test_a_cut_and_a_missing_shard_and_index(work: Path) -> None:
    first = row(work, 0)
    os.truncate(work / "shards/00000.tar", first["jpg_offset"] + first["jpg_size"] + 3000)
    (work / "shards/00001.tar").unlink()
    (work / "holdout/00000.idx").unlink()
    shutil.copy(work / "shards/00003.idx", work / "shards/00002.idx")
    bad = verify(work)["bad"]
    reasons = {(b["shard"], b["key"]): b["reason"] for b in bad}
    assert reasons["shards/00001.tar", ""] == "is missing"
    assert reasons["holdout/00000.idx", ""] == "is missing"
    assert reasons["shards/00002.idx", ""] == "does not list the samples of samples.parquet"
    assert "is cut short" in reasons["shards/00000.tar", ""]
    lost = [b for b in bad if b["shard"] == "shards/00000.tar" and b["key"]]
    assert len(lost) >= 10 and first["key"] not in {b["key"] for b in lost}
    assert any(b["reason"].startswith("cut short: expected") for b in lost)


def test_only_a_deep_look_finds_a_picture_that_was_broken_before(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add(0, ["whole"])
    body = bytearray(jpeg(1, 64, 64))
    del body[-60:-2]  # the header is fine and so is the end mark: copied without being decoded
    uids = world.add(1, ["broken"], body=bytes(body))
    pack(ShardConfig(work=str(world.write()), workers=1))
    assert verify(tmp_path)["bad"] == []
    (bad,) = verify(tmp_path, deep=True)["bad"]
    assert bad["uid"] == uids[0] and bad["reason"].startswith("cannot be decoded: ")


def test_workers_do_not_change_what_is_found(work: Path) -> None:
    bad = row(work, 30)
    overwrite(work / "shards" / bad["shard"], bad["jpg_offset"] + 100, b"\0\1\2")
    alone = verify(work)
    several = run(VerifyConfig(work=str(work), workers=2))
    assert several["bad"] == alone["bad"] != []


def test_without_shards_the_verb_to_run_first_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `pairmill shard` first"):
        verify(tmp_path)


@pytest.mark.parametrize("keep", [0, 200])
def test_samples_that_cannot_be_read_are_bad_and_no_crash(work: Path, keep: int) -> None:
    path = work / "shards/samples.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    found = verify(work)
    assert found["exit_code"] == 5 and {one["shard"] for one in found["bad"]} == {
        f"shards/{i:05d}.tar" for i in range(4)
    }
    assert all("samples.parquet" in one["reason"] for one in found["bad"])
