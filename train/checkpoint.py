"""Checkpoints of a run: `step_00000100/` with model, optimiser and average in safetensors, and `checkpoint.json` written last.

The JSON is the marker (a folder without it was never finished) and holds the sha256 of the other files, so a damaged
checkpoint is known as one before anything of it is used. Nothing is pickled. No random state is stored: every draw of
a run is keyed by (seed, step, rank) or (seed, epoch, uid), so the step is all the state there is.

A run writes through `Writer`: the tensors are copied, which takes the time of a memory copy, and written while training
goes on. The folder may be of an object store (s3://), where each file is one PUT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config import plain
from core.errors import DataError, WorkFolderError
from core.storage import Folder, storage_errors
from train.config import TrainConfig
from train.models import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

log = logging.getLogger("pairmill.train")

Place = str | os.PathLike[str] | Folder
"""Path or URL of a folder."""
Files = dict[str, dict[str, "Tensor"]]
"""Tensors of each file of a checkpoint, by name."""

MARKER = "checkpoint.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
AVERAGE = "average.safetensors"

SETTINGS = "settings"

# What a run cannot change between two checkpoints, and what to call it.
FIXED = {
    "data": "the shards",
    "tokenizer": "the tokenizer",
    "model": "the model",
    "loss": "the loss",
    "batch_size": "the batch size",
    "seed": "the seed",
    "lanes": "the lanes of the data order",
}


@dataclass
class Saved:
    """A checkpoint read back: tensors on the CPU, and `checkpoint.json` as `meta`."""

    path: str
    meta: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    average: dict[str, Tensor]
    """Averaged weights (`train.ema`); empty where the run keeps none."""

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def shape(self) -> ModelConfig:
        return ModelConfig(**self.meta["model"])


def save(home: Place, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any]) -> str:
    """Write the checkpoint of `step` (steps finished so far) under `home`; whole or not at all, also on kill -9.

    Raises:
        StorageError: the folder cannot be written, or the disk is full (older checkpoints stay).
    """
    return write(home, step, snapshot(model, optimizer), meta)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor] | None = None) -> Files:
    """Copies on the CPU of everything a checkpoint holds. Of a sharded model every rank must call it."""
    parts = {MODEL: model.state_dict(), OPTIMIZER: optimizer_tensors(model, optimizer)}
    if average is not None:
        parts[AVERAGE] = average
    return {file: {name: _copy(tensor) for name, tensor in tensors.items()} for file, tensors in parts.items()}


def _copy(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a DTensor, as FSDP makes them
    return whole.detach().to("cpu", copy=True)


def write(home: Place, step: int, files: Files, meta: dict[str, Any]) -> str:
    """Write what `snapshot` copied; returns the checkpoint's path. Raises as `save`."""
    _remove(home, f"step_{step:08d}")
    folder = folder_of(home) / f"step_{step:08d}"
    sums = {name: write_tensors(folder, name, tensors) for name, tensors in files.items()}
    folder.write(MARKER, json.dumps({**meta, "step": step, "sha256": sums}, indent=1).encode())
    return folder.url


class Writer:
    """Writes checkpoints in a thread, one at a time, and removes those that are not to be kept.

    `keep` newest ones stay, and those of every `keep_every`-th step (0: none). Close it with `finish`; a fault of the
    thread is raised by the call that follows it.
    """

    def __init__(self, home: Place, keep: int, keep_every: int = 0) -> None:
        self.home, self.keep, self.keep_every = folder_of(home), keep, keep_every
        self.saved_at = time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, files: Files, meta: dict[str, Any]) -> None:
        """Begin to write; waits for the one before, so that two copies are never held for long."""
        self.finish()
        self.saved_at = time.monotonic()
        self._writing = self._pool.submit(self._write, step, files, meta)

    def finish(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def path(self, step: int) -> str:
        return self.home.path(f"step_{step:08d}")

    def _write(self, step: int, files: Files, meta: dict[str, Any]) -> None:
        with storage_errors(self.home.url):
            write(self.home, step, files, meta)
            prune(self.home, step, self.keep, self.keep_every)


def folder_of(home: Place) -> Folder:
    return home if isinstance(home, Folder) else Folder(home)


def write_tensors(folder: Folder, name: str, tensors: dict[str, Tensor]) -> str:
    """One safetensors file, published whole; returns its sha256. A full disk is StorageError, as for every other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
    with folder.staged(name) as path:
        try:
            save_file(plain, path)
            path.chmod(0o644)  # safetensors makes files that only their owner can read
            return Folder(path.parent).sha256(path.name)
        except SafetensorError as error:
            if "No space left" in str(error) or "StorageFull" in str(error):
                raise OSError(errno.ENOSPC, "No space left on device") from error
            raise


def steps_saved(home: Place) -> list[int]:
    """Steps of the finished checkpoints, oldest first."""
    folder = folder_of(home)
    return sorted(int(n.removeprefix("step_")) for n in _folders(folder) if folder.exists(f"{n}/{MARKER}"))


def _folders(home: Folder) -> list[str]:
    """Folders of checkpoints, finished or not; a copy that someone made beside them (`step_00000100.good`) is none."""
    return [name for name in home.list("step_*") if re.fullmatch(r"step_\d{8,}", name)]


def load(path: Place) -> Saved:
    """Read one checkpoint, checking every byte first.

    Raises:
        DataError: a file is missing, cut short or changed.
    """
    from safetensors.torch import load_file

    folder = folder_of(path)
    try:
        meta = json.loads(folder.read(MARKER))
        tensors = {}
        for name, expected in dict(meta["sha256"]).items():
            with _here(folder, name) as file:
                if Folder(file.parent).sha256(file.name) != expected:
                    raise DataError(f"{folder.path(name)} is damaged: its sha256 is not the one in {MARKER}")
                tensors[name] = load_file(file)
        saved = Saved(folder.url, meta, tensors[MODEL], tensors[OPTIMIZER], tensors.get(AVERAGE, {}))
        _ = saved.step, saved.shape  # which the marker has to name
        return saved
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the checkpoint {folder} is damaged: {error}") from error


@contextlib.contextmanager
def _here(folder: Folder, name: str) -> Iterator[Path]:
    """A file on this machine's disk, where it may have to be fetched to."""
    if folder.local is not None:
        yield folder.local / name
        return
    with tempfile.TemporaryDirectory(prefix="pairmill-") as scratch:
        place = Path(scratch) / name
        with folder.open(name) as source, place.open("wb") as target:
            while block := source.read(1 << 24):
                target.write(block)
        yield place


def newest(home: Place, below: int | None = None) -> Saved | None:
    """The newest checkpoint that is whole, of a step of at most `below`; None where there is none at all.

    Raises:
        DataError: there are checkpoints and all of them are damaged.
    """
    folder = folder_of(home)
    steps = [step for step in steps_saved(folder) if below is None or step <= below]
    for step in reversed(steps):
        try:
            return load(folder / f"step_{step:08d}")
        except DataError as error:
            log.error("%s; falling back to the checkpoint before it", error)
    if steps:
        raise DataError(f"all {len(steps)} checkpoints in {home} are damaged; start the run over with --fresh")
    return None


def prune(home: Place, step: int, keep: int, keep_every: int = 0) -> None:
    """Remove all but the newest `keep` finished checkpoints up to `step`, those of every `keep_every`-th step, and what a
    killed run left unfinished.

    Later ones do not count: the run fell back from them, because they are damaged. They are written anew when it gets there.
    """
    steps = steps_saved(home)
    later = [saved for saved in steps if saved > step]
    counted = [saved for saved in steps if saved <= step]
    wanted = {*later, *counted[-max(1, keep) :], *(saved for saved in steps if keep_every and saved % keep_every == 0)}
    for name in _folders(folder_of(home)):
        if int(name.removeprefix("step_")) not in wanted:
            _remove(home, name)


def remove_all(home: Place) -> None:
    """Remove every checkpoint, finished or not."""
    for name in _folders(folder_of(home)):
        _remove(home, name)


def _remove(home: Place, name: str) -> None:
    # The marker goes first, so that a removal cut short leaves an unfinished checkpoint and not a damaged one.
    folder_of(home).remove(f"{name}/{MARKER}")
    folder_of(home).remove(name)


def check_same(saved: Saved, wanted: dict[str, Any]) -> None:
    """Refuse to continue a run with anything of `FIXED` changed.

    Raises:
        WorkFolderError: names what differs, and both values.
    """
    wanted = json.loads(json.dumps(wanted))  # as a file gives it back: lists where there were tuples
    shape = json.loads(json.dumps(dataclasses.asdict(saved.shape)))  # with the fields that are new since then
    meta = {**saved.meta, "model": shape}
    changes = [(name, meta.get(key), wanted[key]) for key, name in FIXED.items() if meta.get(key) != wanted[key]]
    changes += changed_settings(meta.get(SETTINGS, {}), wanted.get(SETTINGS, {}))
    for name, was, now in changes[:1]:
        raise WorkFolderError(
            f"{saved.path} was trained with other values of {name} (was {_short(was)}, now {_short(now)}); choose another "
            "--name, or throw the run away with --fresh"
        )


def changed_settings(recorded: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, former and present value of each setting that changed; one that did not exist yet was at its default."""
    if not recorded:
        return []
    defaults = plain(TrainConfig().fingerprint())
    begun = {**{key: defaults.get(key) for key in wanted}, **recorded}
    return [
        (key, begun.get(key), wanted.get(key)) for key in sorted({*begun, *wanted}) if begun.get(key) != wanted.get(key)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- the optimiser's state by parameter name, so that no order of parameters is relied on --------------------------------


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` for every parameter that has been stepped."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value
    return tensors


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give `optimizer` the state that `optimizer_tensors` read from another one of the same model."""
    parameters = dict(model.named_parameters())
    for full, value in tensors.items():
        key, _, name = full.partition("/")
        parameter = parameters[name]
        optimizer.state[parameter][key] = like(value, parameter)


def restore_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill the parameters and buffers of a model that is in use, sharded or not."""
    import torch

    own = model.state_dict()
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(like(value, own[name]))


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of `value` on the parameter's device; this rank's part of it where the parameter is sharded."""
    copied = value.to(parameter.device, copy=True)
    if value.ndim == 0 or not hasattr(parameter, "placements"):
        return copied
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(copied, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
