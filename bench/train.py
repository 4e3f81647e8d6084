"""A training step of ours beside open_clip's, on a CPU in bf16: forward, loss, backward, clipping, AdamW, clamp.

Method: the same batches (random pixels of the model's size, real captions, tokens of the same tokenizer), the same shape
built by both from one description, one thread each. Ours is the step of `train.loop` (trimmed captions, tiled loss, fused
AdamW); open_clip's is the step of its trainer: towers under bf16 autocast at 77 positions, `ClipLoss`, gradient clipping,
AdamW with its parameter groups, clamp; in its own environment (`python -m bench.peers open_clip`). Decoding is left out:
`bench.loader` has it. Processes run in turns, and CPU seconds of the best step count, so that a busy machine hurts both.
`floor` is what the model's operations cost at the measured peak of bf16 matrix products: ours / floor is the MFU.

GradCache: a step of small-112 with 256 pairs, whole and by micro-batches of 64; 256 and 1,024 pairs by micro-batches of 64
whose own losses are added up, which is another loss but the memory of one micro-batch; the same way. Memory is the peak beyond
what the process held before its first step: optimiser, gradients, activations.

    python -m bench.train [--model ViT-B-32 small-112] [--batch 64] [--steps 3] [--captions FILE.tsv] [--json]
    python -m bench.train --gradcache [--precision fp32] [--json]
    python -m bench.train --profile --model ViT-B-32      where the time of our step goes

Captions are the last column of a TSV file; by default those of Flickr8k in PAIRMILL_REAL_DATA.
Result: docs/results/train.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import claim
from bench.sides import in_a_process, open_clips_optimizer

GOALS = {"ViT-B-32": 2.5, "small-112": 3.0}
SPLIT_MODEL, SPLIT_BATCH, SPLIT_MICRO = "small-112", 256, 64
SPLIT_TIME_GOAL, SPLIT_MEMORY_GOAL = 1.36, 1.1
ROUNDS, WARM_UP = 2, 2
LR, WD, CLIP_NORM = 5e-4, 0.2, 1.0


# -- what both sides are given ------------------------------------------------------------------------------------------


def write_case(folder: Path, model: str, batch: int, captions: list[str]) -> float:
    """Batches and the model's description in `folder`; returns the mean number of text positions."""
    import numpy as np

    from train.export import open_clip_config
    from train.models import model_config
    from train.tokenizer import Tokenizer

    shape = model_config(model)
    tokens = Tokenizer().encode(captions[:batch], shape.context).astype(np.int64)
    side = shape.image_size
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (batch, 3, side, side), dtype=np.uint8)
    np.savez(folder / "case.npz", pixels=pixels, tokens=tokens)
    described = {"model": model, "model_cfg": open_clip_config(shape)["model_cfg"]}
    (folder / "case.json").write_text(json.dumps(described))
    return float((tokens.argmax(axis=1) + 1).mean())


def read_captions(path: str) -> list[str]:
    """Captions of a TSV file's last column; a plain sentence again and again where there is none."""
    place = Path(path or os.environ.get("PAIRMILL_REAL_DATA", "/nowhere")) / ("" if path else "flickr8k/captions.tsv")
    if not place.is_file():
        return [f"two brown dogs run after a red ball over wet grass, number {i}" for i in range(4096)]
    return [line.rsplit("\t", 1)[-1] for line in place.read_text(encoding="utf-8").splitlines()[1:]]


# -- the two steps ------------------------------------------------------------------------------------------------------


def measure(side: str, folder: Path, steps: int, micro: int, added: bool, precision: str) -> dict[str, float]:
    """CPU seconds of the best of `steps` steps in this process, `WARM_UP` more having gone before, and the bytes they took."""
    step = _our_step(folder, micro, added, precision) if side == "ours" else _open_clips_step(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = float("inf")
    for i in range(WARM_UP + steps):
        start = time.process_time()
        step()
        if i >= WARM_UP:
            best = min(best, time.process_time() - start)
    return {"seconds": best, "bytes": 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


def _case(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    arrays = np.load(folder / "case.npz")
    described = json.loads((folder / "case.json").read_text())
    return torch.from_numpy(arrays["pixels"]), torch.from_numpy(arrays["tokens"]), described


def _our_step(folder: Path, micro: int = 0, added: bool = False, precision: str = "bf16") -> Any:
    """The step of `train.loop`; where `added`, with a loss for every micro-batch alone."""
    from core.allocator import keep_freed_memory
    from train.gradcache import gradcache_step
    from train.guard import clip_by_tower
    from train.loss import clip_loss
    from train.models import model_config
    from train.optim import clamp_log_scale, make_optimizer
    from train.towers import CLIP, trim

    keep_freed_memory()
    pixels, tokens, described = _case(folder)
    model = CLIP(model_config(described["model"]), precision).train()
    optimizer = make_optimizer(model, LR, WD)
    tokens = trim(tokens).contiguous()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        parts = zip(pixels.split(micro), tokens.split(micro), strict=True) if added else ((pixels, tokens),)
        for some, their_tokens in parts:
            gradcache_step(model, some, their_tokens, clip_loss, micro or None)
        clip_by_tower(model, CLIP_NORM)
        optimizer.step()
        clamp_log_scale(model)

    return step


def _open_clips_step(folder: Path) -> Any:
    import math

    import torch
    from open_clip.loss import ClipLoss  # type: ignore[import-not-found]
    from open_clip.model import CLIP  # type: ignore[import-not-found]

    pixels, tokens, described = _case(folder)
    images = pixels.float() / 127.5 - 1  # its loader delivers floats
    model = CLIP(**described["model_cfg"]).train()
    optimizer = open_clips_optimizer(model, LR, WD)
    loss_of = ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(*model(images, tokens))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM, norm_type=2.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))

    return step


# -- figures ------------------------------------------------------------------------------------------------------------


def _apart(side: str, folder: Path, steps: int, *more: str) -> dict[str, float]:
    """What `measure` finds in a process of its own; `more` are its options."""
    from bench.peers import peer_python

    python = peer_python("open_clip") if side == "open_clip" else sys.executable
    words = (f"--side={side}", f"--case={folder}", f"--steps={steps}", *more)
    return dict(in_a_process("train", *words, python=python))


def _peak() -> float:
    """bf16 operations a CPU second of one thread."""
    import torch

    torch.set_num_threads(1)
    a = torch.ones(1024, 1024, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(20):
        start = time.process_time()
        a @ a
        best = min(best, time.process_time() - start)
    return 2 * 1024**3 / best


def compare(model: str, batch: int, steps: int, captions: list[str]) -> dict[str, Any]:
    """One claim: pairs a CPU second."""
    from train.models import flops_per_pair, model_config

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        positions = write_case(folder, model, batch, captions)
        sides = [{s: _apart(s, folder, steps)["seconds"] for s in ("ours", "open_clip")} for _ in range(ROUNDS)]
    ours, theirs = (batch / min(side[s] for side in sides) for s in ("ours", "open_clip"))
    floor = _peak() / flops_per_pair(dataclasses.replace(model_config(model), patch_dropout=0.0), positions)
    what = f"{model}, batch {batch}, bf16, one thread, {positions:.1f} text positions: pairs a CPU second"
    return claim(what, ours, peer=theirs, floor=floor, goal=GOALS.get(model, 2.5) * theirs, at_least=True)


def split(steps: int, captions: list[str], precision: str) -> list[dict[str, Any]]:
    """What GradCache costs and saves: against the whole batch in time, against one micro-batch at a time in memory."""
    by_micro = ("--micro", str(SPLIT_MICRO))
    cases: dict[str, tuple[int, tuple[str, ...]]] = {
        "split": (SPLIT_BATCH, by_micro),
        "whole": (SPLIT_BATCH, ()),
        "added": (SPLIT_BATCH, (*by_micro, "--added")),
        "larger": (4 * SPLIT_BATCH, by_micro),
        "larger, added": (4 * SPLIT_BATCH, (*by_micro, "--added")),
    }
    seconds, peak = dict.fromkeys(cases, float("inf")), dict.fromkeys(cases, float("inf"))
    with tempfile.TemporaryDirectory() as scratch:
        for name, (batch, _) in cases.items():
            (Path(scratch) / name).mkdir()
            write_case(Path(scratch) / name, SPLIT_MODEL, batch, captions)
        for name in [*cases] * ROUNDS:
            found = _apart("ours", Path(scratch) / name, steps, *cases[name][1], "--precision", precision)
            seconds[name], peak[name] = min(seconds[name], found["seconds"]), min(peak[name], found["bytes"])
    what = f"{SPLIT_MODEL}, {precision}, {{}} pairs by micro-batches of {SPLIT_MICRO}"
    claims = [
        claim(
            f"{what.format(SPLIT_BATCH)}: CPU seconds a step, beside the whole batch at once", seconds["split"],
            peer=seconds["whole"], goal=SPLIT_TIME_GOAL * seconds["whole"], at_least=False,
        )
    ]  # fmt: skip
    for cached, added, batch in (("split", "added", SPLIT_BATCH), ("larger", "larger, added", 4 * SPLIT_BATCH)):
        claims.append(
            claim(
                f"{what.format(batch)}: peak bytes, beside adding up micro-batches (the whole {SPLIT_BATCH} at once: "
                f"{peak['whole']:.0f})", peak[cached], peer=peak[added], goal=SPLIT_MEMORY_GOAL * peak[added],
                at_least=False,
            )
        )  # fmt: skip
    return claims


def profile(model: str, batch: int, captions: list[str]) -> str:
    """Table of our step's operators by their own time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with tempfile.TemporaryDirectory() as scratch:
        write_case(Path(scratch), model, batch, captions)
        step = _our_step(Path(scratch))
        for _ in range(WARM_UP):
            step()
        with profiled(activities=[ProfilerActivity.CPU]) as found:
            step()
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(GOALS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--captions", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--gradcache", action="store_true")
    parser.add_argument("--side", choices=("ours", "open_clip"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of --gradcache")
    parser.add_argument("--micro", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--added", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.side:
        case = (Path(options.case), options.steps, options.micro, options.added, options.precision)
        print(json.dumps(measure(options.side, *case)))
        return
    captions = read_captions(options.captions)
    if options.profile:
        for model in options.model:
            print(profile(model, options.batch, captions))
        return
    if options.gradcache:
        claims = split(options.steps, captions, options.precision)
    else:
        claims = [compare(model, options.batch, options.steps, captions) for model in options.model]
    if options.json:
        print(json.dumps(claims))
        return
    for found in claims:
        share = f", MFU {found['ours'] / found['floor']:.0%}" if found["floor"] else ""
        print(f"{found['claim']}: {found['ours']:.4g}, beside {found['peer']:.4g} ({found['ratio']:.2f}x){share}")


if __name__ == "__main__":
    main()
