"""Fixes that `diagnose --apply` tries: the loop once more, with one thing changed, on a copy of a part of the shards where
that is what changes. Nothing of the user's is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from core.errors import InputError
from core.runner import cores
from shardkit.reader import Sample
from train.trials import Bench, Trial, shrunk

COPIED = 256  # samples at most
COPY_S = 30.0  # a slow source may keep us waiting for so long
AT_ONCE = 64


def measure(kind: str, bench: Bench, seconds: float) -> Trial:
    """The loop with the fix that `judge.Fix.apply` names.

    Raises:
        InputError: too few samples could be copied for one batch.
    """
    if kind not in ("local", "smaller"):
        return _changed(kind, bench, bench.config.shards).both(seconds)
    with _copied(kind, bench, _in_time(bench)) as shards:
        return _changed(kind, bench, (shards,)).both(seconds)


def rehearse(kind: str, bench: Bench, seconds: float) -> Trial:
    """The same on the few pictures that the trials have in memory: what the fix allows as far as reading does not limit it.

    Arithmetic from the rates of decoder and model alone was off by a third where both share cores and caches.
    """
    held = [sample for sample in bench.pictures.samples if sample.ok]
    with _copied(kind, bench, itertools.islice(itertools.cycle(held), _wanted(bench))) as shards:
        return _changed(kind, bench, (shards,)).both(seconds)


def _changed(kind: str, bench: Bench, shards: tuple[str, ...]) -> Bench:
    """The bench with the settings that the fix changes, on these shards."""
    config, batch = bench.config, bench.batch_size
    weights = config.weights if shards == config.shards else ()
    workers = cores() if kind == "workers" else bench.workers
    config = dataclasses.replace(config, shards=shards, weights=weights, workers=workers)
    if kind == "batch":
        batch, config = 2 * batch, dataclasses.replace(config, micro_batch=2 * config.micro_batch)
    if kind == "precision":
        config = dataclasses.replace(config, precision="auto")
    return Bench(config, batch, 1, bench.device)


def _wanted(bench: Bench) -> int:
    return max(COPIED, 4 * bench.batch_size)


def _in_time(bench: Bench) -> Iterator[Sample]:
    """The set's first samples, as many as come in time, but a batch."""
    wanted, start, count = min(len(bench.shard_set), _wanted(bench)), time.monotonic(), 0
    while count < wanted and (count < bench.batch_size or time.monotonic() - start < COPY_S):
        samples = bench.shard_set.read(np.arange(count, min(count + AT_ONCE, wanted)))
        yield from samples
        count += len(samples)


@contextlib.contextmanager
def _copied(kind: str, bench: Bench, samples: Iterable[Sample]) -> Iterator[str]:
    """A folder with these samples as one tar, smaller where that is the fix."""
    with tempfile.TemporaryDirectory(prefix="pairmill-remedy-") as folder:
        count = 0
        with tarfile.open(Path(folder) / "00000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for count, sample in enumerate(samples, 1):
                _write(tar, f"{count:08d}", shrunk(sample, bench.shape.image_size) if kind == "smaller" else sample)
        if count < bench.batch_size:
            raise InputError(f"expected at least one batch of {bench.batch_size} samples to copy, found {count}")
        yield folder


def _write(tar: tarfile.TarFile, key: str, sample: Sample) -> None:
    for extension, body in (("jpg", sample.data), ("json", json.dumps({"captions": sample.captions}).encode())):
        member = tarfile.TarInfo(f"{key}.{extension}")
        member.size = len(body)
        tar.addfile(member, io.BytesIO(body))
