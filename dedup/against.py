"""Decontamination: which pairs show a picture, or say a caption, of an evaluation set, and on what evidence.

N pairs of the data, M rows of the set (an item has as many rows as captions). A pair matches an item that has its URL, its
bytes, a picture hash at most phash.RADIUS bits away (directly or mirrored), or a caption that is equal or at least
`--threshold` alike. Captions of fewer than five different words match nothing: "a dog" in a test set is no leak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dedup import bands, minhash, phash
from dedup.evidence import KINDS
from dedup.match import MIN_WORDS, jaccard
from dedup.sign import unpacked
from dedup.tokens import Sets

if TYPE_CHECKING:
    from dedup.config import DedupConfig
    from dedup.evalsets import Items
    from dedup.evidence import Pairs

I64 = npt.NDArray[np.int64]
I8 = npt.NDArray[np.int8]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
TABLE = "dedup/against.parquet"
SCHEMA = pa.schema(
    [
        pa.field("set", pa.string(), nullable=False),
        pa.field("uid", pa.string(), nullable=False),
        pa.field("item", pa.string(), nullable=False),
        pa.field("evidence", pa.string(), nullable=False),
        pa.field("similarity", pa.float32(), nullable=False),
        pa.field("caption", pa.string()),
    ]
)


@dataclass(frozen=True)
class Matches:
    """For each of N pairs the row of the set that it matches (-1: none), how that is known (index of KINDS), how alike.

    `hit` tells of each of the set's M rows whether any pair matches it, also where another one is the better match.
    """

    items: Items
    row: I64
    kind: I8
    similarity: F32
    hit: Mask

    @property
    def reason(self) -> str:
        return f"against:{self.items.source.name}"

    def take(self, rows: I64) -> Matches:
        """Of these pairs, among which are all that match."""
        return Matches(self.items, self.row[rows], self.kind[rows], self.similarity[rows], self.hit)

    def table(self, uid: pa.Array) -> pa.Table:
        """One row a pair that matches, with the set's item and caption."""
        at = np.flatnonzero(self.row >= 0)
        rows = pa.array(self.row[at])
        columns = [
            pa.repeat(self.items.source.name, len(at)),
            uid.take(pa.array(at)),
            self.items.table["uid"].combine_chunks().take(rows),
            pa.DictionaryArray.from_arrays(pa.array(self.kind[at]), pa.array(KINDS)).cast(pa.string()),
            pa.array(self.similarity[at]),
            self.items.table["caption"].combine_chunks().take(rows),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    def report(self, removed: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """What is said of the set: its size, the pairs that match, those that it removed, and the evidence."""
        table, signed = self.items.table, self.items.signed
        pictures = pc.count(table["sha256"]).as_py() or pc.count(table["image_hash"]).as_py()
        hit = np.flatnonzero(self.row >= 0)
        evidence = np.bincount(self.kind[hit], minlength=len(KINDS)).tolist()
        captions = signed.text != 0
        return {
            "set": self.items.source.name,
            "path": self.items.source.path,
            "fingerprint": self.items.source.digest,
            "items": len(pc.unique(table["uid"])),
            "pictures": pictures,
            "unreadable": int(pc.sum(table["unreadable"]).as_py() or 0),
            "captions": int(captions.sum()),
            "captions_too_short": int((captions & (signed.words < MIN_WORDS)).sum()),
            "matched": len(hit),
            "removed": int(removed.sum()),
            "items_matched": len(pc.unique(table["uid"].filter(pa.array(self.hit)))),
            "evidence": {name: n for name, n in zip(KINDS[::-1], evidence[::-1], strict=True) if n},
        }


def match(pairs: Pairs, sets: Sets, items: Items, config: DedupConfig) -> Matches:
    """The strictest match of each pair: URL, bytes, equal caption, picture hash, similar caption, in this order.

    Args:
        pairs: with the columns of store.KEYS.
        sets: their word sets by set number.
    """
    theirs, n = items.signed, len(pairs)
    hit = np.zeros(len(theirs), bool)
    found = Matches(items, np.full(n, -1), np.zeros(n, np.int8), np.zeros(n, np.float32), hit)
    long = np.flatnonzero((theirs.words >= MIN_WORDS) & (theirs.text != 0))
    exact = {
        "url": (*_known(pairs, "url_key"), *_known(theirs, "url_key")),
        "sha256": (*_known(pairs, "bytes_key"), *_known(theirs, "bytes_key")),
        "caption": (np.arange(n), pairs.text, long, theirs.text[long]),
    }
    for kind in KINDS[::-1]:
        if kind in exact:
            rows, keys, their_rows, their_keys = exact[kind]
            hit[their_rows] |= np.isin(their_keys, keys)
            _note(found, kind, _of_key(rows, keys, their_rows, their_keys, n), np.ones(n, np.float32))
        elif kind == "image_hash":
            _note(found, kind, *_near_pictures(pairs, theirs, phash.AT_LEAST, hit))
        else:
            _note(found, kind, *_near_captions(pairs, sets, items, config, hit))
    return found


def _note(found: Matches, kind: str, row: I64, similarity: F32) -> None:
    new = np.flatnonzero((found.row < 0) & (row >= 0))
    found.row[new], found.kind[new], found.similarity[new] = row[new], KINDS.index(kind), similarity[new]


def _known(pairs: Pairs, name: str) -> tuple[I64, U64]:
    """Rows that have this key, and their keys."""
    return np.flatnonzero(pairs.known(name)), pairs.table[name].drop_null().to_numpy()


def _of_key(rows: I64, keys: U64, their_rows: I64, their_keys: U64, total: int) -> I64:
    """For each of `total` pairs the first row of the set with its key, -1 for none."""
    result = np.full(total, -1)
    if not len(their_keys):
        return result
    known, first = np.unique(their_keys, return_index=True)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    same = known[at] == keys
    result[rows[same]] = their_rows[first[at[same]]]
    return result


class _Best:
    """The most similar of the set's things met so far by each of ours; of equals, the first. `met`: all that were near."""

    def __init__(self, ours: int, theirs: int) -> None:
        self.thing, self.similarity = np.full(ours, -1), np.zeros(ours, np.float32)
        self.met = np.zeros(theirs, bool)

    def meet(self, ours: I64, theirs: I64, similarity: F32, at_least: float) -> None:
        near = similarity >= np.float32(at_least)
        ours, theirs, similarity = ours[near], theirs[near], similarity[near]
        self.met[theirs] = True
        order = np.lexsort((theirs, -similarity, ours))
        ours, theirs, similarity = ours[order], theirs[order], similarity[order]
        first = np.ones(len(ours), bool)
        first[1:] = ours[1:] != ours[:-1]
        ours, theirs, similarity = ours[first], theirs[first], similarity[first]
        known = self.thing[ours]
        better = (known < 0) | (similarity > self.similarity[ours])
        better |= (similarity == self.similarity[ours]) & (theirs < known)
        self.thing[ours[better]], self.similarity[ours[better]] = theirs[better], similarity[better]


def _near_pictures(pairs: Pairs, theirs: Pairs, at_least: float, hit: Mask) -> tuple[I64, F32]:
    """The nearest picture of the set, by hash: bands so narrow that hardly a pair within the radius shares none. Adds to
    `hit` the set's rows within it."""
    none = np.full(len(pairs), -1), np.zeros(len(pairs), np.float32)
    (ours_H, ours_mirrored_H), (theirs_E, mirrored_E) = pairs.hashes, theirs.hashes
    if not len(ours_H) or not len(theirs_E):
        return none
    width = min(max(math.ceil(math.log2(len(theirs_E) + 1)) + 4, 12), 32)
    every, every_mirrored = np.concatenate((ours_H, theirs_E)), np.concatenate((ours_mirrored_H, mirrored_E))
    both = np.concatenate((theirs_E, mirrored_E))
    best = _Best(len(ours_H), len(theirs_E))
    for band in range(phash.BANDS):
        ours, there = bands.meeting(phash.band_keys(ours_H, band, width), phash.band_keys(both, band, width))
        there %= len(theirs_E)
        bits = phash.distances(every, every_mirrored, ours, there + len(ours_H))
        best.meet(ours, there, (1 - bits / 256).astype(np.float32), at_least)
    first = np.zeros(len(theirs_E), np.int64)
    hashed = np.flatnonzero(theirs.hash_row >= 0)[::-1]
    first[theirs.hash_row[hashed]] = hashed
    hit[hashed] |= best.met[theirs.hash_row[hashed]]
    has = pairs.hash_row >= 0
    thing = np.where(has, best.thing[pairs.hash_row], -1)
    return np.where(thing >= 0, first[thing], -1), np.where(has, best.similarity[pairs.hash_row], 0).astype(np.float32)


def _near_captions(pairs: Pairs, ours: Sets, items: Items, config: DedupConfig, hit: Mask) -> tuple[I64, F32]:
    """The most similar caption of the set, of those of five words and more. Adds to `hit` the set's rows near enough."""
    their_keys, tokens, offsets = unpacked(items.sets)
    full = np.flatnonzero(ours.sizes)
    if not len(their_keys) or not len(full):
        return np.full(len(pairs), -1), np.zeros(len(pairs), np.float32)
    both = Sets(
        np.concatenate((ours.flat, tokens)),
        np.concatenate((ours.starts, offsets[:-1] + len(ours.flat))),
        np.concatenate((ours.sizes, np.diff(offsets))),
    )
    theirs = np.arange(len(ours.sizes), len(both.sizes))
    _, rows = bands.rows_for(config.threshold)
    met = np.zeros(0, np.uint64)
    keys = zip(*(minhash.band_keys(both, which, rows) for which in (full, theirs)), strict=True)
    for our_keys, keys_there in keys:
        here, there = bands.meeting(our_keys, keys_there)
        met = bands.merged(met, bands.pair_keys(full[here], theirs[there]))
    here, there = bands.unpair(met)
    best = _Best(len(ours.sizes), len(their_keys))
    best.meet(here, there - len(ours.sizes), jaccard(both, here, there), config.threshold)
    hit |= np.isin(items.signed.set_key, their_keys[best.met])
    row_of_set = _of_key(np.arange(len(their_keys)), their_keys, *_with_sets(items.signed), len(their_keys))
    has = pairs.set_number >= 0
    thing = np.where(has, best.thing[pairs.set_number], -1)
    return np.where(thing >= 0, row_of_set[thing], -1), np.where(has, best.similarity[pairs.set_number], 0)


def _with_sets(pairs: Pairs) -> tuple[I64, U64]:
    return np.arange(len(pairs)), pairs.set_key
