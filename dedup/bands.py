"""Banding: which rows share a bucket, found by DuckDB one band at a time, and which pairs of them are worth comparing.

N rows, one key a row and band. DuckDB groups because it spills to disk where the memory given to it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dedup.minhash import PERMUTATIONS

if TYPE_CHECKING:
    import duckdb

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

WINDOW = 3  # a bucket of up to four rows is compared completely; larger ones along the sorted chain
ROWS = ((0.75, 5), (0.65, 4), (0.5, 3), (0.0, 2))  # expected recall at the lower end: .95, .96, .94; at 0.8: .99


def rows_for(threshold: float) -> tuple[float, int]:
    """(lowest similarity served, rows a band) of the banding that serves `threshold`.

    Thresholds of one range share their banding, so that candidates verified once serve all of them.
    """
    return next((low, rows) for low, rows in ROWS if threshold >= low)


def expected_recall(similarity: float, rows: int) -> float:
    """Chance that two sets of this Jaccard similarity share at least one of the `60 / rows` bands."""
    return 1.0 - (1.0 - similarity**rows) ** (PERMUTATIONS // rows)


def fold_columns(columns_RN: list[npt.NDArray[np.uint32]]) -> U64:
    """One uint64 key a row from R columns (multiply, add, shift; R is at most 8)."""
    key_N = np.full(len(columns_RN[0]), 0x9E3779B97F4A7C15, np.uint64)
    for column_N in columns_RN:
        key_N = (key_N ^ column_N) * np.uint64(0xD6E8FEB86659FD93)
        key_N ^= key_N >> np.uint64(32)
    return key_N


def colliding(connection: duckdb.DuckDBPyConnection, keys_N: U64) -> tuple[I64, U64]:
    """The row numbers whose key occurs more than once, and their keys, in no particular order."""
    import pyarrow as pa

    table = pa.table({"id": np.arange(len(keys_N), dtype=np.uint32), "key": keys_N})
    connection.register("band", table)
    try:
        found = connection.execute(
            "SELECT id, key FROM band SEMI JOIN (SELECT key FROM band GROUP BY key HAVING count(*) > 1) USING (key)"
        ).fetchnumpy()
    finally:
        connection.unregister("band")
    return np.asarray(found["id"]).astype(np.int64), np.asarray(found["key"]).astype(np.uint64)


def candidates(ids_M: I64, keys_M: U64, nearness_M: U64, names: I64 | None = None) -> U64:
    """Pairs worth comparing inside each bucket, as sorted distinct `smaller << 32 | larger`.

    Every row is paired with the next `WINDOW` rows of its bucket in order of `nearness`, and with the bucket's first: a
    star alone decays in large buckets, where most rows have nothing to do with its centre. `names` are what the rows are
    called in the result, where several rows stand for one thing.
    """
    order = np.lexsort((ids_M, nearness_M, keys_M))
    ids, keys = (ids_M if names is None else names)[order], keys_M[order]
    new = np.ones(len(ids), bool)
    new[1:] = keys[1:] != keys[:-1]
    first = np.flatnonzero(new)[np.cumsum(new) - 1]
    left, right = [first], [np.arange(len(ids))]
    for step in range(1, WINDOW + 1):
        near = np.flatnonzero(keys[step:] == keys[:-step])
        left.append(near)
        right.append(near + step)
    return pair_keys(ids[np.concatenate(left)], ids[np.concatenate(right)])


def pair_keys(a: I64, b: I64) -> U64:
    """Sorted distinct unordered pairs of different row numbers, each as one uint64."""
    low, high = np.minimum(a, b).astype(np.uint64), np.maximum(a, b).astype(np.uint64)
    return ascending(((low << np.uint64(32)) | high)[low != high])


def ascending(keys: U64) -> U64:
    """The distinct keys in order: np.unique's result, whose hash table takes five times as long on millions of keys."""
    return _once(np.sort(keys))


def merged(a: U64, b: U64) -> U64:
    """The distinct keys of two ascending arrays, in order. A stable sort of two runs is a merge, in linear time."""
    return _once(np.sort(np.concatenate((a, b)), kind="stable"))


def _once(keys: U64) -> U64:
    new = np.ones(len(keys), bool)
    new[1:] = keys[1:] != keys[:-1]
    return keys[new]


def unpair(pairs: U64) -> tuple[I64, I64]:
    """(smaller, larger) row numbers of `pair_keys`."""
    return (pairs >> np.uint64(32)).astype(np.int64), (pairs & np.uint64(0xFFFFFFFF)).astype(np.int64)
