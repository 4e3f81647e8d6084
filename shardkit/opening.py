"""Opening a set of shards: what is listed is compared with what is there, and several sets are put end to end."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import xxhash

from core.errors import DataError, InputError
from core.storage import Folder
from shardkit.foreign import open_foreign
from shardkit.index import SHARDS, Shard, read_shard_list
from shardkit.rows import Rows, SampleFile

log = logging.getLogger("pairmill.shardkit")
OnBad = Literal["stop", "skip"]
CHECKS = 16  # shards asked about at a time: an object store answers each in some 20 ms


@dataclasses.dataclass(frozen=True)
class Opened:
    """A set as found.

    Attributes:
        tables: reads the rows of each of `shards`.
        sets: number of shards of each set that was opened.
        fingerprint: digest of what the sets should hold, of shards left out as well.
        left_out: shards that were left out because they are bad, and the samples they are listed with.
    """

    folder: Folder
    shards: list[Shard]
    tables: list[Rows]
    fingerprint: str
    sets: list[int]
    left_out: list[Shard]


def open_sets(urls: Sequence[str | os.PathLike[str]], check: bool, on_bad: OnBad) -> Opened:
    """All shards that `urls` name, one set after another; see `ShardSet.open`."""
    opened = [_open_one(os.fspath(url), check, on_bad) for url in urls]
    if len(opened) == 1:
        return opened[0]
    digest = xxhash.xxh3_128("\n".join(one.fingerprint for one in opened).encode()).hexdigest()
    shards = [dataclasses.replace(s, name=one.folder.path(s.name)) for one in opened for s in one.shards]
    tables = [table for one in opened for table in one.tables]
    sets, left_out = [len(one.shards) for one in opened], [s for one in opened for s in one.left_out]
    return Opened(opened[0].folder, shards, tables, digest, sets, left_out)


def _open_one(url: str, check: bool, on_bad: OnBad) -> Opened:
    folder = Folder(url)
    if not folder.exists(SHARDS):
        return _report(Opened(*open_foreign(url, skip=on_bad == "skip")), url)
    listed = read_shard_list(folder)
    if not listed.samples:
        raise InputError(f"expected samples in {folder}, found an empty set; check what dedup dropped and why")
    with ThreadPoolExecutor(CHECKS) as pool:
        faults = list(pool.map(lambda shard: _fault(folder, shard, check), listed.shards))
    for fault in filter(None, faults):
        if on_bad == "stop":
            raise fault
        log.warning("%s", fault)
    samples = SampleFile(folder, listed.shards)
    good = [number for number, fault in enumerate(faults) if fault is None]
    bad = [shard for shard, fault in zip(listed.shards, faults, strict=True) if fault is not None]
    tables: list[Rows] = [functools.partial(samples.read, number) for number in good]
    shards = [listed.shards[number] for number in good]
    return _report(Opened(folder, shards, tables, _fingerprint(listed.shards), [len(good)], bad), url)


def _report(opened: Opened, url: str) -> Opened:
    if opened.left_out:
        lost = sum(s.samples for s in opened.left_out)
        log.warning("%s: %d bad shards left out, with %d samples", url, len(opened.left_out), lost)
    if not any(shard.samples for shard in opened.shards):
        raise DataError(f"expected shards in {url}, found all {len(opened.left_out)} of them bad; make them again")
    return opened


def _fault(folder: Folder, shard: Shard, contents: bool) -> DataError | None:
    try:
        check_shard(folder, shard, contents=contents)
    except DataError as error:
        return error
    return None


def check_shard(folder: Folder, shard: Shard, *, contents: bool = False) -> None:
    """Raise DataError, naming it, where a shard is missing, of another size, or (`contents`) of another sha256."""
    advice = "restore it, or make the shards again with `pairmill shard --fresh`"
    try:
        size = folder.size(shard.name)
    except FileNotFoundError:
        raise DataError(f"expected shard {shard.name} in {folder}, found none; {advice}") from None
    if size != shard.bytes:
        raise DataError(
            f"shard {folder.path(shard.name)} has changed: expected {shard.bytes} bytes, found {size}; {advice}"
        )
    if contents and shard.sha256 and folder.sha256(shard.name) != shard.sha256:
        raise DataError(f"shard {folder.path(shard.name)} has changed: its sha256 is not the listed one; {advice}")


def _fingerprint(shards: list[Shard]) -> str:
    digest = xxhash.xxh3_128()
    for shard in shards:
        digest.update(f"{shard.name} {shard.samples} {shard.bytes} {shard.sha256}\n".encode())
    return digest.hexdigest()
