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
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from core.config import StageConfig, UnitsConfig, plain
from core.errors import ConfigError, WorkFolderError
from core.plan import Part
from core.storage import Folder

log = logging.getLogger("pairmill.work")
READY = "ready"  # in a stage's folder on an object store: the input for which part 0 has set the stage up
SETTINGS = "pairmill.toml"
SET_UP_S = 600.0  # parts on an object store wait so long for part 0, which sets the stage up


@dataclass
class Stage:
    """One stage at work in a folder. `finished` is the summary of an earlier, identical run, or None."""

    folder: Folder
    name: str
    home: str
    finished: dict[str, Any] | None
    part: Part
    hold: _Hold
    inputs: str = ""

    def share(self) -> None:
        """The stage is set up: with `--part`, let the other parts in."""
        if not (self.part.whole or self.part.index) and self.folder.local is None:
            self.folder.write(f"{self.home}/{READY}", self.inputs.encode())
        self.hold.give_turn()

    def left_to_others(self, units: Callable[[], int]) -> dict[str, Any] | None:
        """With `--part` and this part done: a summary to return, while `units()` still wait for other parts to do them.

        None says that this run is to close the stage: the last part, or a whole run.
        """
        if self.part.whole:
            return None
        self.hold.take_turn()
        left = units()
        if left == 0 and not self.folder.exists(f"{self.home}/done.json"):
            return None
        log.info("%s: part %s is done; units that other parts have to do yet: %d", self.name, self.part, left)
        return {"part": str(self.part), "left": left}

    def reopen(self) -> None:
        """Take the mark of a finished stage away, before what it vouches for is changed."""
        self.folder.remove(f"{self.home}/done.json")
        self.finished = None

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Mark the stage as done; returns `summary`."""
        self.folder.write(f"{self.home}/done.json", json.dumps(summary, indent=1).encode())
        self.folder.remove(f"{self.home}/{READY}")
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
    part = Part.parse(config.part if isinstance(config, UnitsConfig) else "")
    if config.fresh and not part.whole:
        raise ConfigError("expected --fresh without --part: it would throw away what the other parts are at")
    folder = Folder(config.work)
    folder.make()
    with _Hold(folder, part) as hold:
        _await_set_up(folder, home, part, inputs)
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
            hold.become_only()
            _throw_away(folder, home, keep)
        _record_settings(folder, name, config, inputs)
        yield Stage(folder, name, home, _finished(folder, f"{home}/done.json"), part, hold, inputs)


def _finished(folder: Folder, marker: str) -> dict[str, Any] | None:
    """The summary of a finished stage; None for one that is not, or whose mark is damaged, so that it is closed again."""
    if not folder.exists(marker):
        return None
    try:
        found = json.loads(folder.read(marker))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        log.warning("%s is damaged, so the stage is closed again", folder.path(marker))
        return None
    return found


def _await_set_up(folder: Folder, home: str, part: Part, inputs: str) -> None:
    """Where no lock can be had, part 0 sets a stage up and the others wait for it.

    Raises:
        WorkFolderError: it does not within ten minutes.
    """
    if part.whole or not part.index or folder.local is not None:
        return
    ready, until, wait = f"{home}/{READY}", time.monotonic() + SET_UP_S, 0.1
    while not folder.exists(f"{home}/done.json"):
        if folder.exists(ready) and folder.read(ready).decode() == inputs:
            return
        if time.monotonic() > until:
            raise WorkFolderError(
                f"expected part 0/{part.count} to set {folder} up, which it did not in {SET_UP_S:.0f} s; start it first"
            )
        time.sleep(wait := min(5.0, 1.5 * wait))


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
    if not recorded:
        return
    wanted, made = plain(config.fingerprint()), {**config.defaults(), **recorded}
    for key in sorted(set(made) | set(wanted)):
        if key not in ("inputs", "version") and made.get(key) != wanted.get(key):
            raise WorkFolderError(
                f"{folder} holds the {name} of other settings ({key} was {made.get(key)!r}, now {wanted.get(key)!r}); "
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
def locked(path: Path, what: str, option: str, *, shared: bool = False) -> Iterator[int]:
    """Hold a lock file while the block runs, which gets its descriptor. Released by the kernel on any death of the process,
    kill -9 included. Those that hold it `shared` keep out only those that do not.

    Raises:
        WorkFolderError: another process holds it; `what` is in use, and `option` chooses another.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            raise WorkFolderError(
                f"{what} is in use by another run (process {holder or 'unknown'}); wait for it or choose another {option}"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


class _Hold:
    """A work folder in use: by one run alone, or by parts of one, which take turns to set a stage up and to close it."""

    def __init__(self, folder: Folder, part: Part) -> None:
        self._folder, self._part = folder, part
        # Object stores offer no lock; units are published by one PUT, so two runs waste work but break nothing.
        self._local = folder.local
        self._turn: int | None = None

    def __enter__(self) -> _Hold:
        self._held = contextlib.ExitStack()
        if self._local is not None:
            lock = locked(self._local / ".lock", str(self._folder), "--work", shared=not self._part.whole)
            self._lock = self._held.enter_context(lock)
            self._held.callback(self.give_turn)
            self.take_turn()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def take_turn(self) -> None:
        """Wait until no other part sets up or closes; a whole run is alone anyway."""
        if self._local is None or self._part.whole or self._turn is not None:
            return
        self._turn = os.open(self._local / ".turn", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another part that sets %s up or closes it", self._folder)
            fcntl.flock(self._turn, fcntl.LOCK_EX)

    def give_turn(self) -> None:
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None

    def become_only(self) -> None:
        """Before results are thrown away: make sure that no other part is at work on them.

        Raises:
            WorkFolderError: one is.
        """
        if self._local is None or self._part.whole:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkFolderError(
                f"the input of {self._folder} has changed while other parts are at work; stop them or wait, then start again"
            ) from None
        fcntl.flock(self._lock, fcntl.LOCK_SH)
