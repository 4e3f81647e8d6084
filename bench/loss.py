"""The symmetric tiled loss against the usual two-matrix loss, forward and backward, one CPU thread.

Method: B normalised pairs of width D in fp32. `tiled` is `train.loss.clip_loss` with the masks that training passes;
`two matrices` is the loss as open_clip and most trainers write it for one process (logits by image, logits by text, two
cross-entropies, autograd); `products` are the four B x B x D matrix products that no exact form can avoid. Each runs in
a process of its own: CPU seconds are the best of three, memory is the peak above what the embeddings themselves took.

    python -m bench.loss [--batch 8192] [--width 512] [--json]

Result (Zen 4, one core, D = 512): B = 6,144: 2.34 s and 36 MiB tiled, 3.41 s and 984 MiB two matrices, 1.86 s the bare
products. The ratio of times falls with B (0.80 at 2,048, 0.69 at 6,144): tiles stay in the cache, matrices do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

from bench.machine import claim

FORMS = ("tiled", "two matrices", "products")
TIME_GOAL, MEMORY_GOAL = 0.8, 0.15


def measure(form: str, batch: int, width: int) -> tuple[float, float]:
    """(CPU seconds of one forward and backward pass, peak bytes beyond the inputs) of one form in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    img = torch.nn.functional.normalize(torch.randn(batch, width), dim=1).requires_grad_()
    txt = torch.nn.functional.normalize(img.detach() + 0.1 * torch.randn(batch, width), dim=1).requires_grad_()
    scale = torch.tensor(3.5, requires_grad=True)
    step = steps()[form]
    step(img[:64], txt[:64], scale)  # start-up costs of the library
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        step(img, txt, scale)
        best = min(best, time.process_time() - start)
    return best, 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def steps() -> dict[str, Any]:
    """The three forms as functions of (images, texts, log scale)."""
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy

    from train.loss import clip_loss

    def tiled(img: Tensor, txt: Tensor, scale: Tensor) -> None:
        valid, group = torch.ones(len(img), dtype=torch.bool), torch.arange(len(img))
        clip_loss(img, txt, scale, valid_b=valid, group_b=group).backward()

    def two_matrices(img: Tensor, txt: Tensor, scale: Tensor) -> None:
        own = torch.arange(len(img))
        by_image, by_text = scale.exp() * img @ txt.T, scale.exp() * txt @ img.T
        ((cross_entropy(by_image, own) + cross_entropy(by_text, own)) / 2).backward()

    def products(img: Tensor, txt: Tensor, scale: Tensor) -> None:
        with torch.no_grad():
            logits = img @ txt.T
            torch.mm(img, txt.T, out=logits)
            logits @ txt, logits.T @ img

    return {"tiled": tiled, "two matrices": two_matrices, "products": products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, tuple[float, float]] = {}
    for form in FORMS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[form] = pool.apply(measure, (form, options.batch, options.width))
    (ours, memory), (peer, peer_memory), (floor, _) = (found[form] for form in FORMS)
    what = f"CLIP loss, {options.batch} pairs of width {options.width}, one thread"
    claims = [
        claim(f"{what}: CPU seconds", ours, peer=peer, floor=floor, goal=TIME_GOAL * peer, at_least=False),
        claim(f"{what}: peak bytes", memory, peer=peer_memory, goal=MEMORY_GOAL * peer_memory, at_least=False),
    ]
    if options.json:
        print(json.dumps(claims))
    else:
        for form, (seconds, peak) in found.items():
            print(f"{form:12}  {seconds:7.2f} s CPU  {peak / 2**20:8.0f} MiB")


if __name__ == "__main__":
    main()
