"""Balancing in the manner of MetaCLIP (Xu et al. 2024, algorithm 1): what everybody says is sampled, what few say is kept.

A list of entries is looked up in every caption. An entry that c captions hold is sampled with p = min(1, t / c), and a
caption is kept where any of its entries is sampled, so with 1 - (1 - p1)(1 - p2)…; a caption without an entry is dropped.
Here the entries are the data's own words. The draw of a pair belongs to its uid alone, so a pair that is kept at one t is
kept at every larger one.

N captions, F finds of entries in them, one after the other: caption i has `found[offsets[i]:offsets[i + 1]]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup.sign import string_keys
from dedup.tokens import tokenise

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

RARE_SHARE, RARE_LEAST = 200, 3  # a word is an entry from t / 200 captions on, as MetaCLIP's 100 for t = 20,000
BATCH = 200_000


@dataclass(frozen=True)
class Entries:
    """Which of E entries each caption holds, each once."""

    found: npt.NDArray[np.int32]
    offsets: I64
    count: int

    def keeps(self, among: Mask, t: int, draw_N: npt.NDArray[np.float64]) -> Mask:
        """Whether each caption is kept when those `among` are balanced; False for the others."""
        lengths = np.diff(self.offsets)
        counted = np.repeat(among, lengths)
        captions_E = np.bincount(self.found[counted], minlength=self.count)
        missed_E = np.log1p(-np.minimum(1.0, t / np.maximum(captions_E, 1)) * (1 - 1e-12))
        running = np.concatenate((np.zeros(1), np.cumsum(missed_E[self.found])))
        return among & (draw_N < -np.expm1(running[self.offsets[1:]] - running[self.offsets[:-1]])) & (lengths > 0)


def draws(uid: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each uid."""
    return string_keys(uid.combine_chunks()).to_numpy().astype(np.float64) / 2.0**64


def entries(captions: pa.ChunkedArray | pa.Array, t: int) -> Entries:
    """The entries in every caption: the words that enough captions hold."""
    words, offsets = _words(captions)
    known, numbers, total = np.unique(words, return_inverse=True, return_counts=True)
    chosen = (total >= max(RARE_LEAST, t // RARE_SHARE))[numbers]
    kept = np.concatenate((np.zeros(1, np.int64), np.cumsum(chosen, dtype=np.int64)))
    return Entries(numbers[chosen].astype(np.int32), kept[offsets], len(known))


def _words(captions: pa.ChunkedArray | pa.Array) -> tuple[U64, I64]:
    """Hashes of the different words of each caption, caption by caption, and the captions' offsets."""
    hashes, counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for start in range(0, len(captions), BATCH):
        part = captions.slice(start, BATCH)
        tokens = tokenise(part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part)
        owner = np.repeat(np.arange(len(part)), tokens.lengths)
        order = np.lexsort((tokens.flat, owner))
        word, owner = tokens.flat[order], owner[order]
        new = np.ones(len(word), bool)
        new[1:] = (word[1:] != word[:-1]) | (owner[1:] != owner[:-1])
        hashes.append(word[new])
        counts.append(np.bincount(owner[new], minlength=len(part)))
    return np.concatenate(hashes), np.concatenate((np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))))
