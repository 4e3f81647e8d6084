"""Opening a set of shards: what is listed is compared with what is there, and several sets are put end to end."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from core.errors import DataError, InputError
from core.storage import Folder
from shardkit.foreign import open_foreign
from shardkit.index import SAMPLES, SHARDS, Shard, read_shard_list

log = logging.getLogger("pairmill.shardkit")
Int64 = npt.NDArray[np.int64]
OnBad = Literal["stop", "skip"]
CHECKS = 16  # shards asked about at a time: an object store answers each in some 20 ms


@dataclasses.dataclass(frozen=True)
class Opened:
    """A set as found: `table` has one row a sample in the order of `shards`, with the columns of `COLUMNS`.

    Attributes:
        sets: number of shards of each set that was opened.
        fingerprint: digest of what the sets should hold, of shards left out as well.
        left_out: shards that were left out because they are bad, and the samples they are listed with.
    """

    folder: Folder
    shards: list[Shard]
    table: pa.Table
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
    table = pa.concat_tables([one.table for one in opened], promote_options="permissive")
    sets, left_out = [len(one.shards) for one in opened], [s for one in opened for s in one.left_out]
    return Opened(opened[0].folder, shards, table, digest, sets, left_out)


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
    good = [shard for shard, fault in zip(listed.shards, faults, strict=True) if fault is None]
    bad = [shard for shard, fault in zip(listed.shards, faults, strict=True) if fault is not None]
    table = _read_samples(folder, listed.shards)
    if bad:
        kept = np.repeat([fault is None for fault in faults], [shard.samples for shard in listed.shards])
        table = table.filter(pa.array(kept))
    return _report(Opened(folder, good, table, _fingerprint(listed.shards), [len(good)], bad), url)


def _report(opened: Opened, url: str) -> Opened:
    if opened.left_out:
        lost = sum(s.samples for s in opened.left_out)
        log.warning("%s: %d bad shards left out, with %d samples", url, len(opened.left_out), lost)
    if not opened.table.num_rows:
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


def _read_samples(folder: Folder, shards: list[Shard]) -> pa.Table:
    import pyarrow.parquet as pq

    columns = ["shard", "key", "uid", "captions", "jpg_offset", "jpg_size", "width", "height", "crc32", "image_group"]
    try:
        if folder.local is not None:
            # by path: a table read from a Python file and still alive at exit aborts the process in one of three runs
            # where torch is loaded too (pyarrow 26, torch 2.13)
            table = pq.read_table(folder.local / SAMPLES, columns=columns)
        else:
            with folder.open(SAMPLES) as file:
                table = pq.read_table(file, columns=columns)
    except FileNotFoundError:
        raise DataError(
            f"expected {SAMPLES} beside {SHARDS} in {folder}, found none; run `pairmill shard` again"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"expected the samples of {folder} in {SAMPLES}, found {error}") from error
    codes, names = encoded(table["shard"])
    counts = list(zip(names, np.bincount(codes).tolist(), strict=True))
    if counts != [(s.name, s.samples) for s in shards if s.samples]:
        raise DataError(f"{SAMPLES} and {SHARDS} of {folder} do not list the same shards; run `pairmill shard` again")
    return table


def _fingerprint(shards: list[Shard]) -> str:
    digest = xxhash.xxh3_128()
    for shard in shards:
        digest.update(f"{shard.name} {shard.samples} {shard.bytes} {shard.sha256}\n".encode())
    return digest.hexdigest()


def encoded(column: pa.ChunkedArray) -> tuple[Int64, list[str]]:
    """A number for each row, equal for equal values, and the values by number, in order of first appearance."""
    chunks = column.dictionary_encode().chunks  # one dictionary for all chunks
    codes = [chunk.indices.to_numpy().astype(np.int64) for chunk in chunks]
    return np.concatenate(codes), chunks[0].dictionary.to_pylist()
