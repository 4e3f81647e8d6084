"""Linear layers with products of 8 bits, by SwitchBack (Wortsman et al. 2023, "Stable and low-precision training").

The forward product and the gradient of the input are taken in 8 bits. The gradient of the weight sums over all rows of the
batch, where 8 bits lose too much: it stays in 16. Scales are those of the values at hand, so nothing is kept between steps.

Shape letters: R rows, I inputs, O outputs, K the inner side of a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS = ("int8", "fp8")

# What the products ask of their sides: cuBLASLt's int8 and fp8 kernels.
SIDE = {"int8": 8, "fp8": 16}
ROWS_MIN = 17

TINY = 1e-12  # the least scale: rows of nothing but zeros have one too


def fits(rows: int, inputs: int, outputs: int, kind: str) -> bool:
    """Whether a layer's products can be taken in 8 bits; small and odd ones stay in 16."""
    return rows >= ROWS_MIN and inputs % SIDE[kind] == 0 and outputs % SIDE[kind] == 0


def linear_8bit(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, kind: str) -> Tensor:
    """x @ weight^T + bias in the type of `x` (16 bits); gradients of weight and bias come in their own types."""
    y = _Linear.apply(x_RI, weight_OI, kind)
    return y if bias_O is None else y + bias_O.to(y.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x_RI, weight_OI)
        ctx.kind = kind
        return _PRODUCTS[kind](x_RI, weight_OI.t())

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_RI, weight_OI = ctx.saved_tensors
        d_x = _PRODUCTS[ctx.kind](grad_RO, weight_OI, is_grad=True) if ctx.needs_input_grad[0] else None
        d_weight = (grad_RO.t() @ x_RI).to(weight_OI.dtype) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None


def _int8_product(rows_RK: Tensor, weight_KO: Tensor, is_grad: bool = False) -> Tensor:
    """Each row with a scale of its own, the weight with one; sums are exact in 32 bits."""
    scale_R1 = rows_RK.abs().amax(dim=1, keepdim=True).float().clamp(min=TINY) / 127
    scale = weight_KO.abs().amax().float().clamp(min=TINY) / 127
    rows = (rows_RK / scale_R1).round().to(torch.int8)
    weight = (weight_KO / scale).round().to(torch.int8)
    return (torch._int_mm(rows, weight) * (scale_R1 * scale)).to(rows_RK.dtype)


def _fp8_product(rows_RK: Tensor, weight_KO: Tensor, is_grad: bool = False) -> Tensor:
    """One scale each. Values in E4M3, gradients in E5M2, which reaches further down (Micikevicius et al. 2022)."""
    kind = torch.float8_e5m2 if is_grad else torch.float8_e4m3fn
    rows, scale_rows = _to_fp8(rows_RK, kind)
    weight, scale = _to_fp8(weight_KO, torch.float8_e4m3fn)
    columns_first = weight.t().contiguous().t()  # the only layout that the GPU's kernel reads
    return torch._scaled_mm(rows, columns_first, scale_rows, scale, out_dtype=rows_RK.dtype)


def _to_fp8(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().float().clamp(min=TINY) / torch.finfo(kind).max
    return (x / scale).to(kind).contiguous(), scale


_PRODUCTS = {"int8": _int8_product, "fp8": _fp8_product}
