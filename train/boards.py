"""The rows of metrics.jsonl and eval.jsonl for TensorBoard and wandb too, where a run asks for them.

The JSONL files are the record; what is shown elsewhere is a copy of their numbers under the same names, by step.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from core.config import plain
from core.errors import ConfigError
from core.metrics import Jsonl
from train.config import TrainConfig

BOARDS = ("tensorboard", "wandb")


def check_boards(names: tuple[str, ...]) -> None:
    """ConfigError for a board that is none, or whose package is not installed."""
    for name in names:
        if name not in BOARDS:
            raise ConfigError(f"expected --log out of {', '.join(BOARDS)}; found {name!r}")
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"--log {name} needs the package {name} ({error}); install it with `pip install {name}`"
            ) from error


class Boards:
    """Of rank 0's process: takes rows from after step `start` on. Close it, because both write in the background."""

    def __init__(self, config: TrainConfig, home: Path, start: int) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if "tensorboard" in config.log:
            from torch.utils.tensorboard import SummaryWriter

            # a killed run may have shown steps that are done again now
            self._tensorboard = SummaryWriter(str(home / "tensorboard"), purge_step=start + 1)
        if "wandb" in config.log:
            import wandb  # type: ignore[import-not-found]

            # the id of the folder, so that a run that continues goes on in the same page
            self._wandb = wandb.init(
                project="pairmill", name=config.name, id=xxhash.xxh3_64_hexdigest(str(home.resolve()).encode()), resume="allow",
                dir=str(home), config=plain(config.fingerprint()),
            )  # fmt: skip
            self._wandb.define_metric("*", step_metric="step")

    def show(self, group: str, row: Mapping[str, Any]) -> None:
        """Every number of a row, as `group/name` or `group/name/part`, at the row's step."""
        numbers = dict(_numbers(group, row))
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log({**numbers, "step": row["step"]})

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class ShownJsonl(Jsonl):
    """A JSONL file whose rows go to the boards as well."""

    def __init__(self, path: Path, boards: Boards, group: str) -> None:
        super().__init__(path)
        self._boards, self._group = boards, group

    def append(self, row: dict[str, Any]) -> None:
        super().append(row)
        self._boards.show(self._group, row)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in ("step", "time"):
                yield from _numbers(f"{name}/{key}", part)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)
