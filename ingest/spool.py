"""Rows in a temporary file: written batch by batch, then read in any order; and work a step ahead of who waits for it."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, TypeVar

from core.errors import StorageError

if TYPE_CHECKING:
    import pyarrow as pa

Item = TypeVar("Item")


class Spool:
    """Record batches of one schema, written into `file`. Text is packed to two fifths, which costs less than writing all of it.

    Raises:
        StorageError: the temporary folder is full.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._reader: pa.ipc.RecordBatchFileReader | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, batch: pa.RecordBatch) -> None:
        import pyarrow as pa

        try:
            if self._writer is None:
                options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
                self._writer = pa.ipc.new_file(pa.PythonFile(self._file, "w"), batch.schema, options=options)
            self._writer.write_batch(batch)
        except OSError as error:
            raise _full(error) from error
        self._count += 1

    def __getitem__(self, number: int) -> pa.RecordBatch:
        """What was added as number `number`; nothing can be added any more."""
        import pyarrow as pa

        if self._reader is None:
            assert self._writer is not None
            try:
                self._writer.close()
                self._file.flush()
            except OSError as error:
                raise _full(error) from error
            options = pa.ipc.IpcReadOptions(use_threads=False)
            self._reader = pa.ipc.open_file(pa.PythonFile(self._file, "r"), options=options)
        return self._reader.get_batch(number)


def _full(error: OSError) -> Exception:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    place = tempfile.gettempdir()
    return StorageError(
        f"the list does not fit into what is free in {place} ({error.strerror}); free some space there, or set TMPDIR "
        "to a folder on another disk"
    )


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """`items`, none of them None, each made in a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
