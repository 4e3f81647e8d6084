"""The towers against a plain CLIP written from the paper: same numbers, same gradients, same names."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from core.errors import ConfigError
from tests.train import batches
from train import attention
from train.linear import linear
from train.loss import clip_loss
from train.models import MODELS, flops_per_pair, forward_flops, model_config, param_count
from train.towers import (
    CLIP,
    IMAGE_MEAN,
    IMAGE_STD,
    SEGMENT_GROUP,
    SEGMENT_STEP,
    Segment,
    text_segments,
    trim,
    unwrap,
)

SHAPE = replace(MODELS["test-32"], vocab=64)


def make_model(**changes: object) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(replace(SHAPE, **changes), precision="fp64").double()  # type: ignore[arg-type]
    with torch.no_grad():  # biases and gains start at 0 and 1, which would hide that they are used
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def make_batch(lengths: tuple[int, ...] = (3, 77, 10, 9, 2, 30)) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (len(lengths), 3, 32, 32), dtype=torch.uint8, generator=g)
    tokens = torch.zeros(len(lengths), 77, dtype=torch.int64)
    for row, length in zip(tokens, lengths, strict=True):
        row[: length - 1] = torch.randint(1, 62, (length - 1,), generator=g)
        row[length - 1] = 63
    return pixels, tokens


# -- a plain CLIP: every position of every sample, one matrix at a time ------------------------------------------------

Weights = dict[str, Tensor]


def plain_blocks(w: Weights, prefix: str, x_BLD: Tensor, heads: int, causal: bool, quick: bool) -> Tensor:
    b, length, width = x_BLD.shape
    mask = torch.full((length, length), -math.inf, dtype=x_BLD.dtype).triu(1) if causal else 0.0
    for i in range(2):
        p = f"{prefix}resblocks.{i}."
        y = F.layer_norm(x_BLD, (width,), w[p + "ln_1.weight"], w[p + "ln_1.bias"])
        qkv = (y @ w[p + "attn.in_proj_weight"].T + w[p + "attn.in_proj_bias"]).split(width, dim=2)
        q, k, v = (t.view(b, length, heads, -1).transpose(1, 2) for t in qkv)
        mixed = (q @ k.transpose(2, 3) / math.sqrt(width // heads) + mask).softmax(3) @ v
        mixed = mixed.transpose(1, 2).reshape(b, length, width)
        x_BLD = x_BLD + mixed @ w[p + "attn.out_proj.weight"].T + w[p + "attn.out_proj.bias"]
        y = F.layer_norm(x_BLD, (width,), w[p + "ln_2.weight"], w[p + "ln_2.bias"])
        h = y @ w[p + "mlp.c_fc.weight"].T + w[p + "mlp.c_fc.bias"]
        h = h * torch.sigmoid(1.702 * h) if quick else h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x_BLD = x_BLD + h @ w[p + "mlp.c_proj.weight"].T + w[p + "mlp.c_proj.bias"]
    return x_BLD


def plain_clip(w: Weights, pixels: Tensor, tokens: Tensor, quick: bool = False) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in (IMAGE_MEAN, IMAGE_STD))
    x = F.conv2d((pixels.double() / 255 - mean) / std, w["visual.conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    first = w["visual.class_embedding"].expand(len(x), 1, -1)
    x = torch.cat([first, x], 1) + w["visual.positional_embedding"]
    x = F.layer_norm(x, x.shape[2:], w["visual.ln_pre.weight"], w["visual.ln_pre.bias"])
    x = plain_blocks(w, "visual.transformer.", x, 2, False, quick)
    img = F.layer_norm(x, x.shape[2:], w["visual.ln_post.weight"], w["visual.ln_post.bias"])[:, 0] @ w["visual.proj"]
    y = w["token_embedding.weight"][tokens] + w["positional_embedding"]
    y = plain_blocks(w, "transformer.", y, 2, True, quick)
    y = F.layer_norm(y, y.shape[2:], w["ln_final.weight"], w["ln_final.bias"])
    txt = y[torch.arange(len(y)), tokens.argmax(1)] @ w["text_projection"]
    return F.normalize(img, dim=1), F.normalize(txt, dim=1)


def weights_and_gradients(run: str, model: CLIP, quick: bool = False) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Embeddings and the gradients of an arbitrary function of them."""
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    pixels, tokens = make_batch()
    if run == "plain":
        img, txt = plain_clip(weights, pixels, tokens, quick)
    else:
        img, txt = functional_call(model, weights, (pixels, tokens))
    g = torch.Generator().manual_seed(2)
    target = torch.randn(2, *img.shape, generator=g, dtype=torch.float64)
    ((img * target[0]).sum() + (txt * target[1]).sum()).backward()
    return img.detach(), txt.detach(), {n: t.grad for n, t in weights.items() if t.grad is not None}


def assert_same(ours: tuple[Tensor, Tensor, Weights], theirs: tuple[Tensor, Tensor, Weights]) -> None:
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-11, atol=1e-12)
    assert ours[2].keys() == theirs[2].keys()
    for name, grad in theirs[2].items():
        torch.testing.assert_close(ours[2][name], grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("path", ["sdpa", "matmul"])
@pytest.mark.parametrize("quick", [False, True])
def test_equals_the_plain_model_at_77_positions(path: str, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "sdpa":
        monkeypatch.setattr(attention, "MATMUL_MAX_LENGTH", 0)
    model = make_model(quick_gelu=quick)
    plain = weights_and_gradients("plain", model, quick)
    assert len(plain[2]) == len(list(model.parameters())) - 1  # all but the log scale
    assert_same(weights_and_gradients("ours", model), plain)


def test_checkpointed_blocks_give_the_same() -> None:
    model = make_model()
    expected = weights_and_gradients("ours", model)
    model.set_checkpointing(True)
    assert_same(weights_and_gradients("ours", model), expected)


def test_trimmed_text_equals_77_positions() -> None:
    model = make_model()
    _, tokens = make_batch((3, 12, 10, 9, 2, 7))
    short = trim(tokens)
    assert short.shape == (6, 12)
    torch.testing.assert_close(model.encode_text(short), model.encode_text(tokens), rtol=1e-12, atol=1e-13)


def test_what_follows_the_end_marker_is_never_read() -> None:
    model = make_model()
    _, tokens = make_batch((3, 12, 10, 9, 2, 7))
    noisy = tokens.clone()
    noisy[:, 12:] = torch.randint(1, 62, (6, 65), generator=torch.Generator().manual_seed(3))
    noisy[0, 3:12] = 5
    torch.testing.assert_close(model.encode_text(noisy), model.encode_text(tokens), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("waste", [0, 5, 256, 10_000])
def test_segments_hold_every_caption_and_waste_little(waste: int) -> None:
    length_B = torch.randint(2, 78, (200,), generator=torch.Generator().manual_seed(4))
    order_B, segments = text_segments(length_B, 77, waste)
    assert sorted(order_B.tolist()) == list(range(200))
    assert sum(s.samples for s in segments) == 200
    start = 0
    for samples, length in segments:
        inside = length_B[order_B[start : start + samples]]
        assert int(inside.max()) <= length <= min(77, int(inside.max()) + SEGMENT_STEP - 1)
        assert int((length - inside).sum()) <= waste or samples <= SEGMENT_GROUP
        start += samples
    assert text_segments(length_B[:0], 77)[1] == []


def test_batches_of_many_lengths_come_in_few_shapes() -> None:
    """oneDNN keeps code for every shape: what a run meets has to be bounded, whatever its captions are like."""
    draw = torch.Generator().manual_seed(5)
    shapes = {
        shape
        for _ in range(200)
        for shape in text_segments((torch.randn(256, generator=draw) * 4 + 14).long().clamp(3, 77), 77)[1]
    }
    assert len(shapes) < 40  # exact lengths and counts made 274


def test_floats_are_taken_as_normalised() -> None:
    model = make_model()
    pixels, _ = make_batch()
    mean, std = (torch.tensor(c, dtype=torch.float64).view(3, 1, 1) for c in (IMAGE_MEAN, IMAGE_STD))
    normalised = (pixels.double() / 255 - mean) / std
    torch.testing.assert_close(model.encode_image(normalised), model.encode_image(pixels), rtol=1e-11, atol=1e-12)


def test_patch_dropout_keeps_whole_patches_with_their_positions() -> None:
    full, dropping = make_model().train(), make_model(patch_dropout=0.5).train()
    pixels = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        everything, kept = full.visual._embed(pixels), dropping.visual._embed(pixels)
    assert kept.shape == (4, 1 + 8, 32)
    distance = (kept[:, :, None] - everything[:, None]).norm(dim=3)
    found = distance.argmin(dim=2)
    assert float(distance.amin(dim=2).max()) < 1e-12
    assert all(len(set(row)) == 9 and row[0] == 0 for row in found.tolist())
    assert not torch.equal(found[0].sort().values, found[1].sort().values)  # each image draws its own
    assert torch.equal(dropping.eval().visual._embed(pixels), everything)


def test_bf16_is_close_to_fp32_and_leaves_fp32_gradients() -> None:
    torch.manual_seed(0)
    model = CLIP(replace(SHAPE, vision_layers=4, text_layers=4))
    pixels, tokens = make_batch()
    exact = torch.cat(model(pixels, tokens)).detach()
    model.set_precision("bf16")
    rough = torch.cat(model(pixels, tokens))
    assert rough.dtype == torch.float32
    assert float((exact * rough.detach()).sum(1).min()) > 0.999
    rough.sum().backward()
    grads = [p.grad for n, p in model.named_parameters() if n != "logit_scale"]
    assert all(g is not None and g.dtype == torch.float32 and bool(g.isfinite().all()) for g in grads)


def test_the_gradient_of_bf16_towers_with_the_fp32_loss() -> None:
    """Measured with AMX: the gradient is off by 1.9 % of its length."""
    shape = replace(MODELS["tiny-48"], vocab=64, context=12)
    pixels, tokens = batches.make_batch(32, 48)
    found = []
    for precision in ("fp64", "bf16"):
        torch.manual_seed(0)
        model = CLIP(shape, precision)
        model = model.double() if precision == "fp64" else model
        clip_loss(*model(pixels, tokens), model.logit_scale).backward()
        found.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
    exact, rough = found
    assert float((rough - exact).norm()) < 0.03 * float(exact.norm())
    assert float(F.cosine_similarity(rough, exact, dim=0)) > 0.9995


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 128), (128, 32), (16, 600), (600, 520)])
def test_fast_linear_has_the_gradients_of_the_plain_one(inputs: int, outputs: int) -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(50, inputs, generator=g).bfloat16().requires_grad_()
    weight = torch.randn(outputs, inputs, generator=g).bfloat16().float().requires_grad_()
    bias = torch.randn(outputs, generator=g).bfloat16().float().requires_grad_()
    target = torch.randn(50, outputs, generator=g).bfloat16()
    ours = linear(x, weight, bias)
    grads = torch.autograd.grad(ours, [x, weight, bias], target)
    exact = F.linear(x.double(), weight.double(), bias.double())
    expected = torch.autograd.grad(exact, [x, weight, bias], target.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=1e-2)
    for found, truth in zip(grads, expected, strict=True):
        assert found.dtype == truth.dtype
        assert float((found - truth).float().norm() / truth.float().norm()) < 4e-3


@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameter_counts_are_exact(name: str) -> None:
    with torch.device("meta"):
        model = CLIP(MODELS[name])
    assert sum(p.numel() for p in model.parameters()) == param_count(MODELS[name])


def test_vit_b_32_has_the_published_names_shapes_and_size() -> None:
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in CLIP(model_config("ViT-B-32")).state_dict().items()}
    assert len(shapes) == 302  # of open_clip's state dict
    assert param_count(MODELS["ViT-B-32"]) == 151_277_313
    assert shapes["logit_scale"] == ()
    assert shapes["visual.conv1.weight"] == (768, 3, 32, 32)
    assert shapes["visual.positional_embedding"] == (50, 768)
    assert shapes["visual.transformer.resblocks.11.attn.in_proj_weight"] == (2304, 768)
    assert shapes["visual.transformer.resblocks.0.mlp.c_fc.bias"] == (3072,)
    assert shapes["visual.proj"] == (768, 512)
    assert shapes["transformer.resblocks.11.attn.out_proj.weight"] == (512, 512)
    assert shapes["transformer.resblocks.3.mlp.c_proj.weight"] == (512, 2048)
    assert shapes["text_projection"] == (512, 512)


def test_flops_agree_with_published_figures() -> None:
    """open_clip lists 14.78 GFLOPs a forward pass for ViT-B-32; 6 N T plus attention gives 525 a step for ViT-L-14."""
    assert forward_flops(MODELS["ViT-B-32"]) == pytest.approx(14.78e9, rel=0.01)
    assert flops_per_pair(MODELS["ViT-L-14"]) == pytest.approx(525e9, rel=0.01)
    assert flops_per_pair(replace(MODELS["ViT-L-14"], patch_dropout=0.5)) < 0.56 * flops_per_pair(MODELS["ViT-L-14"])


def test_starts_at_the_paper_s_temperature_or_siglip_s() -> None:
    assert CLIP(SHAPE).logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    siglip = CLIP(SHAPE, logit_bias=True)
    assert [s.item() for s in siglip.loss_scalars()] == pytest.approx([math.log(10), -10.0])


def test_wrong_settings_are_sentences() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*ViT-B-32"):
        model_config("ViT-B32")
    with pytest.raises(ConfigError, match="patch"):
        replace(SHAPE, patch=7)
    with pytest.raises(ConfigError, match="precision must be one of"):
        CLIP(SHAPE, precision="fp4")


def test_unwrap_finds_the_model() -> None:
    model = CLIP(SHAPE)
    assert unwrap(model) is model
    assert Segment(2, 3).length == 3


@pytest.mark.skipif(importlib.util.find_spec("open_clip") is None, reason="open_clip is not installed")
def test_open_clip_loads_our_weights_and_agrees() -> None:
    import open_clip

    ours = CLIP(model_config("ViT-B-32")).eval()
    theirs = open_clip.create_model("ViT-B-32", pretrained=None).eval()
    theirs.load_state_dict(ours.state_dict())
    pixels = torch.randn(2, 3, 224, 224)
    tokens = open_clip.tokenize(["a red fox in the snow", "two boats"])
    with torch.no_grad():
        images = ours.encode_image(pixels), theirs.encode_image(pixels, normalize=True)
        texts = ours.encode_text(tokens), theirs.encode_text(tokens, normalize=True)
    torch.testing.assert_close(*images, rtol=0, atol=1e-5)
    torch.testing.assert_close(*texts, rtol=0, atol=1e-5)
