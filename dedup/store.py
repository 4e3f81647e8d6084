"""Signatures, token sets and verified edges as they lie in the work folder, in and out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from core import catalog
from core.storage import Folder
from dedup import bands, match, oracle, phash
from dedup.config import MOST_BITS
from dedup.evidence import Pairs
from dedup.match import Edges
from dedup.sign import MINHASHES, VERSION, opened
from dedup.tokens import Sets, segments

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("pairmill.dedup")
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
_MARK = b"pairmill.edges"
TOKENS = ("set_key", "tokens")


def load_pairs(connection: duckdb.DuckDBPyConnection, folder: Folder, of: str) -> tuple[Pairs, I64, int]:
    """Signatures in order of uid, each uid once; which rows of the order (uid, unit, row) they are; how many there were.

    A row of the list that repeats another's uid says nothing new: the first stands for it. The sorted table is kept, for
    signatures that `of` tells apart.
    """
    name, mark = "dedup/edges/pairs.parquet", f"{VERSION} {of}".encode()
    table = _read_marked(folder, name, mark)
    if table is None:
        table = _sorted_pairs(connection, folder)
        _write_marked(folder, name, mark, table)
    places, copies = (table[column].to_numpy() for column in ("place", "copies"))
    return Pairs(table), places, int(copies.sum())


def _sorted_pairs(connection: duckdb.DuckDBPyConnection, folder: Folder) -> pa.Table:
    source = catalog.literal(folder, "dedup/signatures/[!.]*.parquet")
    sql = f"""SELECT * FROM read_parquet({source}) ORDER BY uid, unit, "row" """
    table: Any = connection.sql(sql).to_arrow_table()
    uid = table["uid"].combine_chunks()
    new = np.ones(len(uid), bool)
    if len(uid) > 1:
        new[1:] = pc.not_equal(uid[1:], uid[:-1]).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(new)
    table = Pairs(table.take(pa.array(rows)) if len(rows) < len(new) else table).prepared()
    copies = np.diff(np.append(rows, len(new)))
    return table.append_column("place", pa.array(rows)).append_column("copies", pa.array(copies))


def load_captions(connection: duckdb.DuckDBPyConnection, folder: Folder, parts: str) -> pa.ChunkedArray:
    """The captions of all fetched pairs in order of (uid, unit, row), repeated rows among them."""
    source = f"read_parquet({catalog.literal(folder, f'{parts}/[!.]*.parquet')}, union_by_name=true)"
    names = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    only = "WHERE outcome = 'ok'" if "outcome" in names else ""
    table: Any = connection.sql(f"""SELECT caption FROM {source} {only} ORDER BY uid, unit, "row" """).to_arrow_table()
    return table["caption"]


def load_sets(folder: Folder, wanted: U64) -> Sets:
    """The token sets with these sorted keys, in their order; a set of fewer than five words is not stored and is empty."""
    starts, sizes = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
    flats: list[U32] = []
    length = 0
    for keys, tokens, offsets in map(unpacked, _set_files(folder, TOKENS)) if len(wanted) else ():
        at = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
        use = np.flatnonzero((wanted[at] == keys) & (sizes[at] == 0))
        flat, new_offsets = segments(tokens, offsets[use], offsets[use + 1] - offsets[use])
        starts[at[use]] = new_offsets[:-1] + length
        sizes[at[use]] = np.diff(new_offsets)
        length += len(flat)
        flats.append(flat)
    return Sets(np.concatenate([*flats, np.zeros(1, np.uint32)]), starts, sizes)


def _set_files(folder: Folder, columns: Sequence[str]) -> Iterator[pa.Table]:
    """These columns of each file of sets, one chunk each."""
    for name in folder.list("dedup/sets/*.parquet"):
        with opened(folder, name) as file:
            # threads cost more than they save on columns that are only copied
            yield file.read(columns=list(columns), use_threads=False).combine_chunks()


def unpacked(sets: pa.Table) -> tuple[U64, U32, I64]:
    """(keys [S], tokens, offsets [S + 1]) of a table of sets."""
    if not sets.num_rows:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint32), np.zeros(1, np.int64)
    tokens = sets.combine_chunks()["tokens"].chunk(0)
    _, offsets, data = tokens.buffers()
    bounds = np.frombuffer(offsets, np.int64)[tokens.offset : tokens.offset + len(tokens) + 1]
    return sets["set_key"].to_numpy(), np.frombuffer(data, np.uint32), bounds // np.dtype(np.uint32).itemsize


@dataclass(frozen=True)
class MinHashes:
    """Signatures of all distinct sets of a folder, in order of their keys [S], read as they are asked for."""

    folder: Folder
    keys: U64
    places: list[npt.NDArray[np.int32]]  # of each file's sets among the keys

    @classmethod
    def of(cls, folder: Folder) -> MinHashes:
        found = [table["set_key"].to_numpy() for table in _set_files(folder, ["set_key"])]
        keys = bands.ascending(np.concatenate([*found, np.zeros(0, np.uint64)]))
        return cls(folder, keys, [np.searchsorted(keys, part).astype(np.int32) for part in found])

    def __call__(self, wanted: Sequence[int]) -> U32:
        """By these permutations, [len(wanted), S]."""
        result = np.empty((len(wanted), len(self.keys)), np.uint32)
        names = [MINHASHES[k] for k in wanted]
        for place, table in zip(self.places, _set_files(self.folder, names), strict=True):
            for row, name in zip(result, names, strict=True):
                row[place] = table[name].to_numpy()
        return result


def caption_edges(folder: Folder, wanted: U64, threshold: float, of: str) -> tuple[Edges, Edges]:
    """Verified edges that serve `threshold`, between the numbers of the sorted set keys `wanted`, and those that the oracle
    finds around the first `oracle.SAMPLE` stored sets.

    They are read if they are there, else found (among all sets of the folder) and kept, named by set keys. `of` tells the
    signatures they are made from: any other makes them anew.
    """
    floor, rows = bands.rows_for(threshold)
    names, mark = [f"dedup/edges/{kind}-{rows}.parquet" for kind in ("sample", "captions")], f"{VERSION} {floor} {of}"
    tables = [_read_marked(folder, name, mark.encode()) for name in names]
    if any(table is None for table in tables):
        minhashes = MinHashes.of(folder)
        keys, sets = minhashes.keys, load_sets(folder, minhashes.keys)
        log.info("dedup: %s distinct captions in bands of %d", f"{len(keys):,}", rows)
        made = [oracle.near(sets, floor), match.caption_edges(minhashes, sets, threshold)]
        tables = [pa.table({"a": keys[e.a], "b": keys[e.b], "similarity": e.similarity}) for e in made]
        for name, table in zip(names, tables, strict=True):
            _write_marked(folder, name, mark.encode(), table)
    sample, every = (_between(wanted, table) for table in tables if table is not None)
    return every, sample


def _between(wanted: U64, table: pa.Table) -> Edges:
    """Edges of set keys as edges of their places among `wanted`; those of other keys are left out."""
    a, b, similarity = (table[c].to_numpy() for c in ("a", "b", "similarity"))
    at_a, at_b = (np.minimum(np.searchsorted(wanted, x), len(wanted) - 1) for x in (a, b))
    here = np.flatnonzero((wanted[at_a] == a) & (wanted[at_b] == b)) if len(wanted) else np.zeros(0, np.int64)
    return Edges(at_a[here], at_b[here], similarity[here])


def image_edges(folder: Folder, hashes: U8, mirrored: U8) -> Edges:
    """Verified edges between the numbers of the given sorted hashes, up to 64 bits apart; read or found and kept."""
    name, mark = (
        "dedup/edges/images.parquet",
        f"{VERSION} {MOST_BITS} {xxhash.xxh3_128_hexdigest(hashes.tobytes())}".encode(),
    )
    table = _read_marked(folder, name, mark)
    if table is None:
        log.info("dedup: %s distinct picture hashes", f"{len(hashes):,}")
        edges = phash.image_edges(hashes, mirrored, MOST_BITS)
        table = pa.table({"a": edges.a, "b": edges.b, "similarity": edges.similarity})
        _write_marked(folder, name, mark, table)
    return Edges(*(table[c].to_numpy() for c in ("a", "b", "similarity")))


def _read_marked(folder: Folder, name: str, mark: bytes) -> pa.Table | None:
    if not folder.exists(name):
        return None
    with opened(folder, name) as file:
        table = file.read()
    return table if (table.schema.metadata or {}).get(_MARK) == mark else None


def _write_marked(folder: Folder, name: str, mark: bytes, table: pa.Table) -> None:
    with folder.staged(name) as path:
        pq.write_table(table.replace_schema_metadata({_MARK: mark}), path, compression="none", use_dictionary=False)
