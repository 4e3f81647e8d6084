"""The exponential moving average of a model's weights, which is what is evaluated and exported where it is kept.

Averaged weights generalise a little better than the last ones, above all where the learning rate is still high. The
average holds every parameter and every running statistic in the model's own types and, under FSDP, its own parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from train.checkpoint import like


class Average:
    """`decay` is the weight of the past in each update; the first updates trust it less: (1 + n) / (10 + n) after n.

    Without that ramp the first weights, which are noise, would be in the average for thousands of steps.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.tensors = {name: value.detach().clone() for name, value in _floats(model).items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step number `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        own = _floats(self.model)
        torch._foreach_lerp_([self.tensors[name] for name in own], list(own.values()), 1 - decay)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model holds the average; afterwards its own weights again."""
        own = {name: value.detach().clone() for name, value in _floats(self.model).items()}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(own)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from an average read back from a checkpoint."""
        with torch.no_grad():
            for name, value in tensors.items():
                self.tensors[name].copy_(like(value, self.tensors[name]))

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in _floats(self.model).items():
            value.copy_(tensors[name])


def _floats(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and running statistics by name; the counters of normalisations are not averaged."""
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
