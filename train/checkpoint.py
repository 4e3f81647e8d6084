"""Checkpoints of a run: `step_00000100/` with model and optimiser in safetensors, and `checkpoint.json` written last.

The JSON is the marker (a folder without it was never finished) and holds the sha256 of the other files, so a damaged
checkpoint is known as one before anything of it is used. Nothing is pickled. No random state is stored: every draw of
a run is keyed by (seed, step, rank) or (seed, epoch, uid), so the step is all the state there is.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import DataError, WorkFolderError
from core.storage import Folder
from train.models import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

log = logging.getLogger("pairmill.train")

MARKER = "checkpoint.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"

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

    path: Path
    meta: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def shape(self) -> ModelConfig:
        return ModelConfig(**self.meta["model"])


def save(home: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` (steps finished so far) under `home`; whole or not at all, also on kill -9.

    Raises:
        StorageError: the folder cannot be written, or the disk is full (older checkpoints stay).
    """
    folder = Folder(home / f"step_{step:08d}")
    Folder(home).remove(f"step_{step:08d}")
    files = {
        MODEL: {name: tensor.detach() for name, tensor in model.state_dict().items()},
        OPTIMIZER: optimizer_tensors(model, optimizer),
    }
    for name, tensors in files.items():
        write_tensors(folder, name, tensors)
    sums = {name: folder.sha256(name) for name in files}
    folder.write(MARKER, json.dumps({**meta, "step": step, "sha256": sums}, indent=1).encode())
    assert folder.local is not None
    return folder.local


def write_tensors(folder: Folder, name: str, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, published whole; a full disk is StorageError, as for every other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
    with folder.staged(name) as path:
        try:
            save_file(plain, path)
            path.chmod(0o644)  # safetensors makes files that only their owner can read
        except SafetensorError as error:
            if "No space left" in str(error) or "StorageFull" in str(error):
                raise OSError(errno.ENOSPC, "No space left on device") from error
            raise


def steps_saved(home: Path) -> list[int]:
    """Steps of the finished checkpoints, oldest first."""
    return sorted(int(folder.name.removeprefix("step_")) for folder in _folders(home) if (folder / MARKER).exists())


def _folders(home: Path) -> list[Path]:
    """Folders of checkpoints, finished or not; a copy that someone made beside them (`step_00000100.good`) is none."""
    return [folder for folder in home.glob("step_*") if re.fullmatch(r"step_\d{8,}", folder.name)]


def load(path: Path) -> Saved:
    """Read one checkpoint, checking every byte first.

    Raises:
        DataError: a file is missing, cut short or changed.
    """
    from safetensors.torch import load_file

    folder = Folder(path)
    try:
        meta = json.loads(folder.read(MARKER))
        sums = dict(meta["sha256"])
        for name, expected in sums.items():
            if folder.sha256(name) != expected:
                raise DataError(f"{path / name} is damaged: its sha256 is not the one in {MARKER}")
        return Saved(path, meta, load_file(path / MODEL), load_file(path / OPTIMIZER))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the checkpoint {path} is damaged: {error}") from error


def newest(home: Path) -> Saved | None:
    """The newest checkpoint that is whole; None where there is none at all.

    Raises:
        DataError: there are checkpoints and all of them are damaged.
    """
    steps = steps_saved(home)
    for step in reversed(steps):
        try:
            return load(home / f"step_{step:08d}")
        except DataError as error:
            log.error("%s; falling back to the checkpoint before it", error)
    if steps:
        raise DataError(f"all {len(steps)} checkpoints in {home} are damaged; start the run over with --fresh")
    return None


def prune(home: Path, keep: int) -> None:
    """Remove all but the newest `keep` finished checkpoints, and what a killed run left unfinished."""
    steps = steps_saved(home)
    wanted = {f"step_{step:08d}" for step in steps[-max(1, keep) :]}
    for folder in _folders(home):
        if folder.name not in wanted:
            # The marker goes first, so that a removal cut short leaves an unfinished checkpoint and not a damaged one.
            (folder / MARKER).unlink(missing_ok=True)
            Folder(home).remove(folder.name)


def check_same(saved: Saved, wanted: dict[str, Any]) -> None:
    """Refuse to continue a run with anything of `FIXED` changed.

    Raises:
        WorkFolderError: names what differs, and both values.
    """
    for key, name in FIXED.items():
        if saved.meta.get(key) != wanted[key]:
            was, now = _short(saved.meta.get(key)), _short(wanted[key])
            raise WorkFolderError(
                f"{saved.path} was trained with other values of {name} (was {was}, now {now}); choose another --name, "
                "or throw the run away with --fresh"
            )


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
        optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
