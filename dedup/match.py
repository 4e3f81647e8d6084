"""Near-duplicate captions and pictures: buckets from DuckDB, every candidate verified exactly.

S distinct token sets or picture hashes, P candidate pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dedup import bands
from dedup.minhash import PERMUTATIONS

if TYPE_CHECKING:
    import duckdb

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

MIN_WORDS = 5  # below it one word more or less is already more than a fifth of the caption: only equal sets match
_AT_ONCE = 1 << 21  # elements of one comparison table
_WIDE = 1024  # words of a set from which one pair's table is as large, and grows with the square of a page-long caption


@dataclass(frozen=True)
class Edges:
    """Row numbers a < b that were compared and found similar, with their similarity in [0, 1]."""

    a: I64
    b: I64
    similarity: F32

    def at_least(self, threshold: float) -> Edges:
        wanted = self.similarity >= np.float32(threshold)
        return Edges(self.a[wanted], self.b[wanted], self.similarity[wanted])


@dataclass(frozen=True)
class Sets:
    """S token sets as uint64 hashes: set s is `flat[starts[s]:starts[s] + sizes[s]]`; `flat` has at least one element."""

    flat: U64
    starts: I64
    sizes: I64


def segments(flat: U64, starts: I64, sizes: I64) -> tuple[U64, I64]:
    """The segments `flat[starts[i]:starts[i] + sizes[i]]` one after the other, and their offsets."""
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    return flat[np.repeat(starts, sizes) + inside], offsets


def caption_edges(
    connection: duckdb.DuckDBPyConnection, minhashes_KS: npt.NDArray[np.uint32], sets: Sets, threshold: float
) -> Edges:
    """Edges between token sets whose Jaccard similarity is at least the lower end of `threshold`'s range.

    Args:
        minhashes_KS: signatures, one row a permutation (a memory map will do: a band reads only its own rows).
    """
    floor, rows = bands.rows_for(threshold)
    found = np.zeros(0, np.uint64)
    for start in range(0, PERMUTATIONS, rows):
        band = [minhashes_KS[k] for k in range(start, start + rows)]
        ids, keys = bands.colliding(connection, bands.fold_columns(band))
        beside = [minhashes_KS[(start + rows + k) % PERMUTATIONS][ids].astype(np.uint64) for k in (0, 1)]
        nearness = (beside[0] << np.uint64(32)) | beside[1]
        fitting = _of_like_size(bands.candidates(ids, keys, nearness), sets.sizes, floor)
        found = bands.merged(found, fitting)
    a, b = bands.unpair(found)
    return Edges(a, b, jaccard(sets, a, b)).at_least(floor)


def _of_like_size(pairs: U64, sizes: I64, threshold: float) -> U64:
    """Only pairs whose sizes allow the threshold: |A & B| / |A | B| is at most min / max."""
    a, b = bands.unpair(pairs)
    return pairs[np.minimum(sizes[a], sizes[b]) >= threshold * np.maximum(sizes[a], sizes[b])]


def jaccard(sets: Sets, a: I64, b: I64) -> F32:
    """Exact Jaccard similarity of the sets numbered a[i] and b[i], [P]."""
    sizes_a, sizes_b = sets.sizes[a], sets.sizes[b]
    similarity_P = np.zeros(len(a), np.float32)
    widest_P = _rounded_up(np.maximum(sizes_a, sizes_b))
    for width in np.flatnonzero(np.bincount(widest_P)):
        members = np.flatnonzero(widest_P == width)
        step = max(1, _AT_ONCE // int(width) ** 2)
        for start in range(0, len(members), step):
            chunk = members[start : start + step]
            shared = _shared(sets, a[chunk], b[chunk], int(width))
            similarity_P[chunk] = shared / (sizes_a[chunk] + sizes_b[chunk] - shared)
    return similarity_P


def _rounded_up(sizes: I64) -> I64:
    """Multiples of 4 up to 32, then powers of two: few widths, little padding."""
    powers = 2 ** np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    return np.where(sizes <= 32, np.maximum(-(-sizes // 4) * 4, 4), powers)


def _shared(sets: Sets, a_P: I64, b_P: I64, width: int) -> I64:
    """Number of words two sets share: all against all, since captions are short and this has no branches."""
    if width > _WIDE:
        return np.array([_shared_by_sorting(sets, int(a), int(b)) for a, b in zip(a_P, b_P, strict=True)], np.int64)
    left_PW, right_PW = _padded(sets, a_P, width), _padded(sets, b_P, width)
    used = np.arange(width) < sets.sizes[a_P][:, None]
    equal_PWW = left_PW[:, :, None] == right_PW[:, None, :]
    equal_PWW &= used[:, :, None]
    equal_PWW &= (np.arange(width) < sets.sizes[b_P][:, None])[:, None, :]
    return np.count_nonzero(equal_PWW.reshape(len(a_P), -1), axis=1).astype(np.int64)


def _shared_by_sorting(sets: Sets, a: int, b: int) -> int:
    left, right = (sets.flat[sets.starts[s] : sets.starts[s] + sets.sizes[s]] for s in (a, b))
    return len(np.intersect1d(left, right, assume_unique=True))


def _padded(sets: Sets, which_P: I64, width: int) -> U64:
    at_PW = sets.starts[which_P][:, None] + np.arange(width)
    return sets.flat[np.minimum(at_PW, len(sets.flat) - 1)]
