"""GradCache in one process: any micro-batch gives the gradients of the whole batch (ranks: see test_loss)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from tests.train.batches import gradients, make_batch
from train.gradcache import gradcache_step
from train.loss import clip_loss, full_loss, siglip_loss
from train.models import MODELS
from train.towers import CLIP

BATCH = 13
SHAPE = replace(MODELS["test-32"], vocab=64, context=12)


def make_model(siglip: bool = False, patch_dropout: float = 0.0) -> CLIP:
    torch.manual_seed(0)
    return CLIP(replace(SHAPE, patch_dropout=patch_dropout), precision="fp64", logit_bias=siglip).double()


def assert_equal(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert ours.keys() == truth.keys()
    for name, grad in truth.items():
        assert float((ours[name] - grad).norm()) <= 1e-9 * float(grad.norm()), name


@pytest.mark.parametrize("micro", [1, 4, 5, 12, 13, 50, None])
def test_any_micro_batch_equals_the_whole(micro: int | None) -> None:
    whole, split = make_model(), make_model()
    loss = full_loss(*whole(*make_batch(BATCH, 32)), whole.logit_scale)
    loss.backward()
    found = gradcache_step(split, *make_batch(BATCH, 32), clip_loss, micro)
    assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    assert not found.requires_grad
    assert len(gradients(split)) == len(list(split.parameters()))
    assert_equal(gradients(split), gradients(whole))


def test_siglip_s_bias_and_scale_too() -> None:
    whole, split = make_model(siglip=True), make_model(siglip=True)
    gradcache_step(whole, *make_batch(BATCH, 32), siglip_loss, None)
    gradcache_step(split, *make_batch(BATCH, 32), siglip_loss, 4)
    assert "logit_bias" in gradients(split)
    assert_equal(gradients(split), gradients(whole))


def test_the_loss_is_evaluated_once() -> None:
    calls: list[int] = []

    def counted(img: Tensor, txt: Tensor, log_scale: Tensor) -> Tensor:
        calls.append(len(img))
        return clip_loss(img, txt, log_scale)

    gradcache_step(make_model(), *make_batch(BATCH, 32), counted, 3)
    assert calls == [BATCH]


def test_patches_dropped_in_the_second_pass_are_those_of_the_first() -> None:
    pixels, tokens = make_batch(BATCH, 32)
    whole, split = make_model(patch_dropout=0.5), make_model(patch_dropout=0.5)
    torch.manual_seed(7)
    parts = [whole(p, t) for p, t in zip(pixels.split(4), tokens.split(4), strict=True)]
    full_loss(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), whole.logit_scale).backward()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    gradcache_step(split, pixels, tokens, clip_loss, 4)
    assert_equal(gradients(split), gradients(whole))
    assert torch.equal(torch.get_rng_state(), after)  # the replay leaves no trace in what is drawn next


def test_adding_up_micro_batch_losses_is_another_gradient() -> None:
    """The comparison above would notice ordinary gradient accumulation."""
    whole, summed = make_model(), make_model()
    gradcache_step(whole, *make_batch(BATCH, 32), clip_loss, None)
    pixels, tokens = make_batch(BATCH, 32)
    for p, t in zip(pixels.split(4), tokens.split(4), strict=True):
        (clip_loss(*summed(p, t), summed.logit_scale) * len(p) / BATCH).backward()
    with pytest.raises(AssertionError):
        assert_equal(gradients(summed), gradients(whole))


def test_micro_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        gradcache_step(make_model(), *make_batch(BATCH, 32), clip_loss, 0)
