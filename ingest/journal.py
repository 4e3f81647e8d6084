"""What an unfinished unit has fetched so far, on disk, so that a killed run asks no server twice for it.

Way in: `add` appends what is known of one URL and its picture. Way out: `records` after a kill, up to the first record that
is not whole; `read` for the tar. The pictures of a unit lie here and not in memory until its tar is written.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.storage import Folder, storage_errors

HOME = "ingest/journal"
_HEAD = struct.Struct("<4sIIQ")  # mark, bytes of words, bytes of picture, xxh3-64 of both
_MARK = b"pmj1"

Words = list[Any]


class Journal:
    """The journal of unit `name`; in an object store's stead a temporary file, which dies with the process.

    So it is where another process is still at this unit: a node that a cluster has given up may live on for a moment.

    Raises:
        StorageError: the disk is full or cannot be written.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._path = None if folder.local is None else folder.local / HOME / name
        self._where = str(self._path or f"temporary files in {tempfile.gettempdir()}")
        with storage_errors(self._where):
            self._file = _opened(self._path)
            if self._path is not None and not _taken(self._file):
                self._file.close()
                self._path, self._file = None, _opened(None)
        self._end = 0

    def records(self) -> Iterator[tuple[Words, int, int]]:
        """What an earlier run has added: words, and where the picture lies (start, size). Call it before `add`."""
        while (found := self._record_at(self._end)) is not None:
            words, start, size = found
            self._end = start + size
            yield words, start, size
        if os.fstat(self._file.fileno()).st_size > self._end:
            os.ftruncate(self._file.fileno(), self._end)  # what a kill or a power cut left half written

    def _record_at(self, position: int) -> tuple[Words, int, int] | None:
        head = self.read(position, _HEAD.size)
        if len(head) < _HEAD.size:
            return None
        mark, words_size, size, check = _HEAD.unpack(head)
        body = self.read(position + _HEAD.size, words_size + size) if mark == _MARK else b""
        if len(body) != words_size + size or mark != _MARK or _checked(body) != check:
            return None
        return json.loads(body[:words_size], object_hook=_value), position + _HEAD.size + words_size, size

    def add(self, words: Words, data: bytes = b"") -> tuple[int, int]:
        """Append what is known of one URL, and its picture; returns where that lies: (start, size)."""
        text = json.dumps(words, default=_spelt).encode()
        body = text + data
        record = memoryview(_HEAD.pack(_MARK, len(text), len(data), _checked(body)) + body)
        at = self._end
        with storage_errors(self._where):
            while record:
                written = os.pwrite(self._file.fileno(), record, at)
                at, record = at + written, record[written:]
        self._end = at
        return at - len(data), len(data)

    def read(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`; fewer where the file ends."""
        return os.pread(self._file.fileno(), size, start)

    def close(self, *, done: bool) -> None:
        """Close the file, and remove it where the unit is `done`: what it held lies in tar and part now."""
        self._file.close()
        if done and self._path is not None:
            self._path.unlink(missing_ok=True)


def _opened(path: Path | None) -> Any:
    if path is None:
        return tempfile.TemporaryFile(buffering=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)


def _taken(file: Any) -> bool:
    """Whether this process holds the file now; released by the kernel on any death of it."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _checked(body: bytes) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(body)


def _spelt(value: Any) -> dict[str, str]:
    """Bytes and moments, which JSON has no words for."""
    if isinstance(value, datetime.datetime):
        return {"$time": value.isoformat()}
    return {"$bytes": value.hex()}


def _value(found: dict[str, Any]) -> Any:
    if "$time" in found:
        return datetime.datetime.fromisoformat(found["$time"])
    return bytes.fromhex(found["$bytes"]) if "$bytes" in found else found
