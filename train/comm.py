"""How long collectives hold up this rank's step: those of the loss, and the gradients' last all-reduce.

DDP sends gradients while the backward pass is still computing, which costs nothing; what counts is the time from the
moment its last bucket is handed over. Waiting for a slower rank happens inside a collective too: the least time over
the ranks is what communication itself costs, and the rank that has it is the one that the others wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Mark = Any
"""A moment: seconds of the process's clock, or a CUDA event on the stream that computes."""


class Clock:
    """Sums the seconds spent inside its marks since the last `take`."""

    def __init__(self) -> None:
        self._spans: list[tuple[Mark, Mark]] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what runs inside; also a decorator."""
        start = mark()
        yield
        self._spans.append((start, mark()))

    def add(self, start: Mark, end: Mark) -> None:
        self._spans.append((start, end))

    def take(self) -> float:
        """Seconds, and start over. On GPUs call it after the step was waited for."""
        spans, self._spans = self._spans, []
        return sum(_between(start, end) for start, end in spans)


CLOCK = Clock()
"""This process's collectives: a rank has one step at a time."""


def mark() -> Mark:
    """Now: on the computing stream where there is a GPU, because collectives return there before they are done."""
    if not torch.cuda.is_initialized():  # also of a run on the CPU of a machine with a GPU
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Mark, end: Mark) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def watch_gradients(model: nn.Module) -> None:
    """Count, for a DDP model, the time from handing over the last bucket of gradients to its return."""
    register: Callable[..., None] = model.register_comm_hook  # type: ignore[assignment]
    register(None, lambda state, bucket: _reduced(state, bucket))  # DDP takes no annotation that is a string


def _reduced(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's own all-reduce of one bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    start = mark()
    reduced = allreduce_hook(state, bucket)
    if not bucket.is_last():
        return reduced

    def done(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        CLOCK.add(start, mark())
        return future.value()

    return reduced.then(done)
