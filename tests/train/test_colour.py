"""Colour jitter: each of the four changes against its definition, the same in both back-ends, fixed by the draw."""

from __future__ import annotations

import colorsys
from contextlib import closing
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from core.images import encode_jpeg, read_header
from tests.train.shards import photograph
from train.colour import Colour, random_colour, recolour
from train.decode_cpu import CpuDecoder, Decoder, Picture, middle_view
from train.decode_dali import DaliDecoder, dali_installed


def changed(pixels: np.ndarray, colour: Colour | None) -> np.ndarray:
    batch = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].contiguous()
    recolour(batch, [colour])
    return batch[0].permute(1, 2, 0).numpy().astype(int)


def pale(number: int) -> np.ndarray:
    """Colours far enough from the ends that nothing is clipped."""
    return (photograph(number) // 4 + 96).astype(np.uint8)


@pytest.mark.parametrize("factor", [0.0, 0.7, 1.3])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [("brightness", ImageEnhance.Brightness), ("contrast", ImageEnhance.Contrast), ("saturation", ImageEnhance.Color)],
)
def test_each_change_is_pillows(name: str, enhance: type[ImageEnhance.Color], factor: float) -> None:
    """Pillow's are what torchvision's ColorJitter computes; its grey and its mean are whole numbers, hence the 1.6."""
    pixels = pale(1)
    wanted = np.asarray(enhance(Image.fromarray(pixels)).enhance(factor)).astype(int)
    assert np.abs(changed(pixels, Colour()._replace(**{name: factor})) - wanted).max() <= 1.6


def test_clipped_colours_stop_at_the_ends() -> None:
    pixels = photograph(2)
    wanted = np.asarray(ImageEnhance.Brightness(Image.fromarray(pixels)).enhance(1.6)).astype(int)
    assert wanted.max() == 255
    assert np.abs(changed(pixels, Colour(brightness=1.6)) - wanted).max() <= 1


@pytest.mark.parametrize("turn", [-0.1, 0.05, 0.2, 0.5])
def test_hue_turns_and_brightness_stays(turn: float) -> None:
    """Our turn is in YIQ, torchvision's in HSV: the mean angle agrees; luma stays, which HSV's does not."""
    pixels = pale(3)
    got = changed(pixels, Colour(hue=turn))
    luma = np.array([0.299, 0.587, 0.114])
    assert np.abs(got @ luma - pixels @ luma).max() < 1
    for colour in ([150, 110, 110], [110, 150, 110], [110, 110, 150], [150, 140, 100]):
        after = changed(np.full((2, 2, 3), colour, np.uint8), Colour(hue=turn))[0, 0]
        moved = colorsys.rgb_to_hsv(*after / 255)[0] - colorsys.rgb_to_hsv(*np.array(colour) / 255)[0]
        assert abs((moved - turn + 0.5) % 1 - 0.5) < 0.06  # the two circles run at different speeds, at most this far


def test_nothing_changes_without_a_change() -> None:
    pixels = photograph(4)
    assert (changed(pixels, None) == pixels).all() and (changed(pixels, Colour()) == pixels).all()
    assert (changed(pixels, Colour(hue=1.0)) == pixels).all()  # once round the circle


def test_grey_has_one_value_a_pixel_and_keeps_its_luma() -> None:
    pixels = photograph(5)
    colour = random_colour(Random(0), 0.0, 1.0)
    assert colour is not None
    got = changed(pixels, colour)
    assert (got.max(-1) == got.min(-1)).all()
    assert np.abs(got - np.asarray(Image.fromarray(pixels).convert("L")).astype(int)[..., None]).max() <= 1


def test_draws_follow_simclr() -> None:
    drawn = [random_colour(Random(n), 0.5, 0.2) for n in range(4000)]
    jittered = [c for c in drawn if c is not None and c.brightness != 1]
    grey = [c for c in drawn if c is not None and c.saturation == 0]
    assert abs(len(jittered) / 4000 - 0.8) < 0.03 and abs(len(grey) / 4000 - 0.2) < 0.03
    for name, low, high in (("brightness", 0.6, 1.4), ("contrast", 0.6, 1.4), ("hue", -0.1, 0.1)):
        values = [getattr(c, name) for c in jittered]
        assert low <= min(values) < low + 0.01 and high - 0.01 < max(values) <= high
    assert drawn == [random_colour(Random(n), 0.5, 0.2) for n in range(4000)]
    assert random_colour(Random(0), 0.0, 0.0) is None


def decoded(decoder: Decoder) -> Tensor:
    pictures = []
    for number in range(12):
        data = encode_jpeg(photograph(number, 96, 72), 90)
        header = read_header(data)
        view = middle_view(96, 72)._replace(colour=random_colour(Random(number), 0.5, 0.3))
        pictures.append(Picture(data, header, view))
    with closing(decoder):
        pixels, reasons = decoder.decode([*pictures[:7], None, *pictures[7:]])
    assert not reasons and (pixels[7] == 128).all()  # the placeholder keeps its grey
    return pixels.float()


@pytest.mark.skipif(not dali_installed(), reason="DALI is not installed")
def test_both_back_ends_show_the_same_colours() -> None:
    plain = torch.stack([torch.from_numpy(photograph(n, 96, 72)) for n in range(12)]).float().mean((1, 2))
    cpu, dali = decoded(CpuDecoder(32, 2)), decoded(DaliDecoder(32, 1, 13, torch.device("cpu")))
    assert (cpu - dali).abs().mean() <= 0.5
    assert (cpu[[*range(7), *range(8, 13)]].mean((2, 3)) - plain).abs().max() > 20  # and they did change
