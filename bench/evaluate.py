"""Retrieval among very many: 100,000 pictures with 500,000 captions, in bounded memory, and the same numbers as brute force.

Method: random embeddings of small whole numbers, so that sums are exact in fp32 and ties are many; five captions a picture,
near it. `train.evaluate.recalls` runs on the large set in a process of its own: peak memory beyond the embeddings, and
seconds. The matrix of all similarities, which is never held, would take 200 GB. On a small set (2,000 x 10,000) every recall
is compared with numpy's full matrix in whole numbers.

    python -m bench.evaluate [--pictures 100000] [--captions-each 5] [--width 64] [--json]

Result: docs/results/train.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from bench.machine import claim
from bench.sides import in_a_process

GOAL_BYTES = 1 << 30
SMALL = 2000


def embeddings(pictures: int, each: int, width: int) -> tuple[Any, Any, Any]:
    """Pictures (N, E), captions (N each, E), and each caption's picture."""
    import torch

    g = torch.Generator().manual_seed(0)
    img = torch.randint(-4, 5, (pictures, width), generator=g).float()
    owner = torch.arange(pictures).repeat_interleave(each)
    txt = img[owner]
    txt += torch.randint(-9, 10, txt.shape, generator=g)
    return img, txt, owner


def measure(pictures: int, each: int, width: int) -> dict[str, Any]:
    """Recalls, seconds, and peak bytes beyond the embeddings, in this process."""
    from train.evaluate import recalls

    given = embeddings(pictures, each, width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = recalls(*given)
    seconds = time.perf_counter() - start
    return {"recalls": found, "seconds": seconds,
            "bytes": 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}  # fmt: skip


def brute_force(pictures: int, each: int, width: int) -> dict[str, float]:
    """The definition on the whole matrix: whoever is at least as near as the right answer stands before it."""
    import numpy as np

    img, txt, owner = (x.numpy() for x in embeddings(pictures, each, width))
    scores_MN = (txt.astype(np.int32) @ img.astype(np.int32).T).astype(np.int32)
    own_M = scores_MN[np.arange(len(owner)), owner]
    text_rank = (scores_MN >= own_M[:, None]).sum(axis=1) - 1
    best_N = own_M.reshape(pictures, each).max(axis=1)
    others_MN = scores_MN >= best_N
    others_MN[np.arange(len(owner)), owner] = False
    image_rank = others_MN.sum(axis=0)
    ranks = {"t2i": text_rank, "i2t": image_rank}
    return {f"{way}_r{k}": float((rank < k).mean()) for way, rank in ranks.items() for k in (1, 5, 10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--captions-each", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = (options.captions_each, options.width)
    if options.one:
        print(json.dumps(measure(options.pictures, *sizes)))
        return
    words = (f"--pictures={options.pictures}", f"--captions-each={options.captions_each}", f"--width={options.width}")
    found = in_a_process("evaluate", "--one", *words, one_thread=False)
    small, truth = measure(SMALL, *sizes)["recalls"], brute_force(SMALL, *sizes)
    what = f"retrieval, {options.pictures:,} pictures x {options.pictures * options.captions_each:,} captions"
    claims = [
        claim(f"{what}: peak bytes beyond the embeddings", found["bytes"], goal=GOAL_BYTES, at_least=False),
        claim(
            f"recalls that differ from brute force, {SMALL:,} x {SMALL * options.captions_each:,}",
            sum(abs(small[name] - value) > 1e-12 for name, value in truth.items()), goal=0, at_least=False,
        ),
    ]  # fmt: skip
    if options.json:
        print(json.dumps(claims))
        return
    print(f"{what}: {found['bytes'] / 2**20:.0f} MiB beyond the embeddings, {found['seconds']:.0f} s")
    print(f"beside brute force: {small} and {truth}")


if __name__ == "__main__":
    main()
