"""The sharded loss equals the full matrix: value and every gradient, on 1 to 4 real ranks, with and without masks.

Everything runs in fp64, through a small CLIP inside DDP, so that what is compared is what the optimiser would see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.train.ranks import Ranks, first_ranks
from train.gradcache import gradcache_step
from train.loss import (
    _cross_entropy,
    clip_loss,
    clip_loss_and_accuracy,
    full_loss,
    full_siglip_loss,
    local_loss,
    siglip_loss,
)
from train.models import MODELS
from train.towers import CLIP

BATCH = 12
TOLERANCE = 1e-9
SHAPE = replace(MODELS["test-32"], vocab=64, context=12)


def make_model(siglip: bool = False) -> CLIP:
    torch.manual_seed(0)
    return CLIP(SHAPE, precision="fp64", logit_bias=siglip).double()


def make_batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8, generator=g)
    tokens = torch.zeros(BATCH, SHAPE.context, dtype=torch.int64)
    for i in range(BATCH):
        length = 2 + (5 * i) % 11
        tokens[i, : length - 1] = torch.randint(1, 62, (length - 1,), generator=g)
        tokens[i, length - 1] = 63
    return pixels, tokens


def make_masks(kind: str) -> dict[str, Tensor | None]:
    """none; both; "empty rank": the last quarter has no valid pair; "nothing": no pair is valid at all."""
    at = torch.arange(BATCH)
    group = (at * 7) % 11
    valid = {"both": at % 5 != 2, "empty rank": at < 3 * BATCH // 4, "nothing": at < 0}.get(kind)
    return {"valid": valid, "group": None if kind == "none" else group}


def reference(kind: str, siglip: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process that holds the whole batch and the whole matrix."""
    model, masks = make_model(siglip), make_masks(kind)
    img, txt = model(*make_batch())
    plain = full_siglip_loss if siglip else full_loss
    loss = plain(img, txt, *model.loss_scalars(), valid_B=masks["valid"], group_B=masks["group"])
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def frozen_gather_loss(img: Tensor, txt: Tensor, log_scale: Tensor, pg: Any) -> Tensor:
    """Wrong on purpose: other ranks' embeddings arrive without a way back for their gradients."""
    world, rank = dist.get_world_size(pg), dist.get_rank(pg)

    def gather(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.detach(), group=pg)
        parts[rank] = x
        return torch.cat(parts)

    everything = torch.ones(len(img) * world, dtype=torch.bool)
    own = everything[: len(img)]
    rows = _cross_entropy(log_scale.exp() * img @ gather(txt).T, rank * len(img), own, everything, None, None)
    columns = _cross_entropy(log_scale.exp() * txt @ gather(img).T, rank * len(img), own, everything, None, None)
    return (rows + columns) / 2 / len(img)


def rank_gradients(world: int, name: str, kind: str, micro: int | None) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Runs in a rank: one step of a DDP model on this rank's slice; None outside the first `world` ranks."""
    pg = first_ranks(world)
    if pg is None:
        return None
    rank, share = dist.get_rank(pg), BATCH // world
    own = slice(rank * share, (rank + 1) * share)
    masks = {k: None if v is None else v[own] for k, v in make_masks(kind).items()}

    def loss_fn(img: Tensor, txt: Tensor, *scalars: Tensor) -> Tensor:
        more: dict[str, Any] = {"valid_b": masks["valid"], "group_b": masks["group"], "pg": pg}
        if name == "frozen gather":
            return frozen_gather_loss(img, txt, *scalars, pg)
        if name == "local":
            return local_loss(img, txt, *scalars, **more)
        if name.startswith("siglip"):
            return siglip_loss(img, txt, *scalars, tile=3, ring=name == "siglip ring", **more)
        return clip_loss(img, txt, *scalars, tile=3, **more)

    model = DistributedDataParallel(make_model(name.startswith("siglip")), process_group=pg, broadcast_buffers=False)
    pixels, tokens = make_batch()
    loss = gradcache_step(model, pixels[own], tokens[own], loss_fn, micro)
    return loss, {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}


def worst_error(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert ours.keys() == truth.keys()
    return max(float((ours[n] - truth[n]).norm() / truth[n].norm()) for n in truth)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as running:
        yield running


Answers = list[tuple[Tensor, dict[str, Tensor]]]


def answers(ranks: Ranks, *case: Any) -> Answers:
    return [answer for answer in ranks.run(rank_gradients, *case) if answer is not None]


@pytest.mark.parametrize("name", ["tile", "siglip", "siglip ring"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["none", "both", "empty rank"])
def test_ranks_equal_full_batch(ranks: Ranks, name: str, world: int, kind: str) -> None:
    loss, truth = reference(kind, name != "tile")
    found = answers(ranks, world, name, kind, None)
    assert len(found) == world
    for own_loss, grads in found:
        assert abs(own_loss - loss) <= TOLERANCE * abs(loss)
        assert worst_error(grads, truth) <= TOLERANCE


@pytest.mark.parametrize("name", ["tile", "siglip", "siglip ring"])
@pytest.mark.parametrize(("world", "micro", "kind"), [(2, 1, "both"), (2, 4, "none"), (3, 3, "both"), (4, 2, "both")])
def test_gradcache_on_ranks_equals_full_batch(ranks: Ranks, name: str, world: int, micro: int, kind: str) -> None:
    """Also where the last micro-batch is smaller than the others."""
    loss, truth = reference(kind, name != "tile")
    for own_loss, grads in answers(ranks, world, name, kind, micro):
        assert abs(own_loss - loss) <= TOLERANCE * abs(loss)
        assert worst_error(grads, truth) <= TOLERANCE


@pytest.mark.parametrize("kind", ["none", "both"])
def test_local_loss_agrees_on_average(ranks: Ranks, kind: str) -> None:
    loss, truth = reference(kind)
    found = answers(ranks, 4, "local", kind, None)
    assert abs(torch.stack([own for own, _ in found]).mean() - loss) <= TOLERANCE * abs(loss)
    assert worst_error(found[0][1], truth) <= TOLERANCE


def test_the_comparison_catches_a_gather_without_gradients(ranks: Ranks) -> None:
    loss, truth = reference("none")
    found = answers(ranks, 4, "frozen gather", "none", None)
    assert abs(torch.stack([own for own, _ in found]).mean() - loss) <= TOLERANCE * abs(loss)  # the loss looks right
    assert worst_error(found[0][1], truth) > 1e-2


@pytest.mark.parametrize("name", ["tile", "siglip", "siglip ring"])
def test_a_batch_without_any_valid_pair_is_zero_not_nan(ranks: Ranks, name: str) -> None:
    for loss, grads in answers(ranks, 4, name, "nothing", None):
        assert loss == 0
        assert all(bool((grad == 0).all()) for grad in grads.values())


# -- one process ------------------------------------------------------------------------------------------------------


def embeddings(count: int = 37, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    img = F.normalize(torch.randn(count, 8, generator=g, dtype=torch.float64), dim=1)
    txt = F.normalize(img + 0.6 * torch.randn(count, 8, generator=g, dtype=torch.float64), dim=1)
    return img.to(dtype).requires_grad_(), txt.to(dtype).requires_grad_()


def gradients(loss_fn: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss = loss_fn(*leaves)
    return loss.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("tile", [1, 7, 37, 1000])
@pytest.mark.parametrize("log_scale", [0.0, 4.6])
def test_tiles_do_not_show(tile: int, log_scale: float) -> None:
    img, txt = embeddings()
    scale = torch.tensor(log_scale, dtype=torch.float64, requires_grad=True)
    valid, group = torch.arange(37) % 6 != 1, torch.arange(37) % 20
    loss, grads = gradients(lambda *x: clip_loss(*x, valid_b=valid, group_b=group, tile=tile), img, txt, scale)
    truth, expected = gradients(lambda *x: full_loss(*x, valid_B=valid, group_B=group), img, txt, scale)
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_accumulates_in_fp32_under_autocast_and_for_bf16_embeddings() -> None:
    img, txt = embeddings(dtype=torch.bfloat16)
    scale = torch.tensor(4.6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = clip_loss(img, txt, scale)
    (d_img,) = torch.autograd.grad(loss, [img])
    truth = full_loss(img.double(), txt.double(), scale.double())
    assert loss.dtype == torch.float32
    assert d_img.dtype == torch.bfloat16
    assert abs(loss.double() - truth) <= 1e-5 * truth


def test_extreme_logits_stay_finite_and_right() -> None:
    """Scale 100 and opposed pairs: the positive is 200 below the best negative."""
    img = F.normalize(torch.eye(4) + 1e-3, dim=1).requires_grad_()
    txt = (-img.detach()).roll(1, 0).clone().requires_grad_()
    scale = torch.tensor(4.605, requires_grad=True)
    loss, grads = gradients(clip_loss, img, txt, scale)
    truth, expected = gradients(full_loss, img.double(), txt.double(), scale.double())
    assert abs(loss.double() - truth) <= 1e-5 * abs(truth)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_a_worked_example() -> None:
    """Two pairs at right angles, scale e: each softmax is e^e / (e^e + 1)."""
    eye = torch.eye(2, dtype=torch.float64)
    loss = clip_loss(eye, eye, torch.tensor(1.0, dtype=torch.float64))
    assert abs(loss - torch.log1p(torch.exp(-torch.tensor(1.0, dtype=torch.float64).exp()))) < 1e-12


def test_pairs_of_one_picture_are_not_negatives() -> None:
    """Five captions of one picture leave nothing to tell apart: the loss is zero, and no gradient pulls."""
    img, txt = embeddings(5)
    loss = clip_loss(img, txt, torch.tensor(2.0), group_b=torch.zeros(5, dtype=torch.int64))
    assert loss == 0
    assert all(bool((g.abs() < 1e-15).all()) for g in torch.autograd.grad(loss, [img, txt]))


def test_accuracy_counts_images_that_find_their_caption() -> None:
    eye = torch.eye(4)
    texts = eye[[0, 1, 3, 2]]
    valid = torch.tensor([True, True, True, True])
    assert clip_loss_and_accuracy(eye, texts, torch.tensor(1.0), valid_b=valid)[1] == 0.5
    valid[3] = False  # image 2 loses its rival too: its own caption ties with none better
    assert clip_loss_and_accuracy(eye, texts, torch.tensor(1.0), valid_b=valid)[1] == 1.0


@pytest.mark.parametrize("loss_fn", [full_siglip_loss, siglip_loss])
def test_a_worked_example_of_siglip(loss_fn: Callable[..., Tensor]) -> None:
    """Two pairs at right angles, scale e, bias -1: positives at logit e - 1, negatives at -1, summed over two images."""
    eye = torch.eye(2, dtype=torch.float64)
    loss = loss_fn(eye, eye, torch.tensor(1.0), torch.tensor(-1.0))
    assert float(loss) == pytest.approx(math.log1p(math.exp(1 - math.e)) + math.log1p(math.exp(-1)), rel=1e-6)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_masks_in_some_tiles_only(name: str) -> None:
    """Tiles that hold nothing to mask skip the mask: one bad pair and one repeated picture, each in a tile of its own."""
    img, txt = embeddings()
    scalars = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (2.0, -3.0)[: 1 + (name == "siglip")]]
    valid, group = torch.arange(37) != 12, torch.arange(37)
    group[30] = 2
    ours, plain = (clip_loss, full_loss) if name == "clip" else (siglip_loss, full_siglip_loss)
    loss, grads = gradients(lambda *x: ours(*x, valid_b=valid, group_b=group, tile=5), img, txt, *scalars)
    truth, expected = gradients(lambda *x: plain(*x, valid_B=valid, group_B=group), img, txt, *scalars)
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
