"""The hash stays close under re-encoding and resizing, mirrors for free, and tells different pictures apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from core.imagehash import image_hash
from core.images import decode, encode_jpeg, read_header, resize

if TYPE_CHECKING:
    from core.images import Pixels

REAL = os.environ.get("PAIRMILL_REAL_DATA", "")


def scene(seed: int, width: int = 320, height: int = 240) -> Pixels:
    """Smooth random blobs with edges: energy at all low frequencies, as photographs have."""
    rng = np.random.Generator(np.random.PCG64(seed))
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    picture = np.zeros((height, width, 3))
    for _ in range(40):
        cx, cy, r = rng.random(3) * [1, 1, 0.25]
        picture[(x - cx) ** 2 + (y - cy) ** 2 < r**2] = rng.random(3) * 255
    return picture.astype(np.uint8)


def distance(a: bytes, b: bytes) -> int:
    return (int.from_bytes(a) ^ int.from_bytes(b)).bit_count()


def test_it_is_256_balanced_bits() -> None:
    for seed in range(5):
        both = image_hash(scene(seed))
        assert [len(h) for h in both] == [32, 32]
        assert all(100 <= int.from_bytes(h).bit_count() <= 128 for h in both)


def test_the_mirrored_hash_is_the_hash_of_the_mirrored_picture() -> None:
    for seed in range(5):
        plain, mirrored = image_hash(scene(seed))
        there, back = image_hash(np.ascontiguousarray(scene(seed)[:, ::-1]))
        assert distance(mirrored, there) <= 2 and distance(plain, back) <= 2
        assert distance(plain, mirrored) > 60


def test_copies_are_near_and_other_pictures_far() -> None:
    hashes = [image_hash(scene(seed))[0] for seed in range(12)]
    for seed, original in enumerate(hashes):
        pixels = scene(seed)
        worse = encode_jpeg(pixels, 30)
        assert distance(original, image_hash(decode(worse, read_header(worse)))[0]) <= 20
        assert distance(original, image_hash(resize(pixels, 120))[0]) <= 12
        brighter = np.clip(pixels.astype(int) * 0.8 + 20, 0, 255).astype(np.uint8)
        assert distance(original, image_hash(brighter)[0]) <= 4
        assert all(distance(original, other) > 70 for other in hashes[:seed])


def test_any_shape_hashes_and_flat_pictures_hash_to_zeros() -> None:
    for shape in ((1, 1, 3), (5, 300, 3), (64, 64, 3), (301, 17, 3)):
        assert image_hash(np.full(shape, 93, np.uint8)) == (bytes(32), bytes(32))


def test_the_same_pixels_hash_the_same_every_time() -> None:
    assert image_hash(scene(3)) == image_hash(scene(3).copy())


@pytest.mark.realdata
@pytest.mark.skipif(not REAL, reason="PAIRMILL_REAL_DATA is not set")
def test_real_photographs() -> None:
    bodies = [p.read_bytes() for p in sorted((Path(REAL) / "originals").glob("*.jpg"))[:60]]
    photos = [resize(decode(b, read_header(b), min_side=256), 256) for b in bodies]
    hashes = [image_hash(p)[0] for p in photos]
    copies = [encode_jpeg(p, 30) for p in photos]
    assert max(
        distance(h, image_hash(decode(c, read_header(c)))[0]) for h, c in zip(hashes, copies, strict=True)
    ) <= 16  # fmt: skip
    assert min(distance(a, b) for i, a in enumerate(hashes) for b in hashes[:i]) > 70
