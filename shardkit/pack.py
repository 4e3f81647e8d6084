"""Stage `shard`: the kept pairs become tar shards, in an order fixed by the seed.

A shard is a unit: it reads its rows of the plan, copies or resizes the staged images, and publishes tar, index and part
in that order, so a part means a finished shard. Same input, same settings: same bytes, whatever was killed in between.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from core import catalog, images
from core.errors import ConfigError, DataError, ImageError, InputError
from core.plan import Unit
from core.runner import run_units, tick
from core.schema import sample_schema
from core.storage import Folder
from core.work import fingerprint, open_stage, read_settings
from shardkit.config import ShardConfig
from shardkit.index import SAMPLES, SHARDS, Shard, ShardList, dali_index, index_name, read_shard_list
from shardkit.plan import PLANS, VIEWS, write_plans
from shardkit.ranges import RangeReader
from shardkit.tar import Member, TarWriter

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger("pairmill.shardkit")
_NOTE = b"pairmill"  # key of a part's own figures in its Parquet metadata
_PLAIN_KEY = re.compile(r"[0-9A-Za-z_-]{1,90}")  # no dots or spaces; KEY.json stays within a tar name of 100 bytes


def run(config: ShardConfig) -> dict[str, Any]:
    """Write WORK/shards, and WORK/holdout where dedup held pictures out; continues what an earlier run left unfinished.

    Returns: samples, shards, bytes, seconds, and captions, copied, resized, left_out, holdout.

    Raises:
        InputError: ingest or dedup did not run yet, the pairs have changed since dedup ran, or nothing was kept.
        ConfigError: a setting out of range, or fewer samples than ranks.
        DataError: staged images are gone or shorter than their index says.
    """
    started = time.perf_counter()
    _check(config)
    folder = Folder(config.work)
    with catalog.connect(folder, views=VIEWS) as connection:
        for view in VIEWS:
            catalog.require(connection, view)
    inputs = _inputs(folder)
    with open_stage(config, "shard", home="shards", inputs=inputs) as stage:
        if stage.finished is not None:
            _tidy(folder)
            if _whole(folder, stage.finished):
                log.info("shard: already done in %s", folder)
                return stage.finished
            log.warning("shard: some of its files are gone from %s, so it runs again", folder)
            folder.remove("shards/done.json")
        if not folder.exists(PLANS["shards"]):
            folder.remove("holdout")  # it belongs to this stage, though it lies outside its home
            write_plans(folder, config)
        packed = {home: _pack(folder, home, config) for home in ("shards", "holdout")}
        catalog.write(folder)
        summary = {**packed["shards"], "holdout": packed["holdout"]}
        stage.finish({**summary, "seconds": round(time.perf_counter() - started, 3)})
        _tidy(folder)
    return {**summary, "seconds": round(time.perf_counter() - started, 3)}


def _inputs(folder: Folder) -> str:
    """Fingerprint of pairs and decisions, which must be decisions over these pairs."""
    pairs = fingerprint(folder, "ingest/parts/*.parquet")
    decided = read_settings(folder).get("dedup", {}).get("inputs", pairs)
    if decided != pairs:
        raise InputError(f"the pairs in {folder} are not those that dedup decided on; run `pairmill dedup` again first")
    return fingerprint(folder, "dedup/decisions.parquet") + pairs


def _whole(folder: Folder, summary: dict[str, Any]) -> bool:
    """Whether every file that a finished run published is still there."""
    for home in ("shards", "holdout") if summary["holdout"]["samples"] else ("shards",):
        if not folder.exists(f"{home}/{SHARDS}"):
            return False
        listed = read_shard_list(folder / home)
        there = set((folder / home).list("*")) | {f"ranks/{name}" for name in (folder / home / "ranks").list("*")}
        wanted = {SAMPLES} | {index_name(s.name) for s in listed.shards} | {s.name for s in listed.shards}
        if not wanted | {lane["list"] for lane in listed.lanes} <= there:
            return False
    return True


def render(summary: dict[str, Any]) -> RenderableType:
    """What was written, for people."""
    from rich.table import Table

    table = Table("", "samples", "shards", "captions", "MB", "copied", "resized", "left out", box=None)
    for home, one in (("shards", summary), ("holdout", summary["holdout"])):
        if one["samples"]:
            figures = (one[k] for k in ("copied", "resized", "left_out"))
            head = (f"{one['samples']:,}", f"{one['shards']:,}", f"{one['captions']:,}", f"{one['bytes'] / 1e6:,.1f}")
            table.add_row(f"[bold]{home}", *head, *(f"{n:,}" for n in figures))
    return table


def _check(config: ShardConfig) -> None:
    for name, low, high in (
        ("size", 1, 65_535),
        ("quality", 1, 100),
        ("samples_per_shard", 1, 10**9),
        ("ranks", 0, 10**6),
    ):
        value = getattr(config, name)
        if not low <= value <= high:
            flag = name.replace("_", "-")
            raise ConfigError(f"expected --{flag} from {low} to {high:,}, found {value}")


def _tidy(folder: Folder) -> None:
    """Remove what only a continuation would need."""
    for name in (*PLANS.values(), "shards/parts", "holdout/parts"):
        folder.remove(name)


def _pack(folder: Folder, home: str, config: ShardConfig) -> dict[str, Any]:
    """Write the shards of one plan, and the files that describe them."""
    with folder.open(PLANS[home]) as file:
        metadata = pq.ParquetFile(file).metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if not sizes:
        return {"samples": 0, "shards": 0, "bytes": 0}
    for place in (home, f"{home}/parts"):
        folder.sweep(place)
    digits = max(5, len(str(len(sizes) - 1)))
    starts = [0, *itertools.accumulate(sizes)]
    units = [
        Unit(f"{i:0{digits}d}", start, start + n) for i, (start, n) in enumerate(zip(starts[:-1], sizes, strict=True))
    ]
    there = {*folder.list(f"{home}/parts/*.parquet"), *folder.list(f"{home}/*")}
    task = PackShard(folder, home, config.size, config.quality)
    running = run_units(
        units, task, done=lambda unit: _files(home, unit) <= there, workers=config.workers, engine=config.engine,
        label=f"shard ({home})", unit_of_progress="images",
    )  # fmt: skip
    for _ in running:
        pass
    return _describe(folder, home, units, config)


def _part(home: str, unit: Unit) -> str:
    return f"{home}/parts/{unit.id}.parquet"


def _files(home: str, unit: Unit) -> set[str]:
    """What a finished shard consists of."""
    return {f"{home}/{unit.id}.tar", f"{home}/{unit.id}.idx", _part(home, unit)}


# ---- one shard --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackShard:
    """Writes one shard: tar, index, part. Runs in a worker process."""

    folder: Folder
    home: str
    size: int
    quality: int

    def __call__(self, unit: Unit) -> None:
        with self.folder.open(PLANS[self.home]) as file:
            rows = pq.ParquetFile(file).read_row_group(int(unit.id)).to_pylist()
        tar = f"{unit.id}.tar"
        done = _Packed()
        with self.folder.staged(f"{self.home}/{tar}") as path:
            digest = self._write_tar(path, tar, rows, done)
        self.folder.write(f"{self.home}/{unit.id}.idx", dali_index(done.members))
        note = {
            "shard": {"name": tar, "samples": len(done.rows), "bytes": done.bytes, "sha256": digest},
            "left_out": done.left_out, "copied": done.copied, "resized": len(done.rows) - done.copied,
        }  # fmt: skip
        schema = sample_schema().with_metadata({_NOTE: json.dumps(note).encode()})
        with self.folder.staged(_part(self.home, unit)) as path:
            pq.write_table(pa.Table.from_pylist(done.rows, schema=schema), path)

    def _write_tar(self, path: Path, tar: str, rows: list[dict[str, Any]], done: _Packed) -> str:
        staged = RangeReader(self.folder)
        with path.open("wb", buffering=1 << 20) as file:
            hashing = _Hashing(file)
            writer = TarWriter(hashing)
            for row in rows:
                body = _staged_image(staged, row)
                try:
                    image = fit(body, self.size, self.quality)
                except ImageError as error:
                    log.warning("shard: %s is left out (%s)", row["uid"], error)
                    done.left_out.append({"uid": row["uid"], "reason": str(error)})
                else:
                    done.copied += image.data is body
                    _add_sample(writer, tar, row, image, done)
                tick()
            done.bytes = writer.finish()
        return hashing.digest.hexdigest()


@dataclass
class _Packed:
    """What was written of one shard."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    members: list[list[Member]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    copied: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A JPEG that fits, with its size in pixels."""

    data: bytes
    width: int
    height: int


def fit(body: bytes, size: int, quality: int) -> Fitted:
    """The picture as JPEG with a shorter side of at most `size` pixels; the very same bytes where they fit already.

    Raises:
        ImageError: it cannot be decoded.
    """
    header = images.read_header(body)
    if images.fits_as_is(body, header, size):
        return Fitted(body, header.width, header.height)
    pixels = images.resize(images.decode(body, header, min_side=size), size)
    return Fitted(images.encode_jpeg(pixels, quality), pixels.shape[1], pixels.shape[0])


def _staged_image(staged: RangeReader, row: dict[str, Any]) -> bytes:
    tar, size = row["tar"], row["tar_size"]
    try:
        body = staged.read(tar, row["tar_offset"], size)
    except OSError as error:
        raise DataError(
            f"expected staged images in {tar}, found {error.strerror or error}; restore that file, or run ingest again"
        ) from error
    if len(body) != size:
        raise DataError(
            f"{tar} is cut short: expected {size} bytes of {row['uid']} at byte {row['tar_offset']}, found {len(body)}; "
            "restore that file, or run ingest again"
        )
    return body


def sample_key(uid: str) -> str:
    """The tar key of a sample: its uid where that has no dots, spaces or slashes and is short, else a hash of it."""
    return uid if _PLAIN_KEY.fullmatch(uid) else xxhash.xxh3_128_hexdigest(uid.encode())


def _add_sample(writer: TarWriter, tar: str, row: dict[str, Any], image: Fitted, done: _Packed) -> None:
    key, sha256 = sample_key(row["uid"]), hashlib.sha256(image.data).hexdigest()
    ours = {
        "uid": row["uid"], "uids": row["uids"], "url": row["url"], "captions": row["captions"], "width": image.width,
        "height": image.height, "sha256": sha256, "image_group": row["image_group"],
    }  # fmt: skip
    # null for a NaN, which DuckDB and Python write and few other readers of JSON take
    source = json.loads(row["source"], parse_constant=lambda _: None)
    notes = ours | {name: value for name, value in source.items() if name not in ours}
    jpg = writer.add(f"{key}.jpg", image.data)
    txt = writer.add(f"{key}.txt", row["captions"][0].encode())
    described = writer.add(f"{key}.json", json.dumps(notes, ensure_ascii=False, separators=(",", ":")).encode())
    done.members.append([jpg, txt, described])
    place = {"shard": tar, "key": key, "jpg_offset": jpg.offset, "jpg_size": jpg.size, "crc32": zlib.crc32(image.data)}
    done.rows.append(ours | place)


class _Hashing:
    """A file that is written and hashed at once."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self._file.write(data)


# ---- the whole set ----------------------------------------------------------------------------------------------------


def _describe(folder: Folder, home: str, units: list[Unit], config: ShardConfig) -> dict[str, Any]:
    """Join the parts into `samples.parquet`, list the shards, and sum up."""
    notes, captions = [], 0
    with folder.staged(f"{home}/{SAMPLES}") as path, pq.ParquetWriter(path, sample_schema()) as writer:
        for unit in units:
            with folder.open(_part(home, unit)) as file:
                table = pq.read_table(file)
            notes.append(json.loads(table.schema.metadata[_NOTE]))
            captions += len(table["captions"].combine_chunks().flatten())
            writer.write_table(table.replace_schema_metadata(None))
    shards = [Shard(**note["shard"]) for note in notes]
    ranks = _write_rank_lists(folder, home, shards, config.ranks) if home == "shards" and config.ranks else []
    listed = ShardList(shards, config.fingerprint(), ranks)
    folder.write(f"{home}/{SHARDS}", listed.dump())
    left_out = [row for note in notes for row in note["left_out"]]
    if left_out:
        folder.write(f"{home}/left_out.jsonl", "".join(json.dumps(row) + "\n" for row in left_out).encode())
    return {
        "samples": listed.samples, "shards": len(shards), "bytes": listed.total_bytes, "captions": captions,
        "copied": sum(n["copied"] for n in notes), "resized": sum(n["resized"] for n in notes), "left_out": len(left_out),
    }  # fmt: skip


def rank_lists(shards: list[Shard], ranks: int) -> list[list[Shard]]:
    """Shards of each rank, dealt in turn: disjoint, all of them, equally many a rank, samples within one of each other.

    Raises:
        ConfigError: `ranks` does not divide the number of shards.
    """
    if len(shards) % ranks:
        raise ConfigError(f"expected a number of shards that {ranks} ranks can share equally, found {len(shards)}")
    return [shards[rank::ranks] for rank in range(ranks)]


def _write_rank_lists(folder: Folder, home: str, shards: list[Shard], ranks: int) -> list[dict[str, Any]]:
    lists = []
    for rank, mine in enumerate(rank_lists(shards, ranks)):
        name = f"ranks/{rank:05d}-of-{ranks:05d}.txt"
        folder.write(f"{home}/{name}", "".join(f"{shard.name}\n" for shard in mine).encode())
        lists.append({"list": name, "shards": len(mine), "samples": sum(shard.samples for shard in mine)})
    return lists
