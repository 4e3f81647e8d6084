"""The files of a URL list as Arrow batches, one batch schema for all of them.

Text forms (csv, tsv, json, jsonl, txt) come as columns of text, types being settled later over the whole list; parquet
keeps its types as far as they are simple. Bytes that are not UTF-8 are replaced, never fatal; a line that is no row is
counted in `refused`. Compression and UTF-16 are told by the bytes, too.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

from core.errors import InputError, nearest
from core.schema import sound
from core.storage import Folder

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("parquet", "csv", "tsv", "json", "jsonl", "txt")
_ALIASES = {"pq": "parquet", "ndjson": "jsonl", "tab": "tsv", "lst": "txt", "list": "txt"}
BATCH_ROWS = 20_000
_SNIFF_BYTES = 1 << 20
_LINE_BYTES = 1 << 21  # of a line; nobody's caption is as long
_RECORD_BYTES = 1 << 17  # of a row of several lines, the most that the package csv takes for one field
_TO_QUOTE = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # from within a quoted field to its end
_NESTED = 3  # compressed files within compressed files, at most
# BOMs, the longer ones first because UTF-32's begins with UTF-16's
_WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_FOREIGN = {b"PAR1": "parquet", b"PK\x03\x04": "a zip archive (or a spreadsheet)", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


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
def _opened(name: str) -> Iterator[IO[bytes]]:
    """The text of a file as UTF-8: decompressed by its ending and by what it holds.

    Raises:
        InputError: it is no text at all.
    """
    wraps = re.search(r"(?:\.(?:gz|zst|zstd))*$", name.lower())
    endings = wraps[0].split(".")[:0:-1] if wraps else []  # the outermost first
    with contextlib.ExitStack() as stack:
        stream = _buffered(stack, stack.enter_context(Folder("/").open(name)))
        for number in range(_NESTED + len(endings)):
            head = stream.peek(8)[:8]
            if head.startswith(b"\x1f\x8b") or endings[number : number + 1] == ["gz"]:
                stream = _buffered(stack, cast("IO[bytes]", gzip.GzipFile(fileobj=stream, mode="rb")))
            elif head.startswith(b"\x28\xb5\x2f\xfd") or number < len(endings):
                import pyarrow as pa

                # Arrow's, because that of the package zstandard takes a file cut short for a whole one
                stream = _buffered(stack, pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd"))
            else:
                break
        if what := next((what for mark, what in _FOREIGN.items() if head.startswith(mark)), None):
            raise InputError(
                f"expected text in {name}, found {what}; unpack it, or give it the ending that it should have"
            )
        if encoding := next((wide for bom, wide in _WIDE.items() if head.startswith(bom)), None):
            stream = _buffered(stack, cast("IO[bytes]", _Pieces(_utf8(stream, encoding))))
        yield cast("IO[bytes]", stream)


def _buffered(stack: contextlib.ExitStack, stream: Any) -> io.BufferedReader:
    return stack.enter_context(io.BufferedReader(stream, 1 << 16))


def _utf8(stream: io.BufferedReader, encoding: str) -> Iterator[bytes]:
    """A text in another encoding, as UTF-8; Windows writes UTF-16."""
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while block := stream.read(1 << 16):
        yield decoder.decode(block).encode()
    yield decoder.decode(b"", final=True).encode()


class _Pieces(io.RawIOBase):
    """Pieces of a text as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._ready = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._ready = memoryview(piece)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


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
        with _opened(name) as file:
            head = _text(file.read(_SNIFF_BYTES)).removeprefix("\ufeff")
        row, _ = _first_row(head, _dialect(form, head))
        return [str(i) for i in range(len(row))] if positions else row


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
                    yield from _delimited(form, name, names, positions, source)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


# ---- txt ---------------------------------------------------------------------------------------------------------------


def _txt(source: ListSource) -> Iterator[pa.RecordBatch]:
    """Any line is a URL, commas and all; empty lines are not rows."""
    import pyarrow as pa

    for name in source.files:
        with _readable(name), _opened(name) as file:
            lines = io.TextIOWrapper(file, "utf-8", errors="replace")  # which also knows the line ends of old Macs
            urls = (url for line in lines if (url := line.removeprefix("\ufeff").strip()))
            while chunk := list(itertools.islice(urls, BATCH_ROWS)):
                yield pa.record_batch({"url": pa.array(chunk, pa.string())})


# ---- csv and tsv -------------------------------------------------------------------------------------------------------


def _dialect(form: str, head: str) -> dict[str, Any]:
    """How `head` is to be cut into fields. Where the first line has not one of the form's own delimiters, it is that of
    another one: spreadsheets of half of Europe write semicolons into .csv."""
    line = next((line for line in head.splitlines() if line.strip()), "")
    delimiter = next((d for d in (",\t;|" if form == "csv" else "\t,;|") if d in line), "," if form == "csv" else "\t")
    if delimiter != "\t":
        return {"delimiter": delimiter, "quotechar": '"', "doublequote": True}
    return {"delimiter": "\t", **({"quotechar": '"'} if _is_quoted(head) else {"quoting": csv.QUOTE_NONE})}


def _first_row(head: str, dialect: dict[str, Any]) -> tuple[list[str], int]:
    """The first row with anything in it, and the number of rows up to and with it.

    Raises:
        csv.Error: a quote in it is never closed, or text follows the quote that closes it.
    """
    reader = csv.reader(io.StringIO(head, newline=""), **dialect, strict=True)
    number = 0
    try:
        for number, row in enumerate(reader, 1):
            if row:
                return row, number
    except csv.Error as error:
        raise csv.Error(f"row {number + 1} has a stray quote, {error}") from error
    return [], 0


def _is_quoted(head: str) -> bool:
    """Whether a tab-separated text quotes its fields.

    Published lists are mostly unquoted and hold captions that merely begin with a quote; read as quoted, one of them
    swallows thousands of lines. So quotes count only where they are needed to get equal numbers of fields, or where
    each field that begins with one is a well-formed quoted field.
    """
    lines = head.splitlines()[:-1] or [head]
    split = [line.split("\t") for line in lines if line]
    if len({len(fields) for fields in split}) > 1:
        try:
            records = list(csv.reader(io.StringIO(head, newline=""), delimiter="\t", strict=True))
        except csv.Error:
            return False
        return len({len(record) for record in records[:-1] if record}) == 1
    quoted = [f for fields in split for f in fields if f.startswith('"')]
    return bool(quoted) and all(re.fullmatch(r'"(?:[^"]|"")*"', f) for f in quoted)


def _delimited(form: str, name: str, names: list[str], positions: bool, source: ListSource) -> Iterator[list[pa.Array]]:
    """Rows of a csv or tsv; a line with another number of fields is refused."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with _opened(name) as file:
        head = _text(file.read(_SNIFF_BYTES))
        dialect = _dialect(form, head)
    skipped = 0 if positions else _first_row(head, dialect)[1]
    columns = [str(i) for i in range(len(names))]
    quote: Any = dialect.get("quotechar", False)

    def refuse(row: Any) -> str:
        text = " ".join((row.text or "").split())
        source.refuse(
            f"row {row.number} of {name} has {row.actual_columns} fields, not {row.expected_columns}: {text[:80]!r}"
        )
        return "skip"

    with _opened(name) as file:
        if quote:
            place = _labels(names).index(source.url)
            lines = _closed(file, dialect["delimiter"].encode(), len(names), place, name, source)
        else:
            lines = _whole_lines(file, name, source)
        text = cast("IO[bytes]", io.BufferedReader(_Pieces(lines), 1 << 20))
        reader = arrow_csv.open_csv(
            pa.PythonFile(text, mode="r"),
            arrow_csv.ReadOptions(
                use_threads=False, column_names=columns, skip_rows_after_names=skipped, block_size=2 * _LINE_BYTES
            ),
            arrow_csv.ParseOptions(
                delimiter=dialect["delimiter"], quote_char=quote, newlines_in_values=bool(quote), invalid_row_handler=refuse
            ),
            arrow_csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.binary()), strings_can_be_null=False),
        )  # fmt: skip
        for batch in reader:
            if batch.num_rows:
                yield [_strings(column) for column in batch.columns]


def _closed(
    file: IO[bytes], delimiter: bytes, columns: int, url: int, name: str, source: ListSource
) -> Iterator[bytes]:
    """The text of `file` without the lines that open a quote which is not theirs to open.

    Such a quote would swallow every line up to the next quote, wherever that is. It is told by what it leads to: no end
    within `_RECORD_BYTES`, text behind the quote that ends it, another number of fields, or lines swallowed that are
    rows by themselves, with a URL in column `url`. The line is refused and those after it are read as if it were not there.
    """
    cell = rb'(?:"%b|(?!"))[^%b]*+' % (_TO_QUOTE.pattern, re.escape(delimiter))
    closed = re.compile(rb"(?:%b%b)*+%b" % (cell, re.escape(delimiter), cell))  # a line that ends outside of quotes
    lines: deque[bytes] = deque()  # or blocks of lines, where no quote is in them
    blocks = _whole_lines(file, name, source)

    def more() -> bool:
        block = next(blocks, b"")
        lines.extend(block.splitlines(keepends=True) if b'"' in block else [block] if block else [])
        return bool(block)

    def record(first: bytes) -> tuple[list[bytes], bool]:
        """`first`, which ends within quotes, with the lines up to the closing one, and whether they are one row."""
        found, size = [first], len(first)
        while lines or more():
            line = lines.popleft()
            found.append(line)
            size += len(line)
            if size > _RECORD_BYTES:
                break
            if end := _TO_QUOTE.match(line):
                rest = line[end.end() :]
                if rest.startswith(delimiter):
                    if not closed.fullmatch(rest[1:]):
                        continue  # into the next quoted field
                elif rest.strip(b"\r\n"):
                    return found, False
                row = next(csv.reader(io.StringIO(_text(b"".join(found)), newline=""), delimiter=delimiter.decode()))
                return found, len(row) == columns and not (is_row(first) and any(map(is_row, found[1:])))
        return found, False

    def is_row(line: bytes) -> bool:
        fields = line.split(delimiter)
        return len(fields) == columns and bool(re.match(rb'\s*"?https?://', fields[url], re.IGNORECASE))

    number = 1
    ready: list[bytes] = []
    while lines or more():
        line = lines.popleft()
        found = [line]
        if b'"' in line and not closed.fullmatch(line):
            found, whole = record(line)
            if not whole:
                text = _text(line[:80]).strip()
                source.refuse(f"line {number} of {name} opens a quote that is not closed in its row: {text!r}")
                lines.extendleft(reversed(found[1:]))
                number += 1
                continue
        ready += found
        number += sum(max(piece.count(b"\n"), piece.count(b"\r")) for piece in found)
        if not lines:
            yield b"".join(ready)
            ready.clear()
    yield b"".join(ready)


def _whole_lines(file: IO[bytes], name: str, source: ListSource) -> Iterator[bytes]:
    """Blocks that end where a line does. A line that Arrow's block could not hold is refused."""
    rest = b""
    while block := file.read(_SNIFF_BYTES):
        rest += block
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r", 0, -1)) + 1  # at a last \r, its \n may be yet to come
        if end:
            yield rest[:end]
            rest = rest[end:]
        if len(rest) > _LINE_BYTES:
            source.refuse(f"a line of {name} has more than {_LINE_BYTES >> 20} MB: {_text(rest[:80])!r}")
            rest = _behind_line(file, rest[-1:])
    if rest:
        yield rest


def _behind_line(file: IO[bytes], rest: bytes) -> bytes:
    """What was read of `file` behind the end of its present line, whose last byte so far is `rest`."""
    while block := file.read(_SNIFF_BYTES):
        rest += block
        if end := re.search(rb"\r\n|\r(?!\Z)|\n", rest):
            return rest[end.end() :]
        rest = rest[-1:]
    return b""


def _strings(column: Any) -> Any:
    """Bytes as text."""
    import pyarrow as pa

    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if v is None else _text(v) for v in column.to_pylist()], pa.string())


# ---- json and jsonl ----------------------------------------------------------------------------------------------------


def _records(form: str, name: str) -> Iterator[dict[str, Any] | None]:
    """Objects of a JSON list or of JSON lines; None for a line that is not an object."""
    with _opened(name) as file:
        if form == "json":
            data = json.loads(_text(file.read()).removeprefix("\ufeff"))
            if not isinstance(data, list):
                raise InputError(f"expected a list of records in {name}, found a single {type(data).__name__}")
            yield from (r if isinstance(r, dict) else None for r in data)
            return
        for line in file:
            if line.strip():
                try:
                    record = json.loads(_text(line).removeprefix("\ufeff"))
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
        return _strings(column.cast(pa.binary()))  # of strings, too, nobody has checked that they are UTF-8
    try:
        return column.cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        values = (None if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in column.to_pylist())
        return pa.array(list(values), kind)
