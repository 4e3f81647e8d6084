"""MinHash signatures of token sets in numpy.

N sets, n of them at a time, W words of the longest of those, K = 60 permutations. Each permutation is a multiplication by an
odd number and an addition modulo 2^32 of hashed words (universal hashing); the signature is the minimum over the set. All
of it stays in the second-level cache, which makes computing the products anew for every caption three times as fast as
looking a word's up.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from core.errors import HardwareError
from dedup.tokens import Sets, alike, segments

PERMUTATIONS = 60  # divides by 2, 3, 4, 5, 6, so that one signature serves every threshold (bands.rows_for)
SEED = 20140601

U32 = npt.NDArray[np.uint32]


def signatures(sets: Sets, which_N: npt.NDArray[np.int64]) -> U32:
    """Signatures [K, N] of the sets numbered `which_N` (none of them empty), a row a permutation."""
    random = np.random.default_rng(SEED)
    multipliers_K = random.integers(0, 2**32, PERMUTATIONS, np.uint32) | np.uint32(1)
    addends_K = random.integers(0, 2**32, PERMUTATIONS, np.uint32)
    starts_N, sizes_N = sets.starts[which_N], sets.sizes[which_N]
    result_KN = np.empty((PERMUTATIONS, len(which_N)), np.uint32)
    for rows_n, width in alike(sizes_N):
        inside_Wn = np.minimum(np.arange(width)[:, None], sizes_N[rows_n] - 1)  # padding repeats the last word
        words_Wn = sets.flat[starts_N[rows_n] + inside_Wn]
        values_Wn, smallest_n = np.empty_like(words_Wn), np.empty(len(rows_n), np.uint32)
        for result_N, multiplier, addend in zip(result_KN, multipliers_K, addends_K, strict=True):
            np.multiply(words_Wn, multiplier, out=values_Wn)
            np.add(values_Wn, addend, out=values_Wn)
            result_N[rows_n] = np.minimum.reduce(values_Wn, axis=0, out=smallest_n)
    return result_KN


def with_datasketch(sets: Sets, which_N: npt.NDArray[np.int64]) -> U32:
    """The same shape from datasketch's MinHash: the slow reference, in its own permutations.

    Raises:
        HardwareError: datasketch is not installed.
    """
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise HardwareError("--minhash datasketch needs that package; run: pip install datasketch") from error
    words, offsets = segments(sets.flat, sets.starts[which_N], sets.sizes[which_N])
    documents = [words[start:end].tolist() for start, end in itertools.pairwise(offsets)]
    made = MinHash.bulk(documents, num_perm=PERMUTATIONS, seed=SEED, hashfunc=int)
    result_NK = np.array([m.hashvalues for m in made], np.uint64).astype(np.uint32).reshape(-1, PERMUTATIONS)
    return np.ascontiguousarray(result_NK.T)
