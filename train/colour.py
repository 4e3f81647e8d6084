"""Colour jitter and grey pictures, as one affine map of each picture's colours.

SimCLR (Chen et al. 2020, appendix A) changes brightness, contrast, saturation and hue in turn. Each of the four is linear
in the colours once hue is turned in the YIQ plane (as DALI does it), and all four commute but for the clipping between
them. So they fold into three numbers by three and one offset a picture, applied in one pass over its pixels:

    out = gain (luma + scaled and turned chroma) + pull (mean luma of the picture)

Shape letters: B pictures, C = 3 colours, S side of the square, N = S x S pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

# What a strength of 1 means, and how often pictures are jittered at all: SimCLR's own figures. open_clip's usual
# (0.32, 0.32, 0.32, 0.08) is a strength of 0.4.
SPREAD, HUE_SPREAD, SHARE = 0.8, 0.2, 0.8

LUMA = (0.299, 0.587, 0.114)
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


class Colour(NamedTuple):
    """Factors of the four changes (1, 1, 1 and 0 change nothing); hue in turns of the colour circle, -0.5 to 0.5."""

    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0


def random_colour(draw: Random, jitter: float, gray: float) -> Colour | None:
    """Drawn from `draw` alone; None changes nothing.

    Args:
        jitter: strength; a picture in five keeps its colours whatever it is.
        gray: probability of a picture without colour.
    """
    colour: Colour | None = None
    if jitter > 0 and draw.random() < SHARE:
        low, high = max(0.0, 1 - SPREAD * jitter), 1 + SPREAD * jitter
        brightness, contrast, saturation = (draw.uniform(low, high) for _ in range(3))
        turn = min(0.5, HUE_SPREAD * jitter)
        colour = Colour(brightness, contrast, saturation, draw.uniform(-turn, turn))
    if gray > 0 and draw.random() < gray:
        colour = (colour or Colour())._replace(saturation=0.0)
    return colour


def recolour(pixels_BCSS: Tensor, colours: Sequence[Colour | None]) -> None:
    """Change the colours of each picture of uint8 (B, C, S, S) where it lies; None leaves it as it is."""
    if pixels_BCSS.device.type == "cuda":
        _apply(pixels_BCSS, [colour or Colour() for colour in colours])
        return
    # One by one: a picture stays in the core's cache (256 at once took five times as long), and it gets the same
    # pixels in whatever company it comes.
    for i, colour in enumerate(colours):
        if colour is not None:
            _apply(pixels_BCSS[i : i + 1], [colour])


def _apply(pixels_BCSS: Tensor, colours: Sequence[Colour]) -> None:
    numbers_B43 = torch.tensor([_affine(colour) for colour in colours], device=pixels_BCSS.device).view(-1, 4, 3)
    flat_BCN = pixels_BCSS.flatten(2).float()
    offset_B11 = numbers_B43[:, 3:] @ flat_BCN.mean(2, keepdim=True)
    moved_BCN = torch.baddbmm(offset_B11, numbers_B43[:, :3], flat_BCN).round_().clamp_(0, 255)
    # by way of int32, because torch's float to uint8 takes more than twice as long as both steps
    pixels_BCSS.copy_(moved_BCN.to(torch.int32).view(pixels_BCSS.shape))


def _affine(colour: Colour) -> list[float]:
    """The matrix row by row, and the weights of the picture's mean red, green and blue that are added."""
    gain, angle = colour.brightness * colour.contrast, 2 * math.pi * colour.hue
    across, around = colour.saturation * math.cos(angle), colour.saturation * math.sin(angle)
    matrix = [gain * (y + across * c + around * t) for y, c, t in zip(_TO_LUMA, _TO_CHROMA, _TO_TURNED, strict=True)]
    return [*matrix, *(colour.brightness * (1 - colour.contrast) * weight for weight in LUMA)]


def _through_yiq(middle: list[list[float]]) -> list[float]:
    """YIQ back x `middle` x to YIQ."""
    yiq = torch.tensor(YIQ, dtype=torch.float64)
    product: list[float] = (yiq.inverse() @ torch.tensor(middle, dtype=torch.float64) @ yiq).flatten().tolist()
    return product


_TO_LUMA = _through_yiq([[1, 0, 0], [0, 0, 0], [0, 0, 0]])
_TO_CHROMA = _through_yiq([[0, 0, 0], [0, 1, 0], [0, 0, 1]])
# a quarter turn in the direction of growing hue: red, yellow, green
_TO_TURNED = _through_yiq([[0, 0, 0], [0, 0, 1], [0, -1, 0]])
