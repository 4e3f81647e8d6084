"""What dedup needs to know of each pair, computed once a part: keys, sizes, token sets and their MinHash signatures.

One ingest part gives `dedup/signatures/ID.parquet`, a row a fetched pair, and `dedup/sets/ID.parquet`, a row a distinct
token set of at least five words, with its tokens and signature. Deciding again reads only these.
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
import pyarrow.parquet as pq
import xxhash

from core.errors import DataError
from core.plan import Unit
from core.runner import run_units, tick
from core.schema import Outcome
from core.storage import Folder
from core.work import fingerprint_of
from dedup import boilerplate, minhash
from dedup.match import MIN_WORDS
from dedup.tokens import Sets, as_sets, segments

VERSION = "3"  # raised whenever the rule of tokens or permutations changes, so that old signatures are made again
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

MINHASHES = [f"m{k:02d}" for k in range(minhash.PERMUTATIONS)]
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
        pa.field("image_hash", pa.binary(32)),
        pa.field("image_hash_mirrored", pa.binary(32)),
    ]
)
SETS = pa.schema(
    [
        pa.field("set_key", pa.uint64(), nullable=False),
        pa.field("tokens", pa.large_binary(), nullable=False),  # uint32, one after the other
        *(pa.field(name, pa.uint32(), nullable=False) for name in MINHASHES),  # a band reads only its own
    ]
)


def sign(
    folder: Folder, parts: str, units: Sequence[Unit], *, digests: Mapping[str, str], by: str, workers: int, engine: str
) -> None:
    """Sign every part of `parts` (`ingest/parts`) that has no signatures yet, and forget those of parts that went away.

    Args:
        units: of `units_of`.
        digests: of `digests_of`; a part that changed is signed anew.
        by: `numpy` or `datasketch`.

    Raises:
        DataError: a part cannot be read.
    """
    for home in ("signatures", "sets"):
        folder.sweep(f"dedup/{home}")
        for name in folder.list(f"dedup/{home}/*.parquet"):
            if _stem(name) not in digests:
                folder.remove(name)
    marks = _marks(digests, by)
    task = functools.partial(_sign_part, folder=folder, parts=parts, by=by, marks=marks)
    done = functools.partial(_is_signed, folder=folder, marks=marks)
    for _ in run_units(units, task, done=done, workers=workers, engine=engine, label="dedup: sign"):
        pass


def unsigned(folder: Folder, units: Sequence[Unit], *, digests: Mapping[str, str], by: str) -> int:
    """How many of these parts have no signatures yet."""
    marks = _marks(digests, by)
    return sum(not _is_signed(unit, folder=folder, marks=marks) for unit in units)


def _marks(digests: Mapping[str, str], by: str) -> dict[str, bytes]:
    return {unit: f"{VERSION} {by} {digest}".encode() for unit, digest in digests.items()}


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
    return name.rpartition("/")[2].removesuffix(".parquet")


@contextlib.contextmanager
def opened(folder: Folder, name: str) -> Iterator[pq.ParquetFile]:
    """Raises DataError, naming the file, where it cannot be opened or read."""
    with folder.open(name) as raw:
        try:
            yield pq.ParquetFile(raw)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{folder.path(name)} is not a whole Parquet file ({error}); delete it and run "
                f"`pairmill {_maker(folder, name)}` again"
            ) from error


def _maker(folder: Folder, name: str) -> str:
    """The verb that makes this file anew once it is gone."""
    if not name.startswith("ingest/"):
        return "dedup"
    return folder.read("ingest/verb").decode() if folder.exists("ingest/verb") else "ingest"


def _is_signed(unit: Unit, *, folder: Folder, marks: Mapping[str, bytes]) -> bool:
    name = f"dedup/signatures/{unit.id}.parquet"
    if not (folder.exists(name) and folder.exists(f"dedup/sets/{unit.id}.parquet")):
        return False
    with opened(folder, name) as file:
        metadata = file.schema_arrow.metadata or {}
    return bool(metadata.get(_MARK) == marks[unit.id])


def _sign_part(unit: Unit, *, folder: Folder, parts: str, by: str, marks: Mapping[str, bytes]) -> int:
    with opened(folder, f"{parts}/{unit.id}.parquet") as file:
        table = file.read(columns=[c for c in _COLUMNS if c in file.schema_arrow.names])
    if "outcome" in table.column_names:
        table = table.filter(pc.equal(table["outcome"], Outcome.OK.value))
    signed, sets = signatures(table, by)
    with folder.staged(f"dedup/sets/{unit.id}.parquet") as path:
        pq.write_table(sets, path, compression="none", use_dictionary=False, write_statistics=False)
    with folder.staged(f"dedup/signatures/{unit.id}.parquet") as path:
        marked = signed.replace_schema_metadata({_MARK: marks[unit.id]})
        pq.write_table(marked, path, compression="zstd", compression_level=1, use_dictionary=["unit"])
    tick(unit.rows)
    return int(signed.num_rows)


def signatures(pairs: pa.Table, by: str = "numpy") -> tuple[pa.Table, pa.Table]:
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
        column["image_hash"].cast(pa.binary(32)),
        column["image_hash_mirrored"].cast(pa.binary(32)),
    ]
    arrays = [array.cast(field.type) for array, field in zip(columns, SIGNATURES, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SIGNATURES), _set_table(sets, set_keys, by)


def _set_table(sets: Sets, set_keys: npt.NDArray[np.uint64], by: str) -> pa.Table:
    """Each distinct set of at least five words once, in order of size and key: signing like sizes side by side takes 0.6
    of the time."""
    _, first = np.unique(set_keys, return_index=True)
    first = first[np.argsort(sets.sizes[first], kind="stable")]
    first = first[sets.sizes[first] >= MIN_WORDS]
    keys = set_keys[first]
    make = minhash.with_datasketch if by == "datasketch" else minhash.signatures
    hashes = make(sets, first) if len(first) else np.zeros((minhash.PERMUTATIONS, 0), np.uint32)
    flat, offsets = segments(sets.flat, sets.starts[first], sets.sizes[first])
    tokens = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(keys), [None, pa.py_buffer(offsets * flat.itemsize), pa.py_buffer(flat)]
    )
    return pa.Table.from_arrays([pa.array(keys), tokens, *map(pa.array, hashes)], schema=SETS)


def string_keys(strings: pa.Array) -> pa.Array:
    """One uint64 a string, null for null. Equal keys stand for equal strings: at 10^8 of them the chance of a single
    accident is 1 in 4,000."""
    encoded = strings.cast(pa.string()).dictionary_encode()
    words: Sequence[Any] = encoded.dictionary.cast(pa.binary()).to_pylist()
    keys = pa.array(np.fromiter((xxhash.xxh3_64_intdigest(w) for w in words), np.uint64, len(words)))
    return keys.take(encoded.indices)
