"""The same batches through our step and open_clip's, from the same first weights: the same loss at every step?

Method: batches of the shards that bench.parity made, as our loader delivers them, are written down once. Ours takes them
with our towers, tiled loss, fused AdamW and schedule; open_clip 3.3.0, in its own environment, with its model, `ClipLoss`,
AdamW of its parameter groups and the same schedule, at 77 positions. Both in fp32, one thread. What bench.parity compares
differs in the order of samples and the draws of crops as well; here nothing but the arithmetic does.

    python -m bench.parity_steps --work DIR [--model tiny-48] [--steps 59] [--json]

DIR is that of bench.parity (--work). About two minutes. Result: docs/results/parity.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import claim
from bench.sides import in_a_process, open_clips_optimizer

BATCH, LR, WD, WARMUP, TOTAL = 100, 1e-3, 0.2, 59, 295
GOAL = 1e-4  # of the loss: sums in another order, over some sixty steps of growing weights

Step = Callable[[Any, Any], float]


def write_batches(work: Path, place: Path, image_size: int, context: int, steps: int) -> None:
    """`place`/0.npz and so on: uint8 pixels [b, 3, S, S] and tokens [b, L]."""
    import numpy as np
    import torch

    from shardkit.reader import ShardSet
    from train.data import Loader, Plan, Preparer, Quarantine, make_decoder
    from train.tokenizer import Tokenizer

    plan = Plan.of(ShardSet.open(str(work / "train" / "shards")), 0, BATCH)
    decoder = make_decoder("cpu", image_size, 1, BATCH, torch.device("cpu"))
    preparer, notes = Preparer(decoder, Tokenizer(), context), Quarantine(place / "quarantine.jsonl", 0)
    with Loader(plan, preparer, notes, rank=0, ranks=1, start=0, stop=steps, crop=0.9, flip=False) as loader:
        for batch in loader:
            tokens = np.zeros((BATCH, context), np.int64)
            tokens[:, : batch.tokens_bL.shape[1]] = batch.tokens_bL.numpy()
            np.savez(place / f"{batch.step}.npz", pixels=batch.pixels_bCSS.numpy(), tokens=tokens)
    decoder.close()


def our_step(first: Path, model: str) -> tuple[Any, Step]:
    import torch

    from train.export import load_weights
    from train.gradcache import gradcache_step
    from train.loss import clip_loss
    from train.models import model_config
    from train.optim import clamp_log_scale, make_optimizer
    from train.towers import CLIP, trim

    clip = CLIP(model_config(model), "fp32").train()
    load_weights(str(first), model).into(clip)
    optimizer = make_optimizer(clip, LR, WD)

    def step(pixels: torch.Tensor, tokens: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = gradcache_step(clip, pixels, trim(tokens), clip_loss)
        optimizer.step()
        clamp_log_scale(clip)
        return float(loss)

    return optimizer, step


def open_clips_step(first: Path, model: str) -> tuple[Any, Step]:
    import open_clip  # type: ignore[import-not-found]
    import torch

    clip = open_clip.create_model(f"local-dir:{first}", precision="fp32").train()
    optimizer = open_clips_optimizer(clip, LR, WD)
    loss_of = open_clip.ClipLoss()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))

    def step(pixels: torch.Tensor, tokens: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(*clip((pixels.float() / 255 - mean) / std, tokens)[:3])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            clip.logit_scale.clamp_(0, math.log(100))
        return float(loss.detach())

    return optimizer, step


def losses(side: str, first: Path, place: Path, model: str, steps: int) -> list[float]:
    """The loss of each step, in this process."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    optimizer, step = (our_step if side == "ours" else open_clips_step)(first, model)
    found = []
    for number in range(steps):
        late = math.pi * (number - WARMUP) / (TOTAL - WARMUP)
        rate = LR * (number + 1) / WARMUP if number < WARMUP else LR * 0.5 * (1 + math.cos(late))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = np.load(place / f"{number}.npz")
        found.append(step(torch.from_numpy(batch["pixels"]), torch.from_numpy(batch["tokens"])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="that of bench.parity")
    parser.add_argument("--model", default="tiny-48", help="the shape that bench.parity was run with")
    parser.add_argument("--steps", type=int, default=59)
    parser.add_argument("--json", action="store_true", help="print the claim as JSON only")
    parser.add_argument("--side", choices=("ours", "open_clip"), help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    first = options.work.resolve() / "first0"
    if options.side:
        print(json.dumps(losses(options.side, first, options.place, options.model, options.steps)))
        return
    from bench.peers import peer_python
    from train.models import model_config

    shape = model_config(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        write_batches(options.work.resolve(), Path(scratch), shape.image_size, shape.context, options.steps)
        place, work = f"--place={scratch}", f"--work={options.work.resolve()}"
        words = (place, work, f"--model={options.model}", f"--steps={options.steps}")
        ours, theirs = (
            in_a_process("parity_steps", f"--side={side}", *words, python=python)
            for side, python in (("ours", sys.executable), ("open_clip", peer_python("open_clip")))
        )
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    what = f"{options.model}, {options.steps} steps on the same batches (loss {theirs[0]:.3f} to {theirs[-1]:.3f})"
    found = claim(f"{what}: largest difference of the losses, share of it", worst, goal=GOAL, at_least=False)
    print(json.dumps([found]) if options.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
