"""Rows of csv and tsv files as Arrow columns. A line that is no row is refused, and those after it are read.

How a file is cut into fields is told by its first megabyte. Every column comes as text.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, cast

from ingest.listbytes import Pieces, as_text, opened, text

if TYPE_CHECKING:
    import pyarrow as pa

Refuse = Callable[[str], None]
"""Told, for each line that is no row, what is wrong with it."""

_SNIFF_BYTES = 1 << 20
_LINE_BYTES = 1 << 21  # of a line; nobody's caption is as long
_RECORD_BYTES = 1 << 17  # of a row of several lines, the most that the package csv takes for one field
_TO_QUOTE = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # from within a quoted field to its end


def columns(name: str, form: str) -> list[str]:
    """The first row with anything in it, none where the file is empty.

    Raises:
        csv.Error: a quote in it is never closed, or text follows the quote that closes it.
    """
    head = _head(name).removeprefix("\ufeff")
    return _first_row(head, _dialect(form, head))[0]


def rows(name: str, form: str, count: int, url: int, *, header: bool, refuse: Refuse) -> Iterator[list[pa.Array]]:
    """Batches of the columns of a csv or tsv.

    Args:
        form: csv or tsv, which is what decides where the text does not.
        count: columns; a line with another number of fields is refused.
        url: which of them holds URLs.
        header: whether the first row names the columns.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    head = _head(name)
    dialect = _dialect(form, head)
    names = [str(i) for i in range(count)]
    quote: Any = dialect.get("quotechar", False)

    def skip(row: Any) -> str:
        words = " ".join((row.text or "").split())
        refuse(
            f"row {row.number} of {name} has {row.actual_columns} fields, not {row.expected_columns}: {words[:80]!r}"
        )
        return "skip"

    with opened(name) as file:
        lines = _whole_lines(file, name, refuse)
        if quote:
            lines = _closed(lines, dialect["delimiter"].encode(), count, url, name, refuse)
        whole = cast("IO[bytes]", io.BufferedReader(Pieces(lines), 1 << 20))
        reader = arrow_csv.open_csv(
            pa.PythonFile(whole, mode="r"),
            arrow_csv.ReadOptions(
                use_threads=False, column_names=names, block_size=2 * _LINE_BYTES,
                skip_rows_after_names=_first_row(head, dialect)[1] if header else 0,
            ),
            arrow_csv.ParseOptions(
                delimiter=dialect["delimiter"], quote_char=quote, newlines_in_values=bool(quote), invalid_row_handler=skip
            ),
            arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()), strings_can_be_null=False),
        )  # fmt: skip
        for batch in reader:
            if batch.num_rows:
                yield [as_text(column) for column in batch.columns]


# ---- what the first megabyte tells -------------------------------------------------------------------------------------


def _head(name: str) -> str:
    with opened(name) as file:
        return text(file.read(_SNIFF_BYTES))


def _dialect(form: str, head: str) -> dict[str, Any]:
    """How `head` is to be cut into fields. Where the first line has not one of the form's own delimiters, it is that of
    another one: spreadsheets of half of Europe write semicolons into .csv."""
    line = next((line for line in head.splitlines() if line.strip()), "")
    delimiter = next((d for d in (",\t;|" if form == "csv" else "\t,;|") if d in line), "," if form == "csv" else "\t")
    if delimiter != "\t":
        return {"delimiter": delimiter, "quotechar": '"', "doublequote": True}
    return {"delimiter": "\t", **({"quotechar": '"'} if _is_quoted(head) else {"quoting": csv.QUOTE_NONE})}


def _first_row(head: str, dialect: dict[str, Any]) -> tuple[list[str], int]:
    """The first row with anything in it, and the number of rows up to and with it."""
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


# ---- which lines are rows ---------------------------------------------------------------------------------------------


def _closed(
    blocks: Iterator[bytes], delimiter: bytes, count: int, url: int, name: str, refuse: Refuse
) -> Iterator[bytes]:
    """The text of `blocks` of lines without the lines that open a quote which is not theirs to open.

    Such a quote would swallow every line up to the next quote, wherever that is. It is told by what it leads to: no end
    within `_RECORD_BYTES`, text behind the quote that ends it, another number of fields, or lines swallowed that are
    rows by themselves, with a URL in column `url`. The line is refused and those after it are read as if it were not there.
    """
    cell = rb'(?:"%b|(?!"))[^%b]*+' % (_TO_QUOTE.pattern, re.escape(delimiter))
    closed = re.compile(rb"(?:%b%b)*+%b" % (cell, re.escape(delimiter), cell))  # a line that ends outside of quotes
    lines: deque[bytes] = deque()  # or blocks of lines, where no quote is in them

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
                row = next(csv.reader(io.StringIO(text(b"".join(found)), newline=""), delimiter=delimiter.decode()))
                return found, len(row) == count and not (is_row(first) and any(map(is_row, found[1:])))
        return found, False

    def is_row(line: bytes) -> bool:
        fields = line.split(delimiter)
        return len(fields) == count and bool(re.match(rb'\s*"?https?://', fields[url], re.IGNORECASE))

    number = 1
    ready: list[bytes] = []
    while lines or more():
        line = lines.popleft()
        found = [line]
        if b'"' in line and not closed.fullmatch(line):
            found, whole = record(line)
            if not whole:
                words = text(line[:80]).strip()
                refuse(f"line {number} of {name} opens a quote that is not closed in its row: {words!r}")
                lines.extendleft(reversed(found[1:]))
                number += 1
                continue
        ready += found
        number += sum(max(piece.count(b"\n"), piece.count(b"\r")) for piece in found)
        if not lines:
            yield b"".join(ready)
            ready.clear()
    yield b"".join(ready)


def _whole_lines(file: IO[bytes], name: str, refuse: Refuse) -> Iterator[bytes]:
    """Blocks that end where a line does. A line that Arrow's block could not hold is refused."""
    rest = b""
    while block := file.read(_SNIFF_BYTES):
        rest += block
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r", 0, -1)) + 1  # at a last \r, its \n may be yet to come
        if end:
            yield rest[:end]
            rest = rest[end:]
        if len(rest) > _LINE_BYTES:
            refuse(f"a line of {name} has more than {_LINE_BYTES >> 20} MB: {text(rest[:80])!r}")
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
