"""What deciding reads, as it lies in the work folder: pairs in order, word sets, picture hashes and verified edges.

Each file carries the digest of the signatures it was made from, and is made anew for any others. They are Arrow files, mapped
into memory where they lie on a disk, so that a decision reads no more of them than it is about. What takes all pairs at once is
done by one worker of the engine, so that on a cluster the machine where it was started holds none of them.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from core.allocator import keep_freed_memory
from core.catalog import PAIRS
from core.errors import WorkFolderError
from core.plan import Unit
from core.runner import run_units, tick
from core.storage import Folder
from dedup import edges, filters, match, minhash, oracle, phash
from dedup.bands import Share, rows_for
from dedup.evidence import Hashes, Pairs, bytes_of
from dedup.match import Edges
from dedup.sign import SIGNATURES, VERSION, mapped, noted, opened, stored_sets, unpacked
from dedup.tokens import Sets, segments

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("pairmill.dedup")
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
T = TypeVar("T")
_MARK, _COUNTS = b"pairmill.made_from", b"pairmill.sets_and_hashes"
ROWS, HASHES, NUMBERS, VERDICTS = (
    f"dedup/edges/{name}.arrow" for name in ("pairs", "hashes", "set_numbers", "verdicts")
)
IMAGES = f"{phash.RADIUS}"  # how they were found
KEYS = ("caption_key", "url_key", "bytes_key")  # what only comparisons with other data need
_NUMBERED_FROM = (*KEYS, "set_key", "words", "pixels", "image_hash", "image_hash_mirrored")


@dataclass(frozen=True)
class Store:
    """The files of `folder` that belong to the signatures which `of` tells from any others.

    `judge`, `number` and `match` let the engine make those that are not there yet; the rest is for the task that decides.

    Args:
        rows: how many there are to be signed; for progress only.
        connect: opens DuckDB with these views; picklable.
        workers, engine: of what is done in units.
    """

    folder: Folder
    of: str
    rows: int
    connect: Callable[[Collection[str]], AbstractContextManager[duckdb.DuckDBPyConnection]]
    workers: int
    engine: str

    def alone(self, what: str, task: Callable[[], T]) -> T:
        """What `task` returns, a unit of its own for the engine: on the local one it is done in this process."""
        run = run_units(
            [Unit("all", 0, self.rows)], functools.partial(_alone, task=task), done=lambda unit: False, workers=1,
            engine=self.engine, label=f"dedup: {what}",
        )  # fmt: skip
        [(_, result)] = run
        return result

    def has(self, name: str, how: str = "") -> bool:
        return noted(self.folder, name).get(_MARK) == _mark(self.of, how)

    # ---- conditions ----------------------------------------------------------------------------------------------------

    def judge(self, rules: list[filters.Rule], inputs: str) -> str:
        """Have the conditions evaluated unless that was done; how `verdicts` finds what they say.

        Args:
            inputs: fingerprint of all that the view `pairs` shows.
        """
        asked = json.dumps([inputs, *((rule.reason, rule.predicate) for rule in rules)])
        how = xxhash.xxh3_128_hexdigest(asked.encode())
        if not self.has(VERDICTS, how):
            self.alone("conditions", functools.partial(self._judge, rules, how))
        return how

    def _judge(self, rules: list[filters.Rule], how: str) -> None:
        with self.connect(("pairs",)) as connection:
            self._write(VERDICTS, filters.judge(connection, rules), how)

    def verdicts(self, how: str) -> filters.Verdicts | None:
        return filters.Verdicts.of(self._kept(VERDICTS, how))

    # ---- pairs ---------------------------------------------------------------------------------------------------------

    def number(self) -> list[int]:
        """Have all pairs put in order of uid, each uid once: a row of the list that repeats another's uid says nothing new, and
        the first in order of (uid, unit, row) stands for it.

        Returns: how many word sets and picture hashes they have.
        """
        notes = noted(self.folder, ROWS)
        if notes.get(_MARK) == _mark(self.of, "") and _COUNTS in notes and self.folder.exists(PAIRS):
            return list(json.loads(notes[_COUNTS]))
        return self.alone("number", self._number)

    def pairs(self, *, keys: bool) -> Pairs:
        """All pairs as `number` put them in order.

        Beside those of `Pairs.numbered` the table has the columns `uid`, `signed_row` (among all signatures, part after part),
        `copies` (rows of this uid) and `boilerplate`, and with `keys` those of KEYS.
        """
        table = self._kept(ROWS)
        for name, column in self._signed(*KEYS).items() if keys else ():
            table = table.append_column(name, _at(column, table["signed_row"].to_numpy()))
        return Pairs(table, lambda: _hashes(self.folder.url, self.of))

    def _number(self) -> list[int]:
        """Find the order of pairs, and number their keys, word sets and hashes."""
        uid = self._signed("uid")["uid"]
        order = self._in_order(uid)
        uid = _at(uid, order)
        new = np.ones(len(uid), bool)
        new[1:] = pc.not_equal(uid[1:], uid[:-1]).to_numpy(zero_copy_only=False)
        first = np.flatnonzero(new)
        at = first if order is None else order[first]
        every = None if order is None and new.all() else at
        signed = self._signed(*_NUMBERED_FROM, "boilerplate")
        # popped, so that only one column is there twice
        pairs = Pairs(pa.table({name: _at(signed.pop(name), every) for name in _NUMBERED_FROM}))
        table = pairs.numbered()
        columns = {
            "uid": uid if new.all() else _at(uid, first), "signed_row": pa.array(at.astype(np.int32)),
            "copies": pa.array(np.diff(np.append(first, len(new))).astype(np.int32)),
            "boilerplate": _at(signed.pop("boilerplate"), every),
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
        counts = [len(pairs.set_keys), len(pairs.hashes[0])]
        noting = table.replace_schema_metadata({_COUNTS: json.dumps(counts).encode()})
        self._write(ROWS, noting)  # last: where it is, the others are
        return counts

    def _in_order(self, uid: pa.ChunkedArray) -> I64 | None:
        """Rows of the signatures in order of (uid, unit, row); None where that is how they lie."""
        if pc.all(pc.less(uid[:-1], uid[1:]), min_count=0).as_py():
            return None
        rows = pa.table({"uid": uid, **self._signed("unit", "row"), "place": np.arange(len(uid))})
        with self.connect(()) as connection:
            signed: Any = connection.from_arrow(rows)
            return np.asarray(signed.order('uid, unit, "row"').project("place").fetchnumpy()["place"], np.int64)

    def _signed(self, *names: str) -> dict[str, pa.ChunkedArray]:
        """Columns of the signatures, part after part. Each part is opened once, since on a store that takes requests."""
        chunks: dict[str, list[pa.Array]] = {name: [] for name in names}
        for path in self.folder.list("dedup/signatures/*.parquet"):
            with opened(self.folder, path) as file:
                part = file.read(columns=list(names), use_threads=False)
            for name in names:
                chunks[name] += part[name].chunks
        return {name: pa.chunked_array(chunks[name], SIGNATURES.field(name).type) for name in names}

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

    def match(self, threshold: float, sets: int, hashes: int) -> None:
        """Have the edges found between so many things that serve `threshold`, and those that the oracle finds around a sample."""
        floor, rows = rows_for(threshold)
        words = _Captions(self.folder.url, self.of, sets, floor, minhash.PERMUTATIONS // rows)
        self._match("images", IMAGES, _Pictures(self.folder.url, self.of, hashes))
        self._match(f"captions-{rows}", "", words)
        self._keep(f"sample-{rows}", "", functools.partial(_sampled, words))

    def caption_edges(self, threshold: float) -> tuple[Edges, Edges]:
        """Verified edges between set numbers that serve `threshold`, and those of the sample."""
        _, rows = rows_for(threshold)
        return self._edges(f"captions-{rows}"), self._edges(f"sample-{rows}")

    def image_edges(self) -> Edges:
        """Verified edges between numbers of hashes."""
        return self._edges("images", IMAGES)

    def _match(self, name: str, how: str, things: edges.Things) -> None:
        """Find these edges in units, unless they are there."""
        home = f"dedup/edges/{name}.units"
        at = dict[str, Any](workers=self.workers, engine=self.engine)
        try:
            if not self.has(_path(name), how):
                names = edges.compared(things, self.folder, home, _mark(self.of, how), **at)
                self._keep(name, how, functools.partial(edges.joined, self.folder, names))
        except FileNotFoundError:
            # a store has no locks: another run has kept the edges and cleared the units away
            if not self.has(_path(name), how):
                raise
        self.folder.remove(home)

    def _keep(self, name: str, how: str, make: Callable[[], Edges]) -> None:
        """Keep these edges, made by one worker, unless they are there."""
        if not self.has(_path(name), how):
            kind = name.partition("-")[0]
            count = self.alone(f"join {kind}", functools.partial(self._write_edges, name, how, make))
            log.info("dedup: %s like pairs (%s)", f"{count:,}", kind)

    def _write_edges(self, name: str, how: str, make: Callable[[], Edges]) -> int:
        found = make()
        numbers = [pa.array(rows.astype(np.int32)) for rows in (found.a, found.b)]
        self._write(_path(name), pa.table([*numbers, pa.array(found.similarity)], ["a", "b", "similarity"]), how)
        return len(found.a)

    def _edges(self, name: str, how: str = "") -> Edges:
        table = self._kept(_path(name), how)
        a, b, similarity = (table[name].to_numpy() for name in ("a", "b", "similarity"))
        return Edges(a.astype(np.int64), b.astype(np.int64), similarity)

    # ---- files ---------------------------------------------------------------------------------------------------------

    def _kept(self, name: str, how: str = "") -> pa.Table:
        return _kept(self.folder, name, self.of, how)

    def _write(self, name: str, table: pa.Table, how: str = "") -> None:
        marked = table.replace_schema_metadata({**(table.schema.metadata or {}), _MARK: _mark(self.of, how)})
        with self.folder.staged(name) as path, pa.ipc.new_file(path, marked.schema) as file:
            file.write_table(marked.combine_chunks())


def forget() -> None:
    """Give back the word sets and hashes that are kept for the units of this process."""
    _sets.cache_clear()
    _hashes.cache_clear()


def _mark(of: str, how: str) -> bytes:
    return f"{VERSION} {how} {of}".encode()


def _path(edges: str) -> str:
    return f"dedup/edges/{edges}.arrow"


def _alone(unit: Unit, *, task: Callable[[], T]) -> T:
    keep_freed_memory()
    result = task()
    pa.default_memory_pool().release_unused()  # numbering takes twice what it keeps, and edges need the room
    tick(unit.rows)
    return result


def _kept(folder: Folder, name: str, of: str, how: str = "") -> pa.Table:
    """The table of this name, made from these signatures.

    Raises:
        WorkFolderError: it was made from others meanwhile.
    """
    table = mapped(folder, name)
    if (table.schema.metadata or {}).get(_MARK) != _mark(of, how):
        raise WorkFolderError(
            f"expected {folder.path(name)} as this run made it, found another run's; let one run end first"
        )
    return table


@functools.lru_cache(maxsize=1)
def _hashes(url: str, of: str) -> Hashes:
    table = _kept(Folder(url), HASHES, of)
    return bytes_of(table["image_hash"]), bytes_of(table["image_hash_mirrored"])


@functools.lru_cache(maxsize=1)
def _sets(url: str, of: str, count: int) -> Sets:
    """All of `Store.sets`, which the driver and all units that one process does share."""
    return _read_sets(Folder(url), of, count, None)


def _read_sets(folder: Folder, of: str, count: int, among: I64 | None) -> Sets:
    numbers = _kept(folder, NUMBERS, of)["number"].to_numpy()
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


def _sampled(words: _Captions) -> Edges:
    """Edges around a sample of the word sets, by the oracle."""
    sets = _sets(words.url, words.of, words.count)
    return oracle.near(sets, oracle.sample(sets.sizes), words.at_least)


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
