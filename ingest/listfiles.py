"""The files of a URL list as Arrow batches, one batch schema for all of them.

Text forms (csv, tsv, json, jsonl, txt) come as columns of text, types being settled later over the whole list; parquet
keeps its types as far as they are simple. Bytes that are not UTF-8 are replaced, never fatal; a line that is no row is
counted in `refused`. `delimited` cuts csv and tsv into fields, `listbytes` unpacks.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.errors import InputError, nearest
from core.schema import sound
from core.storage import Folder
from ingest import delimited
from ingest.listbytes import as_text, opened, text

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("parquet", "csv", "tsv", "json", "jsonl", "txt")
_ALIASES = {"pq": "parquet", "ndjson": "jsonl", "tab": "tsv", "lst": "txt", "list": "txt"}
BATCH_ROWS = 20_000


@dataclass
class ListSource:
    """A list about to be read. `url`, `caption`, `uid` are names of its columns; caption and uid may be missing.

    `text` says that all columns are text. `refused` counts lines that are no rows, `first_refused` says what is wrong with
    the first of them; both are known once all is read. Names of the columns are unique and not empty, whatever the list
    calls them.
    """

    files: list[str]
    url: str
    caption: str | None
    uid: str | None = None
    text: bool = True
    refused: int = 0
    first_refused: str = ""
    _batches: Iterator[pa.RecordBatch] = field(default_factory=lambda: iter(()))

    def start(self) -> tuple[pa.RecordBatch, Iterator[pa.RecordBatch]]:
        """The first batch, to look at, and all batches, that one included.

        Raises:
            InputError: there is not one row.
        """
        first = next(self._batches, None)
        if first is None:
            raise InputError(f"expected a list of URLs in {self.files[0]}, found no row in it")
        return first, itertools.chain([first], self._batches)

    def refuse(self, why: str, count: int = 1) -> None:
        """Count lines that are no rows."""
        self.refused += count
        self.first_refused = self.first_refused or why


def open_list(files: list[str], url_col: str, caption_col: str) -> ListSource:
    """Open `files`, all of one form, and find the columns; an empty `caption_col` stands for a list without captions.

    Raises:
        InputError: an unknown form, a missing column (those found are named), or a file that cannot be read.
    """
    form = _form(files[0])
    for name in files:
        if _form(name) != form:
            raise InputError(f"expected files of one form, found {files[0]} and {name}")
    if form == "txt":
        source = ListSource(files, "url", None)
        source._batches = _txt(source)
        return source
    positions = url_col.isdigit()
    files, names = _from_first_row(form, files, positions)
    labels = _labels(names)
    source = ListSource(files, _find(url_col, labels, files[0], "--url-col"), None, text=form != "parquet")
    source.caption = _find(caption_col, labels, files[0], "--caption-col") if caption_col else None
    source.uid = next((n for n in labels if n.lower() == "uid" and n not in (source.url, source.caption)), None)
    source._batches = _labelled(_in_order(source, form, names, positions), labels)
    return source


def _from_first_row(form: str, files: list[str], positions: bool) -> tuple[list[str], list[str]]:
    """`files` without the empty ones before the first that names columns, and its columns; Spark leaves empty parts.

    Records have the keys of all of them, because the last record of the last file may be the first with a score.
    """
    if form in ("json", "jsonl"):
        if names := _keys(form, files):
            return files, names
    else:
        for place, name in enumerate(files):
            if names := _column_names(form, name, positions):
                return files[place:], names
    raise InputError(f"expected a list of URLs in {files[0]}, found no row in it")


def _keys(form: str, files: list[str]) -> list[str]:
    """The keys of all records, in the order of their first appearance."""
    keys: dict[str, None] = {}
    for name in files:
        with _readable(name):
            for record in _records(form, name):
                if record and not keys.keys() >= record.keys():
                    keys.update(dict.fromkeys(record))
    return list(keys)


def _labels(names: list[str]) -> list[str]:
    """`names`, each of them once and none empty: pandas writes an index without a name, and JSON allows any key."""
    labels: list[str] = []
    for place, name in enumerate(names):
        label = wanted = sound(name) or f"column_{place}"
        number = 1
        while label in labels:
            number += 1
            label = f"{wanted}_{number}"
        labels.append(label)
    return labels


def _labelled(batches: Iterator[list[pa.Array]], labels: list[str]) -> Iterator[pa.RecordBatch]:
    """Batches of one schema, that of the first one; files of one list may differ in the types of their columns.

    Raises:
        InputError: a value that the type of the first batch cannot hold.
    """
    import pyarrow as pa

    schema: pa.Schema | None = None
    for columns in batches:
        if schema is None:
            schema = pa.schema(list(zip(labels, (c.type for c in columns), strict=True)))
        try:
            yield pa.record_batch([c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"the files of the list differ in the type of a column: {error}; make them equal"
            ) from error


def _form(name: str) -> str:
    stem = re.sub(r"(\.(gz|zst|zstd))+$", "", name.lower())
    ending = stem.rsplit("/", 1)[-1].rpartition(".")[2]
    form = _ALIASES.get(ending, ending)
    if form not in FORMATS:
        raise InputError(f"expected a list ending in .{', .'.join(FORMATS)} (also .gz or .zst), found {name}")
    return form


def _find(wanted: str, names: list[str], where: str, flag: str) -> str:
    """The column that is meant: by name, by name in other case, or by number."""
    if wanted in names:
        return wanted
    same = [n for n in names if n.lower() == wanted.lower()]
    if len(same) == 1:
        return same[0]
    if wanted.isdigit() and int(wanted) < len(names):
        return names[int(wanted)]
    found = ", ".join(repr(n[:60]) for n in names[:40])
    hint = "say which with " + flag
    if any(re.match(r"(https?:)?//", n) for n in names):
        hint = f"a list without a header goes by column numbers from 0, as in {flag} 0"
    elif flag == "--caption-col":
        hint += ", or '' where there are no captions"
    raise InputError(f"{where} has no column {wanted!r}; it has {found}: {nearest(wanted, names)} ({hint})")


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn what Arrow, gzip and zstd say about a damaged file into one sentence."""
    import pyarrow as pa

    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        EOFError,
        zlib.error,
        csv.Error,
        ValueError,
        RecursionError,
    ) as error:
        words = " ".join(str(error).split())[:300]
        raise InputError(f"{name} cannot be read as its ending says: {words}; repair it or rename it") from error


def _column_names(form: str, name: str, positions: bool) -> list[str]:
    """The columns of a file, none where it is empty."""
    with _readable(name):
        if form == "parquet":
            import pyarrow.parquet as pq

            with Folder("/").open(name) as file, pq.ParquetFile(file) as parquet:
                return list(parquet.schema_arrow.names)
        found = delimited.columns(name, form)
        return [str(i) for i in range(len(found))] if positions else found


def _in_order(source: ListSource, form: str, names: list[str], positions: bool) -> Iterator[list[pa.Array]]:
    """The columns `names` of all files, batch by batch.

    Raises:
        InputError: a file that cannot be read, or has other columns than the first.
    """
    for name in source.files:
        with _readable(name):
            if form == "parquet":
                yield from _parquet(name, names, source)
            elif form in ("json", "jsonl"):
                yield from _json(form, name, names, source)
            else:
                found = _column_names(form, name, positions)
                if found and found != names:
                    raise InputError(f"expected the columns of {source.files[0]} in {name}, found {', '.join(found)}")
                if found:
                    url = _labels(names).index(source.url)
                    yield from delimited.rows(name, form, len(names), url, header=not positions, refuse=source.refuse)


# ---- txt ---------------------------------------------------------------------------------------------------------------


def _txt(source: ListSource) -> Iterator[pa.RecordBatch]:
    """Any line is a URL, commas and all; empty lines are not rows."""
    import pyarrow as pa

    for name in source.files:
        with _readable(name), opened(name) as file:
            lines = io.TextIOWrapper(file, "utf-8", errors="replace")  # which also knows the line ends of old Macs
            urls = (url for line in lines if (url := line.removeprefix("\ufeff").strip()))
            while chunk := list(itertools.islice(urls, BATCH_ROWS)):
                yield pa.record_batch({"url": pa.array(chunk, pa.string())})


# ---- json and jsonl ----------------------------------------------------------------------------------------------------


def _records(form: str, name: str) -> Iterator[dict[str, Any] | None]:
    """Objects of a JSON list or of JSON lines; None for a line that is not an object."""
    with opened(name) as file:
        if form == "json":
            data = json.loads(text(file.read()).removeprefix("\ufeff"))
            if not isinstance(data, list):
                raise InputError(f"expected a list of records in {name}, found a single {type(data).__name__}")
            yield from (r if isinstance(r, dict) else None for r in data)
            return
        for line in file:
            if line.strip():
                try:
                    record = json.loads(text(line).removeprefix("\ufeff"))
                except (ValueError, RecursionError):  # the first also for a number of thousands of digits
                    record = None
                yield record if isinstance(record, dict) else None


def _json(form: str, name: str, names: list[str], source: ListSource) -> Iterator[list[pa.Array]]:
    import pyarrow as pa

    records = _records(form, name)
    while chunk := list(itertools.islice(records, BATCH_ROWS)):
        rows = [r for r in chunk if r is not None]
        if len(rows) < len(chunk):
            source.refuse(f"not every record of {name} is an object", len(chunk) - len(rows))
        if rows:
            yield [pa.array([_plain(r.get(n)) for r in rows], pa.string()) for n in names]


def _plain(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else sound(value)
    return sound(json.dumps(value, ensure_ascii=False))


# ---- parquet -----------------------------------------------------------------------------------------------------------


def _parquet(name: str, names: list[str], source: ListSource) -> Iterator[list[pa.Array]]:
    import pyarrow.parquet as pq

    with Folder("/").open(name) as file, pq.ParquetFile(file) as parquet:
        found = list(parquet.schema_arrow.names)
        if sorted(found) != sorted(names):
            raise InputError(f"expected the columns of {source.files[0]} in {name}, found {', '.join(found)}")
        # by place where the order is the same, because names may repeat
        places = list(range(len(names))) if found == names else [found.index(n) for n in names]
        for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
            yield [_simplified(batch.column(place)) for place in places]


def _simple(kind: pa.DataType) -> pa.DataType:
    """The type under which a column of the source is carried: numbers, truth values and times stay, the rest is text."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _simple(kind.value_type)
    if pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_float16(kind):
        return pa.float32()  # DuckDB has no half precision
    keeps = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_timestamp,
        pa.types.is_date,
        pa.types.is_time,
    )
    return kind if any(is_kind(kind) for is_kind in keeps) else pa.string()


def _simplified(column: Any) -> Any:
    import pyarrow as pa

    kind = _simple(column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    types = pa.types
    strings = (types.is_string, types.is_large_string, types.is_string_view)
    binaries = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    if any(holds_bytes(column.type) for holds_bytes in strings + binaries):
        return as_text(column.cast(pa.binary()))  # of strings, too, nobody has checked that they are UTF-8
    try:
        return column.cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        values = (None if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in column.to_pylist())
        return pa.array(list(values), kind)
