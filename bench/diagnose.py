"""`diagnose` against eight causes made on purpose: is the verdict right, and does the first fix gain what was predicted?

Made are: a slow disk (reads wait as long as at 80 kB/s), a slow network (an HTTP server that shapes what it sends), one
decode thread where eight cores are, pictures far too large, one rank with a slow disk, a batch too small for its
overhead, collectives that each take 100 ms longer, and a model that keeps the machine busy. For those that a fix of the loader
helps, `--apply` measures what it gains. Two ranks of one thread each stand for several machines.

    python -m bench.diagnose [--seconds 6] [--only slow_disk ...] [--record FILE] [--json]

About 5 minutes on 2 cores. On a busy machine the verdicts hold, the gains do not. `--record` adds to the evidence that
tests/train/test_judge.py judges again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import claim
from core.images import encode_jpeg
from shardkit.config import ShardConfig
from shardkit.pack import run as pack
from shardkit.ranges import RangeReader
from tests.shardkit.parts import World
from train import decode_cpu, decode_pool, diagnose, models
from train.config import DiagnoseConfig, TrainConfig
from train.distributed import launch_ranks
from train.models import ModelConfig

SLOW_BYTES_S = 80e3
LATE_S = 0.1
PICTURE_S = 0.004
IDLE_CORES = 8
# A wide input and almost nothing behind it: what decoding costs is all there is.
LIGHT = ModelConfig(32, 224, 56, 32, 1, 2, 32, 1, 2)


class Line:
    """A line of a given rate that all threads share: each piece waits until the ones before it are through."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s, self._free, self._lock = bytes_s, 0.0, threading.Lock()

    def carry(self, size: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self.bytes_s
            wait = self._free - time.monotonic()
        time.sleep(max(0.0, wait))


# ---------------------------------------------------------------- the world


def photograph(number: int, width: int, height: int) -> bytes:
    """A JPEG of soft shapes and film grain."""
    rng = np.random.Generator(np.random.PCG64(number))
    coarse = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    soft = coarse.repeat(-(-height // 9), 0).repeat(-(-width // 12), 1)[:height, :width]
    grain = rng.normal(0, 10, (height, width, 1))
    return encode_jpeg(np.ascontiguousarray((soft + grain).clip(0, 255).astype(np.uint8)), 90)


def make_set(work: Path, pictures: int, side: int) -> Path:
    """Shards of pictures whose shorter side is `side`; 64 different ones, as what they show does not matter."""
    world, bodies = World(work), [photograph(n, side * 4 // 3, side) for n in range(min(pictures, 64))]
    for number in range(pictures):
        world.add(number, [f"picture number {number} of the bench"], body=bodies[number % len(bodies)])
    world.write()
    pack(ShardConfig(work=str(work), workers=1, samples_per_shard=256, size=(side,)))
    return work


@contextlib.contextmanager
def slow_disk(work: Path) -> Iterator[None]:
    """Reads of shards below `work` come through a slow line; those of a copy elsewhere do not."""
    whole, line = RangeReader.read, Line(SLOW_BYTES_S)

    def read(self: RangeReader, name: str, offset: int, size: int) -> bytes:
        if self.folder.path(name).startswith(str(work)):
            line.carry(size)
        return whole(self, name, offset, size)

    RangeReader.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        RangeReader.read = whole  # type: ignore[method-assign]


@contextlib.contextmanager
def idle_cores() -> Iterator[None]:
    """Eight cores, of which a picture takes one for 4 ms: on two real ones the model has what one worker leaves, and a second
    one gains nothing."""
    codec, affinity = decode_pool.CODEC, os.sched_getaffinity
    decode_pool.CODEC, os.sched_getaffinity = __spec__.name, lambda _: set(range(IDLE_CORES))
    try:
        yield
    finally:
        decode_pool.CODEC, os.sched_getaffinity = codec, affinity


def render_into(pixels: Any, data: bytes, view: decode_cpu.View) -> None:
    """The codec of `idle_cores`."""
    time.sleep(PICTURE_S)
    decode_cpu.render_into(pixels, data, view)


@contextlib.contextmanager
def slow_server(folder: Path) -> Iterator[str]:
    """The folder behind HTTP in a process of its own, 2 ms away and on a slow line; yields its URL."""
    command = [sys.executable, "-m", "bench.diagnose", "--serve", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait()


def serve(folder: str) -> None:
    line = Line(SLOW_BYTES_S)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = Path(folder) / self.path.strip("/")
            if not path.is_file():
                self.send_error(404)
                return
            whole = path.read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), int(asked[2] or len(whole) - 1)) if asked else (0, len(whole) - 1)
            part = whole[first : last + 1]
            if body and asked:  # the lists that are read whole at the start are no part of what is measured
                time.sleep(0.002)
                line.carry(len(part))
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(whole)}")
            self.end_headers()
            if body:
                self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


# ---------------------------------------------------------------- ranks


def one_rank(trouble: str, values: str) -> None:
    """A rank of a run whose rank 1 reads slowly, or whose collectives all take longer."""
    import torch.distributed as dist

    from train.run import run

    def late(collective: Callable[..., Any]) -> Callable[..., Any]:
        def later(*args: Any, **kwargs: Any) -> Any:
            time.sleep(LATE_S)
            return collective(*args, **kwargs)

        return later

    with contextlib.ExitStack() as stack:
        if trouble == "slow_rank" and os.environ["RANK"] == "1":
            stack.enter_context(slow_disk(Path(json.loads(values)["work"])))
        if trouble == "slow_collectives":
            for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
                setattr(dist, name, late(getattr(dist, name)))
        run(TrainConfig(**json.loads(values)))


def run_of(trouble: str, work: Path, **values: Any) -> dict[str, Any]:
    """Diagnose what two ranks in this trouble have logged."""
    settings = {"work": str(work), "device": "cpu", "workers": 1, "log_every": 5, "val": "none", **values}
    code = launch_ranks(
        ["-m", "bench.diagnose", "--rank", trouble, json.dumps(settings)], 2, {"OMP_NUM_THREADS": "1"}
    ).code
    if code:
        raise SystemExit(f"the ranks ended with code {code}")
    return diagnose.run(DiagnoseConfig(work=str(work), seconds=0))


# ---------------------------------------------------------------- the causes


def causes(home: Path, seconds: float) -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Verdict to expect and what to run, by cause."""
    models.MODELS["light-224"] = LIGHT

    def trial(work: Path, **values: Any) -> dict[str, Any]:
        return diagnose.run(DiagnoseConfig(work=str(work), seconds=seconds, **values))

    def disk() -> dict[str, Any]:
        work = make_set(home / "disk", 512, 56)
        with slow_disk(work):
            return trial(work, model="tiny-48", batch_size=16, apply=1)

    def network() -> dict[str, Any]:
        work = make_set(home / "net", 512, 56)
        with slow_server(work / "shards") as url:
            return trial(work, shards=url, model="tiny-48", batch_size=16, apply=1)

    def workers() -> dict[str, Any]:
        work = make_set(home / "few", 512, 56)
        (work / "runs/main").mkdir(parents=True)
        (work / "runs/main/config.json").write_text(json.dumps({"as_run": {"workers": 1}}))
        with idle_cores():
            return trial(work, model="tiny-48", batch_size=64, apply=1)

    return {
        "slow_disk": ("read_bound", disk),
        "slow_network": ("read_bound", network),
        "few_workers": ("decode_bound", workers),
        "large_pictures": (
            "decode_bound",
            lambda: trial(make_set(home / "large", 256, 700), model="light-224", batch_size=32, apply=1),
        ),
        "slow_rank": (
            "straggler",
            lambda: run_of("slow_rank", make_set(home / "rank", 512, 56), model="tiny-48", batch_size=64, steps=40),
        ),
        "small_batch": (
            "overhead_bound",
            lambda: trial(make_set(home / "small", 512, 36), model="test-32", batch_size=4, apply=1),
        ),
        "slow_collectives": (
            "communication_bound",
            lambda: run_of("slow_collectives", make_set(home / "comm", 512, 56), model="tiny-48", batch_size=64, steps=40),
        ),
        "compute": (
            "not_input_bound",
            lambda: trial(make_set(home / "compute", 256, 224), model="ViT-B-32", batch_size=16),
        ),
    }  # fmt: skip


LOADER = ("slow_disk", "slow_network", "few_workers", "large_pictures")


def bed(seconds: float, only: list[str]) -> dict[str, dict[str, Any]]:
    """The diagnosis of each cause, with what was expected of it."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="pairmill-bench-") as folder:
        for cause, (verdict, look) in causes(Path(folder), seconds).items():
            if not only or cause in only:
                page = look()
                right = page["verdict"] == verdict and page["cause"] == cause
                found[cause] = {"right": right, "expected": verdict, **page}
                applied = page["applied"] or {}
                print(
                    f"{cause}: {page['verdict']} ({page['cause']}), {page['confidence']}, wait {page['wait_share']:.0%}; "
                    f"predicted {applied.get('predicted_gain')}, measured {applied.get('measured_gain')}",
                    file=sys.stderr,
                )
    return found


def off(page: dict[str, Any]) -> float:
    """How far the predicted gain of the first fix is from the measured one, as a share of it; 1 where another was tried."""
    applied = page["applied"]
    if applied["number"] != 1 or not applied["predicted_gain"]:
        return 1.0
    return abs(applied["predicted_gain"] / applied["measured_gain"] - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each trial")
    parser.add_argument("--only", nargs="*", default=[], help="causes to make")
    parser.add_argument("--record", help="file for the evidence")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.serve)
    if arguments.rank:
        return one_rank(*arguments.rank)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the causes are made for a CPU
    found = bed(arguments.seconds, arguments.only)
    if arguments.record:
        kept = {cause: {key: page[key] for key in ("expected", "measured", "applied")} for cause, page in found.items()}
        file = Path(arguments.record)
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | kept, indent=1) + "\n")
    right = sum(page["right"] for page in found.values())
    claims = [claim("causes told right, of those made", right, goal=len(found), at_least=True)]
    claims += [
        claim(f"{cause}: predicted gain off the measured one, share of it", off(found[cause]), goal=0.25,
              at_least=False)
        for cause in LOADER if cause in found
    ]  # fmt: skip
    print(json.dumps(claims, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
