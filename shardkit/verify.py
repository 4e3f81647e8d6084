"""Tool `verify`: read shards again, compare them with their hashes, and name what is bad and why."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from isal import isal_zlib

from core import images
from core.errors import ConfigError, DataError, ImageError, InputError
from core.plan import Unit
from core.runner import run_units, tick
from core.storage import Folder, storage_errors
from shardkit.config import VerifyConfig
from shardkit.index import SAMPLES, SHARDS, Bad, Shard, ShardList, index_name, read_shard_list
from shardkit.pack import find_homes
from shardkit.repair import repair
from shardkit.tar import Member, scan_file

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger("pairmill.shardkit")
_COLUMNS = ["key", "uid", "captions", "jpg_offset", "jpg_size", "crc32"]


def run(config: VerifyConfig) -> dict[str, Any]:
    """Verify every set of the work folder, or the folder asked for; with `repair`, also write what is damaged again.

    Returns: samples, shards, bytes, bad (shard, key, uid, reason; key and uid are empty where the whole shard is meant),
    deep, seconds, and exit_code 5 where something is bad; after a repair `bad` is what is left, `repaired` names the files
    that were written, and `not_repaired` those that could not be, with the reason.

    Raises:
        InputError: there are no shards, or `repair` finds that the pairs have changed.
        ConfigError: `repair` of a folder that is no set of the work folder.
        StorageError: a folder cannot be read.
    """
    started = time.perf_counter()
    if config.shards and config.repair:
        raise ConfigError(
            "--repair needs the pairs of a work folder; leave --shards out and name that folder with --work"
        )
    work = Folder(config.work)
    with storage_errors(config.shards or str(work), "read"):
        homes = [config.shards] if config.shards else find_homes(work)
        if not homes:
            raise InputError(f"expected shards in {work / 'shards'}, found none; run `pairmill shard` first")
        found = {home: _verify_set(work / home, home, config) for home in homes}
        mended: dict[str, Any] = {}
        if config.repair:
            mended = repair(
                work, [one for result in found.values() for one in result.bad], allow_private=config.allow_private
            )
            changed = {name.partition("/")[0] for name in mended["repaired"]}
            found |= {home: _verify_set(work / home, home, config) for home in changed}
    bad = [one for result in found.values() for one in result.bad]
    for one in bad[:20]:
        log.warning("verify: %s %s: %s", one["shard"], one["key"], one["reason"])
    totals = {name: sum(getattr(result, name) for result in found.values()) for name in ("samples", "shards", "bytes")}
    seconds = round(time.perf_counter() - started, 3)
    code = DataError.exit_code if bad else 0
    return {**totals, "bad": bad, **mended, "deep": config.deep, "seconds": seconds, "exit_code": code}


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
    if summary.get("repaired"):
        table.title = f"{table.title}[/], {len(summary['repaired']):,} files written again"
    if not bad:
        return table.title or ""
    for name in ("shard", "key", "uid", "reason"):
        table.add_column(name, overflow="fold")
    for one in bad[:50]:
        table.add_row(*(one[name] for name in ("shard", "key", "uid", "reason")))
    return table


@dataclass
class _Set:
    """What was found of one set of shards."""

    samples: int = 0
    shards: int = 0
    bytes: int = 0
    bad: list[Bad] = dataclasses.field(default_factory=list)


def _verify_set(folder: Folder, home: str, config: VerifyConfig) -> _Set:
    if not folder.exists(SHARDS) and not config.shards:
        return _Set(bad=[_bad(f"{home}/{SHARDS}", "is missing; run `pairmill shard` again")])
    listed = read_shard_list(folder)
    found = [*_beside(folder, listed)]
    if folder.exists(SAMPLES):
        units, start = [], 0
        for i, shard in enumerate(listed.shards):
            units.append(Unit(str(i), start, start + shard.samples))
            start += shard.samples
        verify = VerifyShard(folder, config.deep, folder.sha256(SAMPLES))
        running = run_units(
            units, verify, done=lambda _: False, workers=config.workers, engine=config.engine,
            label=f"verify ({home})", unit_of_progress="images",
        )  # fmt: skip
        found += [one for _, some in running for one in some]
    found = [{**one, "shard": f"{home}/{one['shard']}"} for one in found]
    found.sort(key=lambda one: (one["shard"], one["key"]))
    return _Set(listed.samples, len(listed.shards), listed.total_bytes, found)


def _beside(folder: Folder, listed: ShardList) -> Iterator[Bad]:
    """What is wrong with the set's files as such: its table of samples, its lists, and tars that nobody listed."""
    if not folder.exists(SAMPLES):
        yield _bad(SAMPLES, "is missing")
    elif listed.samples_sha256 and folder.sha256(SAMPLES) != listed.samples_sha256:
        yield _bad(SAMPLES, f"its sha256 is not the one in {SHARDS}: it is damaged or of another packing")
    for name, data in listed.derived_files().items():
        if not folder.exists(name):
            yield _bad(name, "is missing")
        elif folder.read(name) != data:
            yield _bad(name, f"is not what follows from {SHARDS}, so loaders that go by it would read something else")
    known = {shard.sha256: shard.name for shard in listed.shards}
    for name in sorted(set(folder.list("*.tar")) - set(known.values())):
        twin = known.get(folder.sha256(name))
        yield _bad(
            name,
            f"is not listed, its contents are those of {twin}: rename or remove it"
            if twin
            else "is not listed, and loaders that take every tar would read it: move it elsewhere",
        )


def _bad(shard: str, reason: str, key: str = "", uid: str = "") -> Bad:
    return {"shard": shard, "key": key, "uid": uid, "reason": reason}


@functools.lru_cache(maxsize=1)
def _shards(url: str) -> list[Shard]:
    """The list, read once a worker: sending it along with each unit would cost its square."""
    return read_shard_list(Folder(url)).shards


class _Table:
    """`samples.parquet`, of which each shard's rows are read alone. Its footer is as long as the list of shards."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        with folder.open(SAMPLES) as file:
            self._footer = pq.read_metadata(file)
        if "shard" not in self._footer.schema.names:
            raise pa.ArrowInvalid("it has no column shard")
        column = self._footer.schema.names.index("shard")
        groups = [self._footer.row_group(i) for i in range(self._footer.num_row_groups)]
        self._ranges = [_range(group.column(column).statistics) for group in groups]

    def rows(self, shard: str) -> list[dict[str, Any]]:
        holding = [i for i, ends in enumerate(self._ranges) if ends is None or ends[0] <= shard <= ends[1]]
        with self._folder.open(SAMPLES) as file:
            table = pq.ParquetFile(file, metadata=self._footer).read_row_groups(holding, columns=["shard", *_COLUMNS])
        return table.filter(pc.equal(table["shard"], shard)).drop_columns("shard").to_pylist()  # type: ignore[no-any-return]


def _range(statistics: pq.Statistics | None) -> tuple[str, str] | None:
    return (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None


@functools.lru_cache(maxsize=1)
def _table(url: str, sha256: str) -> _Table:
    """Opened once a worker, and once more after a repair."""
    return _Table(Folder(url))


@dataclass(frozen=True)
class VerifyShard:
    """Verifies one shard; runs in a worker process. Unit `i` is the i-th shard.

    Attributes:
        samples_sha256: of the table of samples as it is.
    """

    folder: Folder
    deep: bool
    samples_sha256: str

    def __call__(self, unit: Unit) -> list[Bad]:
        shard = _shards(self.folder.url)[int(unit.id)]
        if not self.folder.exists(shard.name):
            return [_bad(shard.name, "is missing")]
        try:
            return [*self._index(shard), *self._shard(shard, unit)]
        except OSError as error:
            return [_bad(shard.name, f"cannot be read: {error.strerror or error}")]

    def _shard(self, shard: Shard, unit: Unit) -> list[Bad]:
        try:
            rows = _table(self.folder.url, self.samples_sha256).rows(shard.name)
        except (pa.ArrowException, OSError) as error:
            return [_bad(shard.name, f"its rows of {SAMPLES} cannot be read: {error}")]
        digest = self.folder.sha256(shard.name)
        changed = digest != shard.sha256
        twin = next((s.name for s in _shards(self.folder.url) if s.sha256 == digest), None) if changed else None
        if twin:
            return [_bad(shard.name, f"holds what {twin} should hold: they were exchanged")]
        found = []
        if len(rows) != shard.samples:
            found.append(_bad(shard.name, f"{SAMPLES} lists {len(rows)} samples, {SHARDS} {shard.samples}"))
        if changed or self.deep:
            damage = [*self._samples(shard, rows, changed)]
            found += damage
            if changed and not damage:
                reason = "its sha256 is not the listed one, though pictures and captions are whole: a header or KEY.json changed"
                found.append(_bad(shard.name, reason))
        else:
            tick(unit.rows)
        return found

    def _index(self, shard: Shard) -> Iterator[Bad]:
        name = index_name(shard.name)
        if not self.folder.exists(name):
            yield _bad(name, "is missing")
        elif shard.index_sha256 and self.folder.sha256(name) != shard.index_sha256:
            yield _bad(name, "its sha256 is not the listed one")

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
        if isal_zlib.crc32(data) != crc32:
            return "its bytes have changed: the crc32 differs from the index"
        if not self.deep:
            return ""
        try:
            images.decode(data, images.read_header(data))
        except ImageError as error:
            return f"cannot be decoded: {error}"
        return ""
