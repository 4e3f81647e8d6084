"""What a run measures of itself, on every rank: waits, rate, share of the machine's peak; one row a log interval.

Each step's time is split where it passes: waiting for a decoded batch, copying it to the device, computing (the last two
by events on the stream where there is a GPU). Only these three count, so evaluation, checkpoints and the first steps of a
process are in no rate. Two more say what they hold: `comm`, the part of computing in which collectives held the rank up,
and `own`, the step without that part, which is longest on the rank that the others wait for. Where the decoder itself
waits for bytes is measured too, but that costs the run nothing unless the loop waits as well. Of a GPU a row also has what
the driver tells (`train.card`).
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from core.metrics import Jsonl, Series
from train import card
from train.comm import CLOCK, Clock
from train.data import Batch, Loader
from train.distributed import World, gather_objects
from train.memory import Watch
from train.models import ModelConfig, flops_per_pair
from train.towers import PRECISIONS

PEAK_S = 0.3  # seconds spent on measuring the peak: on a busy machine the best of a few products is no peak
WARM_STEPS = 2  # a process's first steps allocate, compile and fill caches
LOOP_PLACES = ("decode", "h2d", "compute")


@dataclass
class Interval:
    """One rank's figures since the last row."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    positions: int = 0
    invalid: int = 0
    skipped: int = 0


class Meter:
    """Collects steps on every rank and writes rows on rank 0."""

    def __init__(
        self,
        ranks: World,
        loader: Loader,
        model: ModelConfig,
        peak_flops: float,
        file: Jsonl,
        watch: Watch,
        readings: card.Readings,
    ) -> None:
        self.watch, self.readings = watch, readings
        self.ranks, self.loader, self.model, self.peak_flops, self.file = ranks, loader, model, peak_flops, file
        self.batch_size = loader.plan.batch_size
        self.copying, self.computing = Clock(), Clock()  # around these two the loop runs its steps
        self.h2d, self.compute, self.comm = Series(), Series(), Series()
        CLOCK.take()  # what another run of this process, or an evaluation, left
        self.interval = Interval()
        self.last: dict[str, Any] = {}
        self._warm = max(0, min(WARM_STEPS, loader.stop - loader.start - 1))  # of a run of one step, that step
        self._seconds = self._waited = 0.0
        self._steps = self._positions = self._pairs = 0

    def add(self, batch: Batch, loss: float, accuracy: float | None, norm: float, finite: bool) -> None:
        """One step is over."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)  # so that every event of the step has passed
        for place, clock in ((self.h2d, self.copying), (self.compute, self.computing), (self.comm, CLOCK)):
            place.add(clock.take())
        self.watch.after(batch.step + 1 - self.loader.start)
        now = self.interval
        now.hashes.append(sum(xxhash.xxh3_64_intdigest(uid.encode()) for uid in batch.uids))
        now.positions += int(batch.tokens_bL.argmax(dim=1).sum()) + len(batch.uids)
        now.invalid += len(batch.uids) - int(batch.valid_b.sum())
        if finite:
            now.loss.append(loss)
            now.norm.append(norm)
            if accuracy is not None:
                now.accuracy.append(accuracy)
        else:
            now.skipped += 1

    def row(self, step: int, *, lr: float, scale: float, grad_norms: dict[str, float | None]) -> dict[str, Any]:
        """Gather the interval from all ranks, write its row (rank 0), start a new one. Every rank must call it."""
        places = {"decode": self.loader.waits.decode, "h2d": self.h2d, "compute": self.compute, "comm": self.comm,
                  "reader": self.loader.waits.reader, "decode_busy": self.loader.waits.decode_busy}  # fmt: skip
        mine = {name: list(series.values) for name, series in places.items()}
        mine["own"] = own_seconds(mine)
        for series in places.values():
            series.take()
        now, self.interval = self.interval, Interval()
        ready = self.loader.ready
        everyone = gather_objects((mine, now.hashes, now.positions, now.invalid, ready, self.readings.take()))
        times, hashes, positions, invalid, queued, gpus = (list(column) for column in zip(*everyone, strict=True))
        steps = len(now.hashes)
        rate, wait_share = self._rates(times, steps)
        text_len = sum(positions) / max(1, steps * self.batch_size)
        self._positions += sum(positions)
        self._pairs += steps * self.batch_size
        self.last = {
            "step": step,
            "epoch": (step - 1) // self.loader.plan.steps_per_epoch,
            "samples_seen": step * self.batch_size,
            "loss": _mean(now.loss),
            "acc": _mean(now.accuracy),
            "scale": scale,
            "lr": lr,
            "grad_norm": _mean(now.norm),
            "grad_norms": grad_norms,  # of the last step, by tower
            "pairs_per_s": rate,
            "wait_share": wait_share,
            "mfu": self._mfu(rate, text_len),
            "waits": {name: _over_ranks([t[name] for t in times]) for name in (*places, "own")},
            "queue": sum(queued) / len(queued),
            "ranks": self.ranks.size,
            "text_len": text_len,
            "invalid": sum(invalid),
            "skipped": now.skipped,
            "batch_hash": _joined_hash(hashes),
            "memory": peak_memory(self.ranks.device),
            "gpu": card.over_ranks(gpus),
            "time": time.time(),
        }
        if self.ranks.main:
            self.file.append(self.last)
        return self.last

    def summary(self) -> dict[str, float | None]:
        """Rate, wait share and MFU of this process's whole run, its first steps left out.

        A process that only finished what an earlier one had almost done says what the newest row with a rate says.
        """
        if not self._seconds:
            row: dict[str, Any] = next((row for row in reversed(self.file.rows()) if row["pairs_per_s"]), {})
            return {name: row.get(name) for name in ("pairs_per_s", "wait_share", "mfu")}
        rate = self._steps * self.batch_size / self._seconds
        mfu = self._mfu(rate, self._positions / max(1, self._pairs))
        return {"pairs_per_s": rate, "wait_share": self._waited / self._seconds, "mfu": mfu}

    def _rates(self, times: list[dict[str, list[float]]], steps: int) -> tuple[float | None, float | None]:
        """Pairs a second and the share of time spent waiting in an interval, warm-up left out."""
        cold = min(self._warm, steps)
        self._warm -= cold
        share = len(times)
        waited = sum(sum(t["decode"][cold:]) for t in times) / share
        seconds = sum(sum(sum(t[place][cold:]) for place in LOOP_PLACES) for t in times) / share
        self._seconds += seconds
        self._waited += waited
        self._steps += steps - cold
        if not seconds:
            return None, None
        return (steps - cold) * self.batch_size / seconds, waited / seconds

    def _mfu(self, rate: float | None, text_len: float) -> float | None:
        return rate * flops_per_pair(self.model, text_len) / self.peak_flops if rate and self.peak_flops else None


def own_seconds(times: dict[str, list[float]]) -> list[float]:
    """Of each step, what this rank needed itself, without waiting for the others in collectives."""
    steps = zip(*(times[place] for place in (*LOOP_PLACES, "comm")), strict=True)
    return [decode + h2d + compute - comm for decode, h2d, compute, comm in steps]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _over_ranks(values: list[list[float]]) -> dict[str, float]:
    """Seconds a step: p50 and p99 over all ranks' steps, the mean, the least and most of the ranks' means, who that is."""
    everything = sorted(v for one in values for v in one)
    if not everything:
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0, "min": 0.0, "max": 0.0, "slowest_rank": 0}
    means = [sum(one) / max(1, len(one)) for one in values]
    last = len(everything) - 1
    return {
        "p50": everything[round(0.50 * last)],
        "p99": everything[round(0.99 * last)],
        "mean": sum(means) / len(means),
        "min": min(means),
        "max": max(means),
        "slowest_rank": means.index(max(means)),
    }


def _joined_hash(hashes: list[list[int]]) -> str:
    """Names the sets of uids of an interval's global batches, in whatever order and on whatever ranks they were."""
    sums = [sum(step) % (1 << 64) for step in zip(*hashes, strict=True)]
    return xxhash.xxh3_64_hexdigest(b"".join(s.to_bytes(8, "big") for s in sums))


def peak_memory(device: torch.device) -> int:
    """Most bytes that this rank has held so far: on its GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_flops(ranks: World, precision: str) -> float:
    """Measured peak of all ranks together, operations a second: a large matrix product, the best of some, all at once."""
    dtype = PRECISIONS[precision]  # of 8 bits: the peak of 16, as the works that report MFU do
    gpu = ranks.device.type == "cuda"
    side = 8192 if gpu else 1024
    a = torch.ones(side, side, dtype=dtype, device=ranks.device)
    best, end = float("inf"), time.perf_counter() + PEAK_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        if gpu:
            torch.cuda.synchronize(ranks.device)
        best = min(best, time.perf_counter() - start)
    return sum(gather_objects(2.0 * side**3 / best))
