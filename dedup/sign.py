"""What dedup needs to know of each pair, computed once a part: keys, sizes, and token sets.

One ingest part gives `dedup/signatures/ID.parquet`, a row a fetched pair, and `dedup/sets/ID.arrow`, a row a distinct
token set of at least five words. Deciding again reads only these and what was made of them (store.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq
import xxhash

from core.errors import DataError
from core.plan import Unit
from core.runner import run_units, tick
from core.schema import Outcome
from core.storage import Folder
from core.work import fingerprint_of
from dedup import boilerplate
from dedup.match import MIN_WORDS
from dedup.tokens import Sets, as_sets, segments

VERSION = "5"  # raised whenever the rule of tokens or permutations changes, so that old signatures are made again
_MARK = b"pairmill.signatures"
_COLUMNS = (
    "uid",
    "unit",
    "row",
    "outcome",
    "url",
    "caption",
    "sha256",
    "width",
    "height",
    "image_hash",
    "image_hash_mirrored",
)

SIGNATURES = pa.schema(
    [
        pa.field("uid", pa.string(), nullable=False),
        pa.field("unit", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("caption_key", pa.uint64(), nullable=False),
        pa.field("set_key", pa.uint64(), nullable=False),
        pa.field("words", pa.int32(), nullable=False),
        pa.field("boilerplate", pa.int8(), nullable=False),
        pa.field("pixels", pa.int64(), nullable=False),
        pa.field("url_key", pa.uint64()),
        pa.field("bytes_key", pa.uint64()),
        pa.field("image_hash", pa.binary()),  # of 32 bytes; as pa.binary(32) a null would take as much
        pa.field("image_hash_mirrored", pa.binary()),
    ]
)
SETS = pa.schema(
    [
        pa.field("set_key", pa.uint64(), nullable=False),
        pa.field("tokens", pa.large_binary(), nullable=False),  # uint32, one after the other
    ]
)


def sign(
    folder: Folder, parts: str, units: Sequence[Unit], *, digests: Mapping[str, str], workers: int, engine: str
) -> None:
    """Sign every part of `parts` (`ingest/parts`) that has no signatures yet, and forget those of parts that went away.

    Args:
        units: of `units_of`.
        digests: of `digests_of`; a part that changed is signed anew.

    Raises:
        DataError: a part cannot be read.
    """
    for home in ("signatures", "sets"):
        folder.sweep(f"dedup/{home}")
        for name in folder.list(f"dedup/{home}/*"):
            if _stem(name) not in digests:
                folder.remove(name)
    marks = _marks(digests)
    task = functools.partial(_sign_part, folder=folder, parts=parts, marks=marks)
    done = functools.partial(_is_signed, folder=folder, marks=marks)
    for _ in run_units(units, task, done=done, workers=workers, engine=engine, label="dedup: sign"):
        pass


def unsigned(folder: Folder, units: Sequence[Unit], *, digests: Mapping[str, str]) -> int:
    """How many of these parts have no signatures yet."""
    marks = _marks(digests)
    return sum(not _is_signed(unit, folder=folder, marks=marks) for unit in units)


def _marks(digests: Mapping[str, str]) -> dict[str, bytes]:
    return {unit: f"{VERSION} {digest}".encode() for unit, digest in digests.items()}


def units_of(folder: Folder, parts: str) -> list[Unit]:
    """One unit a part; opening each proves that it is whole.

    Raises:
        DataError: one is not.
    """
    units, start = [], 0
    for name in folder.list(f"{parts}/*.parquet"):
        with opened(folder, name) as file:
            rows = file.metadata.num_rows
        units.append(Unit(_stem(name), start, start + rows))
        start += rows
    return units


def digests_of(folder: Folder, parts: str) -> dict[str, str]:
    """The fingerprint of each part, by unit id."""
    return {_stem(name): fingerprint_of(folder, [name]) for name in folder.list(f"{parts}/*.parquet")}


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


@contextlib.contextmanager
def opened(folder: Folder, name: str) -> Iterator[pq.ParquetFile]:
    """Raises DataError, naming the file, where it cannot be opened or read."""
    with folder.open(name) as raw, _whole(folder, name, "Parquet"):
        yield pq.ParquetFile(raw)


@contextlib.contextmanager
def _whole(folder: Folder, name: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{folder.path(name)} is not a whole {kind} file ({error}); delete it and run "
            f"`pairmill {_maker(folder, name)}` again"
        ) from error


def stored_sets(folder: Folder) -> Iterator[pa.Table]:
    """Every part's distinct sets (SETS), as `mapped` reads them."""
    for name in folder.list("dedup/sets/*.arrow"):
        yield mapped(folder, name)


def mapped(folder: Folder, name: str) -> pa.Table:
    """The table of an Arrow file, mapped into memory where it lies on a disk.

    Raises:
        DataError: the file is not whole.
    """
    with _whole(folder, name, "Arrow"):
        # from a store all of it at once: Arrow would ask for its end, its beginning and what lies between
        source = pa.BufferReader(folder.read(name)) if folder.local is None else pa.memory_map(folder.path(name))
        with source, pa.ipc.open_file(source) as file:
            return file.read_all()


def noted(folder: Folder, name: str) -> dict[bytes, bytes]:
    """What is noted in an Arrow file beside its table, of which nothing is read; nothing where there is no such file.

    Raises:
        DataError: the file is not whole.
    """
    if not folder.exists(name):
        return {}
    with _whole(folder, name, "Arrow"), folder.open(name) as raw, pa.ipc.open_file(raw) as file:
        return dict(file.schema.metadata or {})


def _maker(folder: Folder, name: str) -> str:
    """The verb that makes this file anew once it is gone."""
    if not name.startswith("ingest/"):
        return "dedup"
    return folder.read("ingest/verb").decode() if folder.exists("ingest/verb") else "ingest"


def _is_signed(unit: Unit, *, folder: Folder, marks: Mapping[str, bytes]) -> bool:
    name = f"dedup/signatures/{unit.id}.parquet"
    if not (folder.exists(name) and folder.exists(f"dedup/sets/{unit.id}.arrow")):
        return False
    with opened(folder, name) as file:
        metadata = file.schema_arrow.metadata or {}
    return bool(metadata.get(_MARK) == marks[unit.id])


def _sign_part(unit: Unit, *, folder: Folder, parts: str, marks: Mapping[str, bytes]) -> int:
    with opened(folder, f"{parts}/{unit.id}.parquet") as file:
        table = file.read(columns=[c for c in _COLUMNS if c in file.schema_arrow.names])
    if "outcome" in table.column_names:
        table = table.filter(pc.equal(table["outcome"], Outcome.OK.value))
    signed, sets = signatures(table)
    with folder.staged(f"dedup/sets/{unit.id}.arrow") as path, pa.ipc.new_file(path, SETS) as file:
        file.write_table(sets)  # deciding again maps it: as Parquet, decoding took longer than the comparisons
    with folder.staged(f"dedup/signatures/{unit.id}.parquet") as path:
        marked = signed.replace_schema_metadata({_MARK: marks[unit.id]})
        pq.write_table(marked, path, compression="lz4", use_dictionary=["unit"])
    tick(unit.rows)
    return int(signed.num_rows)


def signatures(pairs: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Signatures and sets of a table of pairs; columns other than uid, unit, row and caption may be missing."""
    captions = pairs["caption"].combine_chunks()
    sets, set_keys, caption_keys = as_sets(captions)
    nothing = pa.nulls(len(captions))
    column = {
        name: pairs[name].combine_chunks() if name in pairs.column_names else nothing
        for name in _COLUMNS
        if name != "caption"
    }
    pixels = pc.multiply(column["width"].cast(pa.int64()), column["height"].cast(pa.int64()))
    columns = [
        column["uid"],
        column["unit"],
        column["row"],
        pa.array(caption_keys),
        pa.array(set_keys),
        pa.array(sets.sizes.astype(np.int32)),
        pa.array(boilerplate.kinds(captions)),
        pc.fill_null(pixels, 0),
        string_keys(column["url"]),
        string_keys(column["sha256"]),
        column["image_hash"].cast(pa.binary()),
        column["image_hash_mirrored"].cast(pa.binary()),
    ]
    arrays = [array.cast(field.type) for array, field in zip(columns, SIGNATURES, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SIGNATURES), _set_table(sets, set_keys)


def _set_table(sets: Sets, set_keys: npt.NDArray[np.uint64]) -> pa.Table:
    """Each distinct set of at least five words once, in order of its key, which is also that of its size."""
    full = np.flatnonzero(sets.sizes >= MIN_WORDS)
    full = full[np.argsort(set_keys[full])]
    new = np.ones(len(full), bool)
    new[1:] = set_keys[full[1:]] != set_keys[full[:-1]]
    first = full[new]
    keys = set_keys[first]
    flat, offsets = segments(sets.flat, sets.starts[first], sets.sizes[first])
    tokens = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(keys), [None, pa.py_buffer(offsets * flat.itemsize), pa.py_buffer(flat)]
    )
    return pa.Table.from_arrays([pa.array(keys), tokens], schema=SETS)


def unpacked(sets: pa.Table) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """(keys [S], tokens, offsets [S + 1]) of a table of sets."""
    if not sets.num_rows:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint32), np.zeros(1, np.int64)
    tokens = sets.combine_chunks()["tokens"].chunk(0)
    _, offsets, data = tokens.buffers()
    bounds = np.frombuffer(offsets, np.int64)[tokens.offset : tokens.offset + len(tokens) + 1]
    return sets["set_key"].to_numpy(), np.frombuffer(data, np.uint32), bounds // np.dtype(np.uint32).itemsize


def string_keys(strings: pa.Array) -> pa.Array:
    """One uint64 a string, null for null. Equal keys stand for equal strings: at 10^8 of them the chance of a single
    accident is 1 in 4,000."""
    encoded = strings.cast(pa.string()).dictionary_encode()
    words: Sequence[Any] = encoded.dictionary.cast(pa.binary()).to_pylist()
    keys = pa.array(np.fromiter((xxhash.xxh3_64_intdigest(w) for w in words), np.uint64, len(words)))
    return keys.take(encoded.indices)
