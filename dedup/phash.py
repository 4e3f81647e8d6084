"""Matching of 256-bit picture hashes (core.imagehash): bands of sampled low-frequency bits, then the exact distance.

H distinct hashes, each as 32 bytes, with its mirrored twin.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from core.imagehash import BITS_SIDE
from dedup import bands
from dedup.match import Edges

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

RADIUS = (
    36  # bits between hashes of one picture: recompression moves 4, a crop of 5 % 22; other photographs lie above 64
)
AT_LEAST = 1 - RADIUS / 256
BANDS = 24
SEED = 256
LOW = 10  # bands take bits of the lowest 10 x 10 frequencies: a crop flips 4 % of them and 12 % of the highest
MIN_ONES = 96  # a hash is cut at its median, so a picture with less has hardly any structure: it would match its like
_ROWS = 1 << 16
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # bits of a key reach its upper half, which tells a bucket


def usable(hashes_H: U8) -> npt.NDArray[np.bool_]:
    """Whether each hash [H, 32] is of a picture with structure; one of a single colour is all zeros."""
    return np.bitwise_count(hashes_H).sum(axis=1, dtype=np.int64) >= MIN_ONES


def image_edges(hashes_H: U8, mirrored_H: U8, most_bits: int) -> Edges:
    """Edges between hashes [H, 32] at most `most_bits` apart, directly or mirrored; similarity is 1 - bits / 256."""
    a, b = bands.unpair(candidates(hashes_H, mirrored_H, range(BANDS)))
    return Edges(a, b, similarity(hashes_H, mirrored_H, a, b)).at_least(1 - most_bits / 256)


def candidates(hashes_H: U8, mirrored_H: U8, numbers: range, share: bands.Share = bands.WHOLE) -> U64:
    """Pairs of hashes that these bands bring together, directly or mirrored.

    The bands are the narrower the fewer hashes there are, so that a small set is searched nearly completely; the width
    keeps chance company in a bucket rare.
    """
    count = len(hashes_H)
    width = min(max(math.ceil(math.log2(count + 1)) + 4, 12), 32)
    both_N = np.concatenate((hashes_H, mirrored_H))
    names_N = np.arange(2 * count) % count if count else np.zeros(0, np.int64)
    found = np.zeros(0, np.uint64)
    for band in numbers:
        keys_N = ((band_keys(both_N, band, width) * _SPREAD) >> np.uint64(32)).astype(np.uint32)
        rows, keys = bands.buckets(keys_N, share)
        nearness = functools.partial(_nearness, both_N, (band + 1) % BANDS, width)
        found = bands.merged(found, bands.candidates(rows, keys, nearness, names_N))
    return found


def _nearness(both_N: U8, band: int, width: int, rows: I64) -> U64:
    """What else hashes of one bucket agree in, to sort by: the key of the next band."""
    return band_keys(both_N[rows], band, width)


def similarity(hashes_H: U8, mirrored_H: U8, a: I64, b: I64) -> F32:
    """Of the hashes numbered a[i] and b[i]: 1 - bits / 256."""
    return (1 - distances(hashes_H, mirrored_H, a, b) / 256).astype(np.float32)


def band_keys(hashes_N: U8, band: int, width: int) -> U64:
    """One key a hash from `width` sampled bits; which ones depends on the band only."""
    low = (np.arange(LOW)[:, None] * BITS_SIDE + np.arange(LOW)).ravel()
    chosen = np.random.default_rng((SEED, band)).permutation(low)[:width]
    keys_N = np.zeros(len(hashes_N), np.uint64)
    for start in range(0, len(hashes_N), _ROWS):
        rows = slice(start, start + _ROWS)
        for bit in chosen.tolist():
            keys_N[rows] <<= np.uint64(1)
            keys_N[rows] |= (hashes_N[rows, bit >> 3] >> np.uint8(7 - (bit & 7))) & np.uint8(1)
    return keys_N


def distances(hashes_H: U8, mirrored_H: U8, a: I64, b: I64) -> I64:
    """Differing bits of the hashes numbered a[i] and b[i], or of a[i] and b[i]'s mirrored twin, whichever are fewer."""
    result = np.zeros(len(a), np.int64)
    words, twins = np.ascontiguousarray(hashes_H).view(np.uint64), np.ascontiguousarray(mirrored_H).view(np.uint64)
    for start in range(0, len(a), _ROWS):
        left, right = a[start : start + _ROWS], b[start : start + _ROWS]
        direct = np.bitwise_count(words[left] ^ words[right]).sum(axis=1, dtype=np.int64)
        mirror = np.bitwise_count(words[left] ^ twins[right]).sum(axis=1, dtype=np.int64)
        result[start : start + _ROWS] = np.minimum(direct, mirror)
    return result
