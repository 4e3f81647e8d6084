"""CLIP's ResNet image tower (Radford et al. 2021, section 2.4), with open_clip's parameter names and shapes.

Three changes to a plain ResNet: a stem of three convolutions, an average pool in front of every stride (so nothing is
skipped over), and attention over the last grid instead of a mean.

Shape letters: B batch, C channels, H W grid, E joint width.

Batch normalisation is the one layer that looks across samples. Its statistics are those of the micro-batch over all
ranks, so the number of ranks changes no gradient; the number of micro-batches does, as it must.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from train.attention import Segment, attend_one
from train.linear import linear
from train.models import RESNET_EXPANSION, ModelConfig


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation over all ranks, whose running statistics count every batch once.

    Passes without gradients (GradCache's first) and passes repeated in the backward pass (activation checkpointing)
    see the same batch again: they normalise by it and leave the running statistics alone.
    """

    repeating = False

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                x_BCHW, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        record = torch.is_grad_enabled() and not self.repeating
        if record and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.running_mean is not None and self.running_var is not None
        # copies rather than none at all: a repeated pass must save as many tensors as the first did
        mean, var = (
            (self.running_mean, self.running_var) if record else (self.running_mean.clone(), self.running_var.clone())
        )
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return F.batch_norm(x_BCHW, mean, var, self.weight, self.bias, True, self.momentum or 0.0, self.eps)
        return self._over_ranks(x_BCHW, mean, var)

    def _over_ranks(self, x_BCHW: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
        wide = x_BCHW.to(self.weight.dtype)
        count = wide.new_full((1,), wide.numel() / wide.shape[1])
        sums = torch.cat([wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3)), count])
        total, squares, number = _SumOverRanks.apply(sums).split([self.num_features, self.num_features, 1])
        mean = total / number
        var = squares / number - mean.square()
        with torch.no_grad():
            running_mean.lerp_(mean, self.momentum or 0.0)
            running_var.lerp_(var * number / (number - 1), self.momentum or 0.0)
        gain = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * gain
        return (wide * gain.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).to(x_BCHW.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, forward and backward: every rank's loss depends on every rank's samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Conv(nn.Conv2d):
    """A convolution without bias that rounds its weights to the type of its input."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.conv2d(x_BCHW, self.weight.to(x_BCHW.dtype), None, self.stride, self.padding)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a residual; the stride is an average pool behind the 3x3."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = planes * RESNET_EXPANSION
        self.conv1, self.bn1 = Conv(inputs, planes, 1), BatchNorm(planes)
        self.conv2, self.bn2 = Conv(planes, planes, 3), BatchNorm(planes)
        self.avgpool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.conv3, self.bn3 = Conv(planes, outputs, 1), BatchNorm(outputs)
        self.downsample: nn.Sequential | None = None
        if stride > 1 or inputs != outputs:
            parts = [("-1", nn.AvgPool2d(stride)), ("0", Conv(inputs, outputs, 1)), ("1", BatchNorm(outputs))]
            self.downsample = nn.Sequential(OrderedDict(parts))
        nn.init.zeros_(self.bn3.weight)  # every block begins as the identity

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x_BCHW)), inplace=True)
        y = self.avgpool(F.relu(self.bn2(self.conv2(y)), inplace=True))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x_BCHW if self.downsample is None else self.downsample(x_BCHW)), inplace=True)


class AttentionPool(nn.Module):
    """One head-wise query, the mean of the grid, over the grid and itself; (B, C, H, W) -> (B, E)."""

    def __init__(self, side: int, width: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.positional_embedding = nn.Parameter(torch.randn(side * side + 1, width) / width**0.5)
        self.k_proj, self.q_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.c_proj = nn.Linear(width, embed_dim)
        for layer in (self.k_proj, self.q_proj, self.v_proj, self.c_proj):
            nn.init.normal_(layer.weight, std=width**-0.5)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        grid_BPC = x_BCHW.flatten(2).transpose(1, 2)
        x_BPC = torch.cat([grid_BPC.mean(1, keepdim=True), grid_BPC], dim=1)
        x_BPC = x_BPC + self.positional_embedding.to(x_BPC.dtype)
        samples, length, _ = x_BPC.shape
        q = linear(x_BPC[:, 0], self.q_proj.weight, self.q_proj.bias)
        weight = torch.cat([self.k_proj.weight, self.v_proj.weight])
        kv = linear(x_BPC.flatten(0, 1), weight, torch.cat([self.k_proj.bias, self.v_proj.bias]))
        pooled = attend_one(q, kv, self.heads, [Segment(samples, length)], None)
        return self.c_proj(pooled.to(self.c_proj.weight.dtype))


class ResNetTower(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        assert isinstance(cfg.vision_layers, tuple)
        width = cfg.vision_width
        self.checkpoint_blocks = False
        self.conv1, self.bn1 = Conv(3, width // 2, 3, stride=2), BatchNorm(width // 2)
        self.conv2, self.bn2 = Conv(width // 2, width // 2, 3), BatchNorm(width // 2)
        self.conv3, self.bn3 = Conv(width // 2, width, 3), BatchNorm(width)
        inputs = width
        for i, blocks in enumerate(cfg.vision_layers):
            planes = width * 2**i
            stage = []
            for j in range(blocks):
                stage.append(Bottleneck(inputs, planes, 2 if i and not j else 1))
                inputs = planes * RESNET_EXPANSION
            setattr(self, f"layer{i + 1}", nn.Sequential(*stage))
        self.attnpool = AttentionPool(cfg.image_size // cfg.patch, inputs, cfg.vision_heads, cfg.embed_dim)
        # CPUs convolve fastest with the channels innermost; weights laid out so are not copied at every step
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalised pixels in the compute type -> features_BE, in the parameters' type, not normalised."""
        x = pixels_BCHW.contiguous(memory_format=torch.channels_last)
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = F.relu(norm(conv(x)), inplace=True)
        x = F.avg_pool2d(x, 2)
        for block in self._blocks():
            if self.checkpoint_blocks and torch.is_grad_enabled():
                contexts = functools.partial(_once_and_again, block)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        return self.attnpool(x)

    def _blocks(self) -> Iterator[nn.Module]:
        for name in ("layer1", "layer2", "layer3", "layer4"):
            yield from getattr(self, name)


def _once_and_again(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return contextlib.nullcontext(), _repeating(block)


@contextlib.contextmanager
def _repeating(block: nn.Module) -> Iterator[None]:
    """Inside, the block's normalisations take the batch for one they have counted."""
    norms = [module for module in block.modules() if isinstance(module, BatchNorm)]
    for norm in norms:
        norm.repeating = True
    try:
        yield
    finally:
        for norm in norms:
            norm.repeating = False
