"""Near-duplicate photographs: which changes a hash survives, what it confuses, and how fast hashes are matched.

Method: all photographs of Flickr8k are hashed (core.imagehash), and of every n-th one six variants are made and hashed. Every
pair of hashes within the radius is looked for by the bands (dedup.phash) and, as the oracle, by comparing all with all. A
variant counts as found where an edge joins it with its original. Speed is measured on 200,000 hashes: the photographs'
own and copies of them with up to 30 random bits flipped, in CPU seconds of one thread.

    taskset -c 1 python -m bench.phash --data DIR [--every 10] [--json]      DIR holds Flickr8k's images/

Takes one to two minutes. `--pairs FILE` writes the names of different photographs that match, with their distance.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageOps

from bench.machine import claim
from core.imagehash import image_hash
from dedup import phash

U8 = npt.NDArray[np.uint8]
RADIUS = phash.RADIUS
COUNT = 200_000


def jpeg(image: Image.Image, quality: int = 85) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def cropped(image: Image.Image, share: float) -> Image.Image:
    x, y = round(image.width * share), round(image.height * share)
    return image.crop((x, y, image.width - x, image.height - y))


def shifted(image: Image.Image) -> Image.Image:
    red, green, blue = image.split()
    return Image.merge("RGB", (red.point(lambda v: min(255, v * 1.1)), green, blue.point(lambda v: v * 0.9)))


def bannered(image: Image.Image) -> Image.Image:
    image = image.copy()
    ImageDraw.Draw(image).rectangle((0, image.height * 11 // 12, image.width, image.height), fill="white")
    return image


VARIANTS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG quality 30": lambda im: jpeg(im, 30),
    "half size": lambda im: jpeg(im.resize((im.width // 2, im.height // 2))),
    "5 % of the area cropped": lambda im: jpeg(cropped(im, 0.0127)),
    "mirrored": lambda im: jpeg(ImageOps.mirror(im)),
    "colours shifted by 10 %": lambda im: jpeg(shifted(im)),
    "banner over a twelfth": lambda im: jpeg(bannered(im)),
}
MUST = 4  # the first four are to be found


def hashed(image: Image.Image) -> tuple[bytes, bytes]:
    return image_hash(np.asarray(image))


def distances(left: U8, right: U8) -> npt.NDArray[np.int64]:
    """Bits between every hash [A, 32] and every hash [B, 32], [A, B]."""
    words, others = left.view(np.uint64), right.view(np.uint64)
    return np.stack([np.bitwise_count(word ^ others).sum(axis=1, dtype=np.int64) for word in words])


def strangers(direct: U8, mirrored: U8, names: list[str], bits: int) -> list[tuple[int, str, str]]:
    """All pairs of different photographs at most `bits` apart, directly or mirrored, nearest first: (bits, name, name)."""
    found = []
    for start in range(0, len(direct), 256):
        rows = slice(start, start + 256)
        near = np.minimum(distances(direct[rows], direct), distances(direct[rows], mirrored))
        found += [(int(near[i, j]), names[start + i], names[j]) for i, j in np.argwhere(near <= bits) if start + i < j]
    return sorted(found)


def speed(direct: U8, mirrored: U8) -> float:
    """Hashes per CPU second of the whole search, verified distances included."""
    random = np.random.default_rng(0)
    source = random.integers(0, len(direct), COUNT)
    flips = np.zeros((COUNT, 256), np.uint8)
    flips[np.repeat(np.arange(COUNT), 30), random.integers(0, 256, COUNT * 30)] = 1
    flips[: len(direct)] = 0
    source[: len(direct)] = np.arange(len(direct))
    noise = np.packbits(flips, axis=1)
    start = time.process_time()
    phash.image_edges(direct[source] ^ noise, mirrored[source] ^ noise, RADIUS)
    return COUNT / (time.process_time() - start)


def of_variants(pictures: list[Image.Image], originals: tuple[U8, U8]) -> dict[str, dict[str, float]]:
    """For each variant: median and 97th percentile of its distance to its original, and the share that the bands join."""
    result = {}
    for name, make in VARIANTS.items():
        direct, mirrored = _arrays([hashed(make(picture)) for picture in pictures])
        count = len(pictures)
        edges = phash.image_edges(
            np.concatenate((originals[0], direct)), np.concatenate((originals[1], mirrored)), RADIUS
        )
        joined = int(np.count_nonzero((edges.b - edges.a == count) & (edges.a < count)))
        bits = np.minimum(*(np.bitwise_count(x ^ direct).sum(axis=1, dtype=np.int64) for x in originals))
        result[name] = {
            "median": float(np.median(bits)),
            "p97": float(np.percentile(bits, 97)),
            "recall": joined / count,
        }
    return result


def _arrays(hashes: list[tuple[bytes, bytes]]) -> tuple[U8, U8]:
    direct, mirrored = (np.frombuffer(b"".join(h[k] for h in hashes), np.uint8).reshape(-1, 32) for k in (0, 1))
    return direct, mirrored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds Flickr8k's images/")
    parser.add_argument("--every", type=int, default=10, help="make variants of every n-th photograph")
    parser.add_argument("--pairs", type=Path, help="write the matching pairs of different photographs here")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    files = sorted((arguments.data / "images").glob("*.jpg"))
    direct, mirrored = _arrays([hashed(Image.open(file).convert("RGB")) for file in files])
    chosen = slice(0, None, arguments.every)
    pictures = [Image.open(file).convert("RGB") for file in files[chosen]]
    table = of_variants(pictures, (direct[chosen], mirrored[chosen]))
    near = strangers(direct, mirrored, [file.name for file in files], 80)
    if arguments.pairs:
        arguments.pairs.write_text("".join(f"{bits}\t{a}\t{b}\n" for bits, a, b in near))
    exact = [pair for pair in near if pair[0] == 0]
    claims: list[dict[str, Any]] = [
        claim(f"share found: {name}", row["recall"], goal=0.97, at_least=True)
        | {"median_bits": row["median"], "p97_bits": row["p97"], "asked_for": place < MUST}
        for place, (name, row) in enumerate(table.items())
    ]
    wrong = sum(pair[0] <= RADIUS for pair in near) - len(exact)
    claims += [
        claim(f"pairs of different photographs within {RADIUS} bits", wrong, goal=0, at_least=False),
        claim("pairs of photographs with equal hashes", len(exact), goal=1, at_least=True) | {"pairs": exact},
        claim("hashes a second on one core", speed(direct, mirrored), goal=100_000, at_least=True),
    ]
    print(json.dumps(claims, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
