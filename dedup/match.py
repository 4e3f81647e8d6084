"""Near-duplicate captions and pictures: buckets of bands, every candidate verified exactly.

S distinct token sets or picture hashes, P candidate pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dedup import bands, minhash
from dedup.tokens import Sets, alike, counts

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

MIN_WORDS = 5  # below it one word more or less is already more than a fifth of the caption: only equal sets match


@dataclass(frozen=True)
class Edges:
    """Row numbers a < b that were compared and found similar, with their similarity in [0, 1]."""

    a: I64
    b: I64
    similarity: F32

    def at_least(self, threshold: float) -> Edges:
        wanted = self.similarity >= np.float32(threshold)
        return Edges(self.a[wanted], self.b[wanted], self.similarity[wanted])


def caption_candidates(sets: Sets, threshold: float, numbers: range, share: bands.Share = bands.WHOLE) -> U64:
    """Pairs of token sets that these bands bring together and that may be as alike as the lower end of `threshold`'s range.

    Args:
        share: of each band's keys.
    """
    floor, rows = bands.rows_for(threshold)
    full = np.flatnonzero(sets.sizes)
    found = np.zeros(0, np.uint64)
    for number, keys in zip(numbers, minhash.band_keys(sets, full, rows, numbers), strict=True):
        crowd, shared = bands.buckets(keys, share)
        more = [(number * rows + rows + k) % minhash.PERMUTATIONS for k in (0, 1)]
        pairs = bands.candidates(full[crowd], shared, functools.partial(_nearness, sets, more))
        found = bands.merged(found, of_like_size(pairs, sets.sizes, floor))
    return found


def _nearness(sets: Sets, permutations: Sequence[int], which: I64) -> U64:
    """What else two sets of one bucket agree in, to sort by: the values of two more permutations."""
    first, second = minhash.values(sets, which, permutations)
    return (first.astype(np.uint64) << np.uint64(32)) | second


def of_like_size(pairs: U64, sizes: I64, threshold: float) -> U64:
    """Only pairs whose sizes allow the threshold: |A & B| / |A | B| is at most min / max."""
    a, b = bands.unpair(pairs)
    return pairs[np.minimum(sizes[a], sizes[b]) >= threshold * np.maximum(sizes[a], sizes[b])]


def jaccard(sets: Sets, a: I64, b: I64) -> F32:
    """Exact Jaccard similarity of the sets numbered a[i] and b[i], [P]."""
    sizes_a, sizes_b = sets.sizes[a], sets.sizes[b]
    similarity_P = np.zeros(len(a), np.float32)
    for chunk, width in alike(np.maximum(sizes_a, sizes_b)):
        shared = _shared(sets, a[chunk], b[chunk], width)
        similarity_P[chunk] = shared / (sizes_a[chunk] + sizes_b[chunk] - shared)
    return similarity_P


def _shared(sets: Sets, a_P: I64, b_P: I64, width: int) -> I64:
    """Number of words two sets share: once both stand sorted in one row, equal neighbours."""
    words_PW = np.concatenate((_padded(sets, a_P, width), _padded(sets, b_P, width)), axis=1)
    words_PW.sort(axis=1)
    return counts((words_PW[:, 1:] == words_PW[:, :-1]) & (words_PW[:, 1:] != 0)).astype(np.int64)


def _padded(sets: Sets, which_P: I64, width: int) -> U32:
    """The words of each set with zeros behind them, [P, W]; no word is 0."""
    inside_W = np.arange(width)
    at_PW = np.minimum(sets.starts[which_P][:, None] + inside_W, len(sets.flat) - 1)
    return np.where(inside_W < sets.sizes[which_P][:, None], sets.flat[at_PW], np.uint32(0))
