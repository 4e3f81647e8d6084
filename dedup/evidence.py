"""How alike two pairs are, and how that is known: the exact comparisons behind groups, greedy and every removal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup import phash
from dedup.clusters import first_of
from dedup.match import Edges, jaccard
from dedup.tokens import Sets

if TYPE_CHECKING:
    from collections.abc import Callable

    from dedup.policy import Decisions

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Hashes = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

# From the loosest to the strictest; a pair's removal is known by the loosest of what it rests on.
KINDS = ("minhash", "image_hash", "caption", "sha256", "url")


@dataclass(frozen=True)
class Pairs:
    """The signatures of N pairs in order of uid, every uid once. Row numbers index all of them.

    What depends on no setting (who has the same URL, bytes, words, hash) takes sorting; `numbered` is that as a table, which
    is kept, and `table` then holds it in place of what it was made from.

    Args:
        hashes_of: loads `hashes` where they are kept.
    """

    table: pa.Table
    hashes_of: Callable[[], Hashes] | None = None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def at(self, rows: I64) -> Pairs:
        """The pairs at these rows, ascending, where all that have anything in common with one of them are among them.

        Its table has what a decision reads; numbers of word sets and hashes stay what they are.
        """
        place = np.empty(len(self), np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)
        columns = {name: place[self.numbers(name)[rows]] for name in ("url_row", "body_row", "text_row")}
        columns |= {name: self.numbers(name)[rows] for name in ("set_number", "hash_row", "rank", "signed_row")}
        uid = self.table["uid"].take(pa.array(rows))
        return Pairs(pa.table({"uid": uid, **columns}), self.hashes_of)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(self.table[name].to_numpy())

    @cached_property
    def text(self) -> U64:
        """Key of each normalised caption; 0 for one without words."""
        return self.numbers("caption_key")

    @cached_property
    def words(self) -> I64:
        """How many different words each caption has."""
        return self.numbers("words").astype(np.int64)

    @cached_property
    def set_key(self) -> U64:
        return self.numbers("set_key")

    def numbered(self) -> pa.Table:
        """Columns `url_row`, `body_row`, `text_row`, `set_number`, `hash_row` and `rank`, all int32, and `shares`: whether
        another pair is the same in any of these but the rank."""
        columns = {
            "url_row": self.url, "body_row": self.body, "text_row": self.same_text, "set_number": self.set_number,
            "hash_row": self.hash_row, "rank": self.rank,
        }  # fmt: skip
        shares = np.zeros(len(self), bool)
        for label in (self.url, self.body, self.same_text, self.set_number, self.hash_row):
            shares |= (np.bincount(label + 1) > 1)[label + 1] & (label >= 0)
        numbers = {name: pa.array(values.astype(np.int32)) for name, values in columns.items()}
        return pa.table(numbers | {"shares": shares.view(np.int8)})

    @cached_property
    def url(self) -> I64:
        """The first row with the same URL; pairs without one are told apart by the bytes of their picture."""
        return self._noted("url_row", lambda: np.where(self.known("url_key"), self._first("url_key"), self.body))

    @cached_property
    def body(self) -> I64:
        """The first row whose picture has the same bytes."""
        return self._noted("body_row", lambda: self._first("bytes_key"))

    @cached_property
    def same_text(self) -> I64:
        """The first row with the same normalised caption; its own where a caption has no words."""
        return self._noted("text_row", lambda: np.where(self.text == 0, np.arange(len(self)), first_of(self.text)))

    @cached_property
    def set_number(self) -> I64:
        """Which of `set_keys` each pair's is; -1 for a caption without words."""
        return self._noted("set_number", self._number_sets)

    @cached_property
    def set_keys(self) -> U64:
        """The distinct set keys, ascending."""
        keys = np.zeros(int(self.set_number.max(initial=-1)) + 1, np.uint64)
        some = self.set_number >= 0
        keys[self.set_number[some]] = self.set_key[some]
        return keys

    @cached_property
    def hash_row(self) -> I64:
        """Which of `hashes` each pair's picture has; -1 for none that is of use."""
        return self._noted("hash_row", self._number_hashes)

    @cached_property
    def rank(self) -> I64:
        """0 is the best pair: more pixels, then more different words, then the smaller uid."""
        return self._noted("rank", self._ranked)

    @cached_property
    def hashes(self) -> Hashes:
        """Distinct picture hashes, sorted, and their mirrored twins, [H, 32] each."""
        if self.hashes_of is not None:
            return self.hashes_of()
        first = np.zeros(int(self.hash_row.max(initial=-1)) + 1, np.int64)
        rows = np.flatnonzero(self.hash_row >= 0)[::-1]
        first[self.hash_row[rows]] = rows
        return bytes_of(self.table["image_hash"], first), bytes_of(self.table["image_hash_mirrored"], first)

    def known(self, name: str) -> npt.NDArray[np.bool_]:
        """Which rows have this column."""
        return np.asarray(self.table[name].is_valid().to_numpy())

    def _number_sets(self) -> I64:
        first = np.where(self.set_key == 0, -1, first_of(self.set_key))
        distinct = np.flatnonzero(first == np.arange(len(self)))
        number = np.full(len(self), -1)
        number[distinct[np.argsort(self.set_key[distinct])]] = np.arange(len(distinct))
        return np.where(first < 0, -1, number[first])

    def _number_hashes(self) -> I64:
        rows = np.flatnonzero(self.known("image_hash") & self.known("image_hash_mirrored"))
        direct = bytes_of(self.table["image_hash"], rows)
        good = phash.usable(direct)
        which = np.full(len(self), -1, np.int64)
        which[rows[good]] = np.unique(direct[good].view("V32").ravel(), return_inverse=True)[1]
        return which

    def _ranked(self) -> I64:
        words = np.minimum(self.words, np.iinfo(np.int16).max).astype(np.int16)  # a stable sort of 16 bits is by radix
        order = np.argsort(-words, kind="stable")
        order = order[np.argsort(-self.numbers("pixels")[order], kind="stable")]
        rank = np.empty(len(self), np.int64)
        rank[order] = np.arange(len(self))
        return rank

    def _noted(self, name: str, make: Callable[[], I64]) -> I64:
        return self.numbers(name).astype(np.int64) if name in self.table.column_names else make()

    def _first(self, name: str) -> I64:
        known = np.flatnonzero(self.known(name))
        result = np.arange(len(self))
        result[known] = known[first_of(self.table[name].drop_null().to_numpy())]
        return result


def bytes_of(column: pa.ChunkedArray, rows: I64 | None = None) -> npt.NDArray[np.uint8]:
    """Binary values of 32 bytes at `rows`, or all, [n, 32]."""
    chosen = (column if rows is None else column.take(pa.array(rows))).combine_chunks()
    return np.frombuffer(b"".join(chosen.to_pylist()), np.uint8).reshape(-1, 32)


@dataclass(frozen=True)
class Likeness:
    """Exact similarity of pairs given by row numbers: of captions that of their edge, else of their word sets.

    Args:
        captions: edges between set numbers, ascending.
        sets_of: loads the word sets by set number.
    """

    pairs: Pairs
    captions: Edges
    sets_of: Callable[[], Sets]

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
        pairs = self.pairs
        sets_a, sets_b = pairs.set_number[a], pairs.set_number[b]
        similarity = ((sets_a == sets_b) & (sets_a >= 0)).astype(np.float32)
        kind = np.full(len(a), KINDS.index("minhash"), np.int8)
        kind[pairs.same_text[a] == pairs.same_text[b]] = KINDS.index("caption")
        other = np.flatnonzero((similarity == 0) & (sets_a >= 0) & (sets_b >= 0))
        similarity[other] = self._of_sets(sets_a[other], sets_b[other])
        return similarity, kind

    def _of_sets(self, a: I64, b: I64) -> F32:
        edges = self.captions
        similarity, known = np.zeros(len(a), np.float32), np.zeros(len(a), bool)
        if len(edges.a):
            keys, wanted = (edges.a << 32) | edges.b, (np.minimum(a, b) << 32) | np.maximum(a, b)
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            similarity, known = edges.similarity[at], keys[at] == wanted
        if len(rest := np.flatnonzero(~known)):
            similarity[rest] = jaccard(self.sets_of(), a[rest], b[rest])
        return similarity

    def of_removals(self, decisions: Decisions) -> tuple[F32, npt.NDArray[np.int8]]:
        """Similarity and kind of evidence of each pair that has a survivor, else 0 and -1: of the looser side where it rests
        on both."""
        rows = np.flatnonzero(decisions.survivor >= 0)
        survivors = decisions.survivor[rows]
        by_caption = decisions.has("caption_duplicate")[rows]
        by_both = decisions.has("pair_duplicate")[rows]
        similarity, kind = np.ones(len(rows), np.float32), np.full(len(rows), len(KINDS), np.int8)
        for used, compare in ((~by_caption, self._image), (by_caption | by_both, self._caption)):
            at = np.flatnonzero(used)
            if len(at):
                value, known_by = compare(rows[at], survivors[at])
                looser = (value < similarity[at]) | ((value == similarity[at]) & (known_by < kind[at]))
                similarity[at[looser]], kind[at[looser]] = value[looser], known_by[looser]
        of_all, kind_of_all = np.zeros(len(self.pairs), np.float32), np.full(len(self.pairs), -1, np.int8)
        of_all[rows], kind_of_all[rows] = similarity, kind
        return of_all, kind_of_all


def in_company(pairs: Pairs, captions: Edges, pictures: Edges) -> npt.NDArray[np.bool_]:
    """Which pairs have anything in common with another, similar word sets and pictures included."""
    found = pairs.numbers("shares") != 0
    for edges, name in ((captions, "set_number"), (pictures, "hash_row")):
        if len(edges.a):
            number = pairs.numbers(name)
            near = np.zeros(int(number.max()) + 2, bool)  # the last is that of no number
            near[edges.a] = near[edges.b] = True
            found |= near[number]
    return found


def image_groups(pairs: Pairs, edges: Edges) -> tuple[I64, I64]:
    """Edges (a, b) between rows whose pictures are the same: URL, bytes, hash, or hashes joined by `edges`."""
    rows = np.arange(len(pairs))
    a, b = [], []
    for same in (pairs.url, pairs.body):
        copies = np.flatnonzero(same != rows)
        a.append(copies)
        b.append(same[copies])
    hashed = np.flatnonzero(pairs.hash_row >= 0)
    first_row = np.zeros(int(pairs.hash_row.max(initial=-1)) + 1, np.int64)
    first_row[pairs.hash_row[hashed[::-1]]] = hashed[::-1]
    a += [hashed, first_row[edges.a]]
    b += [first_row[pairs.hash_row[hashed]], first_row[edges.b]]
    return np.concatenate(a), np.concatenate(b)
