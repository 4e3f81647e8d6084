"""Picture bytes to square uint8 pixels on CPU threads: libjpeg-turbo, then one antialiased bicubic resize of a window.

Shape letters: B pictures, C = 3 colours, S side of the square.

The window is chosen before anything is decoded, from the picture's header alone, so that every back-end (this one and
DALI) cuts the same part. simplejpeg and torch release the GIL, so plain threads use every core.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.nn import functional as F

from core.errors import ImageError
from core.schema import Outcome

JPEG_MAGIC = b"\xff\xd8\xff"
GREY = 128  # of the placeholder that stands in for a picture that cannot be decoded
MAX_PIXELS = 1 << 28

# Aspect ratios of a random window, as everyone has trained since Szegedy et al. 2014.
WINDOW_RATIO = (3 / 4, 4 / 3)
WINDOW_TRIES = 10


class View(NamedTuple):
    """A window of a picture in its pixels, and whether it is mirrored."""

    left: int
    top: int
    width: int
    height: int
    flip: bool = False


class Decoder(Protocol):
    """Decodes batches of one size. Implementations: `CpuDecoder`, `decode_dali.DaliDecoder`."""

    def decode(self, images: Sequence[bytes], views: Sequence[View | None]) -> tuple[Tensor, dict[int, str]]:
        """Pixels uint8 (B, C, S, S), and the reason for each position that could not be decoded (grey there).

        A view of None marks a picture already known to be bad; the caller has its reason.
        """
        ...

    def close(self) -> None: ...


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) from the header; ImageError when there is none that can be read."""
    try:
        if data.startswith(JPEG_MAGIC):
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        else:
            width, height = _pillow(data, header_only=True)
    except (ValueError, OSError, SyntaxError, Warning) as error:
        raise ImageError(Outcome.CORRUPT, _reason(error)) from error
    if not 0 < width * height <= MAX_PIXELS:
        raise ImageError(Outcome.BOMB, f"{width} x {height} pixels")
    return width, height


def decode_rgb(data: bytes) -> np.ndarray:
    """RGB pixels (height, width, 3), always at full size.

    libjpeg's decode at a fraction of the size (500 to 64 pixels) gained 20 % and changed pixels by 2.1/255 on the mean,
    more than two decoders may differ; shards hold pictures near the training size anyway.

    Raises:
        ImageError: the bytes cannot be decoded whole (a JPEG that ends early counts as corrupt).
    """
    try:
        if data.startswith(JPEG_MAGIC):
            return simplejpeg.decode_jpeg(data)
        return _pillow(data)
    except (ValueError, OSError, SyntaxError, Warning) as error:
        raise ImageError(Outcome.CORRUPT, _reason(error)) from error


def _pillow(data: bytes, header_only: bool = False) -> np.ndarray:
    """Other formats: (width, height) or the pixels; transparency over white, as in `core.images`."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(data)) as image:
            if header_only:
                return np.array(image.size)
            if image.has_transparency_data:
                over = Image.new("RGBA", image.size, "white")
                over.alpha_composite(image.convert("RGBA"))
                return np.asarray(over.convert("RGB"))
            return np.asarray(image.convert("RGB"))


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


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


def render(data: bytes, view: View, size: int) -> Tensor:
    """The window of one picture as uint8 (C, S, S)."""
    pixels = decode_rgb(data)[view.top : view.top + view.height, view.left : view.left + view.width]
    window = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if window.shape[-2:] != (size, size):
        window = F.interpolate(window, (size, size), mode="bicubic", antialias=True, align_corners=False)
    return (window.flip(-1) if view.flip else window)[0]


class CpuDecoder:
    """Decodes batches on a pool of threads."""

    def __init__(self, size: int, threads: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="decode")

    def decode(self, images: Sequence[bytes], views: Sequence[View | None]) -> tuple[Tensor, dict[int, str]]:
        pixels_BCSS = torch.full((len(images), 3, self.size, self.size), GREY, dtype=torch.uint8)

        def work(i: int) -> str | None:
            view = views[i]
            if view is None:
                return None
            try:
                pixels_BCSS[i] = render(images[i], view, self.size)
            except ImageError as error:
                return error.detail
            return None

        reasons = self._pool.map(work, range(len(images)))
        return pixels_BCSS, {i: reason for i, reason in enumerate(reasons) if reason is not None}

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
