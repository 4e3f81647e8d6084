"""The guard against ruinous steps, and gradients cut tower by tower."""

from __future__ import annotations

import math

import pytest
import torch

from train.guard import (
    FIRST_SCALE,
    MAX_SKIPPED,
    MEMORY,
    QUIET_STEPS,
    Guard,
    LossScale,
    by_tower,
    clip_by_tower,
    total_norm,
)
from train.models import model_config
from train.towers import CLIP


def watched(deviations: float, losses: int = 3 * MEMORY) -> Guard:
    """A guard that has seen losses of mean 2 and spread 0.1."""
    guard, g = Guard(deviations), torch.Generator().manual_seed(0)
    for loss in (2 + 0.1 * torch.randn(losses, generator=g)).tolist():
        guard.note(loss, guard.fault(loss, 1.0))
    return guard


def test_mean_and_spread_are_those_of_the_recent_losses() -> None:
    guard = watched(10)
    assert guard.mean == pytest.approx(2, abs=0.05) and math.sqrt(guard.variance) == pytest.approx(0.1, rel=0.3)
    for _ in range(5 * MEMORY):
        guard.note(1.0, "")
    assert guard.mean == pytest.approx(1, abs=0.01)  # old losses are forgotten


@pytest.mark.parametrize(("loss", "fault"), [(2.0, ""), (0.1, ""), (2.5, ""), (3.5, "spike"), (math.nan, "not finite")])
def test_only_what_lies_far_above_is_a_spike(loss: float, fault: str) -> None:
    assert watched(10).fault(loss, 1.0) == fault
    assert watched(0).fault(loss, 1.0) == (fault if fault != "spike" else "")
    assert watched(10, MEMORY // 2).fault(loss, 1.0) == (fault if fault != "spike" else "")  # too early to know
    assert watched(10).fault(2.0, math.inf) == "not finite"


def test_a_loss_that_hardly_moves_makes_no_wiggle_a_spike() -> None:
    guard = Guard(10)
    for _ in range(2 * MEMORY):
        guard.note(5.0, "")
    assert guard.fault(5.4, 1.0) == "" and guard.fault(5.6, 1.0) == "spike"


def test_only_steps_in_a_row_lose_a_run_and_they_leave_the_memory_alone() -> None:
    guard = watched(10)
    before = (guard.mean, guard.variance, guard.seen)
    for _ in range(MAX_SKIPPED - 1):
        guard.note(99.0, "spike")
    assert not guard.lost and (guard.mean, guard.variance, guard.seen) == before
    guard.note(2.0, "")
    guard.note(99.0, "spike")
    assert not guard.lost
    for _ in range(MAX_SKIPPED - 1):
        guard.note(math.nan, "not finite")
    assert guard.lost
    guard.forget()
    assert not guard.lost and guard.fault(99.0, 1.0) == ""


def test_what_it_knows_survives_a_checkpoint_to_the_bit() -> None:
    import json

    guard, other = watched(10), Guard(10)
    other.restore(json.loads(json.dumps(guard.state())))
    assert other == guard


def test_each_tower_is_cut_by_itself_and_the_norms_are_those_before() -> None:
    model = CLIP(model_config("test-32"))
    for tower, size in {"visual.proj": 100.0, "text_projection": 0.5, "logit_scale": 0.25}.items():
        parameter = model.get_parameter(tower)
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[0] = size
    assert {k: len(v) for k, v in by_tower(model).items()} == {"image": 1, "text": 1, "scalars": 1}
    norms = clip_by_tower(model, 1.0)
    assert {k: float(v) for k, v in norms.items()} == pytest.approx({"image": 100.0, "text": 0.5, "scalars": 0.25})
    assert float(total_norm(norms)) == pytest.approx(math.hypot(100, 0.5, 0.25))
    assert float(model.visual.proj.grad.norm()) == pytest.approx(1.0, rel=1e-4)  # type: ignore[union-attr]
    assert float(model.text_projection.grad.norm()) == 0.5  # type: ignore[union-attr]
    clip_by_tower(model, 0.0)
    assert float(model.visual.proj.grad.norm()) == pytest.approx(1.0, rel=1e-4)  # type: ignore[union-attr]


def test_the_factor_of_fp16_halves_on_overflow_and_grows_in_quiet() -> None:
    scale = LossScale.of("fp16")
    assert scale.value == FIRST_SCALE and LossScale.of("bf16").value == 1
    assert [scale.overflowed(finite) for finite in (True, False, False)] == [False, True, True]
    assert scale.value == FIRST_SCALE / 4
    for _ in range(QUIET_STEPS):
        assert not scale.overflowed(True)
    assert scale.value == FIRST_SCALE / 2
    scale.value = 1.0
    assert not scale.overflowed(False)  # then it is the model
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([2.0, 4.0])
    LossScale(2.0).divide([parameter])
    assert parameter.grad.tolist() == [1.0, 2.0]
