"""Tool `verify`: read shards again, compare them with their hashes, and name what is bad and why."""

from __future__ import annotations

import functools
import logging
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from core import images
from core.errors import DataError, ImageError, InputError
from core.plan import Unit
from core.runner import run_units, tick
from core.storage import Folder
from shardkit.config import VerifyConfig
from shardkit.index import SAMPLES, SHARDS, Shard, index_name, read_dali_index, read_shard_list
from shardkit.tar import Member, scan_file

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger("pairmill.shardkit")
Bad = dict[str, str]
_COLUMNS = ["key", "uid", "captions", "jpg_offset", "jpg_size", "crc32"]


def run(config: VerifyConfig) -> dict[str, Any]:
    """Verify WORK/shards and WORK/holdout, or the folder asked for.

    Returns: samples, shards, bytes, bad (shard, key, uid, reason; key and uid are empty where the whole shard is meant),
    deep, seconds, and exit_code 5 where something is bad.

    Raises:
        InputError: there are no shards.
    """
    started = time.perf_counter()
    work = Folder(config.work)
    sets = {"shards": work / "shards", "holdout": work / "holdout"}
    if config.shards:
        sets = {config.shards: Folder(config.shards)}
    else:
        sets = {name: folder for name, folder in sets.items() if folder.exists(SHARDS)}
    if not sets:
        raise InputError(f"expected shards in {work / 'shards'}, found none; run `pairmill shard` first")
    bad: list[Bad] = []
    totals = {"samples": 0, "shards": 0, "bytes": 0}
    for home, folder in sets.items():
        listed = read_shard_list(folder)
        for name, value in (("samples", listed.samples), ("shards", len(listed.shards)), ("bytes", listed.total_bytes)):
            totals[name] += value
        bad += sorted(_verify_set(folder, home, listed.shards, config), key=lambda b: (b["shard"], b["key"]))
    for one in bad[:20]:
        log.warning("verify: %s %s: %s", one["shard"], one["key"], one["reason"])
    seconds = round(time.perf_counter() - started, 3)
    code = DataError.exit_code if bad else 0
    return {**totals, "bad": bad, "deep": config.deep, "seconds": seconds, "exit_code": code}


def render(summary: dict[str, Any]) -> RenderableType:
    """The verdict in words, then up to 50 bad samples."""
    from rich.table import Table

    bad = summary["bad"]
    looked = "read and decoded" if summary["deep"] else "read"
    table = Table(
        title=f"{summary['samples']:,} samples in {summary['shards']:,} shards {looked} in {summary['seconds']:g} s: "
        + (f"[bold red]{len(bad):,} bad" if bad else "[bold green]all as listed"),
        title_justify="left",
    )
    if not bad:
        return table.title or ""
    for name in ("shard", "key", "uid", "reason"):
        table.add_column(name, overflow="fold")
    for one in bad[:50]:
        table.add_row(*(one[name] for name in ("shard", "key", "uid", "reason")))
    return table


def _verify_set(folder: Folder, home: str, shards: list[Shard], config: VerifyConfig) -> Iterator[Bad]:
    if not folder.exists(SAMPLES):
        yield _bad(f"{home}/{SAMPLES}", "is missing")
        return
    units, start = [], 0
    for i, shard in enumerate(shards):
        units.append(Unit(str(i), start, start + shard.samples))
        start += shard.samples
    task = VerifyShard(folder, config.deep)
    running = run_units(
        units, task, done=lambda _: False, workers=config.workers, engine=config.engine, label=f"verify ({home})",
        unit_of_progress="images",
    )  # fmt: skip
    for _, found in running:
        yield from ({**one, "shard": f"{home}/{one['shard']}"} for one in found)


def _bad(shard: str, reason: str, key: str = "", uid: str = "") -> Bad:
    return {"shard": shard, "key": key, "uid": uid, "reason": reason}


@functools.lru_cache(maxsize=1)
def _shards(url: str) -> list[Shard]:
    """The list, read once a worker: sending it along with each unit would cost its square."""
    return read_shard_list(Folder(url)).shards


@dataclass(frozen=True)
class VerifyShard:
    """Verifies one shard; runs in a worker process. Unit `i` is the i-th shard."""

    folder: Folder
    deep: bool

    def __call__(self, unit: Unit) -> list[Bad]:
        shard = _shards(self.folder.url)[int(unit.id)]
        if not self.folder.exists(shard.name):
            return [_bad(shard.name, "is missing")]
        try:
            rows = self._rows(shard)
        except (pa.ArrowException, OSError) as error:
            return [_bad(shard.name, f"its rows of {SAMPLES} cannot be read: {error}")]
        found = [*self._index(shard, rows)]
        if len(rows) != shard.samples:
            found.append(_bad(shard.name, f"{SAMPLES} lists {len(rows)} samples, {SHARDS} {shard.samples}"))
        size = self.folder.size(shard.name)
        changed = size != shard.bytes or self.folder.sha256(shard.name) != shard.sha256
        if changed or self.deep:
            damage = [*self._samples(shard, rows, changed)]
            found += damage
            if changed and not damage:
                found.append(
                    _bad(
                        shard.name,
                        "its sha256 is not the listed one, though pictures and captions are whole: a header or KEY.json changed",
                    )
                )
        else:
            tick(unit.rows)
        return found

    def _rows(self, shard: Shard) -> list[dict[str, Any]]:
        with self.folder.open(SAMPLES) as file:
            return pq.read_table(file, columns=_COLUMNS, filters=[("shard", "=", shard.name)]).to_pylist()

    def _index(self, shard: Shard, rows: list[dict[str, Any]]) -> Iterator[Bad]:
        name = index_name(shard.name)
        if not self.folder.exists(name):
            yield _bad(name, "is missing")
            return
        try:
            samples = read_dali_index(self.folder.read(name), name)
        except DataError as error:
            yield _bad(name, str(error))
            return
        wanted = [Member(f"{r['key']}.jpg", r["jpg_offset"], r["jpg_size"]) for r in rows]
        if [members[0] for members in samples if members] != wanted:
            yield _bad(name, f"does not list the samples of {SAMPLES}")

    def _samples(self, shard: Shard, rows: list[dict[str, Any]], changed: bool) -> Iterator[Bad]:
        """Damaged samples of one shard: pictures by their checksum, captions by the index, pixels by decoding."""
        with self.folder.open(shard.name) as file:
            texts: dict[str, Member] = {}
            if changed:
                try:
                    for member in scan_file(file, shard.name):
                        texts[member.name] = member
                except DataError as error:
                    yield _bad(shard.name, str(error))
            for row in rows:
                tick()
                file.seek(row["jpg_offset"])
                reason = self._picture(file.read(row["jpg_size"]), row["crc32"], row["jpg_size"])
                if not reason and changed:
                    text = texts.get(f"{row['key']}.txt")
                    file.seek(text.offset if text else 0)
                    if text is None or file.read(text.size) != row["captions"][0].encode():
                        reason = "its caption is not the one in the index"
                if reason:
                    yield _bad(shard.name, reason, row["key"], row["uid"])

    def _picture(self, data: bytes, crc32: int, size: int) -> str:
        if len(data) < size:
            return f"cut short: expected {size} bytes, found {len(data)}"
        if zlib.crc32(data) != crc32:
            return "its bytes have changed: the crc32 differs from the index"
        if not self.deep:
            return ""
        try:
            images.decode(data, images.read_header(data))
        except ImageError as error:
            return f"cannot be decoded: {error}"
        return ""
