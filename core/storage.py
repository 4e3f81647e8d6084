"""The only user of fsspec: open, list, hash, and publish atomically, on a local disk or an object store.

A local file is published by temp, fsync, rename, fsync of the folder; a remote one by one PUT. A reader therefore sees a
whole file or none, also after kill -9 or on a full disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from core.errors import InputError, StorageError

TEMPORARY = ".tmp-"
STALE_S = 86_400  # what another machine began to write and left alone for so long is no longer being written


class Folder:
    """One folder, named by a path or an fsspec URL; all names below it are relative and use forward slashes.

    Picklable, so that units can carry it to workers.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        if not os.fspath(url):
            raise InputError("expected a folder, found an empty name")  # which would else be the root of the disk
        self.url = os.fspath(url).rstrip("/") or "/"
        scheme, separator, rest = self.url.partition("://")
        if separator and scheme == "file":
            self.url, separator = rest, ""
        self.local: Path | None = None if separator else Path(self.url)

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Folder:
        return Folder(self.path(name))

    def path(self, name: str) -> str:
        """Full path or URL of `name`. A name that is itself absolute or a URL stands for itself."""
        if name.startswith("/") or "://" in name:
            return name
        if name in ("", "."):
            return self.url
        return f"{self.url}/{name}"

    def _remote(self, name: str) -> tuple[Any, str]:
        try:
            # a cached listing would hide what other processes write
            return _open_store(self.path(name), use_listings_cache=False)
        except ImportError as error:
            raise StorageError(f"{self.url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise StorageError(f"{self.url} cannot be opened: {error}; choose another folder with --work") from error

    def remembering(self) -> Any:
        """The fsspec file system of an object store, which remembers for a minute from now what it lists: for who reads many
        files that nobody is writing, and would ask five times for the size of each."""
        fs, _ = _open_store(self.url, use_listings_cache=True, listings_expiry_time=60)
        fs.invalidate_cache()
        return fs

    def _local_path(self, name: str) -> Path | None:
        path = self.path(name)
        return None if "://" in path else Path(path)

    def exists(self, name: str) -> bool:
        local = self._local_path(name)
        if local is not None:
            return local.exists()
        fs, path = self._remote(name)
        return bool(fs.exists(path))

    def size(self, name: str) -> int:
        """Bytes of file `name`."""
        local = self._local_path(name)
        if local is not None:
            return local.stat().st_size
        fs, path = self._remote(name)
        return int(fs.size(path))

    def list(self, pattern: str) -> list[str]:
        """Sorted names matching `pattern` (`parts/*.parquet`; wildcards in the last segment only), unfinished ones left out."""
        parent, _, leaf = pattern.rpartition("/")
        local = self._local_path(parent)
        names: list[str]
        if local is not None:
            names = os.listdir(local) if local.is_dir() else []
        else:
            fs, path = self._remote(parent)
            names = []
            with contextlib.suppress(FileNotFoundError):
                names = [p.rstrip("/").rsplit("/", 1)[-1] for p in fs.ls(path, detail=False)]
        chosen = sorted(n for n in names if fnmatch.fnmatchcase(n, leaf) and not n.startswith(TEMPORARY))
        return [f"{parent}/{n}" if parent else n for n in chosen]

    def open(self, name: str) -> IO[bytes]:
        """A file object to read `name` from."""
        local = self._local_path(name)
        if local is not None:
            return local.open("rb")
        fs, path = self._remote(name)
        return fs.open(path, "rb")

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of `name` from `offset`; fewer where the file ends."""
        local = self._local_path(name)
        if local is None:
            fs, path = self._remote(name)
            return fs.cat_file(path, start=offset, end=offset + size)
        with local.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> Sequence[bytes | OSError]:
        """Bytes of many (name, offset, size) at once, for object stores, where waiting costs more than bytes.

        Returns what `read_range` would give of each, or the error that it met.
        """
        if not ranges:
            return []
        fs, _ = self._remote(ranges[0][0])
        paths = [fs._strip_protocol(self.path(name)) for name, _, _ in ranges]
        starts = [offset for _, offset, _ in ranges]
        ends = [offset + size for _, offset, size in ranges]
        found = fs.cat_ranges(paths, starts, ends, on_error="return")
        return [one if isinstance(one, bytes | OSError) else OSError(_words(one)) for one in found]

    def sha256(self, name: str) -> str:
        """Hex digest of the whole file."""
        digest = hashlib.sha256()
        with self.open(name) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def write(self, name: str, data: bytes) -> None:
        """Publish `data` as `name`, whole or not at all."""
        with self.staged(name) as path:
            path.write_bytes(data)

    @contextlib.contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """A local temporary path to write to; on a clean exit it is published as `name`, on an error it is removed.

        Raises:
            StorageError: the folder cannot be written, or the disk is full (what was finished before stays).
        """
        local = self._local_path(name)
        with storage_errors(self.path(name)):
            if local is not None:
                local.parent.mkdir(parents=True, exist_ok=True)
                temporary = local.parent / temporary_name(local.name)
            else:
                temporary = Path(tempfile.mkdtemp(prefix="pairmill-")) / name.rsplit("/", 1)[-1]
            try:
                yield temporary
                if local is not None:
                    _sync(temporary)
                    os.replace(temporary, local)
                    _sync(local.parent)
                else:
                    self._put(temporary, name)
            finally:
                temporary.unlink(missing_ok=True)
                if local is None:
                    shutil.rmtree(temporary.parent, ignore_errors=True)

    def _put(self, source: Path, name: str) -> None:
        fs, path = self._remote(name)
        try:
            fs.put_file(str(source), path)
        except Exception as error:  # every store has its own errors for missing buckets, keys and networks
            raise StorageError(f"cannot write {self.path(name)}: {_words(error)}") from error

    def make(self) -> None:
        """Create the folder and prove that it can be written; of an object store, that it can be asked.

        Raises:
            StorageError: it cannot.
        """
        if self.local is None:
            fs, path = self._remote("")
            try:
                fs.exists(path)
            except Exception as error:  # every store has its own errors for missing keys, names and networks
                raise StorageError(f"{self.url} cannot be reached: {_words(error)}") from error
            return
        try:
            with storage_errors(self.url):
                self.local.mkdir(parents=True, exist_ok=True)
                descriptor, probe = tempfile.mkstemp(prefix=TEMPORARY, dir=self.local)
                os.close(descriptor)
                os.unlink(probe)
        except OSError as error:  # special file systems answer with any number
            raise StorageError(
                f"cannot write {self.url}: {error.strerror}; choose another folder with --work"
            ) from error

    def remove(self, name: str) -> None:
        """Remove a file or a whole subfolder; nothing there is fine."""
        local = self._local_path(name)
        if local is None:
            fs, path = self._remote(name)
            with contextlib.suppress(FileNotFoundError):  # also where another run removes it meanwhile
                if fs.info(path)["type"] == "file":
                    fs.rm_file(path)  # a recursive one would look for more below it
                else:
                    fs.rm(path, recursive=True)
        elif local.is_dir() and not local.is_symlink():
            shutil.rmtree(local)
        else:
            local.unlink(missing_ok=True)

    def sweep(self, parent: str) -> None:
        """Remove what killed writers left unfinished in `parent`, and nothing that another run is still writing."""
        local = self._local_path(parent)
        if local is not None and local.is_dir():
            for leftover in local.glob(f"{TEMPORARY}*"):
                if not _is_being_written(leftover):
                    leftover.unlink(missing_ok=True)


def temporary_name(name: str) -> str:
    """The name under which this process writes what will be `name`; no two processes of a cluster have the same."""
    return f"{TEMPORARY}{_node()}-{os.getpid()}-{name}"


def _node() -> str:
    return platform.node().replace("-", "_")[:32]


def _is_being_written(temporary: Path) -> bool:
    node, _, rest = temporary.name.removeprefix(TEMPORARY).partition("-")
    pid = rest.partition("-")[0]
    if not pid.isdigit():
        return False
    if node == _node():
        return pid != str(os.getpid()) and Path(f"/proc/{pid}").exists()
    with contextlib.suppress(OSError):
        return time.time() - temporary.stat().st_mtime < STALE_S
    return False


_UNWRITABLE = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
        errno.EIO, errno.EFBIG,
    }
)  # fmt: skip


@contextlib.contextmanager
def storage_errors(where: str, doing: str = "write") -> Iterator[None]:
    """Turn what the system says about writing (or `doing` what else) to `where` into a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"the disk is full while writing {where}; free some space and run the same command again to continue"
            ) from error
        if error.errno in _UNWRITABLE:
            where = where if doing == "write" else str(error.filename or where)
            raise StorageError(
                f"cannot {doing} {where}: {error.strerror}; choose another folder with --work"
            ) from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_writing(file: IO[bytes]) -> None:
    """Let the disk begin with what was written to a local file, and wait for nothing: the fsync at its end has less to do.

    A hint, and nothing where the system has no such call (Linux: sync_file_range).
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(file.fileno(), 0, 0, _RANGE_WRITE)


_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def _open_store(url: str, **options: Any) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Keys and endpoints come from the environment or the store's own
    files (`AWS_...`, `~/.aws`, fsspec's `conf.json`), so that no setting of ours holds a secret. So do retries: botocore's
    (AWS_MAX_ATTEMPTS, five) times s3fs's five, further and further apart, about 40 s for a store that says SlowDown."""
    import fsspec

    return fsspec.core.url_to_fs(url, **options)


# Packages through which stores are asked; their errors of connections are no OSErrors.
_STORES = frozenset({"botocore", "aiobotocore", "boto3", "s3fs", "gcsfs", "google", "adlfs", "azure", "aiohttp"})


def is_of_a_store(error: Exception) -> bool:
    """Whether an object store, or the way to it, failed: no mistake of ours."""
    return type(error).__module__.partition(".")[0] in _STORES


def expand(pattern: str) -> list[str]:
    """Files named by a path, a glob or an fsspec URL, sorted.

    Raises:
        InputError: nothing is there, or it cannot be reached.
    """
    if not pattern:
        raise InputError("expected a file, found an empty name")
    if os.path.isfile(pattern):
        return [os.path.abspath(pattern)]  # as fsspec names it, without the time of its import
    try:
        fs, path = _open_store(pattern)
        # a name that is there is no pattern, whatever brackets it holds
        found = {path: fs.info(path)} if fs.exists(path) else fs.glob(path, detail=True)
    except Exception as error:  # every store has its own errors for missing packages, keys, names and networks
        raise InputError(f"expected a file at {pattern}, which cannot be reached: {_words(error)}") from error
    names = sorted(name for name, info in found.items() if info["type"] != "directory")
    if not names:
        what = f"a folder; name the files in it, as in {next(iter(found))}/*" if found else "none"
        raise InputError(f"expected a file at {pattern}, found {what}")
    return [str(fs.unstrip_protocol(n)).removeprefix("file://") for n in names]


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
