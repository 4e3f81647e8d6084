"""Restores damaged files of a shard set, to the very bytes that `shards.json` lists, or not at all.

A shard is written again from the plan, which follows from pairs, decisions and settings. Each picture comes from the first
place that still has it as `samples.parquet` describes it: the damaged shard itself, the staged pairs, its URL.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core import config as settings
from core.errors import DataError, ImageError, InputError
from core.plan import Unit
from core.storage import Folder
from core.work import open_stage, read_settings
from shardkit.config import ShardConfig
from shardkit.index import SAMPLES, SHARDS, Bad, Shard, ShardList, index_name, read_shard_list
from shardkit.pack import homes, inputs, tidy
from shardkit.plan import PLANS, planned_shards, write_plans
from shardkit.ranges import RangeReader
from shardkit.write import Output, Row, fill, fit, join_parts, read_plan, staged_images

log = logging.getLogger("pairmill.shardkit")


def repair(work: Folder, bad: list[Bad], *, allow_private: bool) -> dict[str, Any]:
    """Write again what `bad` names; returns repaired (names) and not_repaired (shard, reason).

    Raises:
        InputError: pairs, decisions or settings are no longer those that the shards were made with.
    """
    result: dict[str, Any] = {"repaired": [], "not_repaired": []}
    wanted = sorted({one["shard"] for one in bad})
    if not wanted:
        return result
    wanted = _write_lists(work, wanted, result)
    config = _settings(work)
    with open_stage(config, "shard", home="shards", inputs=inputs(work)):
        write_plans(work, config)
        try:
            for home, size in _places(config):
                damaged = {name.rpartition("/")[2] for name in wanted if name.rpartition("/")[0] == home}
                if damaged:
                    _Set(work, home, size, allow_private).repair(damaged, result)
        finally:
            tidy(work)
    return result


def _write_lists(work: Folder, wanted: list[str], result: dict[str, Any]) -> list[str]:
    """Write again the lists that follow from `shards.json`; returns what else is wanted."""
    for home in sorted({name.partition("/")[0] for name in wanted}):
        if (work / home).exists(SHARDS):
            for name, data in read_shard_list(work / home).derived_files().items():
                if f"{home}/{name}" in wanted:
                    work.write(f"{home}/{name}", data)
                    result["repaired"].append(f"{home}/{name}")
    return [name for name in wanted if name not in result["repaired"]]


def _settings(work: Folder) -> ShardConfig:
    """The settings that the shards were made with, over the same pairs."""
    recorded = read_settings(work).get("shard")
    if recorded is None or recorded["inputs"] != inputs(work):
        raise InputError(
            f"the shards in {work} were made of other pairs or decisions than it holds now, so they cannot be restored; run "
            "`pairmill shard` to make new ones"
        )
    known = {name: value for name, value in recorded.items() if name not in ("inputs", "version")}
    return settings.build(ShardConfig, {**known, "work": work.url}, where=f"{work}/pairmill.toml [shard]")


def _places(config: ShardConfig) -> Iterator[tuple[str, int]]:
    for kind in PLANS:
        yield from zip(homes(kind, config.size), config.size, strict=True)


@dataclass
class _Set:
    """One set of shards under repair."""

    work: Folder
    home: str
    size: int
    allow_private: bool
    listed: ShardList = field(init=False)
    index: dict[str, dict[str, Any]] = field(init=False)
    fetched: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.work / self.home
        self.kind = self.home.partition("-")[0]
        self.listed = read_shard_list(self.folder)
        self.index = self._read_index()

    def _read_index(self) -> dict[str, dict[str, Any]]:
        """The rows of `samples.parquet` by uid; none where it is not what was written."""
        if not self.folder.exists(SAMPLES) or self.folder.sha256(SAMPLES) != self.listed.samples_sha256:
            return {}  # then the staged pictures alone must do
        columns = ["shard", "uid", "jpg_offset", "jpg_size", "sha256"]
        with self.folder.open(SAMPLES) as file:
            return {row["uid"]: row for row in pq.read_table(file, columns=columns).to_pylist()}

    def repair(self, damaged: set[str], result: dict[str, Any]) -> None:
        """Restore the files of `damaged` and note in `result` what became of each."""
        units = {f"{unit.id}.tar": unit for unit in planned_shards(self.work, PLANS[self.kind])}
        pairs = [(shard, units[shard.name]) for shard in self.listed.shards if shard.name in units]
        if SAMPLES in damaged:
            chosen = pairs
        else:
            chosen = [(s, unit) for s, unit in pairs if {s.name, index_name(s.name)} & damaged]
            self._fetch_missing(unit for shard, unit in chosen if shard.name in damaged)
        tables = []
        for shard, unit in chosen:
            try:
                tables.append(self._again(shard, unit))
                log.info("verify: %s/%s is as it was", self.home, shard.name)
                result["repaired"] += sorted(
                    f"{self.home}/{name}" for name in {shard.name, index_name(shard.name)} & damaged
                )
            except DataError as error:
                result["not_repaired"].append({"shard": f"{self.home}/{shard.name}", "reason": str(error)})
        if SAMPLES in damaged and len(tables) == len(self.listed.shards):
            self._write_samples(tables, result)

    def _again(self, shard: Shard, unit: Unit) -> pa.Table:
        """Write one shard and its index as they were; returns its rows of `samples.parquet`.

        Raises:
            DataError: it would not have the listed sha256; nothing is written then.
        """
        rows = self._rows(unit)
        with self.folder.staged(shard.name) as path:
            with Output(path, shard.name) as output:
                fill([output], rows, self._bodies(shard, rows), [self.size])
            if output.entry.sha256 != shard.sha256:
                raise DataError(
                    "written again it would be another file; run `pairmill shard --fresh` to make new shards"
                )
        self.folder.write(index_name(shard.name), output.index)
        return output.table([])

    def _rows(self, unit: Unit) -> list[Row]:
        """The plan's rows of one shard, without those that were left out when it was packed."""
        rows = read_plan(self.work, PLANS[self.kind], unit)
        if not self.index:
            return rows
        # bodies come from anywhere then, and have been compared with the index instead of with what ingest staged
        return [row._replace(stored_sha256=None, stored_crc32=None) for row in rows if row.uid in self.index]

    def _bodies(self, shard: Shard, rows: list[Row]) -> Iterator[bytes]:
        if not self.index:
            yield from staged_images(self.work, rows)
            return
        own = RangeReader(self.folder)
        for row in rows:
            body = next(self._whole(own, shard, row), None)
            if body is None:
                raise DataError(
                    f"the picture of {row.uid} is damaged, its staged copy is gone, and {row.url} no longer gives the same"
                )
            yield body

    def _whole(self, own: RangeReader, shard: Shard, row: Row) -> Iterator[bytes]:
        """The picture from each place that still has it as it was packed."""
        known = self.index[row.uid]
        try:
            if (
                hashlib.sha256(data := own.read(shard.name, known["jpg_offset"], known["jpg_size"])).hexdigest()
                == known["sha256"]
            ):
                yield data
        except OSError:
            pass  # the shard itself is gone
        for body in self._copies(row):
            try:
                data = fit(body, [self.size])[0].data
            except ImageError:
                continue
            if hashlib.sha256(data).hexdigest() == known["sha256"]:
                yield data

    def _copies(self, row: Row) -> Iterator[bytes]:
        try:
            yield from staged_images(self.work, [row])
        except DataError as error:
            log.info("verify: %s", error)
        if row.uid in self.fetched:
            yield self.fetched[row.uid]

    def _fetch_missing(self, units: Iterable[Unit]) -> None:
        """Download the pictures that no file on disk has any more, and only those."""
        if not self.index:
            return
        own = RangeReader(self.folder)
        missing = [
            row
            for unit in units
            for row in self._rows(unit)
            if row.url and next(self._whole(own, Shard(f"{unit.id}.tar", 0, 0), row), None) is None
        ]
        if missing:
            self.fetched = fetch(self.work, missing, allow_private=self.allow_private)

    def _write_samples(self, tables: list[pa.Table], result: dict[str, Any]) -> None:
        with self.folder.staged(SAMPLES) as path:
            join_parts(tables, path)
            if hashlib.sha256(path.read_bytes()).hexdigest() != self.listed.samples_sha256:
                raise DataError(f"{SAMPLES} written again would be another file; run `pairmill shard --fresh`")
        result["repaired"].append(f"{self.home}/{SAMPLES}")


def fetch(work: Folder, rows: list[Row], *, allow_private: bool) -> dict[str, bytes]:
    """Staged bytes of each row by uid, downloaded by `pairmill ingest` as the work folder's own were; no row for a failure.

    Raises:
        DataError: ingest could not run.
    """
    import tomli_w

    known = {k: v for k, v in read_settings(work).get("ingest", {}).items() if k not in ("inputs", "version")}
    log.info("verify: %d pictures are fetched again", len(rows))
    with tempfile.TemporaryDirectory(prefix="pairmill-repair-") as name:
        place = Folder(name)
        columns = {
            "uid": [r.uid for r in rows],
            "url": [r.url for r in rows],
            "caption": [r.captions[0] for r in rows],
        }
        pq.write_table(pa.table(columns), Path(name) / "list.parquet")
        ours = {
            "urls": f"{name}/list.parquet",
            "url_col": "url",
            "caption_col": "caption",
            "allow_private": allow_private,
        }
        recipe = tomli_w.dumps({"ingest": {**known, **ours}})
        (Path(name) / "recipe.toml").write_text(recipe)
        command = [
            sys.executable,
            "-m",
            "cli",
            "run",
            f"{name}/recipe.toml",
            "--work",
            f"{name}/work",
            "--workers",
            "1",
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DataError(f"the damaged pictures could not be fetched again: {done.stderr.strip().splitlines()[-1:]}")
        fresh = place / "work"
        return {row["uid"]: fresh.read_range(row["tar"], row["tar_offset"], row["tar_size"]) for row in _fetched(fresh)}


def _fetched(work: Folder) -> Iterator[dict[str, Any]]:
    for part in work.list("ingest/parts/*.parquet"):
        with work.open(part) as file:
            table = pq.read_table(file, columns=["uid", "outcome", "tar", "tar_offset", "tar_size"])
        yield from (row for row in table.to_pylist() if row["outcome"] == "ok")
