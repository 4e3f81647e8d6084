"""AdamW as CLIP uses it: two parameter groups, warm-up and cosine, clamp of the log scale."""

from __future__ import annotations

import math

import torch
from torch import nn

from train.towers import unwrap

MAX_LOG_SCALE = math.log(100.0)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decayed parameters (two or more dimensions) and the others: gains, biases, scalars, the class embedding."""
    decay: list[nn.Parameter] = []
    keep: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 else keep).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


def make_optimizer(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.2,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-6,
) -> torch.optim.AdamW:
    """AdamW with the values of Radford et al. 2021 (ViT) unless told otherwise; one fused kernel a group."""
    return torch.optim.AdamW(param_groups(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)


def lr_at(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Learning rate of `step` (from 0): linear warm-up over `warmup` steps, then a cosine to `floor` at `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return floor
    done = (step - warmup) / max(1, total - warmup)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clamp_log_scale(model: nn.Module, limit: float = MAX_LOG_SCALE) -> None:
    """Keep the log scale within [0, `limit`]; call after the optimiser's step, as CLIP's stability needs it."""
    unwrap(model).logit_scale.clamp_(0.0, limit)
