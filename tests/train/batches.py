"""Random batches of bytes and tokens, and a model's gradients by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_batch(size: int, side: int) -> tuple[Tensor, Tensor]:
    """Pictures (size, 3, side, side) uint8 and texts (size, 12) of a vocabulary of 64, whose ends lie at various places."""
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=g)
    tokens = torch.randint(1, 62, (size, 12), generator=g)
    for i, row in enumerate(tokens):
        row[2 + i % 9] = 63
    return pixels, tokens


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
