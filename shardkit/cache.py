"""Whole shards of a remote set, kept on a local disk for the ranks of this machine.

A shard is fetched once, in large ranges, and compared with its sha256 before it gets its name; the name says which bytes
it holds, so whatever else uses the folder cannot be mistaken for it. A process that is killed leaves a `.part` file,
which the next fetch of that shard overwrites. Ranks wait for each other on a lock a shard.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from core.errors import ConfigError
from core.storage import Folder
from shardkit.index import Shard

log = logging.getLogger("pairmill.shardkit")

RANGE = 16 << 20  # bytes a request: an object store gives its full rate to a stream from some megabytes on
TRIES, PAUSE_S = 3, 1.0  # beyond those that the store's own client makes


def user_cache(gigabytes: float) -> ShardCache:
    """The cache in `pairmill/shards` of the user's cache folder (XDG_CACHE_HOME)."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return ShardCache(home / "pairmill" / "shards", int(gigabytes * 1e9))


class ShardCache:
    """Shards in `folder`, which together hold at most `most` bytes; the ones longest unused go first.

    A shard that someone still reads may go too: its readers keep their open file, and its room, until they move on.
    Attribute `fetched` counts the bytes that this process fetched.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most, self.fetched = folder, most, 0

    def local(self, remote: Folder, shard: Shard) -> Path:
        """The shard's file, fetched if it is not there.

        Raises:
            OSError: it cannot be fetched, or what comes is not what the list says.
            ConfigError: it is larger than the whole cache.
        """
        path = self._path(remote, shard)
        if not self._touch(path, shard):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(path):
                if not self._touch(path, shard):  # nobody else fetched it while we waited
                    self._make_room(shard)
                    self._fetch(remote, shard, path)
        return path

    def drop(self, remote: Folder, shard: Shard) -> None:
        """Forget a shard whose bytes have gone bad."""
        self._path(remote, shard).unlink(missing_ok=True)

    def _path(self, remote: Folder, shard: Shard) -> Path:
        name = shard.sha256 or hashlib.sha256(f"{remote.path(shard.name)} {shard.bytes}".encode()).hexdigest()
        return self.folder / f"{name}.tar"

    def _touch(self, path: Path, shard: Shard) -> bool:
        try:
            if path.stat().st_size != shard.bytes:
                return False
            os.utime(path)  # the time of last use, which says who goes first
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        with path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # freed by the kernel when its holder dies
            yield

    def _make_room(self, shard: Shard) -> None:
        if shard.bytes > self.most:
            raise ConfigError(
                f"shard {shard.name} of {shard.bytes / 1e9:.2f} GB is larger than the cache of {self.most / 1e9:.2f} GB; "
                "raise --cache-gb"
            )
        held = []
        for path in self.folder.glob("*.tar"):
            with contextlib.suppress(FileNotFoundError):
                held.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = sum(size for _, size, _ in held) + shard.bytes
        for _, size, path in sorted(held):
            if total <= self.most:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _fetch(self, remote: Folder, shard: Shard, path: Path) -> None:
        for attempt in range(TRIES):
            try:
                self._fetch_once(remote, shard, path.with_suffix(".part"))
                os.replace(path.with_suffix(".part"), path)
                return
            except OSError as error:
                if attempt + 1 == TRIES:
                    raise
                log.warning("%s: %s; trying again", remote.path(shard.name), error)
                time.sleep(PAUSE_S * 2**attempt)

    def _fetch_once(self, remote: Folder, shard: Shard, part: Path) -> None:
        digest, size = hashlib.sha256(), 0
        with part.open("wb") as file:
            while size < shard.bytes:
                block = remote.read_range(shard.name, size, min(RANGE, shard.bytes - size))
                if not block:
                    break
                file.write(block)
                digest.update(block)
                size += len(block)
                self.fetched += len(block)
        if size != shard.bytes or (shard.sha256 and digest.hexdigest() != shard.sha256):
            raise OSError(f"{remote.path(shard.name)} has changed: what came is not what the list says")
