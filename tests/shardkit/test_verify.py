"""Verifying: clean shards pass, and every kind of damage is named with shard, key, uid and reason."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import ConfigError, InputError, StorageError
from core.storage import Folder
from shardkit.config import ShardConfig, VerifyConfig
from shardkit.pack import run as pack
from shardkit.verify import _Table, run
from tests.shardkit.parts import World, contents, jpeg, small_world


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


@pytest.mark.parametrize("name", ["sizes.json", "ranks/00001-of-00002.txt"])
def test_lists_beside_the_shards_are_compared_and_restored(tmp_path: Path, name: str) -> None:
    work = small_world(tmp_path).write()
    pack(ShardConfig(work=str(work), workers=1, samples_per_shard=15, ranks=2))
    path = work / "shards" / name
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"00001", b"00009"))
    (bad,) = verify(work)["bad"]
    assert bad["shard"] == f"shards/{name}" and "not what follows from shards.json" in bad["reason"]
    path.unlink()
    assert [(b["shard"], b["reason"]) for b in verify(work)["bad"]] == [(f"shards/{name}", "is missing")]
    summary = verify(work, repair=True)
    assert (summary["repaired"], summary["bad"], path.read_bytes()) == ([f"shards/{name}"], [], whole)


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
    assert reasons["shards/00002.idx", ""] == "its sha256 is not the listed one"
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
    shards = {f"shards/{i:05d}.tar" for i in range(4)}
    assert found["exit_code"] == 5 and {one["shard"] for one in found["bad"]} == shards | {"shards/samples.parquet"}
    assert all("samples.parquet" in one["shard"] + one["reason"] for one in found["bad"])


@pytest.mark.parametrize("how", [{}, {"row_group_size": 7}, {"write_statistics": False}])
def test_a_shards_rows_are_found_however_the_table_is_cut(tmp_path: Path, how: dict[str, Any]) -> None:
    row = {"uid": "u", "captions": ["a"], "jpg_offset": 0, "jpg_size": 1, "crc32": 2}
    rows = [{"shard": f"{n // 10:05d}.tar", "key": str(n), **row} for n in range(35)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples.parquet", **how)
    table = _Table(Folder(tmp_path))
    found = [[one["key"] for one in table.rows(f"{n:05d}.tar")] for n in range(5)]
    assert found == [[str(n) for n in range(first, min(first + 10, 35))] for first in range(0, 50, 10)]


# ---- files that are whole, and wrong ----------------------------------------------------------------------------------


def reasons(found: dict[str, Any]) -> dict[str, str]:
    assert len({one["shard"] for one in found["bad"]}) == len(found["bad"])
    return {one["shard"]: one["reason"] for one in found["bad"]}


def test_exchanged_renamed_and_foreign_tars_are_told_apart(work: Path) -> None:
    shards = work / "shards"
    shards.joinpath("00000.tar").rename(shards / "x")
    shards.joinpath("00001.tar").rename(shards / "00000.tar")
    shards.joinpath("x").rename(shards / "00001.tar")
    shards.joinpath("00002.tar").rename(shards / "renamed.tar")
    shards.joinpath("foreign.tar").write_bytes(bytes(10240))
    assert reasons(verify(work)) == {
        "shards/00000.tar": "holds what 00001.tar should hold: they were exchanged",
        "shards/00001.tar": "holds what 00000.tar should hold: they were exchanged",
        "shards/00002.tar": "is missing",
        "shards/renamed.tar": "is not listed, its contents are those of 00002.tar: rename or remove it",
        "shards/foreign.tar": "is not listed, and loaders that take every tar would read it: move it elsewhere",
    }


def test_an_empty_tar_and_a_table_of_another_packing_are_noticed(work: Path) -> None:
    shutil.copy(work / "holdout/samples.parquet", work / "shards/samples.parquet")
    bad = {one["shard"] for one in verify(work)["bad"]}
    assert {"shards/samples.parquet", "shards/00000.tar"} <= bad
    (work / "holdout/00000.tar").write_bytes(b"")
    assert any(one["shard"] == "holdout/00000.tar" and "cut short" in one["reason"] for one in verify(work)["bad"])


def test_every_flipped_bit_of_any_file_is_noticed(work: Path) -> None:
    for name in ("00001.tar", "00001.idx", "samples.parquet"):
        path = work / "shards" / name
        whole = path.read_bytes()
        for at in range(7, len(whole), max(1, len(whole) // 7)):
            overwrite(path, at, bytes([whole[at] ^ 16]))
            assert verify(work)["exit_code"] == 5, (name, at)
            path.write_bytes(whole)
    assert verify(work)["bad"] == []


def test_a_set_without_its_list_is_bad_and_not_overlooked(work: Path) -> None:
    (work / "holdout/shards.json").unlink()
    assert reasons(verify(work)) == {"holdout/shards.json": "is missing; run `pairmill shard` again"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_may_not_be_read_is_a_sentence(work: Path) -> None:
    (work / "shards").chmod(0)
    try:
        with pytest.raises(StorageError, match="cannot read"):
            verify(work)
    finally:
        (work / "shards").chmod(0o755)


def test_a_file_where_a_folder_belongs_is_a_sentence(work: Path) -> None:
    with pytest.raises(InputError, match=r"expected shards\.json in"):
        verify(work, shards=str(work / "pairmill.toml"))


# ---- repair -----------------------------------------------------------------------------------------------------------


def damage(work: Path) -> None:
    """One damage of each kind: a picture, a caption, a header, a cut, lost and exchanged files, a foreign table."""
    shards = work / "shards"
    bad = row(work, 7)
    overwrite(shards / bad["shard"], bad["jpg_offset"] + 100, b"\0\1\2")
    overwrite(shards / "00000.tar", row(work, 3)["jpg_offset"] - 500, b"?")
    os.truncate(shards / "00001.tar", 5000)
    (shards / "00002.tar").unlink()
    shutil.copy(shards / "00003.tar", shards / "00002.tar")
    (shards / "00003.idx").unlink()
    (work / "holdout/00000.tar").unlink()
    overwrite(work / "holdout/samples.parquet", 50, b"?????")


def test_repair_restores_every_byte(work: Path) -> None:
    before = contents(work)
    damage(work)
    assert verify(work)["exit_code"] == 5
    mended = verify(work, repair=True)
    assert (mended["bad"], mended["not_repaired"], mended["exit_code"]) == ([], [], 0)
    assert set(mended["repaired"]) == {
        "shards/00000.tar", "shards/00001.tar", "shards/00002.tar", "shards/00003.idx", "holdout/00000.tar",
        "holdout/samples.parquet",
    }  # fmt: skip
    assert {k: v for k, v in contents(work).items() if k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }
    assert verify(work, repair=True)["repaired"] == []


def test_a_shard_mends_itself_where_its_own_pictures_are_whole(work: Path) -> None:
    before = contents(work / "shards")
    for path in work.glob("ingest/parts/*.tar"):
        path.unlink()
    overwrite(work / "shards/00000.tar", row(work, 3)["jpg_offset"] - 500, b"?")  # a header
    (work / "shards/00001.idx").unlink()
    assert verify(work, repair=True)["bad"] == []
    assert contents(work / "shards") == before


def test_what_cannot_be_restored_is_left_alone_and_named(work: Path) -> None:
    for path in work.glob("ingest/parts/*.tar"):
        path.unlink()
    bad = row(work, 7)
    overwrite(work / "shards" / bad["shard"], bad["jpg_offset"] + 100, b"\0\1\2")
    before = contents(work / "shards")
    found = verify(work, repair=True)
    assert found["exit_code"] == 5 and [one["key"] for one in found["bad"]] == [bad["key"]]
    (failure,) = found["not_repaired"]
    assert failure["shard"] == f"shards/{bad['shard']}" and bad["uid"] in failure["reason"]
    assert contents(work / "shards") == before


def test_repair_refuses_other_pairs_and_other_folders(work: Path) -> None:
    (work / "shards/00000.idx").unlink()
    with pytest.raises(ConfigError, match="leave --shards out"):
        verify(work, repair=True, shards=str(work / "shards"))
    part = work / "dedup/decisions.parquet"
    pq.write_table(pq.read_table(part).slice(1), part)
    with pytest.raises(InputError, match="made of other pairs or decisions"):
        verify(work, repair=True)


def test_damaged_samples_alone_are_fetched_again(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    for number in range(12):
        (served / f"{number}.jpg").write_bytes(jpeg(number, 320, 240))
    with counting_server(served) as (address, asked):
        (tmp_path / "list.csv").write_text(
            "url,caption\n" + "".join(f"{address}/{n}.jpg,picture number {n}\n" for n in range(12))
        )
        work = tmp_path / "work"
        for command in (
            ["ingest", str(tmp_path / "list.csv"), "--size", "64"], ["dedup"], ["shard", "--size", "48"],
        ):  # fmt: skip
            pairmill(*command, "--work", str(work), "--workers", "1", *(["--allow-private"] * (command[0] == "ingest")))
        before = contents(work / "shards")
        for path in work.glob("ingest/parts/*.tar"):
            path.unlink()
        chosen = [row(work, 2), row(work, 5)]
        for bad in chosen:
            overwrite(work / "shards" / bad["shard"], bad["jpg_offset"] + 100, b"\0\1\2")
        asked.clear()
        found = json.loads(
            pairmill("verify", "--repair", "--allow-private", "--json", "--work", str(work), "--workers", "1")
        )
    assert found["bad"] == [] and contents(work / "shards") == before
    assert sorted(asked) == sorted(bad["url"].removeprefix(address) for bad in chosen)


def pairmill(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "cli", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


@contextlib.contextmanager
def counting_server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server of `folder`; yields its address and the paths it was asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
