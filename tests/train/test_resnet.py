"""The ResNet tower: published sizes, and normalisation that knows neither rank count nor repeated passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from core.errors import ConfigError
from tests.train.batches import gradients, make_batch
from tests.train.ranks import Ranks
from train.export import open_clip_config, shape_from_open_clip
from train.gradcache import gradcache_step
from train.loss import clip_loss
from train.models import MODELS, ModelConfig, forward_flops, param_count, vision_params
from train.resnet import BatchNorm, ResNetTower
from train.towers import CLIP

SHAPE = ModelConfig(32, 64, 32, 8, (1, 2, 1, 1), 4, 32, 2, 2, context=12, vocab=64)
BATCH = 12
TOLERANCE = 1e-9


def make_model() -> CLIP:
    """With gains that the zeros of the last normalisations would hide, so that every gradient is there to compare."""
    torch.manual_seed(0)
    model = CLIP(SHAPE, precision="fp64").double()
    for module in model.modules():
        if isinstance(module, BatchNorm):
            torch.nn.init.normal_(module.weight, 1.0, 0.3)
            torch.nn.init.normal_(module.bias, 0.0, 0.3)
    return model


def buffers(model: CLIP) -> dict[str, Tensor]:
    return {n: b.double() for n, b in model.named_buffers()}


def assert_equal(ours: dict[str, Tensor], truth: dict[str, Tensor], scale: float = 0.0) -> None:
    """`scale` forgives the keys' bias, whose true gradient is zero."""
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        assert float((ours[name] - value).norm()) <= TOLERANCE * max(scale, float(value.norm())), name


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"), [("RN50", 38.32), ("RN101", 56.26), ("RN50x4", 87.14), ("RN50x16", 167.33)]
)
def test_parameters_of_the_published_towers(name: str, millions: float) -> None:
    """Counted in open_clip's own models."""
    assert vision_params(MODELS[name]) / 1e6 == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize(
    "shape", [SHAPE, MODELS["small-rn-112"], replace(SHAPE, vision_layers=(2, 1, 3, 1), image_size=96)]
)
def test_arithmetic_counts_what_is_built(shape: ModelConfig) -> None:
    model = CLIP(shape)
    assert param_count(shape) == sum(p.numel() for p in model.parameters())
    tower, macs = model.visual.eval(), 0.0

    def count(module: torch.nn.Module, _: object, out: Tensor) -> None:
        nonlocal macs
        macs += out[0].numel() * module.weight[0].numel()

    for module in tower.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(count)
    with torch.no_grad():
        tower(torch.zeros(1, 3, shape.image_size, shape.image_size))
    # what is left is the pooling and the text tower
    rest = forward_flops(shape) - 2 * macs
    assert rest > 0
    assert rest == pytest.approx(
        forward_flops(replace(shape, vision_layers=(0, 0, 0, 0))) - 2 * _stem(shape), rel=1e-12
    )


def _stem(shape: ModelConfig) -> float:
    half, side = shape.vision_width // 2, shape.image_size // 2
    return (3 * half + half * half + half * shape.vision_width) * 9 * side**2


def test_open_clip_s_description_there_and_back() -> None:
    for name in ("RN50", "RN50x4", "small-rn-112"):
        assert shape_from_open_clip(open_clip_config(MODELS[name])["model_cfg"]) == MODELS[name]
    assert ModelConfig(**{**asdict(SHAPE), "vision_layers": [1, 2, 1, 1]}) == SHAPE  # as JSON gives it back


@pytest.mark.parametrize(
    "wrong", [{"patch": 16}, {"patch_dropout": 0.5}, {"image_size": 81}, {"image_size": 30}, {"vision_heads": 7}]
)
def test_shapes_that_cannot_be_built(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(SHAPE, **wrong)


# -- normalisation ----------------------------------------------------------------------------------------------------


def test_one_process_is_torch_s_own_batch_normalisation() -> None:
    torch.manual_seed(0)
    ours, theirs = BatchNorm(5), torch.nn.BatchNorm2d(5)
    for step in range(3):
        x = torch.randn(4, 5, 6, 6) * (step + 1)
        assert torch.equal(ours(x), theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
    x = torch.randn(4, 5, 6, 6)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def rank_step(world_micro: int | None) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Runs in a rank: one step on this rank's slice; its loss, gradients and running statistics."""
    rank, share = dist.get_rank(), BATCH // dist.get_world_size()
    own = slice(rank * share, (rank + 1) * share)
    model = DistributedDataParallel(make_model(), broadcast_buffers=False)
    pixels, tokens = make_batch(BATCH, 64)
    loss = gradcache_step(model, pixels[own], tokens[own], clip_loss, world_micro)
    return loss, gradients(model.module), buffers(model.module)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as running:
        yield running


def test_ranks_equal_one_process(ranks: Ranks) -> None:
    model = make_model()
    loss = gradcache_step(model, *make_batch(BATCH, 64), clip_loss, None)
    for own_loss, grads, statistics in ranks.run(rank_step, None):
        assert abs(own_loss - loss) <= TOLERANCE * abs(loss)
        assert_equal(grads, gradients(model), scale=0.1)
        assert_equal(statistics, buffers(model))


def test_micro_batches_on_ranks_normalise_as_one_process_s_do(ranks: Ranks) -> None:
    """Micro-batch i of every rank is normalised together: one process with those samples side by side agrees."""
    share, micro = BATCH // 2, 2
    order = [r * share + i * micro + j for i in range(share // micro) for r in range(2) for j in range(micro)]
    model, (pixels, tokens) = make_model(), make_batch(BATCH, 64)
    loss = gradcache_step(model, pixels[order], tokens[order], clip_loss, 2 * micro)
    for own_loss, grads, statistics in ranks.run(rank_step, micro):
        assert abs(own_loss - loss) <= TOLERANCE * abs(loss)
        assert_equal(grads, gradients(model), scale=0.1)
        assert_equal(statistics, buffers(model))


def test_gradcache_counts_each_micro_batch_once() -> None:
    model, (pixels, tokens) = make_model(), make_batch(BATCH, 64)
    gradcache_step(model, pixels, tokens, clip_loss, 5)
    counted = make_model().train()
    for part in pixels.split(5):
        counted.encode_image(part)
    assert_equal(buffers(model), buffers(counted))
    assert int(model.visual.bn1.num_batches_tracked) == 3


def test_recomputed_activations_change_nothing() -> None:
    plain, frugal = make_model(), make_model()
    frugal.set_checkpointing(True)
    for model in (plain, frugal):
        gradcache_step(model, *make_batch(BATCH, 64), clip_loss, None)
    assert_equal(gradients(frugal), gradients(plain), scale=0.1)
    assert_equal(buffers(frugal), buffers(plain))


def test_every_block_begins_as_the_identity_and_evaluation_ignores_the_batch() -> None:
    torch.manual_seed(0)
    tower = ResNetTower(SHAPE)
    x = torch.randn(3, 32, 8, 8).relu()
    assert torch.equal(tower.layer2[1](torch.cat([x, x], 1)), torch.cat([x, x], 1))
    tower.eval()
    pixels = torch.randn(4, 3, 64, 64)
    assert torch.allclose(tower(pixels)[:1], tower(pixels[:1]), atol=1e-5)


def test_bf16_stays_near_fp32() -> None:
    torch.manual_seed(0)
    model = CLIP(SHAPE)
    with torch.no_grad():
        wide = model.encode_image(make_batch(BATCH, 64)[0])
        model.set_precision("bf16")
        assert float(F.cosine_similarity(model.encode_image(make_batch(BATCH, 64)[0]), wide).min()) > 0.99
