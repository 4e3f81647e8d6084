"""Waiting for another rank shows on the rank that waits, and not on the one that is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.train.ranks import run_ranks
from train.comm import CLOCK, Clock, watch_gradients
from train.meter import own_seconds

LATE_S = 0.4


def late_in_the_loss() -> float:
    from train.loss import clip_loss

    def forward() -> torch.Tensor:
        img, txt = (nn.functional.normalize(torch.randn(4, 8), dim=1).requires_grad_() for _ in range(2))
        _late_the_second_time()
        return clip_loss(img, txt, torch.tensor(2.0))

    return _second(forward)


def late_gradients() -> float:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(4, 4))
    watch_gradients(model)

    def forward() -> torch.Tensor:
        loss = model(torch.ones(2, 4)).sum()
        _late_the_second_time()
        return loss

    return _second(forward)


_calls = 0


def _late_the_second_time() -> None:
    global _calls
    _calls += 1
    if _calls % 2 == 0 and torch.distributed.get_rank() == 1:
        time.sleep(LATE_S)


def _second(forward: Callable[[], torch.Tensor]) -> float:
    """Seconds in collectives of the second pass; the first imports what is imported late."""
    forward().backward()
    torch.distributed.barrier()
    CLOCK.take()
    forward().backward()
    return CLOCK.take()


def test_a_late_rank_is_seen_in_the_loss_and_in_the_gradients() -> None:
    for late in (late_in_the_loss, late_gradients):
        waits, waited_for = run_ranks(2, late)
        assert waits > LATE_S * 0.8
        assert 0 < waited_for < waits


def test_the_clock_starts_over() -> None:
    clock = Clock()
    clock.add(1.0, 1.5)
    clock.add(2.0, 2.25)
    assert clock.take() == 0.75
    assert clock.take() == 0.0


def test_a_ranks_own_time_leaves_collectives_out() -> None:
    times = {"decode": [0.1, 0.2], "h2d": [0.0, 0.1], "compute": [1.0, 1.0], "comm": [0.25, 0.5], "reader": []}
    assert own_seconds(times) == pytest.approx([0.85, 0.8])
