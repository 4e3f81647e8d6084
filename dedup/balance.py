"""Balancing in the manner of MetaCLIP (Xu et al. 2024, algorithm 1): what everybody says is sampled, what few say is kept.

A list of entries (words or phrases) is looked up in every caption. An entry that c captions hold is sampled with p = min(1,
t / c), and a caption is kept where any of its entries is sampled, so with 1 - (1 - p1)(1 - p2)…; a caption without an entry
is dropped. Here the list is the user's, or the data's own words. The draw of a pair belongs to its uid alone, so a pair
that is kept at one t is kept at every larger one.

N captions, F finds of entries in them, one after the other: caption i has `found[offsets[i]:offsets[i + 1]]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from core.errors import InputError
from dedup.sign import string_keys
from dedup.tokens import tokenise

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

RARE_SHARE, RARE_LEAST = (
    200,
    3,
)  # a word of the data is an entry from t / 200 captions on, as MetaCLIP's 100 for t = 20,000
MOST_WORDS = 8  # of an entry
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


def entries(captions: pa.ChunkedArray | pa.Array, t: int, path: str = "") -> Entries:
    """The entries of a file (one a line), or the data's own words, in every caption.

    Raises:
        InputError: the file cannot be read, or holds no word.
    """
    listed = _listed(path) if path else None
    hashes, offsets = _phrases(captions, sorted(listed) if listed else [1])
    if listed:
        known = np.sort(np.concatenate(list(listed.values())))
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        chosen = known[at] == hashes
        numbers, count = at, len(known)
    else:
        known, numbers, total = np.unique(hashes, return_inverse=True, return_counts=True)
        chosen, count = (total >= max(RARE_LEAST, t // RARE_SHARE))[numbers], len(known)
    kept = np.concatenate((np.zeros(1, np.int64), np.cumsum(chosen)))
    return Entries(numbers[chosen].astype(np.int32), kept[offsets], count)


def _listed(path: str) -> dict[int, U64]:
    """Hashes of the file's entries, by their number of words."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--balance-entries: expected a text file of one entry a line at {path} ({error})") from error
    tokens = tokenise(pa.array(lines, pa.string()))
    lengths = [n for n in np.unique(tokens.lengths).tolist() if 0 < n <= MOST_WORDS]
    whole = {n: np.unique(_whole(tokens.flat, tokens.offsets, n)) for n in lengths}
    if not whole:
        raise InputError(f"--balance-entries: expected entries of 1 to {MOST_WORDS} words in {path}, found none")
    return whole


def _whole(hashes: U64, offsets: I64, n: int) -> U64:
    """The key of each line that has exactly n words."""
    lines = np.flatnonzero(np.diff(offsets) == n)
    return _joined(hashes[offsets[lines][:, None] + np.arange(n)])


def _phrases(captions: pa.ChunkedArray | pa.Array, lengths: list[int]) -> tuple[U64, I64]:
    """Keys of all different phrases of these numbers of words, caption by caption, and the captions' offsets."""
    keys, counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for start in range(0, len(captions), BATCH):
        part = captions.slice(start, BATCH)
        tokens = tokenise(part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part)
        every, owner = [], []
        for n in lengths:
            windows, whose = _windows(tokens.offsets, n)
            every.append(_joined(tokens.flat[windows]))
            owner.append(whose)
        key, who = np.concatenate(every), np.concatenate(owner)
        order = np.lexsort((key, who))
        key, who = key[order], who[order]
        new = np.ones(len(key), bool)
        new[1:] = (key[1:] != key[:-1]) | (who[1:] != who[:-1])
        keys.append(key[new])
        counts.append(np.bincount(who[new], minlength=len(part)))
    return np.concatenate(keys), np.concatenate((np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))))


def _windows(offsets: I64, n: int) -> tuple[I64, I64]:
    """Places [W, n] of every n neighbouring words of one caption, and the caption of each."""
    places = np.maximum(np.diff(offsets) - n + 1, 0)
    owner = np.repeat(np.arange(len(places)), places)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(places) - places, places)
    return (offsets[owner] + inside)[:, None] + np.arange(n), owner


def _joined(words_Wn: U64) -> U64:
    """One key a phrase; of a single word its own hash."""
    key_W = words_Wn[:, 0].copy()
    for word_W in words_Wn.T[1:]:
        key_W = (key_W ^ word_W) * np.uint64(0xD6E8FEB86659FD93)
        key_W ^= key_W >> np.uint64(32)
    return key_W
