"""Three short trials on the user's own shards, model and machine: loader alone, model alone, both together.

Around them shorter ones: bytes alone, the model with twice the pairs at a time, and a rehearsal of each fix
(`train.remedies`). Each uses the parts of the real loop (`train.data`, `train.gradcache`,
`train.optim`), for one rank. Rates are pairs a second of this rank; the first steps of each trial are left out, as they
fill queues and caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.allocator import keep_freed_memory
from core.metrics import Series
from core.runner import cores
from shardkit.reader import Batch as RawBatch
from shardkit.reader import BatchReader, Sample, ShardSet
from train import card
from train.config import TrainConfig
from train.data import QUEUE_DEPTH, Batch, Loader, Plan, Preparer, Quarantine, make_decoder
from train.distributed import choose_precision
from train.gradcache import gradcache_step
from train.guard import clip_by_tower
from train.loss import clip_loss
from train.models import model_config
from train.optim import clamp_log_scale, make_optimizer
from train.tokenizer import Tokenizer
from train.towers import CLIP

ENDLESS = 1 << 40  # steps; a trial ends by the clock
WARM_STEPS = 2
LOOKED_AT = 64  # pictures whose headers are read
ROOM = 1.15  # side of a stored picture over the model's, which leaves random crops their room
QUALITY = 90  # of a JPEG stored smaller


@dataclass(frozen=True)
class Trial:
    """What one trial measured: pairs a second, steps counted, seconds by place (sums over those steps), and how many decoded
    batches stood ready on the mean."""

    rate: float
    steps: int
    seconds: float
    places: dict[str, dict[str, float]]
    ready: float = 0.0
    gpu: dict[str, dict[str, float]] | None = None
    """What the driver told of the GPU meanwhile (`train.card`), as a row of a run has it."""

    def share(self, place: str) -> float:
        """Share of the trial's time spent at a place."""
        return self.places.get(place, {}).get("sum", 0.0) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Pictures:
    """What the shards hold, from the headers of a few pictures."""

    progressive: float
    """Share of progressive JPEGs, which no hardware decoder takes."""
    pixels: float
    """Mean pixels of a stored picture."""
    samples: list[Sample]
    """Those that were looked at."""


class Bench:
    """Everything the trials share. `batch_size` is one rank's; the settings are those of a run."""

    def __init__(self, config: TrainConfig, batch_size: int, ranks: int, device: torch.device) -> None:
        if device.type == "cpu":
            keep_freed_memory()
        self.config = dataclasses.replace(config, precision=choose_precision(config.precision, device))
        self.batch_size, self.device = batch_size, device
        self.workers = config.workers or max(1, cores() // ranks)
        self.shard_set = ShardSet.open(config.shards or f"{config.work}/shards", on_bad=config.on_bad_shard)
        self.plan = Plan.of(self.shard_set, config.seed, batch_size, config.weights)
        self.shape = dataclasses.replace(model_config(config.model), patch_dropout=config.patch_dropout)
        self.pictures = _look_at(self.shard_set)

    def read(self, seconds: float) -> Trial:
        """Bytes from the shards, nothing else."""
        with contextlib.closing(self._raw_batches()) as batches:
            return self._timed(lambda: next(batches, None) is not None, seconds, {}, skip=QUEUE_DEPTH)

    def _raw_batches(self) -> Generator[RawBatch, None, None]:
        for epoch in itertools.count():
            with BatchReader(self.shard_set, self.plan.order(epoch)) as reader:
                yield from reader

    def load(self, seconds: float) -> tuple[Trial, Batch]:
        """Read, decode and tokenise; also returns the last batch, for the model's trial."""
        last: list[Batch] = []
        with self._loader(epoch=1) as loader:
            batches = iter(loader)

            def step() -> bool:
                last[:] = [next(batches)]
                return True

            places = {"reader": loader.waits.reader, "decode_busy": loader.waits.decode_busy}
            trial = self._timed(step, seconds, places, skip=QUEUE_DEPTH)
        return trial, last[0]

    def compute(self, batch: Batch, seconds: float) -> Trial:
        """Training steps on one batch that is already on the device."""
        held, step, steps = batch.to(self.device), self._stepper(), Series()
        return self._timed(lambda: _in(steps, step, held), seconds, {"compute": steps}, skip=WARM_STEPS)

    def double(self, batch: Batch, seconds: float) -> Trial | None:
        """The same with twice the pairs at a time; None where they do not fit into memory."""
        try:
            held, step, steps = _twice(batch).to(self.device), self._stepper(2 * self.config.micro_batch), Series()
            return self._timed(lambda: _in(steps, step, held), seconds, {"compute": steps}, skip=WARM_STEPS, pairs=2)
        except torch.OutOfMemoryError:
            return None

    def small_bytes(self) -> float:
        """Bytes of the pictures looked at, stored as small as the model needs them, over their bytes as they are."""
        stored = [sample for sample in self.pictures.samples if sample.ok]
        small = sum(len(shrunk(sample, self.shape.image_size).data) for sample in stored)
        return small / max(1, sum(len(sample.data) for sample in stored))

    def both(self, seconds: float) -> Trial:
        """The real loop."""
        ready: list[int] = []
        step, copying, computing = self._stepper(), Series(), Series()
        with self._loader(epoch=2) as loader, card.watched(self.device) as readings:
            batches = iter(loader)

            def once() -> bool:
                ready.append(loader.ready)
                batch = next(batches)
                with copying.timed():
                    held = batch.to(self.device)
                    self._wait()
                with computing.timed():
                    return step(held)

            places = {"decode": loader.waits.decode, "h2d": copying, "compute": computing,
                      "reader": loader.waits.reader, "decode_busy": loader.waits.decode_busy}  # fmt: skip
            trial = self._timed(once, seconds, places, skip=QUEUE_DEPTH + WARM_STEPS)
            gpu = card.over_ranks([readings.take()])
        return dataclasses.replace(trial, ready=sum(ready[-trial.steps :]) / trial.steps, gpu=gpu)

    def _timed(
        self, once: Callable[[], bool], seconds: float, places: dict[str, Series], *, skip: int, pairs: float = 1.0
    ) -> Trial:
        """Call `once` for `seconds` after `skip` calls that do not count, or until it returns False.

        Each call does `pairs` batches of pairs.
        """
        begun = time.perf_counter()
        for _ in range(skip):
            if not once() or time.perf_counter() - begun > seconds:
                break
        for series in places.values():
            series.take()
        start, steps = time.perf_counter(), 0
        while (steps == 0 or time.perf_counter() - start < seconds) and once():
            steps += 1
        elapsed = time.perf_counter() - start
        return Trial(
            steps * pairs * self.batch_size / elapsed, steps, elapsed, {n: s.take() for n, s in places.items()}
        )

    @contextlib.contextmanager
    def _loader(self, epoch: int) -> Iterator[Loader]:
        """The run's own loader, from an epoch that the other trials do not read."""
        size, config = self.shape.image_size, self.config
        decoder = make_decoder(config.decode, size, self.workers, self.batch_size, self.device)
        with contextlib.closing(decoder), tempfile.TemporaryDirectory(prefix="pairmill-trial-") as folder:
            loader = Loader(
                self.plan, Preparer(decoder, Tokenizer(), self.shape.context),
                Quarantine(Path(folder) / "quarantine.jsonl", 0, 1.0), rank=0, ranks=1,
                start=epoch * self.plan.steps_per_epoch, stop=ENDLESS, crop=config.crop, flip=config.flip,
                colour=config.colour,
            )  # fmt: skip
            with loader:
                yield loader

    def _stepper(self, micro: int | None = None) -> Callable[[Batch], bool]:
        """One update of the weights of a fresh model, with `micro` pairs at a time (the run's number, unless given)."""
        micro = self.config.micro_batch if micro is None else micro
        torch.manual_seed(0)
        model = CLIP(self.shape, self.config.precision).to(self.device)
        model.set_checkpointing(self.config.checkpointing)
        if self.config.compile:
            model.visual.compile()
        model.train()
        optimizer = make_optimizer(model, 1e-6, self.config.wd)

        def step(batch: Batch) -> bool:
            optimizer.zero_grad(set_to_none=True)

            def loss(img: Any, txt: Any, scale: Any) -> Any:
                return clip_loss(img, txt, scale, valid_b=batch.valid_b)

            gradcache_step(model, batch.pixels_bCSS, batch.tokens_bL, loss, micro or None)
            clip_by_tower(model, self.config.grad_clip)
            optimizer.step()
            clamp_log_scale(model)
            self._wait()
            return True

        return step

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _look_at(shard_set: ShardSet) -> Pictures:
    """Headers of pictures spread over the set."""
    import numpy as np

    from core import images
    from core.errors import ImageError

    wanted = np.linspace(0, len(shard_set) - 1, min(LOOKED_AT, len(shard_set))).astype(np.int64)
    samples, headers = shard_set.read(wanted), []
    for sample in samples:
        with contextlib.suppress(ImageError):
            headers.append(images.read_header(sample.data))
    count = max(1, len(headers))
    return Pictures(
        progressive=sum(h.progressive for h in headers) / count,
        pixels=sum(h.width * h.height for h in headers) / count,
        samples=samples,
    )


def shrunk(sample: Sample, image_size: int) -> Sample:
    """The sample as `shard --size` would store it for a model of this input; as it is where it is small enough."""
    from core import images
    from core.errors import ImageError

    size = round(image_size * ROOM)
    try:
        header = images.read_header(sample.data)
        if min(header.width, header.height) <= size:
            return sample
        pixels = images.decode(sample.data, header, min_side=size)
    except ImageError:
        return sample
    return dataclasses.replace(sample, data=images.encode_jpeg(images.resize(pixels, size), QUALITY))


def _in(series: Series, step: Callable[[Batch], bool], batch: Batch) -> bool:
    with series.timed():
        return step(batch)


def _twice(batch: Batch) -> Batch:
    """The batch and itself once more."""
    pixels, tokens, valid, group = (
        torch.cat([t, t]) for t in (batch.pixels_bCSS, batch.tokens_bL, batch.valid_b, batch.group_b)
    )
    return Batch(batch.step, pixels, tokens, valid, group, batch.uids * 2)
