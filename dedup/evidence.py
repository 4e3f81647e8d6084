"""How alike two pairs are, and how that is known: the exact comparisons behind groups, greedy and every removal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup import phash
from dedup.bands import ascending
from dedup.match import Edges, jaccard
from dedup.tokens import Sets

if TYPE_CHECKING:
    from collections.abc import Callable

    from dedup.policy import Decisions

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

# From the loosest to the strictest; a pair's removal is known by the loosest of what it rests on.
KINDS = ("minhash", "image_hash", "caption", "sha256", "url")


@dataclass(frozen=True)
class Pairs:
    """The signatures of N pairs in order of uid, every uid once. Row numbers index all of them."""

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def numbers(self, name: str) -> npt.NDArray[np.generic]:
        return np.asarray(self.table[name].to_numpy())

    @cached_property
    def text(self) -> U64:
        """Key of each normalised caption; 0 for one without words."""
        return self.numbers("caption_key").astype(np.uint64)

    @cached_property
    def words(self) -> I64:
        """How many different words each caption has."""
        return self.numbers("words").astype(np.int64)

    @cached_property
    def set_key(self) -> U64:
        return self.numbers("set_key").astype(np.uint64)

    @cached_property
    def url(self) -> I64:
        """The first row with the same URL; pairs without one are told apart by the bytes of their picture."""
        keys = self._first("url_key")
        return np.where(self._known("url_key"), keys, self.body)

    @cached_property
    def body(self) -> I64:
        """The first row whose picture has the same bytes."""
        return self._first("bytes_key")

    @cached_property
    def hash_row(self) -> I64:
        """Which of `hashes` each pair's picture has; -1 for none that is of use."""
        return self._hashes[0]

    @property
    def hashes(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Distinct picture hashes, sorted, and their mirrored twins, [H, 32] each."""
        return self._hashes[1], self._hashes[2]

    @cached_property
    def _hashes(self) -> tuple[I64, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        rows = np.flatnonzero(self._known("image_hash") & self._known("image_hash_mirrored"))
        direct, mirrored = _bytes_of(self.table["image_hash"], rows), _bytes_of(self.table["image_hash_mirrored"], rows)
        good = phash.usable(direct)
        rows, direct, mirrored = rows[good], direct[good], mirrored[good]
        _, first, inverse = np.unique(direct.view("V32").ravel(), return_index=True, return_inverse=True)
        which = np.full(len(self), -1, np.int64)
        which[rows] = inverse
        return which, direct[first], mirrored[first]

    def _known(self, name: str) -> npt.NDArray[np.bool_]:
        return np.asarray(self.table[name].is_valid().to_numpy())

    def _first(self, name: str) -> I64:
        known = np.flatnonzero(self._known(name))
        keys = self.table[name].drop_null().to_numpy()
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        result = np.arange(len(self))
        result[known] = known[first[inverse]]
        return result


def _bytes_of(column: pa.ChunkedArray, rows: I64) -> npt.NDArray[np.uint8]:
    """Binary values of 32 bytes at `rows`, [len(rows), 32]."""
    chosen = column.take(pa.array(rows)).combine_chunks()
    return np.frombuffer(b"".join(chosen.to_pylist()), np.uint8).reshape(-1, 32)


@dataclass(frozen=True)
class Likeness:
    """Exact similarity of pairs given by row numbers. `sets_of(keys)` loads the token sets with these sorted keys."""

    pairs: Pairs
    sets_of: Callable[[U64], Sets]

    def image(self, a: I64, b: I64) -> F32:
        return self._image(a, b)[0]

    def caption(self, a: I64, b: I64) -> F32:
        return self._caption(a, b)[0]

    def _image(self, a: I64, b: I64) -> tuple[F32, npt.NDArray[np.int8]]:
        pairs = self.pairs
        similarity, kind = np.zeros(len(a), np.float32), np.full(len(a), KINDS.index("image_hash"), np.int8)
        left, right = pairs.hash_row[a], pairs.hash_row[b]
        hashed = (left >= 0) & (right >= 0)
        bits = phash.distances(*pairs.hashes, left[hashed], right[hashed])
        similarity[hashed] = 1 - bits / 256
        for name, label in (("sha256", pairs.body), ("url", pairs.url)):
            same = label[a] == label[b]
            similarity[same], kind[same] = 1.0, KINDS.index(name)
        kind[(pairs.url[a] == pairs.url[b]) & (pairs.body[a] == pairs.body[b])] = KINDS.index("url")
        return similarity, kind

    def _caption(self, a: I64, b: I64) -> tuple[F32, npt.NDArray[np.int8]]:
        keys_a, keys_b = self.pairs.set_key[a], self.pairs.set_key[b]
        similarity = ((keys_a == keys_b) & (keys_a != 0)).astype(np.float32)
        kind = np.full(len(a), KINDS.index("minhash"), np.int8)
        same = (self.pairs.text[a] == self.pairs.text[b]) & (self.pairs.text[a] != 0)
        kind[same] = KINDS.index("caption")
        other = np.flatnonzero(similarity == 0)
        wanted = ascending(np.concatenate((keys_a[other], keys_b[other])))
        sets = self.sets_of(wanted)
        if len(wanted):
            similarity[other] = jaccard(
                sets, np.searchsorted(wanted, keys_a[other]), np.searchsorted(wanted, keys_b[other])
            )
        return similarity, kind

    def of_removals(self, decisions: Decisions) -> tuple[pa.Array, pa.Array]:
        """Evidence and similarity of each pair that has a survivor: of the looser side where it rests on both."""
        rows = np.flatnonzero(decisions.survivor >= 0)
        survivors = decisions.survivor[rows]
        by_caption = decisions.has("caption_duplicate")[rows]
        by_both = decisions.has("pair_duplicate")[rows]
        similarity, kind = np.ones(len(rows), np.float32), np.full(len(rows), len(KINDS), np.int8)
        for used, compare in ((~by_caption, self._image), (by_caption | by_both, self._caption)):
            at = np.flatnonzero(used)
            value, known_by = compare(rows[at], survivors[at])
            looser = (value < similarity[at]) | ((value == similarity[at]) & (known_by < kind[at]))
            similarity[at[looser]], kind[at[looser]] = value[looser], known_by[looser]
        place = np.zeros(len(self.pairs), np.int64)
        place[rows] = np.arange(len(rows))
        at_row = pa.array(place, mask=decisions.survivor < 0)
        names = pa.DictionaryArray.from_arrays(pa.array(kind), pa.array(KINDS)).cast(pa.string())
        return names.take(at_row), pa.array(similarity).take(at_row)


def image_groups(pairs: Pairs, edges: Edges) -> tuple[I64, I64]:
    """Edges (a, b) between rows whose pictures are the same: URL, bytes, hash, or hashes joined by `edges`."""
    rows = np.arange(len(pairs))
    hashed = np.flatnonzero(pairs.hash_row >= 0)
    which, first = np.unique(pairs.hash_row[hashed], return_index=True)
    first_row = hashed[first]  # `which` counts from 0 without gaps: every distinct hash has a row
    a = [rows, rows, hashed, first_row[edges.a]] if len(which) else [rows, rows]
    b = (
        [pairs.url, pairs.body, first_row[pairs.hash_row[hashed]], first_row[edges.b]]
        if len(which)
        else [pairs.url, pairs.body]
    )
    return np.concatenate(a), np.concatenate(b)
