"""What keeps one bad step from ruining a run: which updates are left out, when to go back, and gradients cut by tower.

A step is left out when its loss or gradient is not finite, or when its loss lies far above what the last hundred steps
make likely. What the guard remembers is a few numbers, kept in the checkpoint, so that a continued run decides alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MAX_SKIPPED = 10  # steps in a row left out: the weights are lost, and more steps will not bring them back
MAX_ROLLBACKS = 3
FIRST_SCALE = 65536.0
QUIET_STEPS = 2000
SPIKE = 10.0  # standard deviations: no healthy run was seen to reach it
MEMORY = 100  # steps that the mean and the spread are of
LEAST_SPREAD = 0.01  # of the mean: a loss that hardly moves must not make every wiggle a spike


@dataclass
class Guard:
    """Mean and spread of the recent losses, and how often steps were left out."""

    deviations: float = SPIKE
    """Standard deviations above the mean from which a loss is a spike; 0 knows no spikes."""
    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0
    skipped: int = 0
    """Steps left out in a row."""
    rollbacks: int = 0

    def fault(self, loss: float, norm: float) -> str:
        """Why a step must be left out: "not finite", "spike", or empty when it is fine."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "not finite"
        spread = max(math.sqrt(self.variance), LEAST_SPREAD * abs(self.mean))
        known = self.deviations > 0 and self.seen >= MEMORY
        return "spike" if known and loss > self.mean + self.deviations * spread else ""

    def note(self, loss: float, fault: str) -> None:
        """One step is over."""
        if fault:
            self.skipped += 1
            return
        self.skipped = 0
        self.seen += 1
        share = 1.0 / min(self.seen, MEMORY)
        off = loss - self.mean
        self.mean += share * off
        self.variance = (1.0 - share) * (self.variance + share * off * off)

    @property
    def lost(self) -> bool:
        return self.skipped >= MAX_SKIPPED

    def forget(self) -> None:
        """Take the present level of the loss for the usual one."""
        self.mean = self.variance = 0.0
        self.seen = self.skipped = 0

    def state(self) -> dict[str, Any]:
        state = dataclasses.asdict(self)
        del state["deviations"]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients above what fp16 can hold: halved when one overflows, doubled in long quiet.

    A power of two, so that it rounds nothing. Of other types it is 1 and stays so.
    """

    value: float
    quiet: int = 0
    """Steps since it last changed."""

    @classmethod
    def of(cls, precision: str) -> LossScale:
        return cls(FIRST_SCALE if precision == "fp16" else 1.0)

    def divide(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the factor out of the gradients again."""
        if self.value != 1:
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.value)

    def overflowed(self, finite: bool) -> bool:
        """Note a step; whether its gradient was lost to the factor, which is then halved, and not to the model."""
        if finite or self.value <= 1:
            self.quiet += 1
            if FIRST_SCALE >= self.value > 1 and self.quiet >= QUIET_STEPS:
                self.value, self.quiet = min(FIRST_SCALE, 2 * self.value), 0
            return False
        self.value, self.quiet = self.value / 2, 0
        return True


def by_tower(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters with a gradient: of the image tower, of the text tower, and the scalars of the loss."""
    parts: dict[str, list[nn.Parameter]] = {"image": [], "text": [], "scalars": []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            bare = name.removeprefix("module.")
            tower = "image" if bare.startswith("visual.") else "scalars" if bare.startswith("logit_") else "text"
            parts[tower].append(parameter)
    return {tower: parameters for tower, parameters in parts.items() if parameters}


def clip_by_tower(model: nn.Module, limit: float) -> dict[str, Tensor]:
    """Scale each tower's gradient down to the norm `limit` if it is longer (0: never); returns the norms before.

    Tower by tower, because the two differ by an order of magnitude, and one that breaks out must not stop the other.
    """
    norms: dict[str, Tensor] = {}
    for tower, parameters in by_tower(model).items():
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        # of a sharded tower each rank knows its part of the norm
        norms[tower] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return norms


def total_norm(norms: dict[str, Tensor]) -> Tensor:
    """Norm of the whole gradient."""
    return torch.stack(list(norms.values())).float().norm()
