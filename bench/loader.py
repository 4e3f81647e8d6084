"""The loader beside open_clip's: the same shards of 256-px pictures, random crops of 224 px, tokens included.

Method: shards are packed by the stage itself from photographs of 256 px on the shorter side (`--photographs`: any folder
of JPEGs; drawn ones where none is named, which compress and decode like photographs). The floor is the codec alone: one
thread decodes (libjpeg-turbo) and resizes (torch) the same pictures with the same windows, and does nothing else; on two
cores two processes do so at once. The peer is `open_clip_train.data.get_wds_dataset` with `open_clip.image_transform`, its
tokenizer and PyTorch workers, in a side environment (bench/peers.py). All are held to one core, then to two, by CPU
affinity; parts take turns and the median of the rounds counts. Rates are pictures a CPU second, which a busy machine
disturbs least, and `--wall` takes them a second instead, which is right on an idle machine.

    python -m bench.loader [--photographs DIR] [--rounds 3] [--wall] [--json]

About three minutes of two cores. Memory and open files are watched over ten epochs; what the C allocator merely keeps for
the next batch is given back before each look. Both back-ends also read tars without checksums in which one picture in a
hundred is damaged (cut, empty, HTML, bits flipped, a PNG that says it is a JPEG), in turn with the same tars undamaged.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.machine import claim
from bench.peers import PLACE, peer_python

SIZE, BATCH, PICTURES, EPOCHS = 224, 64, 1024, 10
WARM, IMAGES = 512, 1536


def make_shards(folder: Path, photographs: Path | None) -> Path:
    """WORK with shards of `PICTURES` pictures of 256 px, two captions each."""
    from core.images import decode, encode_jpeg, read_header, resize
    from shardkit.config import ShardConfig
    from shardkit.pack import run
    from tests.shardkit.parts import World
    from tests.train.shards import photograph

    if photographs is not None:
        files = [path.read_bytes() for path in sorted(photographs.glob("*.jpg"))[:256]]
        bodies = [encode_jpeg(resize(decode(data, read_header(data)), 256), 90) for data in files]
    else:
        bodies = [encode_jpeg(photograph(n, 341, 256), 90) for n in range(64)]
    world = World(folder)
    for number in range(PICTURES):
        words = f"a photograph of number {number}, taken on a windy afternoon near the harbour"
        world.add(number, [words, f"{words}, with two people and a dog"], body=bodies[number % len(bodies)])
    world.write()
    run(ShardConfig(work=str(folder), workers=1, samples_per_shard=128))
    return folder / "shards"


def ours(shards: Path, cores: int) -> dict[str, float]:
    """Pictures through `train.data.Loader`, as a run takes them."""
    import torch

    from core.allocator import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as a run on CPUs does
    with _loader(shards, cores, WARM + IMAGES + 4 * BATCH) as loader:
        batches = iter(loader)
        for _ in range(WARM // BATCH):
            next(batches)
        cpu, start, taken = _cpu_s(loader), time.perf_counter(), 0
        while taken < IMAGES:
            batch = next(batches)
            assert batch.pixels_bCSS.shape[1:] == (3, SIZE, SIZE) and bool(batch.valid_b.all())
            taken += len(batch.uids)
        return {"images": taken, "seconds": time.perf_counter() - start, "cpu": _cpu_s(loader) - cpu}


def _processes(loader: Any) -> list[str]:
    """This process and those that decode for it."""
    pool = getattr(loader.preparer.decoder, "_pool", None)  # DALI's decoder has none
    return ["self", *(str(worker._pid) for worker in pool._crew)] if pool else ["self"]


def _cpu_s(loader: Any) -> float:
    workers = (Path(f"/proc/{one}/schedstat").read_text() for one in _processes(loader)[1:])
    return time.process_time() + sum(float(text.split()[0]) for text in workers) / 1e9


def _memory_mb(loader: Any) -> float:
    """Of all its processes, memory that they share counted once."""
    texts = (Path(f"/proc/{one}/smaps_rollup").read_text() for one in _processes(loader))
    return sum(float(text.partition("\nPss:")[2].split()[0]) for text in texts) * 1024 / 1e6


def _loader(shards: Path, workers: int, pictures: int, kind: str = "cpu", max_bad: float = 0.01) -> Any:
    import torch

    from shardkit.reader import ShardSet
    from train.data import Loader, Plan, Preparer, Quarantine, make_decoder
    from train.tokenizer import Tokenizer

    plan = Plan.of(ShardSet.open(shards), 0, BATCH)
    preparer = Preparer(make_decoder(kind, SIZE, workers, BATCH, torch.device("cpu")), Tokenizer(), 77)
    quarantine = Quarantine(shards.parent / "quarantine.jsonl", 0, max_bad)
    return Loader(plan, preparer, quarantine, rank=0, ranks=1, start=0, stop=pictures // BATCH, crop=0.9, flip=False)


def floor(shards: Path) -> dict[str, float]:
    """Decode and resize alone, of pictures that are in memory, with windows chosen before."""
    import numpy as np
    import simplejpeg
    import torch
    from torch.nn import functional as F

    from core.images import read_header
    from shardkit.reader import ShardSet
    from train.data import Augment

    torch.set_num_threads(1)
    samples = ShardSet.open(shards).read(np.arange(IMAGES // 2))
    views = []
    for sample in samples:
        header = read_header(sample.data)
        views.append(Augment(0, 0, 0.9, False)(sample, header.width, header.height)[0])
    out = torch.empty(BATCH, SIZE, SIZE, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    cpu = start = 0.0
    for round_ in range(3):  # the first warms up
        if round_ == 1:
            cpu, start = time.process_time(), time.perf_counter()
        for i, (sample, view) in enumerate(zip(samples, views, strict=True)):
            pixels = torch.from_numpy(simplejpeg.decode_jpeg(sample.data, colorspace="RGB"))[None].permute(0, 3, 1, 2)
            window = pixels[..., view.top : view.top + view.height, view.left : view.left + view.width]
            out[i % BATCH] = F.interpolate(window, (SIZE, SIZE), mode="bicubic", antialias=True)[0]
    return {"images": 2 * len(samples), "seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def memory(shards: Path) -> dict[str, float]:
    """Resident memory in MB and open files after two epochs and after ten."""
    import torch

    from train.data import QUEUE_DEPTH

    torch.set_num_threads(1)
    seen: dict[int, tuple[float, int]] = {}
    trim = ctypes.CDLL(None).malloc_trim
    with _loader(shards, 1, (EPOCHS + 1) * PICTURES) as loader:
        per_epoch = loader.plan.steps_per_epoch
        for batch in loader:
            epoch, rest = divmod(batch.step + 1, per_epoch)
            if rest == 0:
                while loader.ready < QUEUE_DEPTH and epoch <= EPOCHS:  # each look sees as many batches
                    time.sleep(0.01)
                trim(0)
                seen[epoch] = _memory_mb(loader), len(os.listdir("/proc/self/fd"))
    (early, files), (late, files_late) = seen[2], seen[EPOCHS]
    return {"mb": early, "grown_mb": late - early, "files": files, "grown_files": files_late - files}


def damage(body: bytes, kind: int) -> bytes:
    """One of five ways in which what lies in a shard is no JPEG."""
    from PIL import Image

    middle = len(body) // 2
    if kind == 0:
        return body[:middle]
    if kind == 3:
        flipped = bytearray(body)
        for at in range(middle, len(body) - 2, 997):
            flipped[at] ^= 0xFF
        return bytes(flipped)
    if kind == 4:
        png = io.BytesIO()
        Image.open(io.BytesIO(body)).save(png, "PNG", compress_level=1)
        return png.getvalue()
    return [b"", b"<html><body>404 Not Found</body></html>"][kind - 1]


def bare_tars(shards: Path, folder: Path, every: int) -> Path:
    """The pictures of a set in tars without index and checksums; each `every`-th damaged (0: none)."""
    import numpy as np

    from shardkit.reader import ShardSet
    from shardkit.tar import TarWriter

    folder.mkdir()
    for shard, numbers in enumerate(np.array_split(np.arange(PICTURES), 8)):
        with (folder / f"{shard:05d}.tar").open("wb") as file:
            writer = TarWriter(file)
            for n, sample in zip(numbers.tolist(), ShardSet.open(shards).read(numbers), strict=True):
                bad = every and n % every == every // 2
                writer.add(f"{n:06d}.jpg", damage(sample.data, n // every % 5) if bad else sample.data)
                writer.add(f"{n:06d}.txt", sample.captions[0].encode())
            writer.finish()
    return folder


def past_damage(shards: Path, kind: str) -> dict[str, float]:
    """Pictures a CPU second through one back-end, undamaged and with one in a hundred damaged, in turn; medians of three."""
    import torch

    from core.allocator import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    rates: dict[str, list[float]] = {"whole": [], "damaged": []}
    with tempfile.TemporaryDirectory(dir=shards.parent) as place:
        tars = {name: bare_tars(shards, Path(place) / name, every) for name, every in (("whole", 0), ("damaged", 100))}
        for round_ in range(4):  # the first warms up
            for name, folder in tars.items():
                with _loader(folder, 1, PICTURES, kind, max_bad=0.05) as loader:
                    batches, taken = iter(loader), BATCH
                    invalid = int((~next(batches).valid_b).sum())
                    cpu = _cpu_s(loader)  # by then all workers are there
                    for batch in batches:
                        invalid += int((~batch.valid_b).sum())
                        taken += BATCH
                    spent = (_cpu_s(loader) - cpu) * PICTURES / (taken - BATCH)
                assert (invalid > 0) == (name == "damaged"), (name, invalid)
                rates[name] += [PICTURES / spent] if round_ else []
    return {name: statistics.median(found) for name, found in rates.items()}


def _part(name: str, shards: Path, cores: int, first: int = 0) -> dict[str, float]:
    """One part in a process of its own, held to so many cores from the first-th on."""
    if name == "peer":
        packages = next((PLACE / "webdataset0" / "lib").glob("python*")) / "site-packages"
        tars = sorted(shards.glob("*.tar"))
        pattern = f"{shards}/{{{tars[0].stem}..{tars[-1].stem}}}.tar"
        numbers = map(str, (SIZE, BATCH, cores, WARM, IMAGES))
        here = Path(__file__).parent / "loader_peer.py"
        command = [str(peer_python("open_clip")), str(here), pattern, str(packages), *numbers]
    else:
        command = [sys.executable, "-m", "bench.loader", "--part", name, "--shards", str(shards), "--cores", str(cores)]
    allowed = sorted(os.sched_getaffinity(0))[first : first + cores]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, preexec_fn=lambda: os.sched_setaffinity(0, allowed)
    )
    return json.loads(done.stdout.decode().strip().splitlines()[-1])  # type: ignore[no-any-return]


def _floors(shards: Path, cores: int) -> dict[str, float]:
    """The floor on every core at once: a thread each, in processes of their own."""
    with ThreadPoolExecutor(cores) as pool:
        found = list(pool.map(lambda core: _part("floor", shards, 1, core), range(cores)))
    return {
        "images": sum(one["images"] for one in found), "seconds": max(one["seconds"] for one in found),
        "cpu": sum(one["cpu"] for one in found),
    }  # fmt: skip


def measure(shards: Path, rounds: int, wall: bool) -> list[dict[str, Any]]:
    peer_python("webdataset0"), peer_python("open_clip")
    claims = []
    for cores in sorted({1, min(2, len(os.sched_getaffinity(0)))}):
        taken: dict[str, list[float]] = {"ours": [], "peer": [], "floor": []}
        for _ in range(rounds):
            for name, rates in taken.items():
                found = _floors(shards, cores) if name == "floor" else _part(name, shards, cores)
                spent = found["seconds"] * cores if wall else found["cpu"]
                rates.append(found["images"] / spent)
                print(f"{name} on {cores}: {rates[-1]:.0f}", file=sys.stderr)
        mine, peer, least = (statistics.median(taken[name]) for name in taken)
        unit = f"pictures a {'second and core' if wall else 'CPU second'}, {cores} core{'s'[: cores - 1]}"
        claims.append(
            claim(
                f"loader, {unit}: 3.5 times open_clip's", mine, goal=3.5 * peer, at_least=True, peer=peer, floor=least
            )
        )
        claims.append(
            claim(
                f"loader, {unit}: 85 % of decode and resize alone", mine, goal=0.85 * least, at_least=True, floor=least
            )
        )
    for kind in ("cpu", "dali"):
        found = _part(f"damaged-{kind}", shards, 1)
        claims.append(
            claim(
                f"loader, {kind}: 95 % of its own rate where one picture in a hundred is damaged", found["damaged"],
                goal=0.95 * found["whole"], at_least=True, floor=found["whole"],
            )
        )  # fmt: skip
    grown = _part("memory", shards, 1)
    claims.append(claim(f"resident memory grown in {EPOCHS} epochs, MB", grown["grown_mb"], goal=8, at_least=False))
    claims.append(claim(f"open files grown in {EPOCHS} epochs", grown["grown_files"], goal=0, at_least=False))
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--part", choices=("ours", "floor", "memory", "damaged-cpu", "damaged-dali"), help=argparse.SUPPRESS
    )
    parser.add_argument("--shards", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        parts = {
            "ours": lambda: ours(args.shards, args.cores), "floor": lambda: floor(args.shards),
            "memory": lambda: memory(args.shards), "damaged-cpu": lambda: past_damage(args.shards, "cpu"),
            "damaged-dali": lambda: past_damage(args.shards, "dali"),
        }  # fmt: skip
        print(json.dumps(parts[args.part]()))
        sys.stdout.flush()
        return
    with tempfile.TemporaryDirectory(prefix="pairmill-loader-") as folder:
        claims = measure(make_shards(Path(folder), args.photographs), args.rounds, args.wall)
    print(json.dumps(claims, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
