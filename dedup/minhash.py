"""MinHash of token sets in numpy: band keys, computed in one go over each set's words.

N sets, n of them at a time, W words of the longest of those, K = 60 permutations in B bands. Each permutation is a
multiplication of hashed words by an odd number modulo 2^32, and its value the minimum over the set. Words are computed with
while they are in the second-level cache, and only the bands' keys (32 bits a band and set) leave it: storing all 60 values
and reading them again took longer than computing them anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dedup.tokens import Sets, alike

PERMUTATIONS = 60  # divides by 2, 3, 4, 5, 6, so that they can be cut into bands for every threshold (bands.rows_for)
SEED = 20140601

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

_MULTIPLIERS = np.random.default_rng(SEED).integers(0, 2**32, PERMUTATIONS, np.uint32) | np.uint32(1)


def band_keys(sets: Sets, which_N: I64, rows: int, numbers: range | None = None) -> U32:
    """Keys [B, N] of the sets numbered `which_N` (none of them empty): equal where `rows` values in a row are equal.

    Args:
        numbers: of the bands; all of them where it is left out.
    """
    numbers = numbers or range(PERMUTATIONS // rows)
    keys_BN = np.zeros((len(numbers), len(which_N)), np.uint32)
    multipliers_Br = _MULTIPLIERS.reshape(-1, rows)[numbers.start : numbers.stop]
    for rows_n, words_Wn in _tables(sets, which_N):
        values_Wn, smallest_n = np.empty_like(words_Wn), np.empty(len(rows_n), np.uint32)
        for key_N, multipliers in zip(keys_BN, multipliers_Br, strict=True):
            key_n = np.zeros(len(rows_n), np.uint32)
            for multiplier in multipliers:
                np.multiply(words_Wn, multiplier, out=values_Wn)
                key_n = _folded(key_n, np.minimum.reduce(values_Wn, axis=0, out=smallest_n))
            key_N[rows_n] = key_n
    return keys_BN


def values(sets: Sets, which_N: I64, permutations: Sequence[int]) -> U32:
    """MinHash values [len(permutations), N] of the sets numbered `which_N` (none of them empty)."""
    result_KN = np.empty((len(permutations), len(which_N)), np.uint32)
    for rows_n, words_Wn in _tables(sets, which_N):
        for result_N, multiplier in zip(result_KN, _MULTIPLIERS[list(permutations)], strict=True):
            result_N[rows_n] = np.minimum.reduce(words_Wn * multiplier, axis=0)
    return result_KN


def _tables(sets: Sets, which_N: I64) -> Iterator[tuple[I64, U32]]:
    """Places in `which_N` of sets of like sizes, and their words, [W, n]."""
    starts_N, sizes_N = sets.starts[which_N], sets.sizes[which_N]
    for rows_n, width in alike(sizes_N):
        inside_Wn = np.minimum(np.arange(width)[:, None], sizes_N[rows_n] - 1)  # padding repeats the last word
        yield rows_n, sets.flat[starts_N[rows_n] + inside_Wn]


def _folded(keys_n: U32, values_n: U32) -> U32:
    """Keys with one more value mixed in; every bit of it reaches the upper ones."""
    keys_n = (keys_n ^ (keys_n >> np.uint32(15)) ^ values_n) * np.uint32(0x85EBCA6B)
    keys_n ^= keys_n >> np.uint32(13)
    keys_n *= np.uint32(0xC2B2AE35)
    return keys_n
