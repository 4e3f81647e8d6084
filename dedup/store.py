"""What deciding reads, as it lies in the work folder: pairs in order, word sets, picture hashes and verified edges.

Each file carries the digest of the signatures it was made from, and is made anew for any others. They are Arrow files, mapped
into memory where they lie on a disk, so that a decision reads no more of them than it is about.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from core.catalog import PAIRS
from core.storage import Folder
from dedup import edges, match, minhash, oracle, phash
from dedup.bands import Share, rows_for
from dedup.evidence import Hashes, Pairs, bytes_of
from dedup.match import Edges
from dedup.sign import SIGNATURES, VERSION, mapped, opened, stored_sets, unpacked
from dedup.tokens import Sets, segments

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("pairmill.dedup")
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
_MARK = b"pairmill.made_from"
ROWS, HASHES, NUMBERS = (f"dedup/edges/{name}.arrow" for name in ("pairs", "hashes", "set_numbers"))
KEYS = ("caption_key", "url_key", "bytes_key")  # what only comparisons with other data need
_NUMBERED_FROM = (*KEYS, "set_key", "words", "pixels", "image_hash", "image_hash_mirrored")


@dataclass(frozen=True)
class Store:
    """The files of `folder` that belong to the signatures which `of` tells from any others.

    Args:
        workers, engine: of what is compared in units.
    """

    folder: Folder
    of: str
    connect: Callable[[], duckdb.DuckDBPyConnection]
    workers: int
    engine: str

    def pairs(self, *, keys: bool) -> Pairs:
        """All pairs in order of uid, each uid once: a row of the list that repeats another's uid says nothing new, and the
        first in order of (uid, unit, row) stands for it.

        Beside those of `Pairs.numbered` the table has the columns `uid`, `signed_row` (among all signatures, part after part),
        `copies` (rows of this uid) and `boilerplate`, and with `keys` those of KEYS.
        """
        table = self._marked(ROWS)
        if table is None or not self.folder.exists(PAIRS):
            table = self._number()
            pa.default_memory_pool().release_unused()  # what it was made from is twice as large, and edges need the room
        for name in KEYS if keys else ():
            table = table.append_column(name, _at(self._signed(name), table["signed_row"].to_numpy()))
        return Pairs(table, lambda: _hashes(self.folder.url, self.of))

    def _number(self) -> pa.Table:
        """Find the order of pairs, and number their keys, word sets and hashes."""
        order = self._in_order()
        uid = _at(self._signed("uid"), order)
        new = np.ones(len(uid), bool)
        new[1:] = pc.not_equal(uid[1:], uid[:-1]).to_numpy(zero_copy_only=False)
        first = np.flatnonzero(new)
        at = first if order is None else order[first]
        every = None if order is None and new.all() else at
        pairs = Pairs(pa.table({name: _at(self._signed(name), every) for name in _NUMBERED_FROM}))
        table = pairs.numbered()
        columns = {
            "uid": uid if new.all() else _at(uid, first), "signed_row": pa.array(at.astype(np.int32)),
            "copies": pa.array(np.diff(np.append(first, len(new))).astype(np.int32)),
            "boilerplate": _at(self._signed("boilerplate"), every),
        }  # fmt: skip
        for name, column in columns.items():
            table = table.append_column(name, column)
        hashes = [
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(h), [None, pa.py_buffer(h)]) for h in pairs.hashes
        ]
        self._write(HASHES, pa.table(hashes, ["image_hash", "image_hash_mirrored"]))
        self._write(NUMBERS, pa.table({"number": self._set_numbers(pairs.set_keys)}))
        with self.folder.staged(PAIRS) as path:  # what the view `decisions` reads
            pq.write_table(table.select(["uid"]), path, compression="none", use_dictionary=False)
        self._write(ROWS, table)  # last: where it is, the others are
        return table

    def _in_order(self) -> I64 | None:
        """Rows of the signatures in order of (uid, unit, row); None where that is how they lie."""
        uid = self._signed("uid")
        if pc.all(pc.less(uid[:-1], uid[1:]), min_count=0).as_py():
            return None
        rows = pa.table(
            [uid, self._signed("unit"), self._signed("row"), np.arange(len(uid))], ["uid", "unit", "row", "place"]
        )
        signed: Any = self.connect().from_arrow(rows)
        return np.asarray(signed.order('uid, unit, "row"').project("place").fetchnumpy()["place"], np.int64)

    def _signed(self, name: str) -> pa.ChunkedArray:
        """One column of the signatures, part after part."""
        chunks = []
        for path in self.folder.list("dedup/signatures/*.parquet"):
            with opened(self.folder, path) as file:
                chunks += file.read(columns=[name], use_threads=False)[name].chunks
        return pa.chunked_array(chunks, SIGNATURES.field(name).type)

    # ---- word sets -----------------------------------------------------------------------------------------------------

    def _set_numbers(self, keys: U64) -> pa.Array:
        """Which of the sorted set keys each stored set has, part after part; -1 for none, or one that stands before."""
        numbers, known = [np.zeros(0, np.int32)], np.zeros(len(keys), bool)
        for table in stored_sets(self.folder):
            theirs = table["set_key"].to_numpy()
            at = np.minimum(np.searchsorted(keys, theirs), max(len(keys) - 1, 0)).astype(np.int32)
            new = (keys[at] == theirs) & ~known[at] if len(keys) else np.zeros(len(theirs), bool)
            known[at[new]] = True
            numbers.append(np.where(new, at, np.int32(-1)))
        return pa.array(np.concatenate(numbers))

    def sets(self, count: int, among: I64 | None = None) -> Sets:
        """The first `count` word sets by set number; one of fewer than five words is not stored and is empty.

        Args:
            among: the numbers of those that are needed; others may be empty.
        """
        if among is None or _sets.cache_info().currsize:
            return _sets(self.folder.url, self.of, count)
        return _read_sets(self.folder, self.of, count, among)

    # ---- edges ---------------------------------------------------------------------------------------------------------

    def caption_edges(self, pairs: Pairs, threshold: float) -> tuple[Edges, Edges]:
        """Verified edges that serve `threshold`, between set numbers, and those that the oracle finds around a sample."""
        floor, rows = rows_for(threshold)
        count = int(pairs.set_number.max(initial=-1)) + 1
        words = _Captions(self.folder.url, self.of, count, floor, minhash.PERMUTATIONS // rows)
        return self._matched(f"captions-{rows}", "", words), self._edges(
            f"sample-{rows}", "", lambda: _sampled(self.sets(count), floor)
        )

    def image_edges(self, pairs: Pairs) -> Edges:
        """Verified edges between numbers of hashes."""
        count = int(pairs.hash_row.max(initial=-1)) + 1
        return self._matched("images", f"{phash.RADIUS}", _Pictures(self.folder.url, self.of, count))

    def _matched(self, name: str, how: str, things: edges.Things) -> Edges:
        """These edges, read where they are there, else found in units and kept."""
        home = f"dedup/edges/{name}.units"
        at = dict[str, Any](workers=self.workers, engine=self.engine)

        def make() -> Edges:
            return edges.between(things, self.folder, home, _mark(self.of, how), **at)

        try:
            found = self._edges(name, how, make)
        except FileNotFoundError:
            # a store has no locks: another run has kept the edges and cleared the units away
            found = self._edges(name, how, make)
        self.folder.remove(home)
        return found

    def _edges(self, name: str, how: str, make: Callable[[], Edges]) -> Edges:
        """These edges, read where they are there, else made and kept."""
        path = f"dedup/edges/{name}.arrow"
        table = self._marked(path, how)
        if table is None:
            edges = make()
            log.info("dedup: %s like pairs (%s)", f"{len(edges.a):,}", name.partition("-")[0])
            numbers = [pa.array(rows.astype(np.int32)) for rows in (edges.a, edges.b)]
            table = pa.table([*numbers, pa.array(edges.similarity)], ["a", "b", "similarity"])
            self._write(path, table, how)
        a, b, similarity = (table[name].to_numpy() for name in ("a", "b", "similarity"))
        return Edges(a.astype(np.int64), b.astype(np.int64), similarity)

    # ---- files ---------------------------------------------------------------------------------------------------------

    def _marked(self, name: str, how: str = "") -> pa.Table | None:
        """The table of this name where it was made from these signatures."""
        return _marked(self.folder, name, self.of, how)

    def _write(self, name: str, table: pa.Table, how: str = "") -> None:
        marked = table.replace_schema_metadata({_MARK: _mark(self.of, how)}).combine_chunks()
        with self.folder.staged(name) as path, pa.ipc.new_file(path, marked.schema) as file:
            file.write_table(marked)


def forget() -> None:
    """Give back the word sets and hashes that are kept for the units of this process."""
    _sets.cache_clear()
    _hashes.cache_clear()


def _mark(of: str, how: str) -> bytes:
    return f"{VERSION} {how} {of}".encode()


def _marked(folder: Folder, name: str, of: str, how: str = "") -> pa.Table | None:
    table = mapped(folder, name) if folder.exists(name) else None
    return None if table is None or (table.schema.metadata or {}).get(_MARK) != _mark(of, how) else table


@functools.lru_cache(maxsize=1)
def _hashes(url: str, of: str) -> Hashes:
    table = _marked(Folder(url), HASHES, of)
    assert table is not None
    return bytes_of(table["image_hash"]), bytes_of(table["image_hash_mirrored"])


@functools.lru_cache(maxsize=1)
def _sets(url: str, of: str, count: int) -> Sets:
    """All of `Store.sets`, which the driver and all units that one process does share."""
    return _read_sets(Folder(url), of, count, None)


def _read_sets(folder: Folder, of: str, count: int, among: I64 | None) -> Sets:
    table = _marked(folder, NUMBERS, of)
    assert table is not None
    numbers = table["number"].to_numpy()
    wanted = np.zeros(count + 1, bool)  # the last is that of no number
    wanted[slice(count) if among is None else among] = True
    starts, sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)
    flats: list[U32] = []
    row = length = 0
    for part in stored_sets(folder):
        _, tokens, offsets = unpacked(part)
        number = numbers[row : row + part.num_rows]
        use = np.flatnonzero(wanted[number])
        begins, some = offsets[use], offsets[use + 1] - offsets[use]
        if among is not None:
            tokens, begins = segments(tokens, begins, some)
        starts[number[use]] = begins[: len(use)] + length
        sizes[number[use]] = some
        row, length = row + part.num_rows, length + len(tokens)
        flats.append(tokens)
    return Sets(
        flats[0] if len(flats) == 1 and length else np.concatenate([*flats, np.zeros(1, np.uint32)]), starts, sizes
    )


def _sampled(sets: Sets, floor: float) -> Edges:
    return oracle.near(sets, oracle.sample(sets.sizes), floor)


@dataclass(frozen=True)
class _Captions:
    """Word sets, to be compared in units (edges.Things)."""

    url: str
    of: str
    count: int
    at_least: float
    bands: int

    @property
    def keys(self) -> int:
        return self.count

    def candidates(self, numbers: range, share: Share) -> U64:
        return match.caption_candidates(_sets(self.url, self.of, self.count), self.at_least, numbers, share)

    def similarity(self, a: I64, b: I64) -> F32:
        return match.jaccard(_sets(self.url, self.of, self.count), a, b)


@dataclass(frozen=True)
class _Pictures:
    """Picture hashes and their mirrored twins, to be compared in units (edges.Things)."""

    url: str
    of: str
    count: int
    at_least: float = phash.AT_LEAST
    bands: int = phash.BANDS

    @property
    def keys(self) -> int:
        return 2 * self.count

    def candidates(self, numbers: range, share: Share) -> U64:
        return phash.candidates(*_hashes(self.url, self.of), numbers, share)

    def similarity(self, a: I64, b: I64) -> F32:
        return phash.similarity(*_hashes(self.url, self.of), a, b)


def _at(column: pa.ChunkedArray, rows: I64 | None) -> pa.ChunkedArray:
    """The column at these rows; all of it for None."""
    return column if rows is None else pa.chunked_array([column.take(pa.array(rows)).combine_chunks()])
