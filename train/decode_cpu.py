"""Picture bytes to square uint8 pixels on CPU threads: libjpeg-turbo, then one antialiased bicubic resize of a window.

Shape letters: B pictures, C = 3 colours, S side of the square.

The window is chosen before anything is decoded, from the picture's header alone, so that every back-end (this one and
DALI) cuts the same part. simplejpeg and torch release the GIL, so plain threads use every core.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from random import Random
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from core import images
from core.errors import ImageError
from train.colour import Colour, recolour

GREY = 128  # of the placeholder that stands in for a picture that cannot be decoded

# Aspect ratios of a random window, as everyone has trained since Szegedy et al. 2014.
WINDOW_RATIO = (3 / 4, 4 / 3)
WINDOW_TRIES = 10

TASKS = 4  # of a batch for each thread, so that none waits long for the last one
NICE = 10  # of the decode threads, more than the loop's


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


class Decoder(Protocol):
    """Decodes batches to one size. Implementations: `CpuDecoder`, `decode_dali.DaliDecoder`."""

    def decode(self, pictures: Sequence[Picture | None]) -> tuple[Tensor, dict[int, str]]:
        """Pixels uint8 (B, C, S, S), colours last in memory, and the reason of each one that could not be decoded (grey).

        None stands for a picture already known to be bad: grey, and the caller has its reason.
        """
        ...

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
    """The window of one picture in its own colours as uint8 (C, S, S). ImageError where the picture cannot be decoded whole.

    Decoded at full size always: libjpeg's decode at a fraction of it (500 to 64 pixels) gained 20 % and moved pixels
    by 2.1/255 on the mean, more than two back-ends may differ; shards hold pictures near the training size anyway.
    """
    left, top, width, height, flip, _ = picture.view
    pixels = images.decode(picture.data, picture.header)[top : top + height, left : left + width]
    if not pixels.flags.writeable:  # Pillow's memory, which torch takes only under a warning
        pixels = pixels.copy()
    # the leading dimension comes first, because torch takes colours that lie last for what they are only in four
    # dimensions: 147 us instead of 216 to 224 pixels, half of which was turning the result to colours first
    window = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    if window.shape[-2:] != (size, size):
        window = F.interpolate(window, (size, size), mode="bicubic", antialias=True, align_corners=False)
    return (window.flip(-1) if flip else window)[0]


def _stand_back() -> None:
    """A decode thread leaves the cores to the model, where both compute on them.

    Kernels of torch run in this thread alone: N threads that each started a team of N held up the model's team, which
    waits for its slowest member again and again. And the model goes first: a loop that would wait still gets what is left.
    """
    torch.set_num_threads(1)  # of this thread, and of those that meet torch later; not of the loop's
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + NICE))


class CpuDecoder:
    """Decodes batches on a pool of threads, which neither `close` nor the end of the process waits for: one that hangs in a
    picture must not hold up the run that found out."""

    def __init__(self, size: int, threads: int) -> None:
        self.size, self.threads = size, max(1, threads)
        self._pool = ThreadPool(self.threads, _stand_back)

    def decode(self, pictures: Sequence[Picture | None]) -> tuple[Tensor, dict[int, str]]:
        pixels_BCSS = torch.full((len(pictures), self.size, self.size, 3), GREY, dtype=torch.uint8).permute(0, 3, 1, 2)
        reasons: dict[int, str] = {}

        def work(numbers: range) -> None:
            for i in numbers:
                picture = pictures[i]
                if picture is not None:
                    try:
                        pixels_BCSS[i] = render(picture, self.size)
                        if picture.view.colour is not None:
                            recolour(pixels_BCSS[i : i + 1], [picture.view.colour])
                    except ImageError as error:
                        reasons[i] = error.detail

        # a few pictures a task: handing one over costs as much as a twentieth of its decoding
        step = max(1, len(pictures) // (TASKS * self.threads))
        tasks = [range(i, min(i + step, len(pictures))) for i in range(0, len(pictures), step)]
        self._pool.map(work, tasks, chunksize=1)
        return pixels_BCSS, dict(sorted(reasons.items()))

    def close(self) -> None:
        self._pool.terminate()
