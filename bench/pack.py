"""Packing: bytes copied beside `cp`, and pictures resized beside the codec alone.

Method: photograph-like JPEGs of 341x256 pixels (copied) and of 682x512 (resized to 256) are staged in a tar, and the plan
of `pairmill shard` is made once. As many workers as there are cores, started beforehand as `pairmill shard` starts them, then
pack the shards; `cp` copies the same shards. Both are timed by the wall clock, alternately and five times, with everything
in the page cache and fsync at the end of each file; the best time of each counts. Once more the staged pictures are put out of
the page cache before every round, as they are where a data set is larger than memory. The floor is what the checksums of every
byte cost alone (sha256 of the shard, crc32 of each picture), which no packing with these checks can beat.
Resizing is measured in CPU seconds of one worker: a shard packed, beside the decoding, reduction and encoding of its very
pictures in a loop that does nothing else.

    python -m bench.pack [--pictures 6000] [--json]

Takes about a minute of CPU time and 600 MB of the temporary folder. On a busy machine the wall times say more about the
neighbours than about us.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import resource
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from isal import isal_zlib

from bench.machine import claim
from core import images
from core.plan import Unit
from core.schema import decision_schema, pair_schema
from core.storage import Folder
from shardkit.config import ShardConfig
from shardkit.plan import PLANS, planned_shards, write_plans
from shardkit.tar import TarWriter
from shardkit.write import PackShard, read_plan, staged_images


def photograph(seed: int, width: int, height: int) -> bytes:
    """A JPEG whose spectrum falls as a photograph's does; about 23 kB at 341x256."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None] * width)
    spectrum = rng.normal(size=(3, *frequency.shape)) + 1j * rng.normal(size=(3, *frequency.shape))
    field = np.fft.irfft2(spectrum / np.maximum(frequency, 1) ** 1.6, s=(height, width))
    field = field.mean(0) * 2 + field / 2  # most of the contrast is grey
    pixels = np.clip(128 + 48 * field / field.std(), 0, 255).astype(np.uint8)
    return images.encode_jpeg(np.ascontiguousarray(pixels.transpose(1, 2, 0)), 90)


def stage(work: Path, pictures: int, width: int, height: int) -> None:
    """A work folder as ingest and dedup leave it: one tar of `pictures` pictures, one caption each, all kept."""
    (work / "ingest/parts").mkdir(parents=True)
    (work / "dedup").mkdir()
    different = [photograph(seed, width, height) for seed in range(40)]
    pairs = []
    with (work / "ingest/parts/u000000.tar").open("wb") as file:
        writer = TarWriter(file)
        for i in range(pictures):
            data = different[i % len(different)]
            offset = writer.add(f"{i:09d}.jpg", data)
            pairs.append(
                {
                    "uid": f"{i:032x}", "unit": "u000000", "row": i, "url": f"http://example.test/{i}.jpg", "outcome": "ok",
                    "caption": f"photograph number {i} of a street with trees", "sha256": f"{i:064x}",
                    "stored_sha256": hashlib.sha256(data).hexdigest(), "stored_crc32": zlib.crc32(data),
                    "tar": "ingest/parts/u000000.tar", "tar_offset": offset, "tar_size": len(data),
                }
            )  # fmt: skip
        writer.finish()
    kept = [{"uid": p["uid"], "kept": True, "holdout": False, "image_group": p["uid"]} for p in pairs]
    pq.write_table(pa.Table.from_pylist(pairs, schema=pair_schema()), work / "ingest/parts/u000000.parquet")
    pq.write_table(pa.Table.from_pylist(kept, schema=decision_schema()), work / "dedup/decisions.parquet")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(clock: Callable[[], float], action: Callable[[], object]) -> float:
    """Seconds of one call by `clock`."""
    start = clock()
    action()
    return clock() - start


def planned(place: Path, pictures: int, side: int, shards: int) -> tuple[PackShard, list[Unit]]:
    """A staged work folder with its plan: the task that packs a shard, and the shards."""
    work = Folder(place)
    stage(place, pictures, side * 341 // 256, side)
    config = ShardConfig(work=str(place), samples_per_shard=-(-pictures // shards))
    (place / "shards").mkdir()
    write_plans(work, config)
    return PackShard(work, PLANS["shards"], ("shards",), (256,)), planned_shards(work, PLANS["shards"])


def copy(sources: list[Path], target: Path) -> None:
    """What `cp` does with these files, and then makes sure of as we do."""
    subprocess.run(["cp", *sources, target], check=True)
    subprocess.run(["sync", *(target / source.name for source in sources)], check=True)


def emptied(folder: Path, pattern: str = "*") -> None:
    """Without the files of the round before: what is new is written, and the disk gives nothing back meanwhile."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob(pattern):
        path.unlink()


def forgotten(path: Path) -> None:
    """A file that is on the disk and no longer in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def checksums(tar: bytes, picture: int) -> None:
    """The checks of one shard's bytes and no more; its pictures have `picture` bytes on average."""
    hashlib.sha256(tar)
    for start in range(0, len(tar), picture):
        isal_zlib.crc32(tar[start : start + picture])


def copying(place: Path, pictures: int) -> dict[str, Any]:
    """All workers' and `cp`'s megabytes a second on the same shards, the workers' from the disk, and one worker's and the
    checksums' own by CPU time."""
    cores = len(os.sched_getaffinity(0))
    task, units = planned(place, pictures, 256, 4 * cores)
    best = dict.fromkeys(("pack", "cp", "disk", "sums", "cpu"), 1e9)
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        list(pool.map(task, units))  # imports, and the page cache
        tars = sorted((place / "shards").glob("*.tar"))
        total, one = sum(tar.stat().st_size for tar in tars), tars[0].read_bytes()
        emptied(place / "originals")
        tars = [tar.rename(place / "originals" / tar.name) for tar in tars]
        for _ in range(5):
            emptied(place / "copies")
            best["cp"] = min(best["cp"], timed(time.perf_counter, lambda: copy(tars, place / "copies")))
            for where in ("pack", "disk"):
                emptied(place / "shards", "0*")
                emptied(place / "shards/parts")
                if where == "disk":
                    forgotten(place / "ingest/parts/u000000.tar")
                best[where] = min(best[where], timed(time.perf_counter, lambda: list(pool.map(task, units))))
            best["sums"] = min(best["sums"], timed(cpu_seconds, lambda: checksums(one, total // pictures)))
        for _ in range(5):
            emptied(place / "shards", f"{units[0].id}.*")
            emptied(place / "shards/parts", f"{units[0].id}.*")
            best["cpu"] = min(best["cpu"], timed(cpu_seconds, lambda: task(units[0])))
    mb, mb_of_one = total / 1e6, len(one) / 1e6
    return {
        **{what: mb / best[what] for what in ("pack", "cp", "disk")},
        **{what: mb_of_one / best[what] for what in ("cpu", "sums")},
        "cores": cores,
    }  # fmt: skip


def resizing(place: Path, pictures: int) -> tuple[float, float]:
    """Pictures a CPU second of one worker, and of the codec alone on the same pictures."""
    task, units = planned(place, pictures, 512, 5)
    task(units[0])  # imports, and the page cache
    packed, codec = [], []
    for unit in units[1:]:
        rows = read_plan(task.folder, task.plan, unit)
        bodies = list(staged_images(task.folder, rows))
        codec.append(len(rows) / timed(cpu_seconds, functools.partial(recode, bodies)))
        packed.append(len(rows) / timed(cpu_seconds, functools.partial(task, unit)))
    return max(packed), max(codec)


def recode(bodies: list[bytes]) -> None:
    """Decode, reduce, encode."""
    for body in bodies:
        pixels = images.decode(body, images.read_header(body), min_side=256)
        images.encode_jpeg(images.resize(pixels, 256), 90)


def claims(copied: dict[str, Any], resized: tuple[float, float]) -> list[dict[str, Any]]:
    """What was asked for: copying against `cp`, resizing against the codec."""
    ours, codec = resized
    return [
        claim(
            f"byte copy by {copied['cores']} workers, MB a second, beside cp (and the checksums alone on as many cores)",
            copied["pack"], goal=0.7 * copied["cp"], at_least=True, peer=copied["cp"],
            floor=copied["sums"] * copied["cores"],
        ),
        claim("the same, pictures not in memory, beside in memory", copied["disk"], goal=0.5 * copied["pack"], at_least=True,
              peer=copied["pack"]),
        claim("byte copy, MB a CPU second of one worker, beside its checksums alone", copied["cpu"],
              goal=0.5 * copied["sums"], at_least=True, floor=copied["sums"]),
        claim("512 to 256 pixels, pictures a CPU second, beside the codec alone", ours, goal=0.85 * codec, at_least=True,
              floor=codec),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=6000, help="pictures to copy; a fifth of them are resized")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        copied = copying(Path(place) / "copied", arguments.pictures)
        resized = resizing(Path(place) / "resized", arguments.pictures // 5)
    print(json.dumps(claims(copied, resized), indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
