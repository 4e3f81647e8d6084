"""Evaluation sets in whatever form they come, as rows of keys, captions and picture hashes, for `--against`.

A set is a folder of pictures, a folder of webdataset tars, a work folder, or a table (parquet, csv, tsv, json, jsonl) with
captions, URLs, pictures or hashes. What was read of it lies in `dedup/against/DIGEST`, so that deciding again reads only that.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from core import catalog, webdataset
from core.errors import ImageError, InputError
from core.plan import Unit
from core.runner import run_units, tick
from core.storage import Folder, expand
from dedup import captions
from dedup.evidence import Pairs
from dedup.sign import opened, signatures

if TYPE_CHECKING:
    from collections.abc import Sequence

HOME = "dedup/against"
VERSION = "1"
FILES = 256  # pictures a unit
HASH_SIDE = 256  # as ingest hashes what it adopts, so that the two compare
TABLES = (".parquet", ".csv", ".tsv", ".json", ".jsonl")
COLUMNS = {
    "key": ("uid", "key", "__key__", "id", "image_id", "filename"),
    "url": ("url", "URL", "image_url"),
    "caption": ("caption", "captions", "text", "TEXT", "alt_text", "sentence", "sentences"),
    "image": ("image", "img", "jpg", "png", "webp", "image_bytes"),
}
ROWS = pa.schema(
    [
        pa.field("uid", pa.string(), nullable=False),
        pa.field("unit", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("url", pa.string()),
        pa.field("caption", pa.string()),
        pa.field("sha256", pa.string()),
        pa.field("image_hash", pa.binary(32)),
        pa.field("image_hash_mirrored", pa.binary(32)),
        pa.field("unreadable", pa.bool_(), nullable=False),
    ]
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """One set: what the user called it, its short name, how it is read, its files in order, and their fingerprint."""

    path: str
    name: str
    kind: str
    files: tuple[str, ...]
    digest: str

    @property
    def home(self) -> str:
        return f"{HOME}/{self.digest}"

    def units(self) -> list[Unit]:
        size = FILES if self.kind == "pictures" else len(self.files) if self.kind == "table" else 1
        starts = range(0, len(self.files), size)
        return [Unit(f"u{i:06d}", start, min(start + size, len(self.files))) for i, start in enumerate(starts)]


@dataclass(frozen=True)
class Items:
    """What is known of a set: a row an item and caption, their signatures in the same order, and their word sets."""

    source: Source
    table: pa.Table
    signed: Pairs
    sets: pa.Table


def find(paths: Sequence[str]) -> list[Source]:
    """The sets that `--against` names; sets of the same name are told apart by a number.

    Raises:
        InputError: nothing is there, or nothing of a known form.
    """
    sources, names = [], Counter[str]()
    for path in paths:
        kind, files = _files(path)
        stem = path.rstrip("/").rpartition("/")[2].partition(".")[0].strip("*") or "set"
        names[stem] += 1
        name = stem if names[stem] == 1 else f"{stem}-{names[stem]}"
        sources.append(Source(path, name, kind, tuple(files), _digest(kind, files)))
    return sources


def _files(path: str) -> tuple[str, list[str]]:
    plain = path.removesuffix(".gz").removesuffix(".zst")
    if plain.endswith(TABLES):
        return "table", expand(path)
    if path.endswith(".tar"):
        return "tars", expand(path)
    folder = Folder(path)
    if parts := folder.list("ingest/parts/*.parquet"):
        return "table", [folder.path(name) for name in parts]
    found = _below(folder)
    for kind, endings in (("tars", (".tar",)), ("pictures", tuple(f".{e}" for e in webdataset.PICTURES))):
        if files := [f for f in found if f.lower().endswith(endings)]:
            return kind, files
    if tables := [f for f in found if f.endswith(TABLES)]:
        ending = tables[0].rpartition(".")[2]
        return "table", [f for f in tables if f.endswith(ending)]
    raise InputError(
        f"--against: expected pictures, .tar shards or a table ({', '.join(TABLES)}) at {path}, found none of them"
    )


def _below(folder: Folder) -> list[str]:
    """Every file of a folder and the folders in it, sorted; hidden ones left out."""
    if folder.local is None:
        return expand(f"{folder.url}/**")
    found = []
    for parent, below, names in os.walk(folder.local):
        below[:] = sorted(name for name in below if not name.startswith("."))
        found += [f"{parent}/{name}" for name in names if not name.startswith(".")]
    return sorted(os.path.abspath(name) for name in found)


def _digest(kind: str, files: list[str]) -> str:
    """Of names, sizes and (on a local disk) times of change: reading 50,000 pictures to tell that they are the same ones
    would cost more than all the rest."""
    digest, root = xxhash.xxh3_64(f"{VERSION} {kind}".encode()), Folder("/")
    for path in files:
        local = "://" not in path
        digest.update(f"{path} {root.size(path)} {os.stat(path).st_mtime_ns if local else 0}\n".encode())
    return digest.hexdigest()


def read(folder: Folder, source: Source, *, workers: int, engine: str) -> None:
    """Read, decode and hash the set's items unless that was done before.

    Raises:
        DataError: a tar is damaged.
        InputError: a table cannot be read.
    """
    folder.sweep(source.home)
    task = functools.partial(_read_unit, folder=folder, source=source)
    for _ in run_units(
        source.units(), task, done=lambda unit: folder.exists(f"{source.home}/{unit.id}.parquet"), workers=workers, engine=engine,
        label=f"dedup: read {source.name}", unit_of_progress="files",
    ):  # fmt: skip
        pass


def items(folder: Folder, source: Source) -> Items:
    """What `read` found.

    Raises:
        InputError: nothing that could be compared.
    """
    tables = []
    for unit in source.units():
        with opened(folder, f"{source.home}/{unit.id}.parquet") as file:
            tables.append(file.read())
    table = pa.concat_tables(tables).combine_chunks()
    if all(table[name].null_count == len(table) for name in ("url", "caption", "sha256", "image_hash")):
        raise InputError(f"--against {source.path}: expected pictures, captions or URLs to compare with, found none")
    signed, sets = signatures(table)
    return Items(source, table, Pairs(signed), sets)


def _read_unit(unit: Unit, *, folder: Folder, source: Source) -> int:
    files = source.files[unit.start : unit.stop]
    if source.kind == "table":
        found = _of_table(source, files)
    elif source.kind == "tars":
        found = (row for path in files for row in _of_tar(path))
    else:
        found = (row for path in files for row in _of_picture(path))
    rows = [{**row, "unit": unit.id, "row": i} for i, row in enumerate(found)]
    with folder.staged(f"{source.home}/{unit.id}.parquet") as path:
        pq.write_table(pa.Table.from_pylist(rows, schema=ROWS), path)
    tick(unit.rows)
    return len(rows)


def _rows(key: str, url: str | None, texts: Sequence[str | None], picture: Row) -> Iterator[Row]:
    for caption in texts or [None]:
        yield {"uid": key, "url": url, "caption": caption, "unreadable": False, **picture}


def _of_picture(path: str) -> Iterator[Row]:
    root, beside = Folder("/"), str(Path(path).with_suffix(".txt")) if "://" not in path else ""
    texts = [root.read(beside).decode("utf-8", errors="replace")] if beside and root.exists(beside) else []
    yield from _rows(path, None, texts, hashed(root.read(path)))


def _of_tar(path: str) -> Iterator[Row]:
    for sample in webdataset.samples(path):
        notes = sample.notes()
        place = sample.first(webdataset.PICTURES)
        picture = hashed(sample.read(place)) if place else {}
        url = notes.get("url")
        key = f"{path.rpartition('/')[2]}/{sample.key}"
        yield from _rows(key, url if isinstance(url, str) else None, sample.captions(notes), picture)


def hashed(body: bytes) -> Row:
    """Digest and hashes of a picture; one that cannot be decoded is known by its bytes only."""
    from core import imagehash, images

    row: Row = {"sha256": hashlib.sha256(body).hexdigest()}
    try:
        header = images.read_header(body)
        pixels = images.resize(images.decode(body, header, min_side=HASH_SIDE), HASH_SIDE)
    except ImageError:
        return {**row, "unreadable": True}
    row["image_hash"], row["image_hash_mirrored"] = imagehash.image_hash(pixels)
    return row


# ---- tables ------------------------------------------------------------------------------------------------------------


def _of_table(source: Source, files: Sequence[str]) -> Iterator[Row]:
    import duckdb

    try:
        with duckdb.connect() as connection:
            reader = captions.reader_of(list(files))
            known = [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()]
            column = {what: next((n for n in names if n in known), None) for what, names in COLUMNS.items()}
            hashes = [n for n in ("sha256", "image_hash", "image_hash_mirrored") if n in known]
            wanted = [n for n in column.values() if n] + hashes
            if not wanted or wanted == [column["key"]]:
                raise InputError(
                    f"--against {source.path}: expected a column caption, url, image or image_hash, found {', '.join(known)}"
                )
            only = " WHERE outcome = 'ok'" if "outcome" in known else ""
            chosen = ", ".join('"' + n.replace('"', '""') + '"' for n in dict.fromkeys(wanted))
            query: Any = connection.sql(f"SELECT {chosen} FROM {reader}{only}")
            number = 0
            for batch in query.to_arrow_reader(1024):
                for row in batch.to_pylist():
                    yield from _of_row(row, column, hashes, number)
                    number += 1
    except (duckdb.Error, pa.ArrowException) as error:
        raise InputError(f"--against {source.path} cannot be read; DuckDB says: {catalog.says(error)}") from error


def _of_row(row: Row, column: dict[str, str | None], hashes: list[str], number: int) -> Iterator[Row]:
    def value(what: str) -> Any:
        return row.get(column[what] or "")

    key = str(number) if value("key") is None else str(value("key"))
    body = value("image")
    body = body.get("bytes") if isinstance(body, dict) else body
    picture = hashed(body) if isinstance(body, bytes) else {name: _as_stored(name, row[name]) for name in hashes}
    if picture.get("image_hash") and not picture.get("image_hash_mirrored"):
        picture["image_hash_mirrored"] = picture["image_hash"]  # then mirrored copies are not found, and all others are
    texts = value("caption")
    texts = [t for t in texts if isinstance(t, str)] if isinstance(texts, list) else [texts] if texts else []
    url = value("url")
    yield from _rows(key, None if url is None else str(url), [str(t) for t in texts], picture)


def _as_stored(name: str, value: object) -> Any:
    """A hash of a table, which may write it in hexadecimal, as `ROWS` holds it.

    Raises:
        InputError: it is none.
    """
    text = name == "sha256"
    if value is None or (isinstance(value, str) if text else isinstance(value, bytes) and len(value) == 32):
        return value
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        if text:
            return value.hex()  # type: ignore[attr-defined]
        if len(found := bytes.fromhex(value)) == 32:  # type: ignore[arg-type]
            return found
    raise InputError(f"--against: expected 32 bytes in the column {name}, found {value!r:.80}")
