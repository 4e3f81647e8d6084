"""What measuring costs the trainer: the clocks around every part of a step and the rows they end in, as a share of the run.

A run of a small tower (whose steps are short, so that the share is a high one) with every call of the meter timed from
outside, and clocks started and stopped as often as its steps did. Two runs with and without the meter would differ by more
than what is looked for.

    python -m bench.meter [--steps 100] [--model small-112] [--batch-size 64] [--json]

About a minute on 2 cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.diagnose import make_set
from bench.machine import claim
from core.metrics import Series
from train.comm import CLOCK
from train.config import TrainConfig
from train.meter import Meter
from train.run import run

CLOCKS = 7  # a step: batch, copy, compute, reader, decoder, the loss's two collectives
TRIES = 10_000


class Spent:
    """Seconds and calls of the functions that it watches."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        return watched


def one_clock() -> float:
    """Seconds that a clock costs which is started and stopped."""
    series, start = Series(), time.perf_counter()
    for _ in range(TRIES):
        with series.timed(), CLOCK.timed():
            pass
    seconds = time.perf_counter() - start
    CLOCK.take()
    return seconds / TRIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", default="small-112")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    steps, rows = Spent(), Spent()
    Meter.add, Meter.row = steps.watch(Meter.add), rows.watch(Meter.row)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="pairmill-bench-") as folder:
        work = str(make_set(Path(folder), 512, 128))
        settings = {
            "work": work,
            "model": arguments.model,
            "batch_size": arguments.batch_size,
            "steps": arguments.steps,
        }
        summary = run(TrainConfig(device="cpu", val="none", **settings))
    step = arguments.batch_size / summary["pairs_per_s"]
    spent = (steps.seconds + rows.seconds) / steps.calls + CLOCKS * one_clock()
    print(json.dumps([
        claim(f"share of a step of {1e3 * step:.0f} ms that measuring takes ({arguments.model}, {rows.calls} rows)", spent / step,
              goal=0.01, at_least=False)
    ], indent=None if arguments.json else 1))  # fmt: skip


if __name__ == "__main__":
    main()
