"""Who is like whom, in units: bands bring pairs together, and ranges of rows compare them.

A unit of the first kind takes some bands, or one range of one band's keys, and writes the pairs that meet there, sorted by
their smaller row. A unit of the second kind takes a range of rows, merges what all units of the first kind have for it,
compares, and writes the edges; where there are several ranges only their spanning forest, so that whoever joins them all reads
at most an edge a row. How the work is cut depends on the data alone, so every engine makes the same files.

A thing is a word set or a picture's hash, by its number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.allocator import keep_freed_memory
from core.plan import Unit, cut
from core.runner import run_units, tick
from core.storage import Folder
from dedup import bands
from dedup.bands import Share
from dedup.clusters import strongest_forest
from dedup.match import Edges

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

KEYS = 1 << 25  # of a unit of bands: some seconds of work, and 4 bytes of memory each while it lasts
GROUPED = 1 << 26  # keys of a band that are grouped at once, at 30 bytes
ROWS = 1 << 21  # of a unit of comparisons
_EDGE = np.dtype([("a", "<i4"), ("b", "<i4"), ("similarity", "<f4")])


class Things(Protocol):
    """What is compared. Picklable; what it is made of is loaded where it is asked for."""

    @property
    def count(self) -> int:
        """How many things there are."""

    @property
    def bands(self) -> int:
        """How many bands they are brought together by."""

    @property
    def keys(self) -> int:
        """How many keys each band has."""

    @property
    def at_least(self) -> float:
        """The similarity of an edge."""

    def candidates(self, numbers: range, share: Share) -> U64:
        """Pairs (bands.pair_keys) that these bands bring together."""

    def similarity(self, a: I64, b: I64) -> F32:
        """Exactly, of pairs of things."""


@dataclass(frozen=True)
class _Cut:
    """Where the units' files lie, and how the work is cut."""

    folder: Folder
    home: str
    shares: int
    together: list[Unit]
    compared: list[Unit]


def compared(things: Things, folder: Folder, home: str, mark: bytes, *, workers: int, engine: str) -> list[str]:
    """Compare `things`; the files that hold the edges between them, for `joined`.

    Args:
        home: of the units' files in `folder`; for the caller to remove when it has kept the edges.
        mark: of what the files are made from; those of anything else are thrown away.
    """
    if things.count < 2:
        return []
    shares = 1 << ((things.keys - 1) // GROUPED).bit_length()
    together = cut(things.bands * shares, max(1, KEYS // things.keys))
    work = _Cut(folder, home, shares, together, cut(things.count, ROWS))
    mark = mark + f" {shares} {len(work.together)} {len(work.compared)}".encode()
    if not (folder.exists(f"{home}/of") and folder.read(f"{home}/of") == mark):
        folder.remove(home)
        folder.write(f"{home}/of", mark)
    for kind, units, task in (("pairs", together, _bring_together), ("edges", work.compared, _compare)):
        folder.sweep(f"{home}/{kind}")
        run = run_units(
            units, functools.partial(task, things=things, work=work), workers=workers, engine=engine,
            done=functools.partial(_is_there, work=work, kind=kind), label=f"dedup: match, {kind}",
            unit_of_progress="bands" if kind == "pairs" else "rows",
        )  # fmt: skip
        for _ in run:
            pass
    return [_name(work, "edges", unit) for unit in work.compared]


def joined(folder: Folder, names: list[str]) -> Edges:
    """All edges of these files, or a forest that joins what they join at every similarity."""
    found = [np.frombuffer(folder.read(name), _EDGE) for name in names]
    edges = found[0] if len(found) == 1 else np.concatenate([np.zeros(0, _EDGE), *found])
    return Edges(edges["a"].astype(np.int64), edges["b"].astype(np.int64), edges["similarity"].astype(np.float32))


def _name(work: _Cut, kind: str, unit: Unit) -> str:
    return f"{work.home}/{kind}/{unit.id}"


def _is_there(unit: Unit, *, work: _Cut, kind: str) -> bool:
    return work.folder.exists(_name(work, kind, unit))


def _bring_together(unit: Unit, *, things: Things, work: _Cut) -> None:
    """Write the unit's pairs behind the place where each unit of rows begins among them."""
    keep_freed_memory()
    pairs = np.zeros(0, np.uint64)
    if work.shares == 1:
        pairs = things.candidates(range(unit.start, unit.stop), bands.WHOLE)
    else:
        for number in range(unit.start, unit.stop):
            band, share = divmod(number, work.shares)
            pairs = bands.merged(pairs, things.candidates(range(band, band + 1), (share, work.shares)))
    first = np.array([u.start for u in work.compared], np.uint64) << np.uint64(32)
    begins = np.append(np.searchsorted(pairs, first), len(pairs)).astype(np.uint64)
    with work.folder.staged(_name(work, "pairs", unit)) as path, path.open("wb") as file:
        file.write(begins.data)
        file.write(pairs.data)
    tick(unit.rows)


def _compare(unit: Unit, *, things: Things, work: _Cut) -> None:
    """Write the edges among the unit's rows and later ones."""
    keep_freed_memory()
    number = work.compared.index(unit)
    found = [_pairs_of(work, name, number) for name in (_name(work, "pairs", u) for u in work.together)]
    a, b = bands.unpair(functools.reduce(bands.merged, found))
    edges = Edges(a, b, things.similarity(a, b)).at_least(things.at_least)
    if len(work.compared) > 1:
        edges = strongest_forest(edges)
    table = np.empty(len(edges.a), _EDGE)
    table["a"], table["b"], table["similarity"] = edges.a, edges.b, edges.similarity
    work.folder.write(_name(work, "edges", unit), table.tobytes())
    tick(unit.rows)


def _pairs_of(work: _Cut, name: str, number: int) -> U64:
    """What one unit of bands has for the unit of rows with this number."""
    size = np.dtype(np.uint64).itemsize
    begin, end = np.frombuffer(work.folder.read_range(name, size * number, 2 * size), np.uint64).tolist()
    head = size * (len(work.compared) + 1)
    if begin == end:  # which object stores refuse to read
        return np.zeros(0, np.uint64)
    return np.frombuffer(work.folder.read_range(name, head + size * begin, size * (end - begin)), np.uint64)
