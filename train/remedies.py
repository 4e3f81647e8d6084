"""Fixes that `diagnose --apply` tries: the loop once more, with one thing changed, on a copy of a part of the shards where
that is what changes. Nothing of the user's is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
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
    config = bench.config
    if kind == "threads":
        changed = dataclasses.replace(config, threads=cores())
        return Bench(changed, bench.batch_size, 1, bench.device).both(seconds)
    if kind == "batch":
        changed = dataclasses.replace(config, micro_batch=2 * config.micro_batch)
        return Bench(changed, 2 * bench.batch_size, 1, bench.device).both(seconds)
    store: Callable[[Sample], Sample] = (
        (lambda s: shrunk(s, bench.shape.image_size)) if kind == "smaller" else lambda s: s
    )
    with _copied(bench, store) as shards:
        changed = dataclasses.replace(config, shards=(shards,), weights=(), threads=bench.threads)
        return Bench(changed, bench.batch_size, 1, bench.device).both(seconds)


@contextlib.contextmanager
def _copied(bench: Bench, store: Callable[[Sample], Sample]) -> Iterator[str]:
    """A folder with the set's first samples as one tar, each passed through `store`."""
    wanted, start, count = min(len(bench.shard_set), max(COPIED, 2 * bench.batch_size)), time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="pairmill-remedy-") as folder:
        with tarfile.open(Path(folder) / "00000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            while count < wanted and (count < bench.batch_size or time.monotonic() - start < COPY_S):
                for sample in bench.shard_set.read(np.arange(count, min(count + AT_ONCE, wanted))):
                    _write(tar, f"{count:08d}", store(sample))
                    count += 1
        if count < bench.batch_size:
            raise InputError(f"expected at least one batch of {bench.batch_size} samples to copy, found {count}")
        yield folder


def _write(tar: tarfile.TarFile, key: str, sample: Sample) -> None:
    for extension, body in (("jpg", sample.data), ("json", json.dumps({"captions": sample.captions}).encode())):
        member = tarfile.TarInfo(f"{key}.{extension}")
        member.size = len(body)
        tar.addfile(member, io.BytesIO(body))
