"""Packing: what is in the shards, the same bytes every time, also after kill -9, and clear words for bad input."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from core.errors import ConfigError, DataError, InputError, StorageError, WorkFolderError
from core.images import decode, encode_jpeg, read_header
from core.schema import sample_schema
from core.storage import Folder
from core.work import fingerprint, locked
from shardkit.config import ShardConfig
from shardkit.index import Shard, rank_lists, split_name
from shardkit.pack import run
from shardkit.plan import PLANS, planned_shards, rows_of, shard_sizes, shard_sizes_by_bytes, write_plans
from shardkit.tar import Member, scan
from shardkit.write import _is_in_memory, read_plan, sample_key, staged_images
from tests.shardkit.parts import World, contents, jpeg, small_world


def shard(work: Path, **settings: Any) -> dict[str, Any]:
    return run(ShardConfig(**{"work": str(work), "workers": 1, "samples_per_shard": 15, **settings}))


def rows(work: Path, home: str = "shards") -> list[dict[str, Any]]:
    return pq.read_table(work / home / "samples.parquet").to_pylist()


def read_dali_index(path: Path) -> list[list[Member]]:
    version, *lines = path.read_text().splitlines()
    assert version == f"v1.2 {len(lines)}"
    words = [line.split(" ") for line in lines]
    samples = [list(zip(*[iter(w)] * 4, strict=True)) for w in words]
    assert all(extension == split_name(name)[1] for sample in samples for extension, _, _, name in sample)
    return [[Member(name, int(offset), int(size)) for _, offset, size, name in sample] for sample in samples]


def members(work: Path, home: str = "shards") -> dict[str, bytes]:
    found = {}
    for path in sorted((work / home).glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    return found


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, dict[str, Any]]:
    world = small_world(tmp_path_factory.mktemp("packed"))
    return world, shard(world.write(), ranks=2)


def test_every_kept_caption_and_picture_arrives_once(packed: tuple[World, dict[str, Any]]) -> None:
    world, summary = packed
    for home, holdout in (("shards", False), ("holdout", True)):
        wanted = {d["uid"] for d in world.decisions if d["kept"] and d["holdout"] == holdout}
        assert sorted(uid for row in rows(world.work, home) for uid in row["uids"]) == sorted(wanted)
        by_uid = {p["uid"]: p for p in world.pairs}
        for row in rows(world.work, home):
            assert row["captions"] == [by_uid[uid]["caption"] for uid in row["uids"]]
            assert row["uid"] == row["uids"][0] == row["key"] and row["caption"] == row["captions"][0]
    assert summary["samples"] == summary["copied"] == len(rows(world.work)) == 46
    assert summary["holdout"]["samples"] == 6
    assert summary["shards"] == 4  # 46 in shards of at most 15, and a multiple of 2 ranks
    assert summary["bytes"] == sum(p.stat().st_size for p in (world.work / "shards").glob("*.tar"))


def test_members_hold_the_staged_bytes_captions_and_source_columns(packed: tuple[World, dict[str, Any]]) -> None:
    world, _ = packed
    found = members(world.work)
    for row in rows(world.work):
        notes = json.loads(found[f"{row['key']}.json"])
        assert found[f"{row['key']}.jpg"] == world.pictures[row["url"]]
        assert found[f"{row['key']}.txt"].decode() == row["captions"][0]
        assert notes["captions"] == row["captions"] and notes["uids"] == row["uids"]
        assert (notes["width"], notes["height"], notes["image_group"]) == (40, 32, row["image_group"])
        assert notes["similarity"] == int(row["url"].split("/")[-1].split(".")[0]) / 7 and notes["license"] is None
    assert len(found) == 3 * 46


def test_index_and_samples_point_at_the_bytes(packed: tuple[World, dict[str, Any]]) -> None:
    world, _ = packed
    table = pq.read_table(world.work / "shards/samples.parquet")
    assert table.schema == sample_schema()
    for path in sorted((world.work / "shards").glob("*.tar")):
        indexed = read_dali_index(path.with_suffix(".idx"))
        assert [m for sample in indexed for m in sample] == scan(str(path))
        mine = [r for r in table.to_pylist() if r["shard"] == path.name]
        assert [(r["jpg_offset"], r["jpg_size"]) for r in mine] == [(s[0].offset, s[0].size) for s in indexed]


def test_rank_lists_are_disjoint_and_equal(packed: tuple[World, dict[str, Any]]) -> None:
    world, _ = packed
    listed = json.loads((world.work / "shards/shards.json").read_text())
    names = [(world.work / "shards" / lane["list"]).read_text().split() for lane in listed["lanes"]]
    assert [len(n) for n in names] == [2, 2]
    assert sorted(name for mine in names for name in mine) == [s["name"] for s in listed["shards"]]
    assert [lane["samples"] for lane in listed["lanes"]] == [23, 23]


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("samples", [8, 17, 100, 1001])
def test_shards_share_out_equally_over_ranks(ranks: int, samples: int) -> None:
    sizes = shard_sizes(samples, 30, ranks)
    assert sum(sizes) == samples and len(sizes) % ranks == 0 and max(sizes) - min(sizes) <= 1 and max(sizes) <= 30
    lists = rank_lists([Shard(str(i), n, 0) for i, n in enumerate(sizes)], ranks)
    assert sorted(int(s.name) for mine in lists for s in mine) == list(range(len(sizes)))
    assert len({len(mine) for mine in lists}) == 1
    per_rank = [sum(s.samples for s in mine) for mine in lists]
    assert max(per_rank) - min(per_rank) <= 1


@pytest.mark.parametrize(
    "how", [{"workers": 1}, {"workers": 2}, {"workers": 4}, {"workers": 2, "engine": "ray"}], ids=str
)
def test_two_runs_write_the_same_bytes_whoever_works(
    packed: tuple[World, dict[str, Any]], tmp_path: Path, how: dict[str, Any]
) -> None:
    if "engine" in how:
        pytest.importorskip("ray", reason="Ray is an extra")
    world, _ = packed
    small_world(tmp_path).write()
    shard(tmp_path, ranks=2, **how)
    for home in ("shards", "holdout"):
        assert contents(tmp_path / home) == contents(world.work / home)


def test_seed_and_decisions_choose_the_order(packed: tuple[World, dict[str, Any]], tmp_path: Path) -> None:
    world, _ = packed
    small_world(tmp_path).write()
    shard(tmp_path, seed=1)
    order, other = [r["uid"] for r in rows(world.work)], [r["uid"] for r in rows(tmp_path)]
    assert sorted(order) == sorted(other) and order != other
    numbers = [int(r["url"].split("/")[-1].split(".")[0]) for r in rows(world.work)]
    assert numbers != sorted(numbers)


def test_a_finished_stage_is_not_done_again_and_a_changed_input_is(tmp_path: Path) -> None:
    world = small_world(tmp_path)
    world.write()
    first = shard(tmp_path)
    assert shard(tmp_path) == json.loads((tmp_path / "shards/done.json").read_text())
    with pytest.raises(WorkFolderError, match="seed was 0, now 2"):
        shard(tmp_path, seed=2)
    for decision in world.decisions:
        decision["holdout"] = False
    world.write()
    again = shard(tmp_path)
    assert again["samples"] == first["samples"] + first["holdout"]["samples"]
    assert not (tmp_path / "holdout").exists()


@pytest.mark.parametrize(
    "lost", ["shards/00001.tar", "shards/00000.idx", "shards/samples.parquet", "shards/shards.json", "shards/ranks",
             "holdout/00000.tar", "holdout"],
)  # fmt: skip
def test_files_that_are_gone_are_written_again(packed: tuple[World, dict[str, Any]], tmp_path: Path, lost: str) -> None:
    work = tmp_path / "work"
    shutil.copytree(packed[0].work, work)
    before = contents(work / "shards"), contents(work / "holdout")
    path = work / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    shard(work, ranks=2)
    assert (contents(work / "shards"), contents(work / "holdout")) == before


def test_decisions_over_other_pairs_are_refused(tmp_path: Path) -> None:
    world = small_world(tmp_path)
    world.write()
    dedup = world.work / "dedup/decisions.parquet"
    settings = world.work / "pairmill.toml"
    settings.write_text(f'[dedup]\ninputs = "{fingerprint(Folder(world.work), "ingest/parts/*.parquet")}"\n')
    shard(world.work)
    decided = dedup.read_bytes()
    world.add(99, ["a picture that came later"])
    world.write()
    dedup.write_bytes(decided)
    with pytest.raises(InputError, match="pairmill dedup"):
        shard(world.work)


def test_a_refused_command_binds_nobody_to_its_settings(tmp_path: Path) -> None:
    work = small_world(tmp_path).write()
    with pytest.raises(ConfigError, match="lower --ranks"):
        shard(work, ranks=64)
    assert shard(work, ranks=2)["samples"] == 46


def test_only_the_first_caption_where_asked(tmp_path: Path) -> None:
    small_world(tmp_path).write()
    assert shard(tmp_path, captions="first")["captions"] == 46
    assert all(len(row["captions"]) == 1 for row in rows(tmp_path))


def test_the_same_bytes_from_two_units_are_one_sample_and_near_duplicates_are_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = world.add(0, ["one"], group="g")
    second = world.add(1, ["two"], body=jpeg(0), group="g")  # another unit, the same bytes
    world.add(2, ["three"], group="g")  # a near-duplicate that dedup kept
    world.write()
    assert shard(tmp_path)["samples"] == 2
    assert sorted(r["captions"] for r in rows(tmp_path)) == [["one", "two"], ["three"]]
    assert {r["image_group"] for r in rows(tmp_path)} == {"g"}
    assert {*first, *second} == set(next(r["uids"] for r in rows(tmp_path) if len(r["uids"]) == 2))


def test_large_pictures_are_resized_and_broken_ones_left_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add(0, ["large"], body=jpeg(0, 320, 160))
    world.add(1, ["fits"], body=jpeg(1, 64, 32))
    broken = world.add(2, ["broken"], body=jpeg(2, 320, 160)[:-900])
    world.add(3, ["no picture at all"], body=b"<html>")
    world.write()
    summary = shard(tmp_path, size=(32,))
    assert [summary[k] for k in ("samples", "copied", "resized", "left_out")] == [2, 1, 1, 2]
    sizes = {}
    for row in rows(tmp_path):
        data = members(tmp_path)[f"{row['key']}.jpg"]
        assert decode(data, read_header(data)).shape == (row["height"], row["width"], 3)
        assert read_header(data).baseline_420
        sizes[row["captions"][0]] = (row["width"], row["height"])
    assert sizes == {"large": (64, 32), "fits": (64, 32)}
    left_out = [json.loads(line) for line in (tmp_path / "shards/left_out.jsonl").read_text().splitlines()]
    assert broken[0] in {row["uid"] for row in left_out}
    assert any(row["reason"].startswith("truncated") for row in left_out)


def test_a_staged_picture_that_has_changed_is_left_out_and_one_without_sums_is_hashed(tmp_path: Path) -> None:
    world = World(tmp_path, units=1)
    for number in range(3):
        world.add(number, [f"picture {number}"])
    world.write()
    part = tmp_path / "ingest/parts/u000000.parquet"
    table = pq.read_table(part)
    pairs = [row for row in table.to_pylist() if row["outcome"] == "ok"]
    with (tmp_path / pairs[1]["tar"]).open("r+b") as file:
        file.seek(pairs[1]["tar_offset"] + pairs[1]["tar_size"] - 9)  # in the scan, where the picture still decodes
        file.write(b"\x55")
    rows_without = [row | ({"stored_crc32": None, "stored_sha256": None} if row["uid"] == pairs[2]["uid"] else {})
                    for row in table.to_pylist()]  # fmt: skip
    pq.write_table(type(table).from_pylist(rows_without, schema=table.schema), part)
    assert shard(tmp_path)["left_out"] == 1
    (left_out,) = [json.loads(line) for line in (tmp_path / "shards/left_out.jsonl").read_text().splitlines()]
    assert left_out["uid"] == pairs[1]["uid"] and "not those that were staged" in left_out["reason"]
    assert {row["uid"]: row["sha256"] for row in rows(tmp_path)} == {
        pair["uid"]: hashlib.sha256(world.pictures[pair["url"]]).hexdigest() for pair in (pairs[0], pairs[2])
    }


def test_a_key_json_is_json_whatever_the_source_holds(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    world = World(tmp_path)
    for number, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.25)):
        world.add(number, [f"picture {number}"])
        world.pairs[-1]["similarity"] = value
    shard(world.write())
    found = [
        json.loads(data, parse_constant=refuse) for name, data in members(tmp_path).items() if name.endswith("json")
    ]
    assert sorted(str(notes["similarity"]) for notes in found) == ["0.25", "None", "None", "None"]


def test_keys_have_no_dots_spaces_or_slashes() -> None:
    assert sample_key("0123456789abcdef0123456789abcdef") == "0123456789abcdef0123456789abcdef"
    for uid in ("a.b", "a b", "a/b", "é", "", "x" * 91):
        assert len(sample_key(uid)) == 32 and sample_key(uid).isalnum()


# ---- several sizes, shards by bytes -----------------------------------------------------------------------------------


def test_several_sizes_are_the_sets_that_each_would_be_alone(tmp_path: Path) -> None:
    def world(name: str) -> Path:
        made = World(tmp_path / name)
        for number in range(14):
            made.add(number, [f"picture {number}"], body=jpeg(number, 320, 240), holdout=number % 5 == 0)
        made.add(14, ["small"], body=jpeg(14))
        made.add(15, ["broken"], body=jpeg(15, 320, 160)[:-900])
        return made.write()

    both = shard(world("both"), size=(32, 120), ranks=2)
    for size, suffix in ((32, ""), (120, "-120")):
        alone = world(f"alone{size}")
        shard(alone, size=(size,), ranks=2)
        for kind in ("shards", "holdout"):
            ours, theirs = contents(tmp_path / "both" / f"{kind}{suffix}"), contents(alone / kind)
            assert {k: v for k, v in ours.items() if k != "shards.json"} == {
                k: v for k, v in theirs.items() if k != "shards.json"
            }
    assert both["sets"]["shards-120"]["samples"] == both["samples"] == 12
    assert both["sets"]["holdout-120"]["samples"] == both["holdout"]["samples"] == 3
    assert {min(r["width"], r["height"]) for r in rows(tmp_path / "both", "shards-120")} == {120, 32}
    shutil.rmtree(tmp_path / "both/shards-120")
    shard(tmp_path / "both", size=(32, 120), ranks=2)  # gone: made again
    assert len(rows(tmp_path / "both", "shards-120")) == 12
    shard(tmp_path / "both", size=(32,), fresh=True)
    assert not list((tmp_path / "both").glob("*-120"))
    with pytest.raises(ConfigError, match="expected each --size once"):
        shard(tmp_path / "both", size=(32, 32))


@pytest.mark.parametrize("ranks", [0, 1, 3, 8])
def test_shards_by_bytes_hold_no_more(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for samples in (1, 9, 5000):
        if samples < ranks:
            continue
        sample_bytes = rng.integers(1_000, 90_000, samples)
        sizes = shard_sizes_by_bytes(sample_bytes, 4_000_000, ranks)
        each = [int(part.sum()) for part in np.split(sample_bytes, np.cumsum(sizes)[:-1])]
        assert sum(sizes) == samples and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        assert not ranks or len(sizes) % ranks == 0
        assert max(each) <= 4_000_000
        assert len(sizes) <= 1.2 * sample_bytes.sum() / 4_000_000 + max(ranks, 1)
    assert len(shard_sizes_by_bytes(np.array([10**6] * 4), 10, 0)) == 4  # one sample a shard is the end


def test_no_shard_is_ever_empty() -> None:
    for samples in range(1, 40):
        for ranks in range(1, samples + 1):
            for most in (1, 2, 7):
                sizes = shard_sizes(samples, most, ranks)
                assert sum(sizes) == samples and min(sizes) >= 1 and len(sizes) % ranks == 0


def test_megabytes_bound_the_tars(tmp_path: Path) -> None:
    world = World(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(60):
        side = int(rng.integers(8, 40)) * 8
        world.add(number, [f"picture {number} " + "word " * int(rng.integers(0, 400))], body=noise(number, side))
    summary = shard(world.write(), mb_per_shard=1, size=(999,))
    tars = [path.stat().st_size for path in (tmp_path / "shards").glob("*.tar")]
    assert max(tars) <= 1_000_000 and len(tars) == summary["shards"] <= 2 * sum(tars) / 1e6
    assert summary["samples"] == summary["copied"] == 60


def noise(number: int, side: int) -> bytes:
    rng = np.random.default_rng(number)
    return encode_jpeg(rng.integers(0, 256, (side, side, 3), dtype=np.uint8), 90)


# ---- strange captions -------------------------------------------------------------------------------------------------


def test_captions_of_any_kind_arrive_as_they_are(tmp_path: Path) -> None:
    captions = [
        "x" * 3_000_000,
        "“ünï” 🦊 漢字 \u202e",
        "nul \x00 inside",
        'quote " and \\ back',
        "two\nlines\ttab",
        " ",
    ]
    world = World(tmp_path)
    for number, caption in enumerate(captions):
        world.add(number, [caption])
    shard(world.write())
    assert sorted(row["caption"] for row in rows(tmp_path)) == sorted(captions)
    found = members(tmp_path)
    for row in rows(tmp_path):
        assert found[f"{row['key']}.txt"].decode() == row["caption"]
        assert json.loads(found[f"{row['key']}.json"])["captions"] == [row["caption"]]


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_shards_rows_lie_in_bytes_of_its_own(tmp_path: Path, most: int) -> None:
    folder = Folder(small_world(tmp_path).write())
    write_plans(folder, ShardConfig(work=str(tmp_path), samples_per_shard=1000))
    together = read_plan(folder, PLANS["shards"], planned_shards(folder, PLANS["shards"])[0])
    write_plans(folder, ShardConfig(work=str(tmp_path), samples_per_shard=most))
    units = planned_shards(folder, PLANS["shards"])
    assert [unit.rows for unit in units] == shard_sizes(46, most) and units[-1].stop == 46
    assert [row for unit in units for row in read_plan(folder, PLANS["shards"], unit)] == together
    file, starts = tmp_path / rows_of(PLANS["shards"]), np.fromfile(tmp_path / PLANS["shards"], "<i8")[1::2]
    for unit, begin, end in zip(units, starts[:-1], starts[1:], strict=True):  # nothing but these is looked at
        whole = file.read_bytes()
        file.write_bytes(bytes(begin) + whole[begin:end])
        assert read_plan(folder, PLANS["shards"], unit) == together[unit.start : unit.stop]
        file.write_bytes(whole)


def forgotten(path: Path) -> bool:
    """Whether a file could be put out of memory, which a temporary folder that lies in memory does not do."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not _is_in_memory(str(path), path.stat().st_size // 2)


def read_from_disk() -> int:
    """Bytes that this process has asked of disks so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not say what was read from the disk")
def test_what_is_read_next_is_asked_of_the_disk_before(tmp_path: Path) -> None:
    world = World(tmp_path, units=1)
    for number in range(300):
        world.add(number, [f"picture {number}"], body=jpeg(number, 640, 480))
    folder = Folder(world.write())
    write_plans(folder, ShardConfig(work=str(tmp_path)))
    rows = read_plan(folder, PLANS["shards"], planned_shards(folder, PLANS["shards"])[0])
    in_memory, tar = list(staged_images(folder, rows)), tmp_path / rows[0].tar
    if not forgotten(tar):
        pytest.skip("temporary files lie in memory")
    before, reading = read_from_disk(), staged_images(folder, rows)
    assert next(reading) == in_memory[0]
    assert (
        read_from_disk() - before > sum(row.tar_size for row in rows[:128]) / 2
    )  # two batches, but for what came along
    assert list(reading) == in_memory[1:]


# ---- kill -9 ----------------------------------------------------------------------------------------------------------

# It kills itself before a given sample, so that on any machine it dies in the middle of a shard.
_PACK = """
import os, signal, sys
from shardkit.config import ShardConfig
from shardkit.pack import run
from shardkit.write import Output
add, left = Output.add, int(sys.argv[2])
def add_or_die(output, *args):
    global left
    if not left:
        output._tar.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return add(output, *args)
Output.add = add_or_die
run(ShardConfig(work=sys.argv[1], workers=1, samples_per_shard=20, size=(32,)))
"""


def heavy_world(work: Path) -> Path:
    world = World(work)
    for number in range(100):
        world.add(number, [f"picture {number}"], body=jpeg(number, 640, 480), holdout=number >= 80)
    return world.write()


def kill_in_the_middle_of_a_shard(work: Path, parts: int) -> None:
    """Pack, and kill -9 when `parts` shards of 20 samples are finished and another is half written."""
    command = [sys.executable, "-c", _PACK, str(work), str(20 * parts + 11)]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert killed.returncode == -signal.SIGKILL
    assert len(list(work.glob("shards/parts/*.parquet"))) == parts
    assert all(path.stat().st_size for path in work.glob("shards/.tmp-*.tar"))


@pytest.mark.parametrize("parts", [0, 2])
def test_a_killed_run_continues_to_the_same_bytes(tmp_path: Path, parts: int) -> None:
    undisturbed, killed = heavy_world(tmp_path / "a"), heavy_world(tmp_path / "b")
    shard(undisturbed, samples_per_shard=20, size=(32,))
    kill_in_the_middle_of_a_shard(killed, parts)
    assert not (killed / "shards/shards.json").exists() and list(killed.glob("shards/.tmp-*"))
    finished = {p: p.stat().st_mtime_ns for p in killed.glob("shards/parts/*.parquet")}
    tars = {p.stem: p.stat().st_mtime_ns for p in killed.glob("shards/*.tar")}
    shard(killed, samples_per_shard=20, size=(32,))
    for home in ("shards", "holdout"):
        assert contents(killed / home) == contents(undisturbed / home)
    for path in finished:  # what was finished was not written again
        assert (killed / f"shards/{path.stem}.tar").stat().st_mtime_ns == tars[path.stem]


def test_a_run_killed_between_tar_and_index_writes_that_shard_again(
    packed: tuple[World, dict[str, Any]], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    shutil.copytree(packed[0].work, work)
    before = contents(work / "shards")
    for name in ("done.json", "shards.json", "samples.parquet", "00002.idx"):
        (work / "shards" / name).unlink()
    shard(work, ranks=2)
    assert contents(work / "shards") == before


# Files end at 6,000 bytes for it, as they would on a full disk; Python ignores the signal, so that writes fail instead.
_LIMITED = """
import resource, sys
from shardkit.config import ShardConfig
from shardkit.pack import run
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
run(ShardConfig(work=sys.argv[1], workers=int(sys.argv[2]), samples_per_shard=15))
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_a_sentence_and_leaves_no_half_file(tmp_path: Path, workers: str) -> None:
    work = small_world(tmp_path).write()
    command = [sys.executable, "-c", _LIMITED, str(work), workers]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True)
    assert done.returncode == 1 and StorageError.__name__ in done.stderr.splitlines()[-1]
    assert not list(work.glob("shards/*.tar")) and not (work / "shards/shards.json").exists()
    assert shard(work)["samples"] == 46


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    work = small_world(tmp_path).write()
    with locked(work / ".lock", str(work), "--work"), pytest.raises(WorkFolderError, match="in use by another run"):
        shard(work)
    assert shard(work)["samples"] == 46


# ---- bad input --------------------------------------------------------------------------------------------------------


def test_without_ingest_or_dedup_the_verb_to_run_first_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `pairmill ingest` first"):
        shard(tmp_path / "nowhere")
    small_world(tmp_path).write()
    (tmp_path / "dedup/decisions.parquet").unlink()
    with pytest.raises(InputError, match="no decisions yet; run `pairmill dedup` first"):
        shard(tmp_path)


def test_nothing_kept_is_said_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add(0, ["one"], kept=False)
    world.add(1, ["two"], holdout=True)
    world.write()
    with pytest.raises(InputError, match="found 0 kept pairs to train on"):
        shard(tmp_path)


def test_lost_or_cut_staged_images_are_named(tmp_path: Path) -> None:
    small_world(tmp_path).write()
    tar = tmp_path / "ingest/parts/u000001.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"u000001\.tar is cut short"):
        shard(tmp_path)
    tar.unlink()
    with pytest.raises(DataError, match=r"expected staged images in ingest/parts/u000001\.tar, found No such file"):
        shard(tmp_path)
    tar.write_bytes(whole)
    assert shard(tmp_path)["samples"] == 46


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected --samples-per-shard from 1 to 1,000,000,000, found 0"):
        shard(tmp_path, samples_per_shard=0)
    with pytest.raises(ConfigError, match="at least one sample for each of 8 ranks, found 3; lower --ranks"):
        shard_sizes(3, 10, 8)


def test_a_part_damaged_inside_is_no_crash(tmp_path: Path) -> None:
    work = small_world(tmp_path, 10).write()
    rng = random.Random(4)
    for name in ("ingest/parts/u000000.parquet", "dedup/decisions.parquet"):
        whole = (work / name).read_bytes()
        for _ in range(8):
            damaged, at = bytearray(whole), rng.randrange(4, len(whole) - 16)
            damaged[at : at + 8] = rng.randbytes(8)
            (work / name).write_bytes(damaged)
            with contextlib.suppress(DataError, InputError):  # some bytes matter to nobody, some decide what is kept
                shard(work, fresh=True)
        (work / name).write_bytes(whole)
