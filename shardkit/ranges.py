"""Byte ranges of a folder's files, read from any thread."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from core.storage import Folder

OPEN_FILES = 256  # well below the usual limit of 1024 a process


class RangeReader:
    """Reads ranges of a folder's files; local ones through a bounded cache of descriptors.

    Remote ones become local through `cached`, where it is given: from a file's name to a path on this machine.
    """

    def __init__(self, folder: Folder, cached: Callable[[str], str] | None = None) -> None:
        self.folder, self._cached = folder, cached
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of `name` from `offset`; fewer where the file ends.

        Raises:
            OSError: the file is not there or cannot be read.
        """
        path = self.folder.path(name)
        if "://" in path:
            if self._cached is None:
                return self.folder.read_range(name, offset, size)
            path = self._cached(name)
        descriptor = self._descriptor(path)
        data = os.pread(descriptor.number, size, offset)
        while len(data) < size and (more := os.pread(descriptor.number, size - len(data), offset + len(data))):
            data += more
        return data

    def forget(self, path: str) -> None:
        """Close a file, so that the next reader opens what is there by then."""
        with self._lock:
            self._open.pop(path, None)

    def _descriptor(self, path: str) -> _Descriptor:
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
        opened = _Descriptor(path)  # outside the lock: a file system that hangs must not hang the other threads
        with self._lock:
            self._open[path] = opened
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        return opened


class _Descriptor:
    """A file descriptor that closes when its last user lets go, so the cache may drop it while another thread reads."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
