"""Self-attention over rows cut into segments, by two paths that give the same numbers.

Shape letters: R rows, N samples of a segment, L positions of a sample, H heads, K width of a head, D = H K.

On GPUs the fused kernels (`scaled_dot_product_attention`) are right. On CPUs their backward pass was half of a small
tower's step, so there the products are written out, with a backward by hand that copies nothing twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Above this length the L x L weights of the written-out path outgrow what the fused kernel's recompute costs.
MATMUL_MAX_LENGTH = 640


class Segment(NamedTuple):
    """`samples` neighbours in the row order, each `length` rows long."""

    samples: int
    length: int


def attend(qkv_RD3: Tensor, heads: int, segments: list[Segment], causal: bool) -> Tensor:
    """Self-attention inside each sample.

    `qkv_RD3` is (R, 3 D), queries, keys and values side by side; returns (R, D). Device and length choose the path.
    """
    longest = max((s.length for s in segments), default=0)
    if qkv_RD3.device.type == "cpu" and longest <= MATMUL_MAX_LENGTH:
        return _MatmulAttention.apply(qkv_RD3, heads, segments, causal)
    return _sdpa(qkv_RD3, heads, segments, causal)


def _sdpa(qkv: Tensor, heads: int, segments: list[Segment], causal: bool) -> Tensor:
    width = qkv.shape[1] // 3
    out: list[Tensor] = []
    for part, (n, length) in zip(qkv.split([s.samples * s.length for s in segments]), segments, strict=True):
        q, k, v = part.view(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        y_NHLK = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.append(y_NHLK.transpose(1, 2).reshape(n * length, width))
    return out[0] if len(out) == 1 else torch.cat(out)


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, segments: list[Segment], causal: bool) -> Tensor:
        width = qkv.shape[1] // 3
        out = qkv.new_empty(qkv.shape[0], width)
        saved: list[Tensor] = []
        start = 0
        for n, length in segments:
            stop = start + n * length
            q, k, v = _split_heads(qkv[start:stop], n, length, heads)
            weights = _weights(q, k, causal)
            y = torch.bmm(weights, v).view(n, heads, length, -1)
            out[start:stop].view(n, length, heads, -1).copy_(y.transpose(1, 2))
            saved += [q, k, v, weights]
            start = stop
        ctx.save_for_backward(*saved)
        ctx.heads, ctx.segments = heads, segments
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        heads, width, saved = ctx.heads, grad.shape[1], ctx.saved_tensors
        grad_qkv = grad.new_empty(grad.shape[0], 3 * width)
        start = 0
        for i, (n, length) in enumerate(ctx.segments):
            stop = start + n * length
            q, k, v, weights = saved[4 * i : 4 * i + 4]
            dy = grad[start:stop].view(n, length, heads, -1).transpose(1, 2).reshape(n * heads, length, -1)
            dqkv = _attention_grad(q, k, v, weights, dy)
            merged = dqkv.view(3, n, heads, length, -1).permute(1, 3, 0, 2, 4)
            grad_qkv[start:stop].view(n, length, 3, heads, -1).copy_(merged)
            start = stop
        return grad_qkv, None, None, None


def _split_heads(qkv: Tensor, n: int, length: int, heads: int) -> Tensor:
    """(N L, 3 D) -> (3, N H, L, K)."""
    return qkv.view(n, length, 3, heads, -1).permute(2, 0, 3, 1, 4).reshape(3, n * heads, length, -1)


def _weights(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    length, scale = q.shape[1], q.shape[2] ** -0.5
    logits = torch.bmm(q * scale, k.transpose(1, 2))
    if causal:
        logits += logits.new_full((length, length), -torch.inf).triu_(1)
    if logits.dtype == torch.bfloat16:  # faster than the bf16 kernel by a third on CPUs, and rounded once only
        return torch.softmax(logits, dim=-1, dtype=torch.float32).to(logits.dtype)
    return torch.softmax(logits, dim=-1)


def _attention_grad(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, dy: Tensor) -> Tensor:
    """Gradients of q, k, v as one (3, N H, L, K) tensor, so that merging the heads is a single copy."""
    scale = q.shape[2] ** -0.5
    dqkv = q.new_empty(3, *q.shape)
    torch.bmm(weights.transpose(1, 2), dy, out=dqkv[2])
    dweights = torch.bmm(dy, v.transpose(1, 2))
    dlogits = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
    torch.bmm(dlogits, k, out=dqkv[0])
    torch.bmm(dlogits.transpose(1, 2), q, out=dqkv[1])
    dqkv[:2].mul_(scale)
    return dqkv


def attend_one(q_ND: Tensor, kv_RD2: Tensor, heads: int, segments: list[Segment], read_N: Tensor | None) -> Tensor:
    """One query a sample over all its positions; (N, D).

    `read_N`, if given, is the row of each query: later rows of its sample are masked (the causal mask's last line).
    """
    width = q_ND.shape[1]
    out: list[Tensor] = []
    sample = start = 0
    for n, length in segments:
        stop = start + n * length
        k, v = kv_RD2[start:stop].view(n, length, 2, heads, width // heads).permute(2, 0, 3, 1, 4)
        q = q_ND[sample : sample + n].view(n, heads, 1, width // heads)
        logits = (q * (width // heads) ** -0.5) @ k.transpose(2, 3)
        if read_N is not None:
            row_NL = torch.arange(start, stop, device=q.device).view(n, length)
            hidden_NL = row_NL > read_N[sample : sample + n, None]
            logits = logits.masked_fill(hidden_NL[:, None, None], -torch.inf)
        out.append((logits.softmax(dim=-1) @ v).reshape(n, width))
        sample, start = sample + n, stop
    return out[0] if len(out) == 1 else torch.cat(out)
