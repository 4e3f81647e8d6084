"""Reads samples out of shards by offset, checks them, and hands out batches in epoch order ahead of time.

The trainer's only door to shards. `ShardSet.open` takes a folder that `pairmill shard` wrote, or any webdataset tars
(`folder`, `{00000..00007}.tar`), whose members it scans once. `BatchReader` reads ahead in threads and delivers the rank's
part of each global batch of an `EpochOrder`, in order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from types import TracebackType

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from core.errors import ConfigError, InputError, RunError
from shardkit.cache import ShardCache, user_cache
from shardkit.lanes import EpochOrder, Order
from shardkit.mixture import Mixture
from shardkit.opening import OnBad, Opened, open_sets
from shardkit.ranges import RangeReader
from shardkit.rows import Numbers, RowCache

__all__ = ["Batch", "BatchReader", "EpochOrder", "Mixture", "Sample", "ShardCache", "ShardSet", "user_cache"]

FETCHES = 8  # shards fetched at a time: one stream from an object store gives 50 to 100 MB/s
AHEAD = 32  # steps whose shards are fetched before they are read

log = logging.getLogger("pairmill.shardkit")
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture with its captions, as read.

    Attributes:
        data: the image file's bytes (JPEG in our shards; PNG or WebP are possible in foreign ones).
        image_group: equal for samples of the same picture.
        width, height: pixels, 0 where the index does not know them.
        index: the sample's number in the set.
        reason: why the bytes cannot be trusted; empty for a good sample.
    """

    data: bytes
    captions: list[str]
    uid: str
    image_group: int
    key: str
    shard: str
    width: int
    height: int
    index: int
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


class ShardSet:
    """All samples of a set of shards, readable by number from any thread.

    Attributes:
        shards: in listed order; sample numbers count through them.
        shard_sizes: samples in each, int64, as `EpochOrder` takes them.
        set_sizes: the same for each of several sets, as `Mixture` takes them.
        lost: samples of bad shards that were left out.
        fingerprint: digest of the shards' contents (of their names and sizes for foreign ones); the same set in another
            place has the same one.
        bytes_read, read_s: bytes of images read so far, and the seconds that threads spent on it, summed.
        reading: the shard that each thread (by its ident) is reading now.
    """

    def __init__(self, opened: Opened, cache: ShardCache | None = None) -> None:
        self.folder, self.shards, self.fingerprint = opened.folder, opened.shards, opened.fingerprint
        self.shard_sizes: Int64 = np.array([s.samples for s in self.shards], dtype=np.int64)
        self.set_sizes = np.split(self.shard_sizes, np.cumsum(opened.sets)[:-1])
        self.lost = sum(s.samples for s in opened.left_out)
        self.bytes_read, self.read_s = 0, 0.0
        self.reading: dict[int, str] = {}
        self._lock = threading.Lock()
        remote = any("://" in self.folder.path(shard.name) for shard in self.shards)
        self.cache = cache if remote else None
        self._by_name = {shard.name: shard for shard in self.shards}
        self._files = RangeReader(self.folder, self._local if self.cache else None)
        self._starts = np.concatenate([[0], np.cumsum(self.shard_sizes)])
        self._rows = RowCache(opened.tables, len(opened.sets))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def fetched(self) -> int:
        """Bytes that came from afar so far."""
        return self.cache.fetched if self.cache is not None else 0

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str] | Sequence[str],
        *,
        check: bool = False,
        on_bad: OnBad = "stop",
        cache: ShardCache | None = None,
    ) -> ShardSet:
        """Open folders of shards, ours or foreign; several are read as one set.

        Args:
            url: a folder, or a webdataset pattern of tars (`path/{00000..00007}.tar`, `path/*.tar`), or several.
            check: compare each shard's sha256 too, which reads them all.
            cache: keeps whole shards of remote sets on a local disk; without it every picture is a request of its own.
            on_bad: `skip` leaves shards out that are missing or damaged, with a warning, and counts their samples.

        Raises:
            InputError: there are no shards.
            DataError: a shard is missing or is not what the index says; the message names it.
        """
        urls = [url] if isinstance(url, (str, os.PathLike)) else list(url)
        return cls(open_sets(urls, check, on_bad), cache)

    def captions(self, index: int) -> list[str]:
        """All captions of one sample, without reading its image."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._rows[shard].captions(index - int(self._starts[shard]))

    def image_groups(self) -> Int64:
        """The image group of every sample, int64 of shape (S,); read anew at each call."""
        return self._rows.groups()

    def read(self, indices: Int64) -> list[Sample]:
        """The samples with these numbers, in this order. A bad one carries its reason; nothing is raised for it.

        Raises:
            DataError: the list of samples has been damaged since it was opened.
        """
        indices = np.asarray(indices, dtype=np.int64)
        start = time.perf_counter()
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        at = indices - self._starts[shard_of]
        samples: list[Sample | None] = [None] * len(indices)
        for i in np.argsort(indices, kind="stable").tolist():  # number order is disk order
            samples[i] = self._read_one(int(indices[i]), int(shard_of[i]), int(at[i]))
        self.reading.pop(threading.get_ident(), None)
        found = [sample for sample in samples if sample is not None]
        with self._lock:
            self.bytes_read += sum(len(sample.data) for sample in found)
            self.read_s += time.perf_counter() - start
        return found

    def shards_of(self, indices: Int64) -> set[int]:
        """Numbers of the shards that these samples lie in."""
        return set((np.searchsorted(self._starts, indices, side="right") - 1).tolist())

    def prefetch(self, numbers: set[int]) -> None:
        """Bring these shards into the cache, several at a time; what cannot be fetched is told by `read`."""

        def bring(number: int) -> None:
            with contextlib.suppress(OSError):
                self._local(self.shards[number].name)

        with ThreadPool(FETCHES) as pool:  # whose threads no process waits for at its end, should a store never answer
            pool.map(bring, sorted(numbers), chunksize=1)

    def _local(self, name: str) -> str:
        if self.cache is None or "://" not in self.folder.path(name):
            return self.folder.path(name)
        return str(self.cache.local(self.folder, self._by_name[name]))

    def _read_one(self, index: int, shard: int, at: int) -> Sample:
        """Sample `at` of a shard; what has rotted in the cache is fetched again, once."""
        name = self.shards[shard].name
        self.reading[threading.get_ident()] = name
        rows = self._rows[shard]
        numbers = Numbers._make(rows.numbers[at].tolist())
        data, reason = self._read_once(name, numbers)
        if reason and self.cache is not None:
            path = self._local(name) if len(data) else ""
            self.cache.drop(self.folder, self.shards[shard])
            self._files.forget(path)
            data, reason = self._read_once(name, numbers)
        words = rows.captions(at), rows.uid[at], numbers.group, rows.key[at]
        return Sample(data, *words, name, numbers.width, numbers.height, index, reason)

    def _read_once(self, name: str, known: Numbers) -> tuple[bytes, str]:
        """A sample's bytes, and why they cannot be trusted."""
        try:
            data = self._files.read(name, known.jpg_offset, known.jpg_size)
        except OSError as error:
            return b"", f"{name} cannot be read: {error.strerror or error}"
        if len(data) != known.jpg_size:
            return data, f"{name} is cut short: expected {known.jpg_size} bytes, found {len(data)}"
        if known.crc32 >= 0 and isal_zlib.crc32(data) != known.crc32:
            return data, f"{name} has changed: the sample's crc32 differs from the index"
        return data, ""


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of global batch `step`: B / ranks samples."""

    step: int
    samples: list[Sample]


class BatchReader:
    """Iterates over a rank's batches of one epoch from `start_step`, in order, read ahead by threads.

    Use it as a context manager, or call `close`.

    Args:
        depth: batches ready or being read at most.
        threads: batches being read at once.
        timeout_s: how long the next batch may take before the epoch is given up.

    Raises:
        RunError: no batch came within `timeout_s`; the message names rank, shard and stage. Also a bug in a thread is
            raised where its batch would have been delivered.
    """

    def __init__(
        self,
        shard_set: ShardSet,
        order: Order,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
        *,
        depth: int = 4,
        threads: int = 2,
        timeout_s: float = 120.0,
    ) -> None:
        if order.samples != len(shard_set):
            raise InputError(f"expected an order of the set's {len(shard_set)} samples, found one of {order.samples}")
        order.rank_indices(0, rank, ranks)  # refuses a rank count that cannot be before any thread starts
        self.shard_set, self.order, self.rank, self.ranks = shard_set, order, rank, ranks
        self.depth, self.timeout_s = depth, timeout_s
        self._next_read = self._next_out = start_step
        self._ready: dict[int, Batch | BaseException] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [  # daemons, because a read that hangs for ever must not keep the process alive
            threading.Thread(target=self._work, name=f"pairmill-read-{i}", daemon=True)
            for i in range(min(threads, depth))
        ]
        if shard_set.cache is not None:
            self._threads.append(threading.Thread(target=self._fetch, name="pairmill-fetch", daemon=True))
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while self._next_out < self.order.steps:
            yield self._take()

    def __len__(self) -> int:
        """Batches still to come."""
        return self.order.steps - self._next_out

    @property
    def ready(self) -> int:
        """Batches that wait to be taken."""
        return len(self._ready)

    def _take(self) -> Batch:
        with self._changed:
            arrived = False
            while not arrived:
                before = self.shard_set.fetched
                arrived = self._changed.wait_for(lambda: self._closed or self._next_out in self._ready, self.timeout_s)
                if not arrived and self.shard_set.fetched == before:
                    break  # while a large shard still comes in nobody starves
            if self._closed:
                raise RunError("the reader was closed while a batch was awaited")
            if not arrived:
                raise RunError(self._starved())
            batch = self._ready.pop(self._next_out)
            self._next_out += 1
            self._changed.notify_all()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def _starved(self) -> str:
        shards = sorted(set(self.shard_set.reading.values()))
        return (
            f"rank {self.rank} starved in stage read: batch {self._next_out} did not come within {self.timeout_s:g} s, "
            f"reading {', '.join(shards) or 'no shard'} of {self.shard_set.folder}; check that disk or network, then resume"
        )

    def _work(self) -> None:
        while (step := self._claim()) is not None:
            batch: Batch | BaseException
            try:
                indices = self.order.rank_indices(step, self.rank, self.ranks)
                batch = Batch(step, self.shard_set.read(indices))
            except Exception as error:  # crosses to the taker's thread, where it is raised
                batch = error
            with self._changed:
                self._ready[step] = batch
                self._changed.notify_all()

    def _fetch(self) -> None:
        """Fetch the shards of later steps, until all have been or nobody wants them."""
        done = set[int]()
        for step in range(self._next_out, self.order.steps):
            with self._changed:
                self._changed.wait_for(lambda step=step: self._closed or step < self._next_out + AHEAD)  # type: ignore[misc]
                if self._closed:
                    return
            wanted = self.shard_set.shards_of(self.order.rank_indices(step, self.rank, self.ranks)) - done
            if wanted:
                try:
                    self.shard_set.prefetch(wanted)
                except ConfigError:  # the reading threads meet it too, and raise it where it is heard
                    return
            done |= wanted

    def _claim(self) -> int | None:
        """The next step to read, once there is room for it; None at the end of the epoch."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next_read < self._next_out + self.depth)
            if self._closed or self._next_read >= self.order.steps:
                return None
            self._next_read += 1
            return self._next_read - 1

    def close(self) -> None:
        """Stop reading; what a thread is in the middle of is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
