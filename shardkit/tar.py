"""Tar files: a deterministic USTAR writer, and a scan of any tar's members that checks every bound.

The writer puts no time, owner or machine into a header, so the same members make the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from core.errors import DataError

Int64 = npt.NDArray[np.int64]

BLOCK = 512
END = bytes(2 * BLOCK)
_REGULAR = b"0\0"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_ABOUT_NEXT = (_LONG_NAME, _LONG_LINK, _PAX)
_MAX_TEXT = 1 << 20  # a name or attribute block beyond this is damage, not a name


class Member(NamedTuple):
    """One file of a tar: `offset` and `size` in bytes are those of its data."""

    name: str
    offset: int
    size: int


class TarWriter:
    """Appends members to an open file, in the order given; `finish` writes the end mark.

    Members gather in a buffer, whose headers are made at once, and which is hashed and written whole.
    `digest` is the sha256 of what was written.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self._written = self._filled = 0
        self._buffer = memoryview(bytearray(_BUFFER))  # a bytearray would copy twice what is assigned to a part of it
        self._names, self._sizes, self._heads = list[str](), list[int](), list[int]()  # the last: block of each header

    @property
    def position(self) -> int:
        """Size of the tar so far, in bytes."""
        return self._written + self._filled

    def add(self, name: str, data: bytes) -> int:
        """Append one file and say at which byte of the tar its own begin.

        Raises:
            DataError: this name or one before it is longer than 100 bytes, or the file larger than 8 GiB.
        """
        size = len(data)
        end = self._filled + BLOCK + size
        if end > len(self._buffer) - BLOCK:
            self.flush()
            end = BLOCK + size
            if end > len(self._buffer) - BLOCK:
                self._buffer = memoryview(bytearray(end + BLOCK))
        self._names.append(name)
        self._sizes.append(size)
        self._heads.append(self._filled // BLOCK)
        self._filled = end + -end % BLOCK
        self._buffer[end - size : end] = data
        self._buffer[end : self._filled] = _PADDING[-end % BLOCK]
        return self._written + end - size

    def flush(self) -> None:
        """Hash and write what has gathered."""
        if not self._names:
            return
        blocks = np.frombuffer(self._buffer, np.uint8, self._filled).reshape(-1, BLOCK)
        blocks[self._heads] = headers(self._names, np.array(self._sizes))
        self._write(self._buffer[: self._filled])
        self._names, self._sizes, self._heads, self._filled = [], [], [], 0

    def finish(self) -> int:
        """Write the end mark; returns the size of the tar in bytes."""
        self.flush()
        self._write(END)
        return self._written

    def _write(self, data: bytes | memoryview) -> None:
        self.digest.update(data)
        self._file.write(data)
        self._written += len(data)


def headers(names: Sequence[str], sizes: Int64) -> npt.NDArray[np.uint8]:
    """USTAR headers (POSIX.1-1988) of n regular files of mode 0644, owner 0 and time 0: uint8 of shape (n, 512).

    Raises:
        DataError: a name is longer than 100 bytes, or a file is larger than 8 GiB.
    """
    encoded = [name.encode() for name in names]
    lengths = list(map(len, encoded))
    if min(lengths) == 0 or max(lengths) > 100 or sizes.max() >= 8**11:
        name, size = next(
            m for m in zip(names, sizes, strict=True) if not 0 < len(m[0].encode()) <= 100 or m[1] >= 8**11
        )
        raise DataError(
            f"expected member names of 1 to 100 bytes and less than 8 GiB each, found {name!r} with {size} bytes"
        )
    found = np.repeat(_HEADER, len(names), 0)
    found[:, :100] = np.array(encoded, "S100").view(np.uint8).reshape(-1, 100)
    found[:, 124:135] = _octal(sizes, 11)
    found[:, 148:154] = _octal(found.sum(1, np.int64), 6)
    found[:, 154] = 0
    return found


def _octal(numbers: Int64, digits: int) -> Int64:
    """Octal digits as ASCII, shape (n, digits)."""
    return (numbers[:, None] >> np.arange(3 * digits - 3, -1, -3) & 7) + ord("0")


_PADDING = [bytes(size) for size in range(BLOCK)]
_BUFFER = 1 << 20
# A header without name, size and checksum, whose own field counts as spaces.
_HEADER = np.frombuffer(
    bytes(100) + b"0000644\0" + b"0000000\0" * 2 + bytes(12) + b"%011o\0" % 0 + b" " * 8 + b"0" + bytes(100)
    + b"ustar\00000" + bytes(247), np.uint8,
)[None]  # fmt: skip


def scan(path: str) -> list[Member]:
    """The regular files of the tar at `path`, in order.

    Raises:
        DataError: the tar is cut short or damaged; the message names it and the byte.
    """
    with open(path, "rb") as file:
        return list(scan_file(file, path))


def scan_file(file: IO[bytes], label: str) -> Iterator[Member]:
    """The regular files of an open, seekable tar (USTAR, GNU long names, PAX); `label` names it in errors.

    Raises:
        DataError: a header is damaged, a member runs past the end, or the end mark is missing.
    """
    end = file.seek(0, 2)
    position = 0
    overrides: dict[str, str] = {}
    while True:
        file.seek(position)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise DataError(
                f"{label} is cut short: expected a tar header or the end mark at byte {position}, found the end"
            )
        if not any(block):
            return
        kind, size = block[156:157], _checked_size(block, label, position)
        offset = position + BLOCK
        if kind in _ABOUT_NEXT:
            text = file.read(min(size, _MAX_TEXT))
            overrides |= _pax(text, label, position) if kind == _PAX else {}
            overrides |= {"path": _text(text)} if kind == _LONG_NAME else {}
        elif kind != _PAX_GLOBAL:
            size = int(overrides.get("size", size))
        if offset + size > end:
            raise DataError(f"{label} is cut short: a member needs {offset + size} bytes, the file has {end}")
        if kind in _REGULAR:
            yield Member(overrides.get("path") or _name(block), offset, size)
        if kind not in _ABOUT_NEXT:
            overrides = {}
        position = offset + size + (-size % BLOCK)


def _checked_size(block: bytes, label: str, position: int) -> int:
    try:
        stored = int(block[148:156].strip(b"\0 ") or b"0", 8)
        if stored != sum(block) - sum(block[148:156]) + 8 * 0x20:
            raise ValueError
        if block[124] & 0x80:  # GNU's binary sizes, for files of 8 GiB and more
            return int.from_bytes(block[125:136], "big")
        return int(block[124:136].strip(b"\0 ") or b"0", 8)
    except ValueError:
        raise DataError(f"{label} is damaged: expected a tar header at byte {position}, found something else") from None


def _name(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    name = _text(block[0:100])
    return f"{prefix}/{name}" if prefix else name


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="surrogateescape")


def _pax(text: bytes, label: str, position: int) -> dict[str, str]:
    """`path` and `size` of a PAX attribute block, whose records read `LENGTH NAME=VALUE\\n`."""
    found = {}
    while text.strip(b"\0"):
        length, space, _ = text.partition(b" ")
        if not (space and length.isdigit() and len(length) < int(length) <= len(text)):
            raise DataError(f"{label} is damaged: expected PAX attributes at byte {position}, found something else")
        record, text = text[len(length) + 1 : int(length) - 1], text[int(length) :]
        key, _, value = record.partition(b"=")
        if key == b"path" or (key == b"size" and value.isdigit()):
            found[key.decode()] = value.decode(errors="surrogateescape")
    return found
