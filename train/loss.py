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
Logits are kept in powers of two: on a CPU 2^x costs a third of e^x, and a hundredth where the result is next to nothing.

SigLIP's loss (Zhai et al. 2023) is a sum over entries, so its texts may also come rank by rank round a ring.

Normalisation: the value is the global mean, the same on every rank. Gradients are N times this rank's part, because
DDP (and FSDP) average over ranks afterwards; after that average they equal those of one process with the whole batch.

Masks: an invalid pair is neither a positive nor a negative, and does not count in the mean. Two pairs of the same
group (the same picture) are not each other's negatives.

`full_loss`, `local_loss` and `full_siglip_loss` say the same in the plain forms, for reading and for the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as F

from train import distributed
from train.comm import CLOCK

gather_rows, scatter_sum = CLOCK.timed()(distributed.gather_rows), CLOCK.timed()(distributed.scatter_sum)

LOG2_E = math.log2(math.e)

# Side of a tile. On a Zen 4 core (D = 512, 4,096 pairs; 1 MB of second-level cache) 256, 512, 768 and 1,024 took 1.13, 1.01,
# 0.93 and 0.94 s: larger tiles ask less often for masks and call less. On GPUs one that fills the card.
TILE_CPU = 1024
TILE_GPU = 4096


@dataclass(frozen=True)
class Given:
    """What comes with the embeddings: masks of this rank's pairs, the side of a tile (None chooses), the ranks."""

    valid_b: Tensor | None
    group_b: Tensor | None
    tile: int | None
    pg: dist.ProcessGroup | None


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
        at = self.positives(rows, columns)
        if self.group_b is not None and self.group_B is not None:
            group_t, group_T = self.group_b[rows], self.group_B[columns]
            if at is not None or self._worth_masking(lambda: torch.isin(group_t, group_T).any()):
                out = group_t[:, None] == group_T
                if at is not None:
                    out[at] = False
        if self.valid_b is not None and self.valid_B is not None:
            valid_t, valid_T = self.valid_b[rows], self.valid_B[columns]
            if self._worth_masking(lambda: ~(valid_t.all() & valid_T.all())):
                unusable = ~(valid_t[:, None] & valid_T)
                out = unusable if out is None else out.logical_or_(unusable)
        return out

    def _worth_masking(self, found: Callable[[], Tensor]) -> bool:
        # A mask costs a CPU as much as 2^x; on a GPU it is cheap, and asking would stall the queue.
        return self.img_bD.device.type != "cpu" or bool(found())

    def logits(self, scale: Tensor, rows: slice, columns: slice) -> Tensor:
        """`scale` times the cosines of a tile, -inf where excluded."""
        logits = _products(self.img_bD[rows] * scale, self.txt_BD[columns])
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
        return _ClipLoss.apply(img, txt, log_scale, Given(valid_b, group_b, tile, pg))


def _products(x_tD: Tensor, y_TD: Tensor) -> Tensor:
    # The operator that torch's own CPU compiler emits: on Zen 4 a tenth faster at fp32 tiles than the product of `@`.
    fused = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    if fused is None or x_tD.dtype != torch.float32 or x_tD.device.type != "cpu":
        return x_tD @ y_TD.T
    return fused(x_tD, y_TD, None, "none", [], "")


def _accumulation_type(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        img: Tensor,
        txt: Tensor,
        log_scale: Tensor,
        given: Given,
    ) -> tuple[Tensor, Tensor]:
        stripe, valid_b, pg = _gather(img, txt, given), given.valid_b, given.pg
        scale = log_scale.to(img.dtype).exp()
        row_lse, col_lse, positive, hit = _log_sum_exps(stripe, scale * LOG2_E)
        col_lse = _merge_columns(col_lse, pg)
        own = col_lse[stripe.first : stripe.first + img.shape[0]]
        terms = (row_lse + own - 2 * positive) / LOG2_E
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
        d_txt = scatter_sum(d_txt_BD, ctx.pg).mul_(weight)
        d_scale = (img * d_img).sum().to(ctx.scalar_type)
        return d_img, d_txt, d_scale, None


def _log_sum_exps(stripe: Stripe, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row log-sum-exp_b, this rank's part of the column log-sum-exp_B, positive logit_b, row maximum is positive_b.

    All of them to the base of 2, in which `scale` is given.
    """
    img, txt = stripe.img_bD, stripe.txt_BD
    row_lse, row_max = img.new_full((2, img.shape[0]), -torch.inf)
    col_lse = txt.new_full((txt.shape[0],), -torch.inf)
    positive = img.new_zeros(img.shape[0])
    for rows, columns in stripe.tiles():
        logits = stripe.logits(scale, rows, columns)
        at = stripe.positives(rows, columns)
        if at is not None:
            positive[at[0] + rows.start] = logits[at]
        top, row = _log2_sum_exp2(logits, 1)
        row_max[rows] = torch.maximum(row_max[rows], top)
        row_lse[rows] = torch.logaddexp2(row_lse[rows], row)
        col_lse[columns] = torch.logaddexp2(col_lse[columns], _log2_sum_exp2(logits, 0)[1])
    return row_lse, col_lse, positive, positive >= row_max


def _log2_sum_exp2(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Maximum, and log2 of the sum of 2^x, along `dim`."""
    top = logits.amax(dim=dim, keepdim=True)
    base = _finite(top)  # a line without any term: 2^(-inf - 0) = 0, log2 0 = -inf
    return top.squeeze(dim), (logits - base).exp2_().sum(dim=dim).log2_().add_(base.squeeze(dim))


def _finite(x: Tensor) -> Tensor:
    return x.where(x.isfinite(), x.new_zeros(()))


def _clip_gradients(stripe: Stripe, scale: Tensor, row_lse: Tensor, col_lse: Tensor) -> tuple[Tensor, Tensor]:
    """2 n dL/dU_bD and this rank's part of 2 n dL/dV_BD."""
    img, txt = stripe.img_bD, stripe.txt_BD
    d_img, d_txt = torch.zeros_like(img), torch.zeros_like(txt)
    # Lines without a term have -inf logits and lse; any finite number makes 2^(-inf - lse) the 0 that it should be.
    row_lse, col_lse = _finite(row_lse), _finite(col_lse)
    for rows, columns in stripe.tiles():
        logits = stripe.logits(scale * LOG2_E, rows, columns)
        g = (logits - row_lse[rows, None]).exp2_()
        g += logits.sub_(col_lse[columns]).exp2_()
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
    ring: bool = False,
) -> Tensor:
    """SigLIP's pairwise sigmoid loss (Zhai et al. 2023), summed over all pairs and divided by the number of images.

    Same stripe, masks, normalisation and memory as `clip_loss`. Start `log_scale` at log 10 and `bias` at -10. With
    `ring` the texts of one rank at a time are held instead of all: N - 1 steps from neighbour to neighbour, the same
    bytes.
    """
    with torch.autocast(img_bD.device.type, enabled=False):
        img, txt = _accumulation_type(img_bD), _accumulation_type(txt_bD)
        return _SiglipLoss.apply(img, txt, log_scale, bias, Given(valid_b, group_b, tile, pg), ring)


class _SiglipLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        img: Tensor,
        txt: Tensor,
        log_scale: Tensor,
        bias: Tensor,
        given: Given,
        ring: bool,
    ) -> Tensor:
        stripe, valid_b, pg = (_own if ring else _gather)(img, txt, given), given.valid_b, given.pg
        scale = log_scale.to(img.dtype).exp()
        offset = bias.to(img.dtype)
        total = img.new_zeros(())
        for part, _ in _visits(stripe, pg, ring):
            for rows, columns in part.tiles():
                total += F.softplus(_signed(part, scale, offset, rows, columns)[0]).sum()
        count = valid_b.sum() if valid_b is not None else torch.tensor(img.shape[0], device=img.device)
        sums = torch.stack([total, count.to(total.dtype)])
        _all_reduce(sums, pg)
        pairs = sums[1].clamp(min=1)
        ctx.save_for_backward(scale, offset, pairs, *stripe[:2])
        ctx.stripe, ctx.pg = stripe._replace(img_bD=img.new_empty(0), txt_BD=img.new_empty(0)), pg
        ctx.ring, ctx.scalar_type = ring, log_scale.dtype
        return sums[0] / pairs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scale, offset, pairs, img, txt = ctx.saved_tensors
        stripe = ctx.stripe._replace(img_bD=img, txt_BD=txt)
        d_img, d_txt, d_bias = torch.zeros_like(img), torch.zeros_like(img), img.new_zeros(())
        with torch.autocast(img.device.type, enabled=False):
            for part, d_part in _visits(stripe, ctx.pg, ctx.ring, d_txt):
                d_bias += _add_siglip_gradients(part, scale, offset, d_img, d_part)
        weight = grad * _world(ctx.pg) / pairs
        d_img *= weight * scale
        d_scale = (img * d_img).sum().to(ctx.scalar_type)
        d_bias = (d_bias * weight).to(ctx.scalar_type)
        return d_img, d_txt.mul_(weight * scale), d_scale, d_bias, None, None


def _add_siglip_gradients(stripe: Stripe, scale: Tensor, offset: Tensor, d_img: Tensor, d_txt: Tensor) -> Tensor:
    """Add n dL/dU / scale to `d_img` and n dL/dV / scale to `d_txt`; returns n dL/dbias."""
    d_bias = d_img.new_zeros(())
    for rows, columns in stripe.tiles():
        signed, at = _signed(stripe, scale, offset, rows, columns)
        g = signed.sigmoid_()
        if at is not None:
            g[at] *= -1
        d_bias += g.sum()
        d_img[rows].addmm_(g, stripe.txt_BD[columns])
        d_txt[columns].addmm_(g.T, stripe.img_bD[rows])
    return d_bias


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


def _gather(img: Tensor, txt: Tensor, given: Given) -> Stripe:
    """This rank's stripe: texts, and masks where there are any, of all ranks."""
    pg = given.pg
    rank = dist.get_rank(pg) if _world(pg) > 1 else 0
    valid_B = None if given.valid_b is None else gather_rows(given.valid_b.to(torch.uint8), pg).bool()
    group_B = None if given.group_b is None else gather_rows(given.group_b, pg)
    own = _own(img, txt, given)
    return own._replace(txt_BD=gather_rows(txt, pg), first=rank * img.shape[0], valid_B=valid_B, group_B=group_B)


def _own(img: Tensor, txt: Tensor, given: Given) -> Stripe:
    """The part of this rank's stripe that needs nothing of others."""
    tile = given.tile or (TILE_CPU if img.device.type == "cpu" else TILE_GPU)
    return Stripe(img, txt, 0, given.valid_b, given.valid_b, given.group_b, given.group_b, tile)


def _visits(
    stripe: Stripe, pg: dist.ProcessGroup | None, ring: bool, home_bD: Tensor | None = None
) -> Iterator[tuple[Stripe, Tensor]]:
    """The parts of a stripe with a place to add its texts' gradients to; `home_bD` receives the sum over ranks.

    Gathered, the stripe is one part. Round the ring (`stripe` is `_own`) there is one for each rank's texts, which
    travel on together with their gradients and masks until both are home again.
    """
    if not ring:
        d_txt_BD = stripe.txt_BD if home_bD is None else torch.zeros_like(stripe.txt_BD)
        yield stripe, d_txt_BD
        if home_bD is not None:
            home_bD.copy_(scatter_sum(d_txt_BD, pg))
        return
    world, size = _world(pg), stripe.img_bD.shape[0]
    rank = dist.get_rank(pg) if world > 1 else 0
    held = [stripe.txt_BD, stripe.valid_B, stripe.group_B, None if home_bD is None else torch.zeros_like(home_bD)]
    for turn in range(world):
        txt, valid, group, grad = held
        assert txt is not None
        first = (rank - (rank + turn) % world) * size
        part = stripe._replace(txt_BD=txt, valid_B=valid, group_B=group, first=first)
        yield part, txt if grad is None else grad
        if turn < world - 1 or grad is not None:
            held = _pass_on(held, pg)
    if home_bD is not None and held[3] is not None:
        home_bD.copy_(held[3])


@CLOCK.timed()
def _pass_on(tensors: list[Tensor | None], pg: dist.ProcessGroup | None) -> list[Tensor | None]:
    """Give to the rank before, receive from the rank behind."""
    world = _world(pg)
    if world == 1:
        return tensors
    rank = dist.get_rank(pg)
    group: Any = pg or dist.group.WORLD
    before, behind = (dist.get_global_rank(group, (rank + step) % world) for step in (-1, 1))
    ready = [None if x is None else (x.to(torch.uint8) if x.dtype == torch.bool else x.contiguous()) for x in tensors]
    found = [None if x is None else torch.empty_like(x) for x in ready]
    moves = [dist.P2POp(dist.isend, x, before, group) for x in ready if x is not None]
    moves += [dist.P2POp(dist.irecv, x, behind, group) for x in found if x is not None]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return [x if x is None or x.dtype != torch.uint8 else x.bool() for x in found]


def _all_reduce(x: Tensor, pg: dist.ProcessGroup | None, op: Any = None) -> None:
    if _world(pg) > 1:
        dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=pg)


def _merge_columns(col_lse: Tensor, pg: dist.ProcessGroup | None) -> Tensor:
    """log2 of the sum over ranks of 2^col_lse, from a maximum and a sum of B floats."""
    if _world(pg) == 1:
        return col_lse
    top = col_lse.clone()
    _all_reduce(top, pg, dist.ReduceOp.MAX)
    base = _finite(top)
    total = (col_lse - base).exp2_()
    _all_reduce(total, pg)
    return total.log2_().add_(base)


@CLOCK.timed()
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
    by_image = _cross_entropy(logits, 0, valid, valid, group_B, group_B)
    by_text = _cross_entropy(logits.T, 0, valid, valid, group_B, group_B)
    return (by_image + by_text) / 2 / valid.sum().clamp(min=1)


def full_siglip_loss(
    img_BD: Tensor,
    txt_BD: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    *,
    valid_B: Tensor | None = None,
    group_B: Tensor | None = None,
) -> Tensor:
    """SigLIP's loss of one process, the whole matrix, plain autograd."""
    logits = log_scale.to(img_BD.dtype).exp() * img_BD @ txt_BD.T + bias.to(img_BD.dtype)
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    valid = own.new_ones(len(logits)) if valid_B is None else valid_B
    counts = valid[:, None] & valid
    if group_B is not None:
        counts &= own | (group_B[:, None] != group_B)
    return F.softplus(logits.where(~own, -logits))[counts].sum() / valid.sum().clamp(min=1)


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
    group: Any = pg or dist.group.WORLD
    img_BD, txt_BD = (all_gather_tensor_autograd(x, 0, group) for x in (img_bD, txt_bD))
    valid_b = torch.ones(len(img_bD), dtype=torch.bool, device=img_bD.device) if valid_b is None else valid_b
    valid_B = gather_rows(valid_b.to(torch.uint8), pg).bool()
    group_B = None if group_b is None else gather_rows(group_b, pg)
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
