"""A work folder as one stage sees it: locked while in use, with the settings it was made with, and a marker when done.

`pairmill.toml` records every stage's settings and the fingerprint of what the stage read. A stage that finds itself
finished with the same settings and the same input returns its old summary; other settings are refused, because mixing
two settings in one folder is how data sets rot; a changed input makes the stage run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from core.config import StageConfig, plain
from core.errors import WorkFolderError
from core.storage import Folder

log = logging.getLogger("pairmill.work")
SETTINGS = "pairmill.toml"


@dataclass
class Stage:
    """One stage at work in a folder. `finished` is the summary of an earlier, identical run, or None."""

    folder: Folder
    name: str
    home: str
    finished: dict[str, Any] | None

    def reopen(self) -> None:
        """Take the mark of a finished stage away, before what it vouches for is changed."""
        self.folder.remove(f"{self.home}/done.json")
        self.finished = None

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Mark the stage as done; returns `summary`."""
        self.folder.write(f"{self.home}/done.json", json.dumps(summary, indent=1).encode())
        return summary


def fingerprint(folder: Folder, *patterns: str) -> str:
    """A short digest of the names and contents of small marker files and the names and sizes of large ones.

    Contents are hashed up to 1 MiB from the end, where Parquet keeps its footer with the statistics of every column.
    """
    return fingerprint_of(folder, [name for pattern in patterns for name in folder.list(pattern)])


def fingerprint_of(folder: Folder, names: Iterable[str]) -> str:
    """`fingerprint` of the files with these names, in this order."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name in names:
        size = folder.size(name)
        tail = min(size, 1 << 20)
        digest.update(f"{name} {size}\n".encode())
        digest.update(folder.read_range(name, size - tail, tail))
    return digest.hexdigest()


@contextlib.contextmanager
def open_stage(
    config: StageConfig, name: str, *, home: str, inputs: str = "", redo: bool = True, keep: Collection[str] = ()
) -> Iterator[Stage]:
    """Enter the work folder for stage `name`, whose outputs all lie under `home` (`ingest`, `dedup`, `shards`).

    Args:
        inputs: fingerprint of what the stage reads.
        redo: whether a changed input makes the stage start over (cheap, derived data) or is refused (downloads).
        keep: entries of `home` that outlive a changed input, because the stage itself tells which of them still hold.

    Raises:
        StorageError: the folder cannot be written.
        WorkFolderError: another run is using it, or it holds other settings.
    """
    folder = Folder(config.work)
    folder.make()
    with _lock(folder):
        recorded = read_settings(folder).get(name, {})
        if config.fresh:
            _throw_away(folder, home)
        if not folder.list(f"{home}/*"):
            recorded = {}  # nothing was made with them: a mistyped first command binds nobody
        _check_settings(folder, name, recorded, config)
        if recorded and recorded.get("inputs", "") != inputs:
            if not redo:
                raise WorkFolderError(
                    f"{folder} holds the {name} of another input; choose another folder with --work, or throw that "
                    f"{name} away with --fresh"
                )
            log.info("%s: its input has changed, so it runs again", name)
            _throw_away(folder, home, keep)
        _record_settings(folder, name, config, inputs)
        marker = f"{home}/done.json"
        finished = json.loads(folder.read(marker)) if folder.exists(marker) else None
        yield Stage(folder, name, home, finished)


def _throw_away(folder: Folder, home: str, keep: Collection[str] = ()) -> None:
    folder.remove(f"{home}/done.json")  # first, so that what a kill leaves of the rest is not taken for finished
    if not keep:
        folder.remove(home)
        return
    for name in folder.list(f"{home}/*"):
        if name.rpartition("/")[2] not in keep:
            folder.remove(name)


def read_settings(folder: Folder) -> dict[str, Any]:
    """The saved settings of every stage that ran in `folder`, by stage; empty for a new folder.

    Raises:
        WorkFolderError: the file is damaged.
    """
    if not folder.exists(SETTINGS):
        return {}
    try:
        return tomllib.loads(folder.read(SETTINGS).decode())
    except ValueError as error:
        raise WorkFolderError(f"{folder.path(SETTINGS)} is damaged ({error}); repair it or delete it") from error


def _check_settings(folder: Folder, name: str, recorded: dict[str, Any], config: StageConfig) -> None:
    wanted = plain(config.fingerprint())
    for key in sorted(set(recorded) | set(wanted)):
        if recorded and key not in ("inputs", "version") and recorded.get(key) != wanted.get(key):
            raise WorkFolderError(
                f"{folder} holds the {name} of other settings ({key} was {recorded.get(key)!r}, now {wanted.get(key)!r}); "
                f"choose another folder with --work, or throw that {name} away with --fresh"
            )


def _record_settings(folder: Folder, name: str, config: StageConfig, inputs: str) -> None:
    import tomli_w

    settings = read_settings(folder)
    mine = {**plain(config.fingerprint()), "inputs": inputs, "version": package_version()}
    if settings.get(name) != mine:
        folder.write(SETTINGS, tomli_w.dumps({**settings, name: mine}).encode())


def package_version() -> str:
    """Version of pairmill, or `unknown` when it runs from a folder that was never installed."""
    try:
        return version("pairmill")
    except PackageNotFoundError:
        return "unknown"


@contextlib.contextmanager
def locked(path: Path, what: str, option: str) -> Iterator[None]:
    """Hold a lock file while the block runs. Released by the kernel on any death of the process, kill -9 included.

    Raises:
        WorkFolderError: another process holds it; `what` is in use, and `option` chooses another.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            raise WorkFolderError(
                f"{what} is in use by another run (process {holder or 'unknown'}); wait for it or choose another {option}"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Folder) -> contextlib.AbstractContextManager[None]:
    if folder.local is None:
        # Object stores offer no lock; units are published by one PUT, so two runs waste work but break nothing.
        return contextlib.nullcontext()
    return locked(folder.local / ".lock", str(folder), "--work")
