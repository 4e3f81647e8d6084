"""Our trainer and open_clip's, from the same first weights, on the same pictures, with the same schedule: the same model?

Method: the 6,000 training photographs of Flickr8k with their first captions, packed once by `pairmill shard`, are read by
both: ours by its index, open_clip's trainer (3.3.0, in its own environment, `python -m bench.peers open_clip`) by
webdataset. Both start from one open_clip folder a seed, and see random crops of at least 0.9 of the area, one precision,
AdamW (0.9, 0.98, 1e-6, decay 0.2), a warm-up of one epoch and a cosine, no gradient clipping. What differs is what the
trainers themselves do: order of the samples, draws of the crops, decoder, attention, loss, rounding. Every epoch of either
is measured by one evaluator, ours, on the 1,000 test photographs with all 5,000 captions.

They agree where the difference of their means over the seeds is no larger than the spread of the seeds (largest minus
least, of the trainer where it is larger).

    python -m bench.parity --data DIR [--work DIR] [--model small-112] [--precision bf16] [--seeds 0 1] [--epochs 5]
        [--json]

DIR holds images/, captions.tsv and images.tsv (see bench.flickr8k). A run in --work that is finished is not repeated.
Result: docs/results/parity.md, rewritten by this command, with parity.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.flickr8k import served, write_list
from bench.machine import claim, machine
from bench.peers import peer_python
from bench.sides import ROOT, first_weights, pairmill

PAGE = ROOT / "docs" / "results" / "parity.md"
TRAINERS = ("pairmill", "open_clip")
BATCH, LR, WD, CROP = 100, 1e-3, 0.2, 0.9
THEIR_NAMES = {"bf16": "amp_bf16", "fp32": "fp32"}
COLOURS = {"pairmill": "#36c", "open_clip": "#c63"}
WINDOW = 10  # steps a point of the curves covers


@dataclass(frozen=True)
class Setup:
    """What both trainers are told alike."""

    model: str
    precision: str
    epochs: int
    seeds: tuple[int, ...]


# -- what both are given ------------------------------------------------------------------------------------------------


def prepare(data: Path, work: Path, port: int) -> None:
    """`work`/train/shards with first captions, `work`/test with all captions; nothing where they are there."""
    if (work / "test").exists() and (work / "train" / "shards" / "done.json").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    with served(data / "images", port) as base_url:
        write_list(data, base_url, work / "urls.tsv")
        pairmill("ingest", str(work / "urls.tsv"), "--work", str(work / "train"), "--size", "128", "--allow-private")
    held_out = ("--where", "split IN ('train', 'test')", "--holdout", "split = 'test'")
    pairmill("dedup", "--work", str(work / "train"), *held_out)
    pairmill("shard", "--work", str(work / "train"), "--samples-per-shard", "1000")
    shutil.move(work / "train" / "holdout", work / "test")
    pairmill("shard", "--work", str(work / "train"), "--samples-per-shard", "1000", "--captions", "first", "--fresh")


# -- the two trainers ---------------------------------------------------------------------------------------------------


def train_ours(work: Path, setup: Setup, seed: int, per_epoch: int) -> None:
    """A run called `seedN` in `work`/train; it goes on where it was stopped."""
    pairmill(
        "train", "--work", str(work / "train"), "--name", f"seed{seed}", "--model", setup.model, "--batch-size", str(BATCH),
        "--epochs", str(setup.epochs), "--lr", str(LR), "--warmup", str(per_epoch), "--wd", str(WD), "--grad-clip", "0",
        "--crop", str(CROP), "--seed", str(seed), "--init", str(work / f"first{seed}"), "--val", str(work / "test"),
        "--eval-every", str(per_epoch), "--checkpoint-every", "0", "--precision", setup.precision,
    )  # fmt: skip


def train_theirs(work: Path, setup: Setup, seed: int, per_epoch: int) -> None:
    """A run called `seedN` in `work`/open_clip, with a checkpoint an epoch."""
    logs = work / "open_clip"
    if (logs / f"seed{seed}" / "checkpoints" / f"epoch_{setup.epochs}.pt").exists():
        return
    shutil.rmtree(logs / f"seed{seed}", ignore_errors=True)
    shards = sorted((work / "train" / "shards").glob("*.tar"))
    numbers = f"{{{shards[0].stem}..{shards[-1].stem}}}"
    command = [
        str(peer_python("open_clip")), "-m", "open_clip_train.main", "--model", f"local-dir:{work / f'first{seed}'}",
        "--name", f"seed{seed}", "--logs", str(logs), "--dataset-type", "webdataset", "--seed", str(seed),
        "--train-data", str(work / "train" / "shards" / f"{numbers}.tar"), "--train-num-samples", str(BATCH * per_epoch),
        "--batch-size", str(BATCH), "--epochs", str(setup.epochs), "--lr", str(LR), "--warmup", str(per_epoch), "--wd", str(WD),
        "--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6", "--precision", THEIR_NAMES[setup.precision], "--workers", "1",
        "--log-every-n-steps", "1", "--aug-cfg", f"scale=({CROP},1.0)",
    ]  # fmt: skip
    subprocess.run(command, stdout=sys.stderr, cwd=logs.parent, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)


def curve_of_ours(work: Path, seed: int) -> list[tuple[int, float]]:
    """(step, mean loss of the steps since the point before)."""
    rows = (work / "train" / "runs" / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, rows)]


def curve_of_theirs(work: Path, seed: int, marks: list[int]) -> list[tuple[int, float]]:
    """The losses of open_clip's log, averaged up to the same steps."""
    log = (work / "open_clip" / f"seed{seed}" / "out.log").read_text()
    losses = [float(found) for found in re.findall(r"Train Epoch: .* Loss: ([\d.]+) \(", log)]
    starts = [0, *marks]
    return [(end, sum(losses[start:end]) / (end - start)) for start, end in zip(starts, marks, strict=False)]


def recalls_of_ours(work: Path, seed: int) -> list[dict[str, float]]:
    """Retrieval after each epoch."""
    rows = (work / "train" / "runs" / f"seed{seed}" / "eval.jsonl").read_text().splitlines()
    return [row["retrieval"] for row in map(json.loads, rows)]


def recalls_of_theirs(work: Path, setup: Setup, seed: int) -> list[dict[str, float]]:
    """The same of open_clip's checkpoints, by our evaluator."""
    place = work / "open_clip" / f"seed{seed}"
    known = place / "recalls.json"
    if not known.exists():
        names = [str(place / "checkpoints" / f"epoch_{epoch}.pt") for epoch in range(1, setup.epochs + 1)]
        given = ("--work", str(place), "--model", setup.model, "--val", str(work / "test"))
        found = [pairmill("eval", "--checkpoint", name, *given) for name in names]
        known.write_text(json.dumps([one["retrieval"] for one in found]))
    recalls: list[dict[str, float]] = json.loads(known.read_text())
    return recalls


# -- figures ------------------------------------------------------------------------------------------------------------


def measure(data: Path, work: Path, setup: Setup, port: int) -> dict[str, Any]:
    """curves[trainer][seed] of (step, loss), recalls[trainer][seed] of one retrieval an epoch, steps an epoch."""
    prepare(data, work, port)
    listed = json.loads((work / "train" / "shards" / "shards.json").read_text())
    per_epoch = listed["samples"] // BATCH
    curves: dict[str, list[Any]] = {name: [] for name in TRAINERS}
    recalls: dict[str, list[Any]] = {name: [] for name in TRAINERS}
    for seed in setup.seeds:
        if not (work / f"first{seed}").exists():
            first_weights(work / f"first{seed}", setup.model, seed)
        train_ours(work, setup, seed, per_epoch)
        train_theirs(work, setup, seed, per_epoch)
        ours = curve_of_ours(work, seed)
        curves["pairmill"].append(ours)
        curves["open_clip"].append(curve_of_theirs(work, seed, [step for step, _ in ours]))
        recalls["pairmill"].append(recalls_of_ours(work, seed))
        recalls["open_clip"].append(recalls_of_theirs(work, setup, seed))
    return {"curves": curves, "recalls": recalls, "per_epoch": per_epoch, "samples": listed["samples"]}


def epoch_losses(found: dict[str, Any], epoch: int) -> dict[str, list[float]]:
    """Mean loss of one epoch (from 0), by trainer and seed."""
    first, last = epoch * found["per_epoch"], (epoch + 1) * found["per_epoch"]
    means = {}
    for name, curves in found["curves"].items():
        inside = [[loss for step, loss in curve if first < step <= last] for curve in curves]
        means[name] = [sum(losses) / len(losses) for losses in inside]
    return means


def gap_and_spread(values: dict[str, list[float]]) -> tuple[float, float]:
    """Difference of the trainers' means, and the larger spread of the seeds."""
    ours, theirs = (values[name] for name in TRAINERS)
    gap = abs(sum(ours) / len(ours) - sum(theirs) / len(theirs))
    return gap, max(max(ours) - min(ours), max(theirs) - min(theirs))


def compared(found: dict[str, Any], epochs: int) -> dict[str, dict[str, list[float]]]:
    """What is held against each other, by its name: the loss of every epoch, R@10 both ways at the end."""
    values = {f"loss, epoch {epoch + 1}": epoch_losses(found, epoch) for epoch in range(epochs)}
    for way, words in (("t2i", "text to image"), ("i2t", "image to text")):
        last = {name: [run[-1][f"{way}_r10"] for run in runs] for name, runs in found["recalls"].items()}
        values[f"R@10, {words}"] = last
    return values


def page(found: dict[str, Any], values: dict[str, dict[str, list[float]]], setup: Setup) -> str:
    """The results page."""
    lines = [
        "# The same model as open_clip's trainer",
        "",
        f"    python -m bench.parity --data /path/to/flickr8k --model {setup.model} --precision {setup.precision} "
        f"--epochs {setup.epochs} --seeds {' '.join(map(str, setup.seeds))}",
        "",
        f"Run on {machine()} ({time.strftime('%Y-%m-%d')}). `{setup.model}`, {found['samples']:,} photographs of Flickr8k "
        f"with their first captions, batch {BATCH}, {setup.epochs} epochs of {found['per_epoch']} steps, {setup.precision}, "
        f"seeds {', '.join(map(str, setup.seeds))}; method in [bench/parity.py](../../bench/parity.py).",
        "",
        "![loss and retrieval of both](parity.svg)",
        "",
        "| | pairmill | open_clip 3.3.0 | difference of the means | spread of the seeds | agree |",
        "|---|---|---|---|---|---|",
    ]
    for name, both in values.items():
        shown = "{:.3f}".format if name.startswith("loss") else "{:.1%}".format
        gap, spread = gap_and_spread(both)
        each = " | ".join(", ".join(map(shown, both[trainer])) for trainer in TRAINERS)
        lines.append(f"| {name} | {each} | {shown(gap)} | {shown(spread)} | {'yes' if gap <= spread else '**no**'} |")
    lines += [
        "",
        "Numbers side by side are the seeds. Chance at R@10 is about 1 %. Both trainers' checkpoints of every epoch were",
        "measured by one evaluator, ours. What the arithmetic alone does, on the same batches, `bench.parity_steps` measures.",
        "",
    ]
    return "\n".join(lines)


def drawn(found: dict[str, Any], epochs: int) -> str:
    """Loss over steps, and R@10 over epochs (mean of both ways), of all runs, as an SVG of two panels."""
    total = epochs * found["per_epoch"]
    losses = found["curves"]
    recalls = {
        name: [
            [((i + 1) * found["per_epoch"], 50 * (one["t2i_r10"] + one["i2t_r10"])) for i, one in enumerate(run)]
            for run in runs
        ]
        for name, runs in found["recalls"].items()
    }
    panels = [
        _panel(40, "loss over steps", losses, total, f"{WINDOW}-step means"),
        _panel(400, "R@10 over steps, %", recalls, total, "after each epoch"),
    ]
    names = "".join(
        f'<text x="{600}" y="{34 + 14 * i}" fill="{COLOURS[name]}">{name}</text>' for i, name in enumerate(TRAINERS)
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="260" font-family="sans-serif" font-size="11">'
    return f'{head}<rect width="720" height="260" fill="#fff"/>{"".join(panels)}{names}</svg>\n'


def _panel(left: int, title: str, runs: dict[str, list[Any]], total: int, note: str) -> str:
    values = [value for some in runs.values() for run in some for _, value in run]
    low, high = min(values), max(values)
    lines = []
    for name, some in runs.items():
        for i, run in enumerate(some):
            points = " ".join(
                f"{left + 280 * step / total:.1f},{220 - 180 * (value - low) / (high - low):.1f}" for step, value in run
            )
            dash = ' stroke-dasharray="4 3"' if i else ""
            lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}"{dash}/>')
    axes = f'<path d="M{left},30V220H{left + 290}" fill="none" stroke="#888"/>'
    ends = "".join(
        f'<text x="{left - 4}" y="{y}" text-anchor="end">{value:.3g}</text>' for y, value in ((220, low), (44, high))
    )
    words = (
        f'<text x="{left}" y="20">{title}</text><text x="{left + 280}" y="236" text-anchor="end">{total}; {note}</text>'
    )
    return axes + "".join(lines) + ends + words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with images/, captions.tsv and images.tsv")
    parser.add_argument("--work", type=Path, default=Path("work-parity"), help="where shards and runs go")
    parser.add_argument("--model", default="small-112", help="one of our shapes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--precision", choices=tuple(THEIR_NAMES), default="bf16", help="of the matrix products of both"
    )
    parser.add_argument("--port", type=int, default=8809, help="port of the local web server")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON")
    options = parser.parse_args()
    setup = Setup(options.model, options.precision, options.epochs, tuple(options.seeds))
    found = measure(options.data, options.work.resolve(), setup, options.port)
    values = compared(found, options.epochs)
    PAGE.write_text(page(found, values, setup), encoding="utf-8")
    PAGE.with_suffix(".svg").write_text(drawn(found, options.epochs))
    claims = []
    for name, both in values.items():
        gap, spread = gap_and_spread(both)
        claims.append(claim(f"{name}: gap to open_clip, within the spread of seeds", gap, goal=spread, at_least=False))
    print(json.dumps(claims) if options.json else PAGE.read_text())


if __name__ == "__main__":
    main()
