"""How alike two pairs are, and how that is known: the exact comparisons behind groups, greedy and every removal."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup import phash
from dedup.bands import ascending
from dedup.clusters import first_of
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
    """The signatures of N pairs in order of uid, every uid once. Row numbers index all of them.

    What depends on no setting (who has the same URL, bytes, words, hash) takes sorting; `prepared` puts it into the table,
    where it is found from then on.
    """

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

    def prepared(self) -> pa.Table:
        """The table with the columns `url_row`, `body_row`, `text_row`, `set_number` and `hash_row`."""
        columns = {
            "url_row": self.url, "body_row": self.body, "text_row": self.same_text, "set_number": self.set_number,
            "hash_row": self.hash_row,
        }  # fmt: skip
        table = self.table
        for name, values in columns.items():
            table = table.append_column(name, pa.array(values))
        return table

    @cached_property
    def url(self) -> I64:
        """The first row with the same URL; pairs without one are told apart by the bytes of their picture."""
        return self._noted("url_row", lambda: np.where(self._known("url_key"), self._first("url_key"), self.body))

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
        """Which of the distinct set keys, in ascending order, each pair's is."""
        return self._noted("set_number", lambda: np.unique(self.set_key, return_inverse=True)[1].astype(np.int64))

    @property
    def set_keys(self) -> U64:
        """The distinct set keys, ascending."""
        keys = np.zeros(int(self.set_number.max(initial=-1)) + 1, np.uint64)
        keys[self.set_number] = self.set_key
        return keys

    @cached_property
    def hash_row(self) -> I64:
        """Which of `hashes` each pair's picture has; -1 for none that is of use."""
        return self._noted("hash_row", self._number_hashes)

    @cached_property
    def hashes(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Distinct picture hashes, sorted, and their mirrored twins, [H, 32] each."""
        first = np.zeros(int(self.hash_row.max(initial=-1)) + 1, np.int64)
        rows = np.flatnonzero(self.hash_row >= 0)[::-1]
        first[self.hash_row[rows]] = rows
        return _bytes_of(self.table["image_hash"], first), _bytes_of(self.table["image_hash_mirrored"], first)

    def _number_hashes(self) -> I64:
        rows = np.flatnonzero(self._known("image_hash") & self._known("image_hash_mirrored"))
        direct = _bytes_of(self.table["image_hash"], rows)
        good = phash.usable(direct)
        which = np.full(len(self), -1, np.int64)
        which[rows[good]] = np.unique(direct[good].view("V32").ravel(), return_inverse=True)[1]
        return which

    def _noted(self, name: str, make: Callable[[], I64]) -> I64:
        return self.numbers(name).astype(np.int64) if name in self.table.column_names else make()

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
    _latest: list[tuple[U64, Sets]] = field(default_factory=list)

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
        sets = self._sets(wanted)
        if len(wanted):
            similarity[other] = jaccard(
                sets, np.searchsorted(wanted, keys_a[other]), np.searchsorted(wanted, keys_b[other])
            )
        return similarity, kind

    def _sets(self, wanted: U64) -> Sets:
        """The sets with these sorted keys; what one comparison asks for, the next ones mostly ask for again."""
        if self._latest:
            keys, sets = self._latest[0]
            at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
            if len(keys) and np.array_equal(keys[at], wanted):
                return Sets(sets.flat, sets.starts[at], sets.sizes[at])
        self._latest[:] = [(wanted, self.sets_of(wanted))]
        return self._latest[0][1]

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
