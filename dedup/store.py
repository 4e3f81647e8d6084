"""Signatures, token sets and verified edges as they lie in the work folder, in and out."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from core import catalog
from core.storage import Folder
from dedup import bands, match, phash
from dedup.config import MOST_BITS
from dedup.evidence import Pairs
from dedup.match import Edges, Sets
from dedup.minhash import PERMUTATIONS
from dedup.sign import VERSION, opened

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("pairmill.dedup")
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
_MARK = b"pairmill.edges"


def load_pairs(connection: duckdb.DuckDBPyConnection, folder: Folder) -> tuple[Pairs, I64, int]:
    """Signatures in order of uid, each uid once; which rows of the order (uid, unit, row) they are; how many there were.

    A row of the list that repeats another's uid says nothing new: the first stands for it.
    """
    source = catalog.literal(folder, "dedup/signatures/*.parquet")
    sql = f"""SELECT * FROM read_parquet({source}) ORDER BY uid, unit, "row" """
    table: Any = connection.sql(sql).to_arrow_table()
    uid = table["uid"].combine_chunks()
    new = np.ones(len(uid), bool)
    if len(uid) > 1:
        new[1:] = pc.not_equal(uid[1:], uid[:-1]).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(new)
    return Pairs(table.take(pa.array(rows)) if len(rows) < len(new) else table), rows, len(new)


def load_sets(folder: Folder, wanted: U64) -> Sets:
    """The token sets with these sorted keys, in their order; a set of fewer than five words is not stored and is empty."""
    starts, sizes = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
    flats: list[U64] = []
    length = 0
    for keys, tokens, offsets, _ in _set_files(folder, minhash=False) if len(wanted) else ():
        at = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
        use = np.flatnonzero((wanted[at] == keys) & (sizes[at] == 0))
        flat, new_offsets = match.segments(tokens, offsets[use], offsets[use + 1] - offsets[use])
        starts[at[use]] = new_offsets[:-1] + length
        sizes[at[use]] = np.diff(new_offsets)
        length += len(flat)
        flats.append(flat)
    return Sets(np.concatenate([*flats, np.zeros(1, np.uint64)]), starts, sizes)


def _set_files(folder: Folder, *, minhash: bool) -> Iterator[tuple[U64, U64, I64, npt.NDArray[np.uint32]]]:
    """(keys, tokens, offsets, signatures [n, K]) of each file."""
    columns = ["set_key", "tokens"] + (["minhash"] if minhash else [])
    for name in folder.list("dedup/sets/*.parquet"):
        with opened(folder, name) as file:
            table = file.read(columns=columns).combine_chunks()
        if not table.num_rows:
            continue
        tokens = table["tokens"].chunk(0)
        offsets = tokens.offsets.to_numpy().astype(np.int64)
        hashes = np.zeros((0, PERMUTATIONS), np.uint32)
        if minhash:
            column = table["minhash"].chunk(0)
            hashes = np.frombuffer(column.buffers()[1], np.uint32).reshape(-1, PERMUTATIONS)[column.offset :][
                : len(column)
            ]
        yield table["set_key"].to_numpy(), tokens.values.to_numpy(), offsets, hashes


def caption_edges(
    connection: duckdb.DuckDBPyConnection, folder: Folder, wanted: U64, threshold: float, by: str
) -> Edges:
    """Verified edges that serve `threshold`, between the numbers of the sorted set keys `wanted`.

    They are read if they are there, else found (among all sets of the folder) and kept, named by set keys.
    """
    floor, rows = bands.rows_for(threshold)
    name, mark = f"dedup/edges/captions-{rows}.parquet", f"{VERSION} {by} {floor}".encode()
    table = _read_marked(folder, name, mark)
    if table is None:
        keys, minhashes, sets = _gather(folder)
        log.info("dedup: %s distinct captions in bands of %d", f"{len(keys):,}", rows)
        edges = match.caption_edges(connection, minhashes, sets, threshold)
        table = pa.table({"a": keys[edges.a], "b": keys[edges.b], "similarity": edges.similarity})
        _write_marked(folder, name, mark, table)
    a, b, similarity = (table[c].to_numpy() for c in ("a", "b", "similarity"))
    at_a, at_b = (np.minimum(np.searchsorted(wanted, x), len(wanted) - 1) for x in (a, b))
    here = np.flatnonzero((wanted[at_a] == a) & (wanted[at_b] == b)) if len(wanted) else np.zeros(0, np.int64)
    return Edges(at_a[here], at_b[here], similarity[here])


def image_edges(connection: duckdb.DuckDBPyConnection, folder: Folder, hashes: U8, mirrored: U8) -> Edges:
    """Verified edges between the numbers of the given sorted hashes, up to 64 bits apart; read or found and kept."""
    name, mark = (
        "dedup/edges/images.parquet",
        f"{VERSION} {MOST_BITS} {xxhash.xxh3_128_hexdigest(hashes.tobytes())}".encode(),
    )
    table = _read_marked(folder, name, mark)
    if table is None:
        log.info("dedup: %s distinct picture hashes", f"{len(hashes):,}")
        edges = phash.image_edges(connection, hashes, mirrored, MOST_BITS)
        table = pa.table({"a": edges.a, "b": edges.b, "similarity": edges.similarity})
        _write_marked(folder, name, mark, table)
    return Edges(*(table[c].to_numpy() for c in ("a", "b", "similarity")))


def _gather(folder: Folder) -> tuple[U64, npt.NDArray[np.uint32], Sets]:
    """All distinct sets: keys [S] ascending, signatures [K, S] on disk, tokens in memory.

    The signatures go to an unnamed temporary file, one row a permutation: a band reads only its own rows, so memory
    holds a few of sixty at a time.
    """
    found = [keys for keys, _, _, _ in _set_files(folder, minhash=False)]
    keys = bands.ascending(np.concatenate(found)) if found else np.zeros(0, np.uint64)
    if not len(keys):
        return keys, np.zeros((PERMUTATIONS, 0), np.uint32), load_sets(folder, keys)
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * PERMUTATIONS * len(keys))
        columns = np.memmap(file, np.uint32, "r+", shape=(PERMUTATIONS, len(keys)))
    for part, _, _, hashes in _set_files(folder, minhash=True):
        columns[:, np.searchsorted(keys, part)] = hashes.T
    return keys, columns, load_sets(folder, keys)


def _read_marked(folder: Folder, name: str, mark: bytes) -> pa.Table | None:
    if not folder.exists(name):
        return None
    with opened(folder, name) as file:
        table = file.read()
    return table if (table.schema.metadata or {}).get(_MARK) == mark else None


def _write_marked(folder: Folder, name: str, mark: bytes, table: pa.Table) -> None:
    with folder.staged(name) as path:
        pq.write_table(table.replace_schema_metadata({_MARK: mark}), path)
