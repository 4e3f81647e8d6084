"""MinHash signatures of token sets in numpy.

N captions, K = 60 permutations, V words in the vocabulary. Each permutation is a multiplication by an odd number and an
addition modulo 2^32, applied to hashed words (universal hashing); the signature is the minimum over the set. The
permuted values of every word are computed once a part and then only gathered, because a caption's words are few and
common: a gather costs a third of computing them anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.errors import HardwareError
from dedup.tokens import Tokens

PERMUTATIONS = 60  # divides by 2, 3, 4, 5, 6, so that one signature serves every threshold (bands.rows_for)
SEED = 20140601
_CHUNK = 2048  # captions at a time: 2048 * 60 * 4 bytes stay in the second-level cache

U32 = npt.NDArray[np.uint32]


def signatures(sets: Tokens, which: npt.NDArray[np.int64]) -> U32:
    """Signatures [N, K] of the sets numbered `which` (none of them empty)."""
    return gathered_minima(permuted(sets.vocabulary), sets, which)


def permuted(words_V: npt.NDArray[np.uint64]) -> U32:
    """The K permuted values of every word hash, [V, K]."""
    random = np.random.default_rng(SEED)
    multipliers_K = random.integers(0, 2**32, PERMUTATIONS, np.uint32) | np.uint32(1)
    addends_K = random.integers(0, 2**32, PERMUTATIONS, np.uint32)
    values_VK = words_V.astype(np.uint32)[:, None] * multipliers_K + addends_K
    # low bits of a product depend on low bits only; fold the high ones in before the minimum is taken
    values_VK ^= values_VK >> np.uint32(15)
    values_VK *= np.uint32(0x2C1B3C6D)
    values_VK ^= values_VK >> np.uint32(16)
    return values_VK


def gathered_minima(table_VK: U32, sets: Tokens, which_N: npt.NDArray[np.int64]) -> U32:
    """Minimum of `table_VK` over each set's words, [N, K]; sets of one size go together."""
    starts_N, lengths_N = sets.offsets[which_N], sets.lengths[which_N]
    result_NK = np.empty((len(which_N), PERMUTATIONS), np.uint32)
    padded_N = _padded(lengths_N)
    order_N = np.argsort(padded_N, kind="stable")
    bounds = np.cumsum(np.bincount(padded_N))
    begin = 0
    for end in bounds:
        for chunk in range(begin, end, _CHUNK):
            rows = order_N[chunk : min(chunk + _CHUNK, end)]
            result_NK[rows] = _minima_of(table_VK, sets.ids, starts_N[rows], lengths_N[rows], int(padded_N[rows[0]]))
        begin = int(end)
    return result_NK


def _minima_of(
    table_VK: U32, ids: npt.NDArray[np.int32], starts_n: npt.NDArray[np.int64], lengths_n: npt.NDArray[np.int64], most: int
) -> U32:  # fmt: skip
    smallest_nK = table_VK[ids[starts_n]]
    buffer_nK = np.empty_like(smallest_nK)
    for position in range(1, most):
        words_n = ids[starts_n + np.minimum(position, lengths_n - 1)]  # padding repeats the last word: no change
        np.take(table_VK, words_n, axis=0, out=buffer_nK, mode="clip")
        np.minimum(smallest_nK, buffer_nK, out=smallest_nK)
    return smallest_nK


def _padded(lengths_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sizes rounded up in steps of about an eighth, so that long captions do not each make a group of their own."""
    step_N = 2 ** np.maximum(np.floor(np.log2(np.maximum(lengths_N, 1))).astype(np.int64) - 3, 0)
    return -(-lengths_N // step_N) * step_N


def with_datasketch(sets: Tokens, which: npt.NDArray[np.int64]) -> U32:
    """The same shape from datasketch's MinHash: the slow reference, in its own permutations.

    Raises:
        HardwareError: datasketch is not installed.
    """
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise HardwareError("--minhash datasketch needs that package; run: pip install datasketch") from error
    words = sets.vocabulary.astype(np.uint32).tolist()
    documents = [[words[i] for i in sets.ids[sets.offsets[n] : sets.offsets[n + 1]]] for n in which]
    made = MinHash.bulk(documents, num_perm=PERMUTATIONS, seed=SEED, hashfunc=int)
    return np.array([m.hashvalues for m in made], np.uint64).astype(np.uint32).reshape(len(which), PERMUTATIONS)
