"""Work folders with real shards, packed by the stage itself, small enough to train on in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from core.images import encode_jpeg, resize
from shardkit.config import ShardConfig
from shardkit.pack import run as pack
from tests.shardkit.parts import World

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 210), "yellow": (220, 210, 50)}
PLACES = ("left", "right", "top", "bottom")


def photograph(number: int, width: int = 64, height: int = 48) -> np.ndarray:
    """Smooth, coloured noise of several scales, uint8 (height, width, 3): to a decoder it looks like a photograph."""
    rng = np.random.Generator(np.random.PCG64(number))
    out = np.zeros((height, width, 3))
    for side, weight in ((4, 0.6), (8, 0.3), (16, 0.1)):
        coarse = np.ascontiguousarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        across = coarse.repeat(-(-height // side), 0).repeat(-(-width // side), 1)[:height, :width]
        smooth = resize(np.ascontiguousarray(across), min(height, width) // 3)
        rows = np.linspace(0, smooth.shape[0] - 1, height).astype(int)
        columns = np.linspace(0, smooth.shape[1] - 1, width).astype(int)
        out += weight * smooth[rows][:, columns]
    return out.clip(0, 255).astype(np.uint8)


def coloured(number: int) -> tuple[np.ndarray, list[str]]:
    """A picture with a coloured half, and captions that say which: something a small model learns in a few steps."""
    colour = list(COLOURS)[number % 4]
    place = PLACES[number // 4 % 4]
    pixels = photograph(number) // 3 + 80
    half: Any = {"left": np.s_[:, :32], "right": np.s_[:, 32:], "top": np.s_[:24], "bottom": np.s_[24:]}[place]
    pixels[half] = COLOURS[colour]
    return pixels, [f"{colour} on the {place} {number}", f"the {place} side is {colour}, picture number {number}"]


def make_work(work: Path, pictures: int = 96, *, holdout_every: int = 0, bad: dict[int, bytes] | None = None) -> Path:
    """WORK with `shards` (and `holdout`) of `coloured` pictures, two captions each, 40 to a shard.

    `bad` replaces the bytes of some pictures.
    """
    world = World(work)
    for number in range(pictures):
        pixels, captions = coloured(number)
        body = (bad or {}).get(number) or encode_jpeg(np.ascontiguousarray(pixels), 92)
        world.add(number, captions, body=body, holdout=bool(holdout_every) and number % holdout_every == 0)
    world.write()
    pack(ShardConfig(work=str(work), workers=1, samples_per_shard=40, size=(64,)))
    return work
