"""What is known of each sample, a shard at a time, so that a rank holds the rows of the shards it reads and no others."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from core.errors import DataError
from core.storage import Folder
from shardkit.index import SAMPLES, SHARDS, Shard
from shardkit.lanes import WHOLE, mix

Int64 = npt.NDArray[np.int64]
Rows = Callable[[list[str]], pa.Table]
"""Reads some of `COLUMNS` of one shard's rows; `crc32` is null where nobody knows it."""

COLUMNS = ["key", "uid", "captions", "jpg_offset", "jpg_size", "width", "height", "crc32", "image_group"]
SHARDS_HELD = 160  # the windows of 64 lanes, each with the one that comes next
_UID = 32  # bytes of an image group that is a uid, as ours all are


class Numbers(NamedTuple):
    """Of one sample; `crc32` is -1 where nobody knows it, `group` equal for samples of one picture."""

    jpg_offset: int
    jpg_size: int
    width: int
    height: int
    crc32: int
    group: int


class Words:
    """The strings of an Arrow array, by number: its own scalars take five times as long, 2 us a string."""

    def __init__(self, array: pa.Array) -> None:
        _, ends, text = array.buffers()
        self._ends = _ends(ends, array)
        self._text = memoryview(text or b"")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, at: int) -> str:
        start, stop = self._ends[at : at + 2].tolist()
        return str(self._text[start:stop], "utf-8")


class ShardRows:
    """The rows of one shard, n samples: words, and numbers as int64 of shape (n, 6), as `Numbers`."""

    def __init__(self, table: pa.Table) -> None:
        self.key, self.uid = (Words(table[name].combine_chunks()) for name in ("key", "uid"))
        captions = table["captions"].combine_chunks()
        self._captions, self._last = Words(captions.values), _ends(captions.buffers()[1], captions)
        numbers = [table[name].cast(pa.int64()).fill_null(-1).to_numpy() for name in Numbers._fields[:-1]]
        self.numbers: Int64 = np.stack([*numbers, _groups(table["image_group"])], 1)

    def captions(self, at: int) -> list[str]:
        """All captions of one sample."""
        start, stop = self._last[at : at + 2].tolist()
        return [self._captions[i] for i in range(start, stop)]


def _ends(buffer: pa.Buffer, array: pa.Array) -> npt.NDArray[np.int32]:
    """Where each of an Arrow array's n strings or lists begins, and the last one ends: shape (n + 1,)."""
    return np.frombuffer(buffer, np.int32)[array.offset : array.offset + len(array) + 1]


class RowCache:
    """The rows of a set's shards, by number, from any thread: those used last stay in memory.

    So many that no order reads a shard's rows twice in an epoch (`lanes.EpochOrder`): sets of up to WHOLE samples are
    held whole, and of larger ones the windows that are being mixed. 200 bytes a sample that is held.
    """

    def __init__(self, tables: Sequence[Rows], sets: int) -> None:
        self._tables, self._sets = tables, sets
        self._held: OrderedDict[int, ShardRows] = OrderedDict()
        self._rows = 0
        self._lock = threading.Lock()

    def __getitem__(self, shard: int) -> ShardRows:
        with self._lock:
            if shard in self._held:
                self._held.move_to_end(shard)
                return self._held[shard]
        found = ShardRows(self._tables[shard](COLUMNS))  # unlocked: a store that hangs must not hang the other threads
        with self._lock:
            if shard not in self._held:
                self._rows += len(found.uid)
            self._held[shard] = found
            while len(self._held) > self._sets * SHARDS_HELD and self._rows > self._sets * WHOLE:
                _, dropped = self._held.popitem(last=False)
                self._rows -= len(dropped.uid)
        return found

    def groups(self) -> Int64:
        """The image group of every sample of the set, int64 of shape (S,); nothing is kept."""
        return np.concatenate([_groups(table(["image_group"])["image_group"]) for table in self._tables])


def _groups(column: pa.ChunkedArray) -> Int64:
    """A number for each image group, equal for equal ones, and with near certainty for no others: 64 bits of a hash."""
    groups = column.combine_chunks().cast(pa.binary())
    if not len(groups):
        return np.empty(0, np.int64)
    ends = _ends(groups.buffers()[1], groups)
    if (np.diff(ends) == _UID).all():  # 100 times as fast as one by one
        words = np.frombuffer(groups.buffers()[2], np.uint8)[ends[0] : ends[-1]].copy().view(np.uint64).reshape(-1, 4)
        return _of_words(words).view(np.int64)
    return np.array([_of(group) for group in groups.to_pylist()], dtype=np.uint64).view(np.int64)


def _of(group: bytes) -> np.uint64:
    if len(group) == _UID:
        return _of_words(np.frombuffer(group, np.uint64)[None])[0]
    return np.uint64(xxhash.xxh3_64_intdigest(group))


def _of_words(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    total = np.zeros(len(words), np.uint64)
    for column in words.T:
        total = mix(total ^ column)
    return total


class SampleFile:
    """`samples.parquet` of a folder: one row group a shard that holds samples.

    Raises:
        DataError: it is missing, damaged, or lists other shards than `shards`.
    """

    def __init__(self, folder: Folder, shards: Sequence[Shard]) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        try:
            # by path where there is one: a table read from a Python file and still alive at exit aborts the process in one
            # of three runs where torch is loaded too (pyarrow 26, torch 2.13)
            source = folder.local / SAMPLES if folder.local is not None else folder.open(SAMPLES)
            self._file = pq.ParquetFile(source)
        except FileNotFoundError:
            raise DataError(
                f"expected {SAMPLES} beside {SHARDS} in {folder}, found none; run `pairmill shard` again"
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        filled = [i for i in range(self._file.num_row_groups) if self._file.metadata.row_group(i).num_rows]
        if [self._listed(i) for i in filled] != [(shard.name, shard.samples) for shard in shards if shard.samples]:
            raise DataError(
                f"{SAMPLES} and {SHARDS} of {folder} do not list the same shards; run `pairmill shard` again"
            )
        number = iter(filled)
        self._groups = [next(number) if shard.samples else None for shard in shards]

    def _listed(self, group: int) -> tuple[str, int]:
        """The shard of a row group, by the statistics of its first column, and its samples."""
        row_group = self._file.metadata.row_group(group)
        of = row_group.column(0).statistics
        one = of is not None and of.has_min_max and of.min == of.max
        return (of.min if one else "", row_group.num_rows)

    def read(self, shard: int, columns: list[str]) -> pa.Table:
        """The rows of one shard, by its number in the list."""
        group = self._groups[shard]
        with self._lock:  # of a reader that may not be shared
            try:
                if group is None:
                    return self._file.schema_arrow.empty_table().select(columns)
                return self._file.read_row_group(group, columns=columns, use_threads=False)
            except (pa.ArrowException, OSError, KeyError) as error:
                raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"expected the samples of {self.folder} in {SAMPLES}, found {error}")
