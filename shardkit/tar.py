"""Tar files: a deterministic USTAR writer, and a scan of any tar's members that checks every bound.

The writer puts no time, owner or machine into a header, so the same members make the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

from core.errors import DataError

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
    """Appends members to an open file in the order given; `finish` writes the end mark.

    `position` is the size of the tar so far, in bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.position = 0

    def add(self, name: str, data: bytes) -> Member:
        """Append one file and say where its bytes lie."""
        member = Member(name, self.position + BLOCK, len(data))
        self.position += self._file.write(b"".join([header(name, len(data)), data, PADDING[len(data) % BLOCK]]))
        return member

    def finish(self) -> int:
        """Write the end mark; returns the size of the tar in bytes."""
        self.position += self._file.write(END)
        return self.position


PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]
"""What follows a member, by its size modulo a block."""
# What lies between name and size, between size and checksum, and behind that, in every header.
_OWNER = b"0000644\0" + b"0000000\0" * 2
_TIME = b"\0" + b"%011o\0" % 0
_KIND = b"0" + bytes(100) + b"ustar\00000" + bytes(247)
_FORM = b"%b" + _OWNER + b"%b" + _TIME + b"%06o\0 " + _KIND
_FIXED_SUM = sum(_OWNER) + sum(_TIME) + sum(_KIND) + 8 * 0x20  # the checksum's own field counts as spaces


def header(name: str, size: int) -> bytes:
    """The 512-byte USTAR header (POSIX.1-1988) of a regular file: mode 0644, owner 0, time 0.

    Raises:
        DataError: the name is longer than 100 bytes, or the file is larger than 8 GiB.
    """
    encoded = name.encode()
    if not 0 < len(encoded) <= 100 or size >= 8**11:
        raise DataError(f"expected a member name of 1 to 100 bytes and less than 8 GiB, found {name!r} of {size} bytes")
    digits = b"%011o" % size
    # the low half of an Adler-32 is one more than the sum of the bytes, at a fifth of what `sum` takes
    total = _FIXED_SUM + (zlib.adler32(encoded + digits) & 0xFFFF) - 1
    return _FORM % (encoded.ljust(100, b"\0"), digits, total)


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
