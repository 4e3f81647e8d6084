"""Which sample goes where: kept captions grouped by picture, shuffled by seed, cut into shards.

A plan is one Arrow IPC stream a shard, of one row a sample, one after another in a file, and beside it where each begins: a
worker reads its shard and no more, at the same cost however many there are (a Parquet footer names every column of every
row group, 1.6 kB a shard, and has to be parsed whole).
DuckDB joins, groups and sorts (it spills to disk); rows then stream through Arrow, never all at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from core import catalog
from core.errors import ConfigError, InputError
from core.plan import Unit
from core.schema import pair_fields
from core.storage import Folder
from shardkit.config import ShardConfig

if TYPE_CHECKING:
    import duckdb

# One row a kept caption, with the picture it belongs to. Pictures are the same where the bytes received are (one URL may
# be fetched by two units) and dedup says so too; near-duplicates stay samples of their own and share an image group.
_ROWS = """
CREATE TEMP TABLE caption_rows AS
WITH kept AS (
    SELECT uid, bool_or(holdout) AS holdout, min(image_group) AS image_group FROM decisions WHERE kept GROUP BY uid
)
SELECT kept.holdout, kept.image_group, coalesce(sha256, tar || ':' || tar_offset) AS picture, unit, "row", uid, caption,
    url, tar, tar_offset, tar_size, stored_sha256, stored_crc32, {source} AS source
FROM pairs JOIN kept USING (uid)
WHERE outcome = 'ok' AND tar IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY uid ORDER BY unit, "row") = 1
"""

_PICTURES = """
CREATE TEMP TABLE pictures AS
SELECT holdout, image_group, picture, arg_min(uid, (unit, "row")) AS first_uid
FROM caption_rows GROUP BY holdout, image_group, picture
"""

_ORDERED = """
SELECT p.first_uid, r.uid, r.caption, r.url, r.tar, r.tar_offset, r.tar_size, r.stored_sha256, r.stored_crc32, r.image_group,
    r.source
FROM caption_rows r JOIN pictures p USING (holdout, image_group, picture)
WHERE holdout = {holdout} {only}
ORDER BY md5_number({seed} || ':' || p.first_uid), p.first_uid, r.unit, r."row"
"""

# Bytes of each sample's three members in a tar, in the order of _ORDERED; what JSON adds around the columns is 400 or less.
_BYTES = """
SELECT (512 * (3 + ceil(any_value(r.tar_size) / 512) + ceil(max(strlen(r.caption)) / 512) + ceil((400
    + sum(strlen(r.caption) + strlen(r.uid) + 6) + max(coalesce(strlen(r.url), 0) + strlen(r.source))) / 512)))::BIGINT
    AS bytes
FROM caption_rows r JOIN pictures p USING (holdout, image_group, picture)
WHERE holdout = {holdout}
GROUP BY p.first_uid
ORDER BY md5_number({seed} || ':' || p.first_uid), p.first_uid
"""

VIEWS = ("pairs", "decisions")
# For each shard and for the end, the rows and the bytes before it: int64 of shape (shards + 1, 2).
PLANS = {"shards": "shards/plan.starts", "holdout": "shards/plan-holdout.starts"}


def rows_of(plan: str) -> str:
    """Name of the file with a plan's rows."""
    return plan.removesuffix(".starts") + ".arrow"


def planned_shards(folder: Folder, plan: str) -> list[Unit]:
    """One unit a shard of the plan, named as the shard is."""
    starts = np.frombuffer(folder.read(plan), _STARTS).reshape(-1, 2)[:, 0].tolist()
    digits = max(5, len(str(len(starts) - 2)))
    return [Unit(f"{i:0{digits}d}", *ends) for i, ends in enumerate(itertools.pairwise(starts))]


def planned_rows(folder: Folder, plan: str, unit: Unit) -> pa.Table:
    """The rows of one shard: a read of 32 bytes and one of its own, however many shards there are."""
    _, begin, _, end = np.frombuffer(folder.read_range(plan, int(unit.id) * 16, 32), _STARTS).tolist()
    with pa.ipc.open_stream(folder.read_range(rows_of(plan), begin, end - begin)) as stream:
        return stream.read_all()


def write_plans(folder: Folder, config: ShardConfig) -> None:
    """Write both plans; the one of `shards` last, so that where it lies both do.

    Raises:
        InputError: nothing was kept, or no kept pair has a staged image.
        ConfigError: fewer samples than ranks.
        DataError: a part is damaged.
    """
    with catalog.reading(folder), catalog.connect(folder, views=VIEWS) as connection:
        connection.execute(_ROWS.format(source=_source_columns(connection)))
        connection.execute(_PICTURES)
        samples = {
            home: _count(connection, f"SELECT count(*) FROM pictures WHERE holdout = {holdout}")
            for home, holdout in (("holdout", True), ("shards", False))
        }
        if not samples["shards"]:
            kept = _count(connection, "SELECT count(*) FROM decisions WHERE kept AND NOT holdout")
            raise InputError(
                f"expected kept pairs with images in {folder}, found {kept} kept pairs to train on and no image of theirs; "
                'see what was dropped: pairmill sql "SELECT reason, count(*) FROM decisions GROUP BY reason"'
            )
        sizes = {home: _sizes(connection, home, n, config) for home, n in samples.items()}
        for home in sizes:
            _write_plan(connection, folder, home, sizes[home], config)


def _sizes(connection: duckdb.DuckDBPyConnection, home: str, samples: int, config: ShardConfig) -> list[int]:
    """Samples in each shard of one home. Only training shards are dealt to ranks."""
    ranks = config.ranks if home == "shards" else 0
    if not config.mb_per_shard or not samples:
        return shard_sizes(samples, config.samples_per_shard, ranks)
    in_order = _BYTES.format(holdout=home == "holdout", seed=int(config.seed))
    return shard_sizes_by_bytes(connection.sql(in_order).fetchnumpy()["bytes"], config.mb_per_shard * 10**6, ranks)


def shard_sizes_by_bytes(sample_bytes: np.ndarray, most: int, ranks: int = 0) -> list[int]:
    """Samples in each shard: as few shards as hold at most `most` bytes each (one sample where that alone is more), a
    multiple of `ranks` many, and as even in samples as can be.

    Args:
        sample_bytes: of each sample in order, int64 of shape (S,).

    Raises:
        ConfigError: there are fewer samples than ranks.
    """
    ends = np.append(0, np.cumsum(sample_bytes, dtype=np.int64))
    shards = math.ceil(int(ends[-1]) / most)
    while True:
        sizes = _even(len(sample_bytes), shards, ranks)
        largest = np.diff(ends[np.append(0, np.cumsum(sizes))]).max()
        if largest <= most or len(sizes) < shards:  # the second: there are no more samples to make shards of
            return sizes
        shards = len(sizes) + max(1, len(sizes) // 100)


def shard_sizes(samples: int, most: int, ranks: int = 0) -> list[int]:
    """Samples in each shard: as few shards as hold at most `most`, a multiple of `ranks` many, and as even as can be.

    Raises:
        ConfigError: there are fewer samples than ranks.
    """
    return _even(samples, math.ceil(samples / most), ranks)


def _even(samples: int, shards: int, ranks: int) -> list[int]:
    """`samples` over `shards` shards or a few more, until `ranks` divides their number."""
    if samples < ranks:
        raise ConfigError(f"expected at least one sample for each of {ranks} ranks, found {samples}; lower --ranks")
    ranks = max(ranks, 1)
    shards += -shards % ranks
    if shards > samples:  # an empty shard stops other loaders
        shards = samples - samples % ranks
    return [samples // shards + (i < samples % shards) for i in range(shards)]


def _count(connection: duckdb.DuckDBPyConnection, sql: str) -> int:
    return int(connection.execute(sql).fetchall()[0][0])


def _source_columns(connection: duckdb.DuckDBPyConnection) -> str:
    """SQL for the source's own columns of a pair as one JSON object."""
    ours = {field.name for field in pair_fields()}
    names = [name for name in catalog.columns(connection, "pairs") if name not in ours]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    return f"to_json(struct_pack({', '.join(f'{q} := {q}' for q in quoted)}))::VARCHAR" if quoted else "'{}'"


def _write_plan(
    connection: duckdb.DuckDBPyConnection, folder: Folder, home: str, sizes: list[int], config: ShardConfig
) -> None:
    only = "AND r.uid = p.first_uid" if config.captions == "first" else ""
    rows = connection.sql(_ORDERED.format(holdout=home == "holdout", seed=int(config.seed), only=only))
    starts = [(0, 0)]
    with folder.staged(rows_of(PLANS[home])) as path, pa.OSFile(str(path), "wb") as file:
        for table in _cut(pa.RecordBatchReader.from_stream(rows), sizes):
            with pa.ipc.new_stream(file, _SCHEMA, options=_PACKED) as stream:
                stream.write_table(table)
            starts.append((starts[-1][0] + table.num_rows, file.tell()))
    folder.write(PLANS[home], np.array(starts, _STARTS).tobytes())


_STARTS = np.dtype("<i8")
# half of a plan are hashes as text, half as long so, and written no later than as they are
_PACKED = pa.ipc.IpcWriteOptions(compression="zstd")
_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.string()),
        pa.field("uids", pa.list_(pa.string())),
        pa.field("captions", pa.list_(pa.string())),
        pa.field("url", pa.string()),
        pa.field("tar", pa.string()),
        pa.field("tar_offset", pa.int64()),
        pa.field("tar_size", pa.int64()),
        pa.field("stored_sha256", pa.string()),
        pa.field("stored_crc32", pa.uint32()),
        pa.field("image_group", pa.string()),
        pa.field("source", pa.string()),
    ]
)


def _cut(batches: pa.RecordBatchReader, sizes: list[int]) -> Iterator[pa.Table]:
    """Caption rows, in order, as one table of samples a shard."""
    pending = pa.table({f.name: pa.array([], f.type) for f in batches.schema}, schema=batches.schema)
    remaining = iter(sizes)
    wanted = next(remaining, 0)
    for batch in batches:
        pending = pa.concat_tables([pending, pa.Table.from_batches([batch])])
        starts = _starts(pending)
        done = 0
        while wanted and len(starts) - 1 - done >= wanted:  # the last picture may have more captions in the next batch
            yield _grouped(pending, starts[done : done + wanted + 1])
            done, wanted = done + wanted, next(remaining, 0)
        pending = pending.slice(starts[done])
    if wanted:
        yield _grouped(pending, np.append(_starts(pending), pending.num_rows))


def _starts(rows: pa.Table) -> np.ndarray:
    """Row at which each picture begins."""
    import pyarrow.compute as pc

    first = rows["first_uid"]
    changed = pc.not_equal(first.slice(1), first.slice(0, max(len(first) - 1, 0)))
    return np.append(0, np.flatnonzero(changed.to_numpy()) + 1)


def _grouped(rows: pa.Table, bounds: np.ndarray) -> pa.Table:
    """One row a picture: its caption rows are `bounds[i]` to `bounds[i + 1]`."""
    part = rows.slice(bounds[0], bounds[-1] - bounds[0]).combine_chunks()
    offsets = pa.array(bounds - bounds[0], pa.int32())
    one = part.take(offsets[:-1])
    lists = {
        name: pa.ListArray.from_arrays(offsets, part[column].combine_chunks().cast(pa.string()))
        for name, column in (("uids", "uid"), ("captions", "caption"))
    }
    columns = [lists[f.name] if f.name in lists else one[f.name].cast(f.type) for f in _SCHEMA]
    return pa.table(columns, schema=_SCHEMA)
