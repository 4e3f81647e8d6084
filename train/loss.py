"""The contrastive losses, sharded exactly.

Shape letters: b pairs of this rank, B pairs of all ranks (B = N b), D joint width, t rows or columns of a tile.

CLIP's loss over the global batch (Radford et al. 2021) reads every entry of S = scale * U V^T once by rows and once by
columns. Each rank forms only its own b x B stripe of S, tile by tile:

    forward    all-gather V (texts); per tile, fold the row log-sum-exp (complete on this rank) and the column
               log-sum-exp (partial); merge the columns over ranks with two all-reduces of B floats (max, then sum).
    backward   form each tile again; G = dL/dS = (exp(S - row_lse) + exp(S - col_lse) - 2 [positive]) / 2n;
               dU = scale G V stays here; the partial dV = scale G^T U goes home in one reduce-scatter.

So half the bytes and half the logits of the usual local loss, and nothing of size b x B is ever held: saved for the
backward pass are the embeddings and two vectors. The gradient of the log scale is sum(G * S) = sum(U * dU), exact.

Normalisation: the value is the global mean, the same on every rank. Gradients are N times this rank's part, because
DDP (and FSDP) average over ranks afterwards; after that average they equal those of one process with the whole batch.

Masks: an invalid pair is neither a positive nor a negative, and does not count in the mean. Two pairs of the same
group (the same picture) are not each other's negatives.

`full_loss` and `local_loss` say the same in the plain forms, for reading and for the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor
from torch.nn import functional as F

from train.comm import CLOCK

# Side of a tile. On CPUs one that stays in the second-level cache beside its operands; on GPUs one that fills the card.
TILE_CPU = 512
TILE_GPU = 4096


class Stripe(NamedTuple):
    """What one rank needs to form its b x B stripe of the logits, all in the accumulation type."""

    img_bD: Tensor
    txt_BD: Tensor
    first: int
    """Global number of this rank's first pair."""
    valid_b: Tensor | None
    valid_B: Tensor | None
    group_b: Tensor | None
    group_B: Tensor | None
    tile: int

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        rows, columns = self.img_bD.shape[0], self.txt_BD.shape[0]
        for i in range(0, rows, self.tile):
            for j in range(0, columns, self.tile):
                yield slice(i, min(i + self.tile, rows)), slice(j, min(j + self.tile, columns))

    def positives(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """Where the positives lie inside a tile (row and column numbers), or None when it holds none."""
        start = max(rows.start, columns.start - self.first)
        stop = min(rows.stop, columns.stop - self.first)
        if start >= stop:
            return None
        at = torch.arange(start, stop, device=self.img_bD.device)
        return at - rows.start, at + self.first - columns.start

    def excluded(self, rows: slice, columns: slice) -> Tensor | None:
        """True where a tile's pair is no term of the loss; None when every pair counts."""
        out: Tensor | None = None
        if self.group_b is not None and self.group_B is not None:
            out = self.group_b[rows, None] == self.group_B[None, columns]
            at = self.positives(rows, columns)
            if at is not None:
                out[at] = False
        if self.valid_b is not None and self.valid_B is not None:
            unusable = ~(self.valid_b[rows, None] & self.valid_B[None, columns])
            out = unusable if out is None else out.logical_or_(unusable)
        return out

    def logits(self, scale: Tensor, rows: slice, columns: slice) -> Tensor:
        """scale * cosine of a tile, -inf where excluded."""
        logits = (self.img_bD[rows] * scale) @ self.txt_BD[columns].T
        excluded = self.excluded(rows, columns)
        return logits if excluded is None else logits.masked_fill_(excluded, -torch.inf)


def clip_loss(
    img_bD: Tensor,
    txt_bD: Tensor,
    log_scale: Tensor,
    *,
    valid_b: Tensor | None = None,
    group_b: Tensor | None = None,
    tile: int | None = None,
    pg: dist.ProcessGroup | None = None,
) -> Tensor:
    """CLIP's symmetric loss over the batch of all ranks: its global mean, the same scalar on every rank.

    `img_bD` and `txt_bD` are normalised embeddings of this rank's pairs (every rank must hold equally many). Sums run
    in fp32, or in fp64 when the embeddings are fp64. `valid_b` is bool, `group_b` an int64 picture id. Without `pg`
    the default group is used if there is one.
    """
    return clip_loss_and_accuracy(img_bD, txt_bD, log_scale, valid_b=valid_b, group_b=group_b, tile=tile, pg=pg)[0]


def clip_loss_and_accuracy(
    img_bD: Tensor,
    txt_bD: Tensor,
    log_scale: Tensor,
    *,
    valid_b: Tensor | None = None,
    group_b: Tensor | None = None,
    tile: int | None = None,
    pg: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """`clip_loss`, and the share of images whose own caption scores highest among all of the batch."""
    with torch.autocast(img_bD.device.type, enabled=False):
        img, txt = _accumulation_type(img_bD), _accumulation_type(txt_bD)
        return _ClipLoss.apply(img, txt, log_scale, valid_b, group_b, tile, pg)


def _accumulation_type(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        img: Tensor,
        txt: Tensor,
        log_scale: Tensor,
        valid_b: Tensor | None,
        group_b: Tensor | None,
        tile: int | None,
        pg: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        stripe = _gather(img, txt, valid_b, group_b, tile, pg)
        scale = log_scale.to(img.dtype).exp()
        row_lse, col_lse, positive, hit = _log_sum_exps(stripe, scale)
        col_lse = _merge_columns(col_lse, pg)
        own = col_lse[stripe.first : stripe.first + img.shape[0]]
        terms = row_lse + own - 2 * positive
        count = torch.ones_like(terms)
        if valid_b is not None:  # where, not a product: the terms of invalid pairs are not finite
            count = valid_b.to(terms.dtype)
            terms, hit = terms.where(valid_b, terms.new_zeros(())), hit & valid_b
        sums = torch.stack([terms.sum() / 2, count.sum(), hit.sum().to(terms.dtype)])
        _all_reduce(sums, pg)
        pairs = sums[1].clamp(min=1)
        ctx.save_for_backward(scale, row_lse, col_lse, pairs, *stripe[:2])
        ctx.stripe, ctx.pg = stripe._replace(img_bD=img.new_empty(0), txt_BD=img.new_empty(0)), pg
        ctx.scalar_type = log_scale.dtype
        loss, accuracy = sums[0] / pairs, sums[2] / pairs
        ctx.mark_non_differentiable(accuracy)
        return loss, accuracy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scale, row_lse, col_lse, pairs, img, txt_BD = ctx.saved_tensors
        stripe = ctx.stripe._replace(img_bD=img, txt_BD=txt_BD)
        with torch.autocast(img.device.type, enabled=False):
            d_img, d_txt_BD = _clip_gradients(stripe, scale, row_lse, col_lse)
        weight = grad * _world(ctx.pg) / (2 * pairs)
        d_img *= weight
        d_txt = _send_home(d_txt_BD, ctx.pg).mul_(weight)
        d_scale = (img * d_img).sum().to(ctx.scalar_type)
        return d_img, d_txt, d_scale, None, None, None, None


def _log_sum_exps(stripe: Stripe, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row log-sum-exp_b, this rank's part of the column log-sum-exp_B, positive logit_b, row maximum is positive_b."""
    img, txt = stripe.img_bD, stripe.txt_BD
    row_lse, row_max = img.new_full((2, img.shape[0]), -torch.inf)
    col_lse = txt.new_full((txt.shape[0],), -torch.inf)
    positive = img.new_zeros(img.shape[0])
    for rows, columns in stripe.tiles():
        logits = stripe.logits(scale, rows, columns)
        at = stripe.positives(rows, columns)
        if at is not None:
            positive[at[0] + rows.start] = logits[at]
        top, lse = _row_log_sum_exp(logits)
        row_max[rows] = torch.maximum(row_max[rows], top)
        row_lse[rows] = torch.logaddexp(row_lse[rows], lse)
        col_lse[columns] = torch.logaddexp(col_lse[columns], logits.logsumexp(dim=0))
    return row_lse, col_lse, positive, positive >= row_max


def _row_log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    top = logits.amax(dim=1)
    base = top.where(top.isfinite(), top.new_zeros(()))  # a row without any term: exp(-inf - 0) = 0, log 0 = -inf
    return top, (logits - base[:, None]).exp_().sum(dim=1).log_().add_(base)


def _clip_gradients(stripe: Stripe, scale: Tensor, row_lse: Tensor, col_lse: Tensor) -> tuple[Tensor, Tensor]:
    """2 n dL/dU_bD and this rank's part of 2 n dL/dV_BD."""
    img, txt = stripe.img_bD, stripe.txt_BD
    d_img, d_txt = torch.zeros_like(img), torch.zeros_like(txt)
    # Rows without a term have -inf logits and lse; any finite number makes exp(-inf - lse) the 0 that it should be.
    row_lse = row_lse.where(row_lse.isfinite(), row_lse.new_zeros(()))
    col_lse = col_lse.where(col_lse.isfinite(), col_lse.new_zeros(()))
    for rows, columns in stripe.tiles():
        logits = stripe.logits(scale, rows, columns)
        g = (logits - row_lse[rows, None]).exp_()
        g += logits.sub_(col_lse[columns]).exp_()
        at = stripe.positives(rows, columns)
        if at is not None:
            usable = stripe.valid_b[rows][at[0]] if stripe.valid_b is not None else None
            g[at] -= 2 if usable is None else 2 * usable.to(g.dtype)
        d_img[rows].addmm_(g, txt[columns])
        d_txt[columns].addmm_(g.T, img[rows])
    return d_img.mul_(scale), d_txt.mul_(scale)


def siglip_loss(
    img_bD: Tensor,
    txt_bD: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    *,
    valid_b: Tensor | None = None,
    group_b: Tensor | None = None,
    tile: int | None = None,
    pg: dist.ProcessGroup | None = None,
) -> Tensor:
    """SigLIP's pairwise sigmoid loss (Zhai et al. 2023), summed over all pairs and divided by the number of images.

    Same stripe, masks, normalisation and memory as `clip_loss`. Start `log_scale` at log 10 and `bias` at -10.
    """
    with torch.autocast(img_bD.device.type, enabled=False):
        img, txt = _accumulation_type(img_bD), _accumulation_type(txt_bD)
        return _SiglipLoss.apply(img, txt, log_scale, bias, valid_b, group_b, tile, pg)


class _SiglipLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        img: Tensor,
        txt: Tensor,
        log_scale: Tensor,
        bias: Tensor,
        valid_b: Tensor | None,
        group_b: Tensor | None,
        tile: int | None,
        pg: dist.ProcessGroup | None,
    ) -> Tensor:
        stripe = _gather(img, txt, valid_b, group_b, tile, pg)
        scale = log_scale.to(img.dtype).exp()
        offset = bias.to(img.dtype)
        total = img.new_zeros(())
        for rows, columns in stripe.tiles():
            total += F.softplus(_signed(stripe, scale, offset, rows, columns)[0]).sum()
        count = valid_b.sum() if valid_b is not None else torch.tensor(img.shape[0], device=img.device)
        sums = torch.stack([total, count.to(total.dtype)])
        _all_reduce(sums, pg)
        pairs = sums[1].clamp(min=1)
        ctx.save_for_backward(scale, offset, pairs, *stripe[:2])
        ctx.stripe, ctx.pg = stripe._replace(img_bD=img.new_empty(0), txt_BD=img.new_empty(0)), pg
        ctx.scalar_type = log_scale.dtype
        return sums[0] / pairs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scale, offset, pairs, img, txt_BD = ctx.saved_tensors
        stripe = ctx.stripe._replace(img_bD=img, txt_BD=txt_BD)
        d_img, d_txt_BD, d_bias = torch.zeros_like(img), torch.zeros_like(txt_BD), img.new_zeros(())
        with torch.autocast(img.device.type, enabled=False):
            for rows, columns in stripe.tiles():
                signed, at = _signed(stripe, scale, offset, rows, columns)
                g = signed.sigmoid_()
                if at is not None:
                    g[at] *= -1
                d_bias += g.sum()
                d_img[rows].addmm_(g, txt_BD[columns])
                d_txt_BD[columns].addmm_(g.T, img[rows])
        weight = grad * _world(ctx.pg) / pairs
        d_img *= weight * scale
        d_txt = _send_home(d_txt_BD, ctx.pg).mul_(weight * scale)
        d_scale = (img * d_img).sum().to(ctx.scalar_type)
        return d_img, d_txt, d_scale, (d_bias * weight).to(ctx.scalar_type), None, None, None, None


def _signed(
    stripe: Stripe, scale: Tensor, offset: Tensor, rows: slice, columns: slice
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Minus label times logit of a tile (-inf where excluded), and where its positives are."""
    logits = stripe.logits(scale, rows, columns).add_(offset)
    at = stripe.positives(rows, columns)
    if at is not None:
        own = -logits[at]
        logits[at] = own.where(own.isfinite(), own.new_full((), -torch.inf))
    return logits, at


# -- what crosses between ranks ---------------------------------------------------------------------------------------


def _world(pg: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(pg) if dist.is_available() and dist.is_initialized() else 1


def _gather(
    img: Tensor,
    txt: Tensor,
    valid_b: Tensor | None,
    group_b: Tensor | None,
    tile: int | None,
    pg: dist.ProcessGroup | None,
) -> Stripe:
    """This rank's stripe: texts, and masks where there are any, of all ranks."""
    rank = dist.get_rank(pg) if _world(pg) > 1 else 0
    tile = tile or (TILE_CPU if img.device.type == "cpu" else TILE_GPU)
    valid_B = None if valid_b is None else _all_gather(valid_b.to(torch.uint8), pg).bool()
    group_B = None if group_b is None else _all_gather(group_b, pg)
    return Stripe(img, _all_gather(txt, pg), rank * img.shape[0], valid_b, valid_B, group_b, group_B, tile)


@CLOCK.timed()
def _all_gather(x: Tensor, pg: dist.ProcessGroup | None) -> Tensor:
    world = _world(pg)
    if world == 1:
        return x
    out = x.new_empty(world * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=pg)
    return out


@CLOCK.timed()
def _all_reduce(x: Tensor, pg: dist.ProcessGroup | None, op: Any = None) -> None:
    if _world(pg) > 1:
        dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=pg)


def _merge_columns(col_lse: Tensor, pg: dist.ProcessGroup | None) -> Tensor:
    """log(sum over ranks of exp(col_lse)), from a maximum and a sum of B floats."""
    if _world(pg) == 1:
        return col_lse
    top = col_lse.clone()
    _all_reduce(top, pg, dist.ReduceOp.MAX)
    base = top.where(top.isfinite(), top.new_zeros(()))
    total = (col_lse - base).exp_()
    _all_reduce(total, pg)
    return total.log_().add_(base)


@CLOCK.timed()
def _send_home(grad_BD: Tensor, pg: dist.ProcessGroup | None) -> Tensor:
    """Sum over ranks of the gradient of all texts; each rank receives the part of its own."""
    world = _world(pg)
    if world == 1:
        return grad_BD
    out = grad_BD.new_empty(grad_BD.shape[0] // world, grad_BD.shape[1])
    dist.reduce_scatter_tensor(out, grad_BD, group=pg)
    return out


# -- the same loss in plain forms -------------------------------------------------------------------------------------


def full_loss(
    img_BD: Tensor,
    txt_BD: Tensor,
    log_scale: Tensor,
    *,
    valid_B: Tensor | None = None,
    group_B: Tensor | None = None,
) -> Tensor:
    """One process, the whole B x B matrix, plain autograd: the definition that the others are compared with."""
    logits = log_scale.to(img_BD.dtype).exp() * img_BD @ txt_BD.T
    valid = torch.ones(len(logits), dtype=torch.bool, device=logits.device) if valid_B is None else valid_B
    return (_cross_entropy(logits, 0, valid, valid, group_B, group_B) / valid.sum().clamp(min=1)) / 2 + (
        _cross_entropy(logits.T, 0, valid, valid, group_B, group_B) / valid.sum().clamp(min=1)
    ) / 2


def local_loss(
    img_bD: Tensor,
    txt_bD: Tensor,
    log_scale: Tensor,
    *,
    valid_b: Tensor | None = None,
    group_b: Tensor | None = None,
    pg: dist.ProcessGroup | None = None,
) -> Tensor:
    """The usual sharded form: own rows against all columns in both directions, through a differentiable gather.

    Returns this rank's share times the number of ranks, so the ranks' mean is the global loss and its gradients need
    DDP's average like those of `clip_loss`. Holds two b x B matrices.
    """
    world, rank = _world(pg), dist.get_rank(pg)
    img_BD = torch.cat(dist_nn.all_gather(img_bD, group=pg or dist.group.WORLD))
    txt_BD = torch.cat(dist_nn.all_gather(txt_bD, group=pg or dist.group.WORLD))
    valid_b = torch.ones(len(img_bD), dtype=torch.bool, device=img_bD.device) if valid_b is None else valid_b
    valid_B = _all_gather(valid_b.to(torch.uint8), pg).bool()
    group_B = None if group_b is None else _all_gather(group_b, pg)
    first, scale = rank * len(img_bD), log_scale.to(img_bD.dtype).exp()
    by_image = _cross_entropy(scale * img_bD @ txt_BD.T, first, valid_b, valid_B, group_b, group_B)
    by_text = _cross_entropy(scale * txt_bD @ img_BD.T, first, valid_b, valid_B, group_b, group_B)
    return (by_image + by_text) / 2 * world / valid_B.sum().clamp(min=1)


def _cross_entropy(
    logits_bB: Tensor, first: int, valid_b: Tensor, valid_B: Tensor, group_b: Tensor | None, group_B: Tensor | None
) -> Tensor:
    """Sum over valid rows of -log softmax at column `first` + row, over the columns that count."""
    own_b = torch.arange(len(logits_bB), device=logits_bB.device)
    counts = valid_B.expand_as(logits_bB).clone()
    if group_b is not None and group_B is not None:
        counts &= group_b[:, None] != group_B
    counts[own_b, own_b + first] = True  # also of invalid rows, which keeps them finite until they are dropped
    terms = F.cross_entropy(logits_bB.masked_fill(~counts, -torch.inf), own_b + first, reduction="none")
    return terms[valid_b].sum()
