"""Picture bytes to square uint8 pixels on CPUs: libjpeg-turbo, then one antialiased bicubic resize of a window.

Shape letters: B pictures, C = 3 colours, S side of the square.

The window is chosen before anything is decoded, from the picture's header alone, so that every back-end (this one and
DALI) cuts the same part.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core import images
from train.colour import Colour, recolour
from train.decode_pool import Pool

# Aspect ratios of a random window, as everyone has trained since Szegedy et al. 2014.
WINDOW_RATIO = (3 / 4, 4 / 3)
WINDOW_TRIES = 10


class View(NamedTuple):
    """A window of the upright picture in its pixels, whether it is mirrored, and how its colours are changed."""

    left: int
    top: int
    width: int
    height: int
    flip: bool = False
    colour: Colour | None = None


class Picture(NamedTuple):
    """Encoded bytes, what their header says, and the window to cut."""

    data: bytes
    header: images.Header
    view: View


Decoded = tuple[Tensor, dict[int, str]]
"""Pixels uint8 (B, C, S, S), colours last in memory, and the reason of each one that could not be decoded and is grey."""


class Decoder(ABC):
    """Decodes batches to one size. Implementations: `CpuDecoder`, `decode_dali.DaliDecoder`."""

    @abstractmethod
    def begin(self, pictures: Sequence[Picture | None]) -> Callable[[], Decoded]:
        """Begin to decode; what is returned waits for the pixels, and others may be begun before.

        None stands for a picture already known to be bad: grey, and the caller has its reason.
        """

    def decode(self, pictures: Sequence[Picture | None]) -> Decoded:
        """Decode, and wait for it; see `begin`."""
        return self.begin(pictures)()

    @abstractmethod
    def close(self) -> None: ...


def middle_view(width: int, height: int) -> View:
    """The largest square in the middle."""
    side = min(width, height)
    return View((width - side) // 2, (height - side) // 2, side, side)


def random_view(width: int, height: int, draw: Random, smallest: float, flip: bool = False) -> View:
    """A window of `smallest` to all of the picture's area with a ratio of 3:4 to 4:3, drawn from `draw` alone.

    Where ten draws do not fit into the picture (it is long and thin), the middle one of the nearest allowed ratio.
    """
    mirrored = flip and draw.random() < 0.5
    low, high = math.log(WINDOW_RATIO[0]), math.log(WINDOW_RATIO[1])
    for _ in range(WINDOW_TRIES):
        area = width * height * (smallest + (1 - smallest) * draw.random())
        ratio = math.exp(low + (high - low) * draw.random())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draw.random() * (width - w + 1)), int(draw.random() * (height - h + 1))
            return View(left, top, w, h, mirrored)
    w = max(1, min(width, round(height * WINDOW_RATIO[1])))
    h = max(1, min(height, round(width / WINDOW_RATIO[0])))
    return View((width - w) // 2, (height - h) // 2, w, h, mirrored)


def render(picture: Picture, size: int) -> Tensor:
    """The window of one picture as uint8 (C, S, S); see `render_into`."""
    pixels_SSC = np.empty((size, size, 3), np.uint8)
    render_into(pixels_SSC, picture.data, picture.view)
    return torch.from_numpy(pixels_SSC).permute(2, 0, 1)


def render_into(pixels_SSC: np.ndarray, data: bytes, view: View) -> None:
    """Write the window of one picture into uint8 (S, S, C). ImageError where the picture cannot be decoded whole.

    Decoded at full size always: libjpeg's decode at a fraction of it (500 to 64 pixels) gained 20 % and moved pixels
    by 2.1/255 on the mean, more than two back-ends may differ; shards hold pictures near the training size anyway.
    """
    left, top, width, height, flip, colour = view
    pixels = images.decode(data, images.read_header(data))[top : top + height, left : left + width]
    if not pixels.flags.writeable:  # Pillow's memory, which torch takes only under a warning
        pixels = pixels.copy()
    # the leading dimension comes first, because torch takes colours that lie last for what they are only in four
    # dimensions: 147 us instead of 216 to 224 pixels, half of which was turning the result to colours first
    window_BCHW, out_BCSS = (torch.from_numpy(array)[None].permute(0, 3, 1, 2) for array in (pixels, pixels_SSC))
    size = out_BCSS.shape[-2:]
    if window_BCHW.shape[-2:] == size:
        out_BCSS.copy_(window_BCHW)
    else:  # F.interpolate, but into memory that is there: 10 us of 570 in all
        torch.ops.aten._upsample_bicubic2d_aa.out(window_BCHW, size, False, None, None, out=out_BCSS)
    if flip:
        out_BCSS.copy_(out_BCSS.flip(-1))
    if colour is not None:
        recolour(out_BCSS, [colour])


class CpuDecoder(Decoder):
    """Decodes batches in processes."""

    def __init__(self, size: int, workers: int) -> None:
        self.size, self._pool = size, Pool(max(1, workers))

    def begin(self, pictures: Sequence[Picture | None]) -> Callable[[], Decoded]:
        result = self._pool.begin(pictures, self.size)

        def decoded() -> Decoded:
            pixels_BSSC, reasons = result()
            return torch.from_numpy(pixels_BSSC).permute(0, 3, 1, 2), reasons

        return decoded

    def close(self) -> None:
        self._pool.close()
