"""Stage `shard`: the kept pairs become tar shards, in an order fixed by the seed.

A shard is a unit: it reads its rows of the plan, copies or resizes the staged images, and publishes tar, index and part
in that order, so a part means a finished shard. Same input, same settings: same bytes, whatever was killed in between.
Several sizes are written in one pass: a unit then makes the same shard of every set, and reads and decodes once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from core import catalog
from core.errors import ConfigError, InputError
from core.plan import Part, Unit
from core.runner import run_units
from core.storage import Folder
from core.work import Stage, fingerprint, open_stage, read_settings
from shardkit.config import ShardConfig
from shardkit.index import (
    SAMPLES,
    SHARDS,
    Shard,
    ShardList,
    index_name,
    rank_list_name,
    rank_lists,
    read_shard_list,
)
from shardkit.plan import PLANS, VIEWS, planned_shards, rows_of, write_plans
from shardkit.write import NOTE, PackShard, join_parts, part_name

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger("pairmill.shardkit")
KINDS = ("shards", "holdout")


def run(config: ShardConfig) -> dict[str, Any]:
    """Write WORK/shards, and WORK/holdout where dedup held pictures out; continues what an earlier run left unfinished.

    Returns: samples, shards, bytes, seconds, and captions, copied, resized, left_out, of the first size's training set;
    the same figures of its holdout set as holdout, and of the sets of further sizes, by folder, as sets.

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
    with open_stage(config, "shard", home="shards", inputs=inputs(folder)) as stage:
        if stage.finished is not None:
            tidy(folder)
            if _whole(folder, stage.finished):
                log.info("shard: already done in %s", folder)
                return stage.finished
            log.warning("shard: some of its files are gone from %s, so it runs again", folder)
            stage.reopen()
        if not folder.exists(PLANS["shards"]):
            for home in _beside(folder):
                folder.remove(home)
            write_plans(folder, config)
        stage.share()
        summary = _pack_all(stage, config)
        if "left" in summary:
            return summary
        catalog.write(folder)
        stage.finish({**summary, "seconds": round(time.perf_counter() - started, 3)})
        tidy(folder)
    return {**summary, "seconds": round(time.perf_counter() - started, 3)}


def inputs(folder: Folder) -> str:
    """Fingerprint of pairs and decisions, which must be decisions over these pairs.

    Raises:
        InputError: they are not.
    """
    pairs = fingerprint(folder, "ingest/parts/*.parquet", catalog.SCORES)
    decided = read_settings(folder).get("dedup", {}).get("inputs", pairs)
    if decided != pairs:
        raise InputError(f"the pairs in {folder} are not those that dedup decided on; run `pairmill dedup` again first")
    return fingerprint(folder, "dedup/decisions.parquet") + pairs


def homes(kind: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The folder of each size's set: `shards` and `shards-336`, or `holdout` and `holdout-336`."""
    return (kind, *(f"{kind}-{size}" for size in sizes[1:]))


def find_homes(folder: Folder) -> list[str]:
    """Every set of shards that this stage has made in a work folder, also one whose list of shards has been lost."""
    made = {home for home in ("shards", *_beside(folder)) if folder.exists(f"{home}/{SHARDS}")}
    if folder.exists("shards/done.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # of a damaged mark, which names none
            summary = json.loads(folder.read("shards/done.json"))
            made |= {home for home, figures in sets(summary).items() if figures["samples"]}
    return sorted(made, key=lambda home: (not home.startswith("shards"), home))


def sets(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of each set in this stage's summary, by folder."""
    return {"shards": summary, "holdout": summary["holdout"], **summary.get("sets", {})}


def _beside(folder: Folder) -> list[str]:
    """Folders of this stage's that lie outside its home."""
    found = {*folder.list("shards-*"), *folder.list("holdout-*")}
    return ["holdout", *sorted(name for name in found if re.fullmatch(r"(shards|holdout)-\d+", name))]


def _whole(folder: Folder, summary: dict[str, Any]) -> bool:
    """Whether every file that a finished run published is still there."""
    for home in (home for home, figures in sets(summary).items() if figures["samples"]):
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
    for home, one in sets(summary).items():
        if one["samples"]:
            figures = (one[k] for k in ("copied", "resized", "left_out"))
            head = (f"{one['samples']:,}", f"{one['shards']:,}", f"{one['captions']:,}", f"{one['bytes'] / 1e6:,.1f}")
            table.add_row(f"[bold]{home}", *head, *(f"{n:,}" for n in figures))
    return table


def _check(config: ShardConfig) -> None:
    for name, low, high in (
        ("samples_per_shard", 1, 10**9),
        ("mb_per_shard", 0, 10**6),
        ("ranks", 0, 10**6),
    ):
        value = getattr(config, name)
        if not low <= value <= high:
            flag = name.replace("_", "-")
            raise ConfigError(f"expected --{flag} from {low} to {high:,}, found {value}")
    for size in config.size:
        if not 1 <= size <= 65_535:
            raise ConfigError(f"expected --size from 1 to 65,535, found {size}")
    if not config.size or len(set(config.size)) < len(config.size):
        raise ConfigError(f"expected each --size once, found {list(config.size)}")


def tidy(folder: Folder) -> None:
    """Remove what only a continuation would need."""
    for plan in PLANS.values():
        folder.remove(plan)
        folder.remove(rows_of(plan))
    for home in ("shards", *_beside(folder)):
        folder.remove(f"{home}/parts")


# ---- all sets ---------------------------------------------------------------------------------------------------------


def _pack_all(stage: Stage, config: ShardConfig) -> dict[str, Any]:
    """Write every set, or a part of each; returns the summary without its seconds."""
    folder, units = stage.folder, {kind: planned_shards(stage.folder, PLANS[kind]) for kind in KINDS}
    for kind in KINDS:
        _pack(folder, kind, units[kind], config, stage.part)
    if partial := stage.left_to_others(lambda: sum(len(_unpacked(folder, k, units[k], config)) for k in KINDS)):
        return partial
    packed = {home: figures for kind in KINDS for home, figures in _describe_all(folder, kind, units[kind], config)}
    first = {**packed.pop("shards"), "holdout": packed.pop("holdout")}
    return {**first, "sets": packed} if packed else first


def _pack(folder: Folder, kind: str, units: list[Unit], config: ShardConfig, part: Part) -> None:
    """Write the shards of one plan, or a part of them, in every size."""
    places = homes(kind, config.size)
    for home in places if units else ():
        folder.sweep(home)
        folder.sweep(f"{home}/parts")
    todo = set(_unpacked(folder, kind, units, config))
    task = PackShard(folder, PLANS[kind], places, config.size)
    running = run_units(
        units, task, done=lambda unit: unit not in todo, part=part, workers=config.workers, engine=config.engine,
        label=f"shard ({kind})", unit_of_progress="images",
    )  # fmt: skip
    for _ in running:
        pass


def _unpacked(folder: Folder, kind: str, units: list[Unit], config: ShardConfig) -> list[Unit]:
    """Those shards of a plan that lack a file in some size."""
    if not units:
        return []
    places, there = homes(kind, config.size), set[str]()
    for home in places:
        there |= {*folder.list(f"{home}/parts/*.parquet"), *folder.list(f"{home}/*")}
    return [unit for unit in units if not _files(places, unit) <= there]


def _describe_all(
    folder: Folder, kind: str, units: list[Unit], config: ShardConfig
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write the files that describe the sets of one plan; yields the figures of each folder."""
    for home in homes(kind, config.size):
        nothing = {"samples": 0, "shards": 0, "bytes": 0}
        yield home, describe(folder, home, units, config) if units else nothing


def _files(places: tuple[str, ...], unit: Unit) -> set[str]:
    """What a finished shard consists of, in every size."""
    return {
        name for home in places for name in (f"{home}/{unit.id}.tar", f"{home}/{unit.id}.idx", part_name(home, unit))
    }


def describe(folder: Folder, home: str, units: list[Unit], config: ShardConfig) -> dict[str, Any]:
    """Join the parts into `samples.parquet`, list the shards, and sum up."""
    notes: list[dict[str, Any]] = []
    captions = 0

    def parts() -> Iterator[pa.Table]:
        nonlocal captions
        for unit in units:
            with folder.open(part_name(home, unit)) as file:
                table = pq.read_table(file)
            notes.append(json.loads(table.schema.metadata[NOTE]))
            captions += len(table["captions"].combine_chunks().flatten())
            yield table

    with folder.staged(f"{home}/{SAMPLES}") as path:
        join_parts(parts(), path)
    shards = [Shard(**note["shard"]) for note in notes]
    ranks = config.ranks if home.startswith("shards") else 0
    lanes = [
        {"list": rank_list_name(rank, ranks), "shards": len(mine), "samples": sum(shard.samples for shard in mine)}
        for rank, mine in enumerate(rank_lists(shards, ranks))
    ]
    listed = ShardList(shards, config.fingerprint(), lanes, folder.sha256(f"{home}/{SAMPLES}"))
    for name, data in listed.derived_files().items():
        folder.write(f"{home}/{name}", data)
    folder.write(f"{home}/{SHARDS}", listed.dump())
    left_out = [row for note in notes for row in note["left_out"]]
    if left_out:
        folder.write(f"{home}/left_out.jsonl", "".join(json.dumps(row) + "\n" for row in left_out).encode())
    return {
        "samples": listed.samples, "shards": len(shards), "bytes": listed.total_bytes, "captions": captions,
        "copied": sum(n["copied"] for n in notes), "resized": sum(n["resized"] for n in notes), "left_out": len(left_out),
    }  # fmt: skip
