"""Reading: the right bytes in the right order, damage is marked or named, starvation is an error and never a hang."""

from __future__ import annotations

import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import ConfigError, DataError, InputError, RunError
from shardkit import ranges
from shardkit import rows as rows_module
from shardkit.config import ShardConfig
from shardkit.foreign import expand_braces
from shardkit.pack import run
from shardkit.reader import BatchReader, EpochOrder, ShardSet
from tests.shardkit.parts import World, small_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = small_world(tmp_path_factory.mktemp("reader"))
    run(ShardConfig(work=str(world.write()), workers=1, samples_per_shard=7))
    return world


@pytest.fixture
def shards(world: World, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(world.work / "shards", tmp_path / "shards")
    return tmp_path / "shards"


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "samples.parquet").to_pylist()


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_samples_come_whole_and_in_the_order_asked_for(world: World) -> None:
    shard_set = ShardSet.open(world.work / "shards")
    wanted = rows(world.work / "shards")
    indices = np.array([45, 0, 17, 17, 3])
    for index, sample in zip(indices, shard_set.read(indices), strict=True):
        row = wanted[index]
        assert sample.ok and sample.data == world.pictures[row["url"]]
        assert (sample.captions, sample.uid, sample.key, sample.shard) == (
            row["captions"],
            row["uid"],
            row["key"],
            row["shard"],
        )
        assert (sample.width, sample.height, sample.index) == (40, 32, index)
        assert shard_set.captions(index) == row["captions"]
    assert len(shard_set) == len(wanted) == 46 and shard_set.shard_sizes.sum() == 46
    assert shard_set.bytes_read == sum(len(world.pictures[wanted[i]["url"]]) for i in indices)
    assert 0 < shard_set.read_s < 60


def test_image_groups_are_equal_for_the_same_picture_only(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number in range(6):
        world.add(number, ["caption"], group="pair" if number in (1, 4) else "")
    run(ShardConfig(work=str(world.write()), workers=1))
    shard_set = ShardSet.open(tmp_path / "shards")
    groups = shard_set.image_groups()
    assert groups.dtype == np.int64 and len(np.unique(groups)) == 5
    same = [i for i, row in enumerate(rows(tmp_path / "shards")) if row["image_group"] == "pair"]
    assert len(same) == 2 and groups[same[0]] == groups[same[1]]
    assert [s.image_group for s in shard_set.read(np.arange(6))] == groups.tolist()


def test_more_shards_than_open_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads read through a cache of two descriptors, which drops files that others are reading."""
    monkeypatch.setattr(ranges, "OPEN_FILES", 2)
    shard_set = ShardSet.open(world.work / "shards")
    before = len(os.listdir("/proc/self/fd"))
    results: list[bool] = []
    order = EpochOrder(shard_set.shard_sizes, 1, 0, 1, 1)

    def read_all() -> None:
        for step in range(order.steps):
            results.extend(s.ok for s in shard_set.read(order.batch_indices(step)))

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 * 46 and all(results)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# ---- damage -----------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_marks_that_sample_and_no_other(shards: Path) -> None:
    row = rows(shards)[20]
    shard_set = ShardSet.open(shards)
    flip_byte(shards / row["shard"], row["jpg_offset"] + 300)
    samples = shard_set.read(np.arange(46))
    assert [s.index for s in samples if not s.ok] == [20]
    assert samples[20].reason == f"{row['shard']} has changed: the sample's crc32 differs from the index"


def test_a_shard_cut_short_or_gone_under_a_run_marks_its_samples(shards: Path) -> None:
    shard_set = ShardSet.open(shards)
    listed = rows(shards)
    os.truncate(shards / "00000.tar", listed[2]["jpg_offset"] + 10)
    (shards / "00001.tar").unlink()
    samples = shard_set.read(np.arange(46))
    reasons = {s.index: s.reason for s in samples if not s.ok}
    assert "00000.tar is cut short" in reasons[2] and 1 not in reasons
    gone = [i for i, row in enumerate(listed) if row["shard"] == "00001.tar"]
    assert all(reasons[i] == "00001.tar cannot be read: No such file or directory" for i in gone)


def test_a_changed_or_missing_shard_is_named_at_the_door(shards: Path) -> None:
    flip_byte(shards / "00002.tar", 40)
    ShardSet.open(shards)  # the size is right; contents are compared on request, and at each read
    with pytest.raises(DataError, match=r"00002\.tar has changed: its sha256"):
        ShardSet.open(shards, check=True)
    os.truncate(shards / "00002.tar", 1024)
    with pytest.raises(DataError, match=r"00002\.tar has changed: expected \d+ bytes, found 1024; restore it"):
        ShardSet.open(shards)
    (shards / "00002.tar").unlink()
    with pytest.raises(DataError, match=r"expected shard 00002\.tar in .*, found none"):
        ShardSet.open(shards)


def test_samples_and_list_of_different_sets_are_refused(shards: Path, world: World) -> None:
    shutil.copy(world.work / "holdout/samples.parquet", shards / "samples.parquet")
    with pytest.raises(DataError, match="do not list the same shards"):
        ShardSet.open(shards)
    (shards / "samples.parquet").unlink()
    with pytest.raises(DataError, match=r"expected samples\.parquet beside shards\.json"):
        ShardSet.open(shards)


def test_the_fingerprint_follows_the_data_and_not_the_place(shards: Path, world: World) -> None:
    original = ShardSet.open(world.work / "shards").fingerprint
    assert ShardSet.open(shards).fingerprint == original
    assert ShardSet.open(world.work / "holdout").fingerprint != original


def test_a_folder_without_shards_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected shards in .*run `pairmill shard` first"):
        ShardSet.open(tmp_path)


# ---- foreign shards ---------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(world: World, tmp_path: Path) -> Path:
    """Our tars without our files beside them."""
    for path in (world.work / "shards").glob("*.tar"):
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def test_foreign_tars_read_like_our_own(foreign: Path, world: World) -> None:
    ours = ShardSet.open(world.work / "shards")
    for url in (str(foreign), f"{foreign}/{{00000..00006}}.tar", f"{foreign}/*.tar"):
        theirs = ShardSet.open(url)
        for mine, other in zip(ours.read(np.arange(46)), theirs.read(np.arange(46)), strict=True):
            assert (mine.data, mine.captions, mine.uid, mine.key, mine.shard) == (
                other.data, other.captions, other.uid, other.key, other.shard,
            )  # fmt: skip
        assert (ours.shard_sizes == theirs.shard_sizes).all() and (ours.image_groups() == theirs.image_groups()).all()


def test_foreign_tars_without_json_and_with_other_extensions(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, data in (
            ("./a.b/k1.png", b"png"), ("./a.b/k1.txt", b"one"), ("k2.webp", b"webp"), ("k2.json", b'{"caption": "two"}'),
            ("k3.jpg", b"no caption"), ("k4.txt", b"no picture"), ("k5.JPG", b"jpg"), ("k5.txt", "fünf".encode()),
            ("k6.jpg", b"bad json"), ("k6.json", b"{"), ("k7.jpg", b"no list"), ("k7.json", b'{"captions": []}'),
            ("k7.txt", b"seven"),
        ):  # fmt: skip
            (tmp_path / "member").write_bytes(data)
            tar.add(tmp_path / "member", name)
    samples = ShardSet.open(tmp_path).read(np.arange(4))
    assert [(s.data, s.captions, s.key) for s in samples] == [
        (b"png", ["one"], "./a.b/k1"), (b"webp", ["two"], "k2"), (b"jpg", ["fünf"], "k5"),
        (b"no list", ["seven"], "k7"),
    ]  # fmt: skip


def test_a_foreign_tar_cut_short_is_named(foreign: Path) -> None:
    os.truncate(foreign / "00003.tar", 5000)
    with pytest.raises(DataError, match=r"00003\.tar is cut short"):
        ShardSet.open(foreign)


def test_a_missing_foreign_tar_is_named(foreign: Path) -> None:
    with pytest.raises(InputError, match=r"expected a file at .*00007\.tar, found none"):
        ShardSet.open(f"{foreign}/{{00000..00007}}.tar")


def test_braces_that_name_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="count upwards"):
        ShardSet.open(f"{tmp_path}/{{5..2}}.tar")


def test_braces() -> None:
    assert expand_braces("a{08..11}.tar") == ["a08.tar", "a09.tar", "a10.tar", "a11.tar"]
    assert expand_braces("{x,y}{0..1}") == ["x0", "x1", "y0", "y1"]


def test_shards_behind_a_url(shards: Path) -> None:
    """An in-memory object store of fsspec's stands for s3://: ranges come through Folder.read_range."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(f"{shards}/", "/reader-test/shards", recursive=True)
    near, far = ShardSet.open(shards), ShardSet.open("memory://reader-test/shards")
    assert [s.data for s in far.read(np.arange(46))] == [s.data for s in near.read(np.arange(46))]
    assert all(s.ok for s in far.read(np.arange(46))) and far.fingerprint == near.fingerprint
    store.rm("/reader-test", recursive=True)


# ---- batches ----------------------------------------------------------------------------------------------------------


def ids_of(shard_set: ShardSet, ranks: int, start: int, batch: int = 12) -> list[set[str]]:
    order = EpochOrder(shard_set.shard_sizes, seed=3, epoch=0, lanes=4, batch_size=batch)
    readers = [BatchReader(shard_set, order, rank, ranks, start, depth=3, threads=3) for rank in range(ranks)]
    batches = []
    for parts in zip(*readers, strict=True):
        assert {len(part.samples) for part in parts} == {batch // ranks}
        assert len({part.step for part in parts}) == 1
        batches.append({s.uid for part in parts for s in part.samples})
    return batches


def test_ranks_see_the_same_batches_and_resume_on_another_number(world: World) -> None:
    shard_set = ShardSet.open(world.work / "shards")
    alone = ids_of(shard_set, 1, 0)
    assert len(alone) == 3 and len(set().union(*alone)) == 36
    for ranks in (2, 3, 4):
        for start in range(3):
            assert ids_of(shard_set, ranks, start) == alone[start:]


def test_batches_come_in_order_and_ahead_of_time(world: World) -> None:
    shard_set = ShardSet.open(world.work / "shards")
    order = EpochOrder(shard_set.shard_sizes, 0, 0, 2, 2)
    with BatchReader(shard_set, order, depth=4, threads=4) as reader:
        assert len(reader) == 23
        steps = [batch.step for batch in reader]
        assert steps == list(range(23)) and len(reader) == 0
    with BatchReader(shard_set, order, depth=3, threads=2) as reader:
        wait_until(lambda: reader.ready >= 3)
        threading.Event().wait(0.05)
        assert reader.ready == 3  # and no more: memory is bounded by depth
        mine = [t for t in threading.enumerate() if t.name.startswith("pairmill-read")]
        assert mine
    wait_until(lambda: not any(thread.is_alive() for thread in mine))


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited 5 s in vain")


@pytest.fixture
def blocked(shards: Path) -> Iterator[Path]:
    """A shard that never answers: a pipe without a writer, as a dead network disk looks to a reader."""
    (shards / "00003.tar").rename(shards / "gone.tar")
    os.mkfifo(shards / "00003.tar")
    yield shards
    os.close(os.open(shards / "00003.tar", os.O_RDWR | os.O_NONBLOCK))  # lets the reading thread go


def test_starvation_names_rank_shard_and_stage(shards: Path, request: pytest.FixtureRequest) -> None:
    shard_set = ShardSet.open(shards)
    request.getfixturevalue("blocked")
    order = EpochOrder(shard_set.shard_sizes, 0, 0, 1, 2)
    with (
        BatchReader(shard_set, order, rank=1, ranks=2, timeout_s=0.3) as reader,
        pytest.raises(
            RunError, match=r"rank 1 starved in stage read: batch \d+ did not come within 0\.3 s, reading 00003\.tar"
        ),
    ):
        list(reader)


def test_a_reader_that_cannot_be_is_refused_at_once(world: World) -> None:
    shard_set = ShardSet.open(world.work / "shards")
    with pytest.raises(ConfigError, match="that 5 ranks can share equally, found 12"):
        BatchReader(shard_set, EpochOrder(shard_set.shard_sizes, 0, 0, 2, 12), 0, 5)
    with pytest.raises(InputError, match="expected an order of the set's 46 samples, found one of 40"):
        BatchReader(shard_set, EpochOrder([40], 0, 0, 2, 12))


# ---- several sets, and bad shards left out ------------------------------------------------------------------------------


def test_several_sets_read_as_one(shards: Path, foreign: Path, world: World) -> None:
    ours, held = ShardSet.open(shards), ShardSet.open(world.work / "holdout")
    both = ShardSet.open([str(shards), str(world.work / "holdout")])
    assert [s.data for s in both.read(np.arange(len(both)))] == [
        s.data for one in (ours, held) for s in one.read(np.arange(len(one)))
    ]
    assert [len(sizes) for sizes in both.set_sizes] == [len(ours.shards), len(held.shards)]
    assert both.fingerprint not in (ours.fingerprint, held.fingerprint)
    mixed = ShardSet.open([str(shards), str(foreign)])  # the second without checksums
    assert all(s.ok for s in mixed.read(np.arange(len(mixed)))) and len(mixed) == 92
    assert mixed.image_groups()[:46].tolist() == mixed.image_groups()[46:].tolist()  # the same pictures mask each other
    flip_byte(shards / "00000.tar", rows(shards)[0]["jpg_offset"] + 5)
    assert [s.index for s in mixed.read(np.arange(92)) if not s.ok] == [0]


def test_bad_shards_are_left_out_and_counted_on_request(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = ShardSet.open(shards)
    os.truncate(shards / "00002.tar", 1024)
    (shards / "00004.tar").unlink()
    with caplog.at_level("WARNING", "pairmill.shardkit"):
        rest = ShardSet.open(shards, on_bad="skip")
    lost = int(whole.shard_sizes[2] + whole.shard_sizes[4])
    assert rest.lost == lost and len(rest) == 46 - lost
    assert "2 bad shards left out, with 13 samples" in caplog.text and "00002.tar has changed" in caplog.text
    assert rest.fingerprint == whole.fingerprint  # a run on these shards may be continued
    kept = [s.uid for s in whole.read(np.arange(46)) if s.shard not in ("00002.tar", "00004.tar")]
    assert [s.uid for s in rest.read(np.arange(len(rest)))] == kept
    assert all(s.ok for s in rest.read(np.arange(len(rest))))
    for path in shards.glob("*.tar"):
        path.unlink()
    with pytest.raises(DataError, match="found all 7 of them bad"):
        ShardSet.open(shards, on_bad="skip")


def test_bad_foreign_shards_are_left_out_on_request(foreign: Path) -> None:
    whole = ShardSet.open(foreign)
    os.truncate(foreign / "00003.tar", 5000)
    rest = ShardSet.open(foreign, on_bad="skip")
    assert [s.name for s in rest.shards] == [s.name for s in whole.shards if s.name != "00003.tar"]
    assert len(rest) == 46 - whole.shard_sizes[3]


# ---- what is held ---------------------------------------------------------------------------------------------------------


def test_a_set_holds_the_rows_of_the_shards_it_reads(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller than the limits would be for one set: shards go that were used longest ago, and come back the same."""
    monkeypatch.setattr(rows_module, "SHARDS_HELD", 3)
    monkeypatch.setattr(rows_module, "WHOLE", 10)
    whole, held = ShardSet.open(shards), ShardSet.open(shards)
    assert not held._rows._held  # opening reads the list of row groups alone
    order = np.random.default_rng(0).permutation(46)
    for part in np.array_split(order, 9):
        held.read(part)
        assert len(held._rows._held) <= 3
    assert [s.data for s in held.read(order)] == [s.data for s in whole.read(order)]
    assert held.image_groups().tolist() == [s.image_group for s in whole.read(np.arange(46))]


def test_image_groups_of_any_name_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    """Uids are hashed all at once where a shard holds nothing else, and one by one elsewhere."""
    uid = "0123456789abcdef" * 2
    columns = [[uid, uid[::-1]], [uid, "x"], [uid], []]
    found = [rows_module._groups(pa.chunked_array([pa.array(names, pa.string())])) for names in columns]
    assert found[0][0] == found[1][0] == found[2][0] and len(found[3]) == 0
    assert len({*found[0].tolist(), *found[1].tolist()}) == 3
