"""Parameter groups, schedule, clipping, clamp."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from train.gradcache import gradcache_step
from train.guard import clip_by_tower
from train.loss import clip_loss
from train.models import MODELS
from train.optim import MAX_LOG_SCALE, clamp_log_scale, lr_at, make_optimizer, param_groups, set_lr
from train.towers import CLIP

SHAPE = replace(MODELS["test-32"], vocab=64)


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    model = CLIP(SHAPE, logit_bias=True)
    names = {id(p): n for n, p in model.named_parameters()}
    decay, keep = ([names[id(p)] for p in group["params"]] for group in param_groups(model, 0.2))  # type: ignore[attr-defined]
    assert sorted(decay + keep) == sorted(names.values())
    assert all("bias" not in n and ".ln_" not in n and "ln_final" not in n for n in decay)
    assert {"logit_scale", "logit_bias", "visual.class_embedding", "ln_final.weight"} <= set(keep)
    assert {"visual.proj", "token_embedding.weight", "positional_embedding", "visual.conv1.weight"} <= set(decay)


def test_frozen_parameters_are_left_out() -> None:
    model = CLIP(SHAPE)
    model.visual.requires_grad_(False)
    assert all(not n.startswith("visual") for n, p in model.named_parameters() if p.requires_grad)
    count = sum(len(group["params"]) for group in param_groups(model, 0.2))  # type: ignore[arg-type, misc]
    assert count == sum(p.requires_grad for p in model.parameters())


def test_a_step_is_adamw_with_decay_on_matrices_only() -> None:
    """First step of Adam moves by lr * sign(g) (up to eps); decoupled decay shrinks matrices by lr * wd before."""
    torch.manual_seed(0)
    model = CLIP(SHAPE)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    make_optimizer(model, lr=0.01).step()
    for name, parameter in model.named_parameters():
        shrunk = before[name] * (1 - 0.01 * 0.2) if parameter.ndim >= 2 else before[name]
        torch.testing.assert_close(parameter.detach(), shrunk - 0.01, rtol=1e-5, atol=1e-6)


def test_warm_up_then_cosine() -> None:
    rates = [lr_at(step, peak=1.0, warmup=10, total=110) for step in range(112)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert rates[110] == rates[111] == 0.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:111]))
    assert lr_at(35, peak=1.0, warmup=10, total=110) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert lr_at(110, peak=1.0, warmup=10, total=110, floor=0.1) == 0.1
    assert lr_at(0, peak=1.0, warmup=0, total=4) == 1.0
    assert lr_at(3, peak=1.0, warmup=8, total=4) == pytest.approx(0.5)  # a run shorter than its warm-up
    optimizer = make_optimizer(CLIP(SHAPE), lr=1.0)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(("value", "expected"), [(9.0, math.log(100)), (2.0, 2.0), (-1.0, 0.0)])
def test_log_scale_is_clamped_between_one_and_a_hundred(value: float, expected: float) -> None:
    model = CLIP(SHAPE)
    model.logit_scale.data.fill_(value)
    clamp_log_scale(model)
    assert model.logit_scale.item() == pytest.approx(expected)
    assert math.log(100) == MAX_LOG_SCALE


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8"])
def test_memorises_a_batch_in_few_bits(precision: str) -> None:
    """Everything joined: towers, loss, GradCache, optimiser; 16 pairs are told apart after 40 steps."""
    torch.manual_seed(0)
    model = CLIP(SHAPE, precision)
    optimizer = make_optimizer(model, lr=3e-3)
    pixels = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    tokens = torch.cat([torch.randint(1, 62, (16, 6)), torch.full((16, 1), 63)], dim=1)
    losses = []
    for step in range(40):
        set_lr(optimizer, lr_at(step, peak=3e-3, warmup=5, total=40))
        optimizer.zero_grad()
        losses.append(float(gradcache_step(model, pixels, tokens, clip_loss, 8 if step % 2 else None)))
        clip_by_tower(model, 1.0)
        optimizer.step()
        clamp_log_scale(model)
    assert losses[0] > 2.0
    assert losses[-1] < 0.1
