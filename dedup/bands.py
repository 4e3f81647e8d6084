"""Banding: which rows share a bucket, one band at a time, and which pairs of them are worth comparing.

N rows with one key of 32 bits each, M of them in buckets with others. Candidates are verified, so two keys that pass for one
by chance cost a comparison. Sorting keys with their rows in numpy takes 17 ns a row and band where DuckDB's grouping takes
120, and 30 bytes a row, one band at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dedup.minhash import PERMUTATIONS

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Nearness = Callable[[I64], U64]
Share = tuple[int, int]  # (i, n): the keys that leave i when divided by n, a power of two

_LOWER = np.uint64(0xFFFFFFFF)
WHOLE: Share = (0, 1)
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


def buckets(keys_N: U32, share: Share = WHOLE) -> tuple[I64, U32]:
    """The rows whose key others have too, in order of (key, row), and their keys.

    Args:
        share: only of these keys.
    """
    number, shares = share
    rows = np.arange(len(keys_N)) if shares == 1 else np.flatnonzero((keys_N & np.uint32(shares - 1)) == number)
    ordered = np.sort((keys_N[rows].astype(np.uint64) << np.uint64(32)) | rows.astype(np.uint64))
    upper = (ordered >> np.uint64(32)).astype(np.uint32)
    same = upper[1:] == upper[:-1]
    shared = np.concatenate((same, [False])) | np.concatenate(([False], same)) if len(rows) else same
    return (ordered[shared] & _LOWER).astype(np.int64), upper[shared]


def candidates(rows_M: I64, keys_M: U32, nearness: Nearness, names_N: I64 | None = None) -> U64:
    """Pairs worth comparing inside each bucket of `buckets`, as sorted distinct `smaller << 32 | larger`.

    Every row is paired with the next `WINDOW` rows of its bucket, and with the bucket's first: a star alone decays in
    large buckets, where most rows have nothing to do with its centre. In buckets that this does not compare completely,
    the rows stand in order of `nearness(rows)`. `names_N` are what rows are called in the result, where several stand for
    one thing.
    """
    new = np.ones(len(rows_M), bool)
    new[1:] = keys_M[1:] != keys_M[:-1]
    begins = np.flatnonzero(new)
    sizes = np.diff(np.append(begins, len(rows_M)))
    large = np.flatnonzero(np.repeat(sizes > WINDOW + 1, sizes))
    rows = rows_M.copy()
    rows[large] = rows[large[np.lexsort((rows[large], nearness(rows[large]), keys_M[large]))]]
    rows = rows if names_N is None else names_N[rows]
    left, right = [rows[np.repeat(begins, sizes)]], [rows]
    for step in range(1, WINDOW + 1):
        near = np.flatnonzero(keys_M[step:] == keys_M[:-step])
        left.append(rows[near])
        right.append(rows[near + step])
    return pair_keys(np.concatenate(left), np.concatenate(right))


def meeting(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> tuple[I64, I64]:
    """All (i, j) with ours[i] == theirs[j]; `theirs` is the smaller."""
    order = np.argsort(theirs, kind="stable")
    low = np.searchsorted(theirs, ours, "left", sorter=order)
    left, right = spread(low, np.searchsorted(theirs, ours, "right", sorter=order) - low)
    return left, order[right]


def spread(begins: I64, counts: I64) -> tuple[I64, I64]:
    """All (i, j) with begins[i] <= j < begins[i] + counts[i], in order."""
    left = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    return left, begins[left] + inside


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
    return (pairs >> np.uint64(32)).astype(np.int64), (pairs & _LOWER).astype(np.int64)
