"""A 256-bit perceptual hash of a picture and of its mirror image, for near-duplicates. numpy only, about 0.2 ms.

The picture is averaged to 64x64 grey, its low 16x16 DCT coefficients without the constant row and column are compared
with their median, and each comparison is one bit: the idea of PDQ (Facebook, 2019) with another filter before it, so
distances compare with PDQ's but the bits do not. Mirroring a picture flips the sign of the coefficients of odd
horizontal frequency, so the mirrored hash costs only the comparison.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

GREY_SIDE = 64
BITS_SIDE = 16
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601


def image_hash(pixels: npt.NDArray[np.uint8]) -> tuple[bytes, bytes]:
    """Hash of uint8 RGB `pixels` [H, W, 3] and of the mirrored picture: 32 bytes each.

    Bit 16 * i + j (most significant first) belongs to vertical frequency i + 1 and horizontal frequency j + 1. A picture
    of one colour hashes to zeros.
    """
    grey_HW = pixels.astype(np.float32) @ _LUMA
    height, width = grey_HW.shape
    coefficients_BB = _basis(height) @ (grey_HW @ _basis(width).T)
    coefficients_BB[np.abs(coefficients_BB) < 1e-2] = 0.0  # rounding noise of flat pictures must not become bits
    mirrored_BB = coefficients_BB * _MIRROR_SIGNS
    return _bits(coefficients_BB), _bits(mirrored_BB)


def _bits(coefficients_BB: npt.NDArray[Any]) -> bytes:
    middle = np.partition(coefficients_BB, BITS_SIDE * BITS_SIDE // 2, axis=None)[BITS_SIDE * BITS_SIDE // 2]
    return np.packbits(coefficients_BB > middle).tobytes()


_MIRROR_SIGNS = np.where(np.arange(1, BITS_SIDE + 1) % 2, -1, 1).astype(np.float32)[None, :]


@functools.lru_cache(maxsize=1024)
def _basis(side: int) -> npt.NDArray[np.float32]:
    """[16, side]: area average to 64, then rows 1 to 16 of the orthonormal DCT-II of length 64, as one matrix.

    Both are linear, and in one product they cost a third. Sides below 64 repeat pixels.
    """
    edges = np.linspace(0.0, side, GREY_SIDE + 1)
    cells = np.arange(side)
    overlap = np.minimum(edges[1:, None], cells[None, :] + 1) - np.maximum(edges[:-1, None], cells[None, :])
    averaging = np.clip(overlap, 0.0, None) * (GREY_SIDE / side)
    frequency, position = np.arange(1, BITS_SIDE + 1)[:, None], np.arange(GREY_SIDE)[None, :]
    dct = np.sqrt(2 / GREY_SIDE) * np.cos(np.pi * frequency * (2 * position + 1) / (2 * GREY_SIDE))
    return (dct @ averaging).astype(np.float32)
