"""A file of a URL list as text: what it is packed in and which encoding it has are told by its bytes, too.

Bytes that are not UTF-8 are replaced, never fatal.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import re
from collections.abc import Iterator
from typing import IO, Any, cast

from core.errors import InputError
from core.storage import Folder

_NESTED = 3  # compressed files within compressed files, at most
# BOMs, the longer ones first because UTF-32's begins with UTF-16's
_WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_FOREIGN = {b"PAR1": "parquet", b"PK\x03\x04": "a zip archive (or a spreadsheet)", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@contextlib.contextmanager
def opened(name: str) -> Iterator[IO[bytes]]:
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
            stream = _buffered(stack, cast("IO[bytes]", Pieces(_utf8(stream, encoding))))
        yield cast("IO[bytes]", stream)


def _buffered(stack: contextlib.ExitStack, stream: Any) -> io.BufferedReader:
    return stack.enter_context(io.BufferedReader(stream, 1 << 16))


def _utf8(stream: io.BufferedReader, encoding: str) -> Iterator[bytes]:
    """A text in another encoding, as UTF-8; Windows writes UTF-16."""
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while block := stream.read(1 << 16):
        yield decoder.decode(block).encode()
    yield decoder.decode(b"", final=True).encode()


class Pieces(io.RawIOBase):
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


def text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def as_text(column: Any) -> Any:
    """Bytes as text."""
    import pyarrow as pa

    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if v is None else text(v) for v in column.to_pylist()], pa.string())
