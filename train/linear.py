"""The linear layer of the towers, and its fast form for bf16 on CPUs.

Shape letters: R rows, I inputs, O outputs.

On a CPU the products themselves run at the machine's peak, so what is left to save lies around them. Measured on one
Zen 4 core at 12,500 rows, 256 -> 1024: a bias as part of the product instead of a pass of its own 35.1 -> 31.4 ms, the
weights' gradient with its short side as rows 36.7 -> 33.1 ms, the bias' gradient as a product 5.5 -> 3.4 ms.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from train.eightbit import fits, linear_8bit

# Matrix units (AMX) want their rows packed, and oneDNN packs a transposed operand while it multiplies. From about this many
# columns on a copy in advance is cheaper: 3,200 rows, 768 -> 3072, 32.6 -> 22.4 ms; but 256 -> 768 2.1 -> 2.5 ms.
TRANSPOSED_MIN = 512

# A product sums columns faster than `sum` does, from about this many columns on.
BIAS_PRODUCT_MIN = 512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, eight_bits: str = "") -> Tensor:
    """x_RI @ weight_OI^T + bias_O in the type of `x`; the weights' gradients come in the weights' own type.

    `eight_bits` takes the products in "int8" or "fp8" where the sides allow it.
    """
    if eight_bits and fits(len(x), weight.shape[1], weight.shape[0], eight_bits):
        return linear_8bit(x, weight, bias, eight_bits)
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.ndim == 2 and weight.dtype == torch.float32:
        return _CpuLinear.apply(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _CpuLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        return _product(x, low, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, low = ctx.saved_tensors
        grad = grad.contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        d_x = grad @ low if wants_x else None
        d_weight = _weight_grad(grad, x) if wants_weight else None
        return d_x, d_weight, _bias_grad(grad) if wants_bias else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The operator that torch's own CPU compiler emits: oneDNN adds the bias while the tile is in registers.
    if bias is None or not len(x) or not _fuses_bf16():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _fuses_bf16() -> bool:
    """Whether oneDNN is there and multiplies bf16 on this CPU: it refuses where it would have to emulate (before AVX-512)."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """(O, I) in fp32."""
    if grad.shape[1] <= x.shape[1]:
        return (_transposed(grad) @ x).float()
    return (_transposed(x) @ grad).t().contiguous().float()


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous() if x.shape[1] >= TRANSPOSED_MIN else x.t()


def _bias_grad(grad: Tensor) -> Tensor:
    """(O,) in fp32."""
    if grad.shape[1] < BIAS_PRODUCT_MIN:
        return grad.sum(0).float()
    return (grad.new_ones(1, grad.shape[0]) @ grad)[0].float()
