"""Downloads beside img2dataset: CPU and wall time, the codec floor, memory, slow hosts, a list of ten million rows.

Method: photographs (JPEG, about 500 pixels wide; the folder given by --images) are served by nginx on loopback, cycled
with distinct query strings. Both clients run as programs of their own with as many processes as there are cores and 64
downloads at once in each, reduce to 256 pixels at quality 95, and write tars and Parquet. Runs alternate; medians count.
CPU seconds are what the kernel charged the client and all of its children, start-up and imports included; the server's
are not in it. Only pictures that were stored count. Larger, PNG and WebP sources are made of the same photographs.

The codec floor is decode, bicubic reduction, encode and nothing else (no colour profile, no rotation, no hash), in one
thread, of the same files, by the codecs that we use: the fastest we found.

    python -m bench.ingest [NAME...] [--images DIR] [--runs 3] [--urls 3000] [--rows 50000] [--json]

NAME is one of jpeg500, jpeg2000, png, webp, hosts, memory, biglist; all of them without one. img2dataset goes into a side
environment (bench/peers.py). Needs nginx (apt-get install nginx).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from bench.cost import timed
from bench.machine import claim
from bench.peers import peer_python
from bench.web import SlowHosts, nginx
from core import images
from core.runner import cores

SIZE, QUALITY, CONCURRENCY, SHARD = 256, 95, 64, 500
Claims = list[dict[str, Any]]


@dataclass(frozen=True)
class Cost:
    """One run of a client: pictures stored, CPU seconds, wall seconds."""

    stored: int
    cpu: float
    wall: float

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu / self.stored


@dataclass(frozen=True)
class Bench:
    """What every sub-bench is given."""

    images: Path
    urls: int
    rows: int
    runs: int
    folder: Path


# ---- the two clients ---------------------------------------------------------------------------------------------------


def write_list(path: Path, base: str, names: list[str], count: int) -> Path:
    """A Parquet list of `count` URLs that differ, with captions."""
    urls = [f"{base}/{names[i % len(names)]}?n={i}" for i in range(count)]
    pq.write_table(pa.table({"url": urls, "caption": [f"a photograph of number {i}" for i in range(count)]}), path)
    return path


def our_command(urls: Path, work: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "cli", "ingest", str(urls), f"--work={work}", f"--size={SIZE}", f"--quality={QUALITY}",
        f"--concurrency={CONCURRENCY}", f"--per-host={CONCURRENCY}", f"--unit-urls={SHARD}", "--allow-private", "--json", *more,
    ]  # fmt: skip


def ours(urls: Path, folder: Path) -> Cost:
    with tempfile.TemporaryDirectory(dir=folder) as work:
        said, cpu, wall = timed(our_command(urls, Path(work)))
    return Cost(json.loads(said.splitlines()[-1])["ok"], cpu, wall)


def theirs(urls: Path, folder: Path) -> Cost:
    program = peer_python("img2dataset").with_name("img2dataset")
    with tempfile.TemporaryDirectory(dir=folder) as out:
        _, cpu, wall = timed([
            str(program), f"--url_list={urls}", "--input_format=parquet", "--url_col=url", "--caption_col=caption",
            "--output_format=webdataset", f"--output_folder={out}/shards", f"--image_size={SIZE}", "--resize_mode=keep_ratio",
            "--resize_only_if_bigger=True", f"--encode_quality={QUALITY}", f"--processes_count={cores()}",
            f"--thread_count={CONCURRENCY}", f"--number_sample_per_shard={SHARD}",
        ])  # fmt: skip
        stored = sum(json.loads(p.read_text())["successes"] for p in Path(out, "shards").glob("*_stats.json"))
    return Cost(stored, cpu, wall)


def alternated(urls: Path, bench: Bench) -> tuple[Cost, Cost]:
    """Medians of `bench.runs` runs of each, one after the other so that a busy machine hits both."""
    runs: tuple[list[Cost], list[Cost]] = ([], [])
    for _ in range(bench.runs):
        for client, costs in zip((ours, theirs), runs, strict=True):
            costs.append(client(urls, bench.folder))
            say(
                f"{client.__name__}: {costs[-1].cpu_ms:.2f} ms CPU a picture, {costs[-1].wall:.1f} s, {costs[-1].stored}"
            )
    ours_, theirs_ = (
        Cost(c[0].stored, statistics.median(x.cpu for x in c), statistics.median(x.wall for x in c)) for c in runs
    )
    return ours_, theirs_


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# ---- sources -----------------------------------------------------------------------------------------------------------


def photographs(bench: Bench) -> list[Path]:
    found = sorted(bench.images.glob("*.jpg"))
    if not found:
        raise SystemExit(f"expected .jpg photographs in {bench.images}; name their folder with --images")
    return found


def converted(bench: Bench, ending: str, *, side: int = 0, most: int = 200) -> Path:
    """A folder with the photographs as `ending`, enlarged to `side` pixels on the longer side where that is given."""
    folder = bench.folder / f"{ending}{side}"
    folder.mkdir()

    def convert(source: Path) -> None:
        from PIL import Image

        image = Image.open(source).convert("RGB")
        if side:
            scale = side / max(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        image.save(folder / f"{source.stem}.{ending}", quality=90)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(convert, photographs(bench)[:most]))
    return folder


def floor_ms(folder: Path) -> float:
    """Milliseconds of CPU a picture for decode, reduction and encoding alone, in one thread: the best of three passes."""
    bodies = [path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".jpg", ".png", ".webp")]
    headers = [images.read_header(body) for body in bodies]
    passes = []
    for _ in range(3):
        started = time.thread_time()
        for body, header in zip(bodies, headers, strict=True):
            bare = dataclasses.replace(header, icc=None, orientation=1)  # colour and rotation are our own doing
            images.encode_jpeg(images.reduced(body, bare, SIZE), QUALITY)
        passes.append(1000 * (time.thread_time() - started) / len(bodies))
    return min(passes)


# ---- the benches -------------------------------------------------------------------------------------------------------


def beside(bench: Bench, folder: Path, what: str, *, cpu_goal: float, wall_goal: float) -> Claims:
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".jpg", ".png", ".webp"))
    with nginx(folder) as base:
        urls = write_list(bench.folder / f"{folder.name}.parquet", base, names, bench.urls)
        mine, peer = alternated(urls, bench)
    floor = floor_ms(folder)
    return [
        claim(f"{what}: CPU ms a stored picture, ours against the peer's", mine.cpu_ms / peer.cpu_ms, goal=cpu_goal,
              at_least=False) | {"ours": mine.cpu_ms, "peer": peer.cpu_ms, "floor": floor, "ratio": mine.cpu_ms / peer.cpu_ms},
        claim(f"{what}: wall seconds", mine.wall / peer.wall, goal=wall_goal, at_least=False)
        | {"ours": mine.wall, "peer": peer.wall, "ratio": mine.wall / peer.wall},
        claim(f"{what}: share of our CPU that is the codec floor", floor / mine.cpu_ms, goal=0.75, at_least=True, floor=floor),
        claim(f"{what}: pictures stored", mine.stored, goal=peer.stored, at_least=True, peer=peer.stored),
    ]  # fmt: skip


def jpeg500(bench: Bench) -> Claims:
    photographs(bench)
    return beside(bench, bench.images, "500-pixel JPEG", cpu_goal=0.45, wall_goal=0.5)


def jpeg2000(bench: Bench) -> Claims:
    return beside(bench, converted(bench, "jpg", side=2000), "2,000-pixel JPEG", cpu_goal=0.30, wall_goal=0.5)


def png(bench: Bench) -> Claims:
    return beside(bench, converted(bench, "png"), "500-pixel PNG", cpu_goal=1.0, wall_goal=1.0)


def webp(bench: Bench) -> Claims:
    return beside(bench, converted(bench, "webp"), "500-pixel WebP", cpu_goal=1.0, wall_goal=1.0)


def hosts(bench: Bench, count: int = 5000, latency: float = 0.2) -> Claims:
    """Requests a second between the first tenth and the last, against what the concurrency allows."""
    body = images.encode_jpeg(np.full((64, 64, 3), 128, np.uint8), 90)
    with SlowHosts(count, latency, body) as slow:
        urls = bench.folder / "hosts.parquet"
        addresses = [f"http://{a}:{slow.port}/a.jpg" for a in slow.addresses]
        pq.write_table(pa.table({"url": addresses, "caption": ["a picture"] * count}), urls)
        with tempfile.TemporaryDirectory(dir=bench.folder) as work:
            timed(our_command(urls, Path(work)))
        moments = np.sort(slow.moments)
    low, high = int(0.1 * len(moments)), int(0.9 * len(moments))
    rate = float((high - low) / (moments[high] - moments[low]))
    most = cores() * CONCURRENCY / latency
    say(f"{rate:.0f} requests/s of {most:.0f}")
    return [
        claim(
            f"{count} hosts of {latency} s latency: share of concurrency/latency", rate / most, goal=0.9, at_least=True
        )
    ]


class Memory(threading.Thread):
    """Resident bytes of the processes that a process has started, sampled every half second until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self.samples: list[tuple[float, int, int]] = []  # (seconds, largest worker, main process)

    def run(self) -> None:
        started = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            while self._process.status() != psutil.STATUS_ZOMBIE:
                workers = [_resident(child) for child in self._process.children(recursive=True)]
                sample = (time.monotonic() - started, max(workers, default=0), _resident(self._process))
                self.samples.append(sample)
                time.sleep(0.5)


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def memory(bench: Bench) -> Claims:
    """Peak and growth of the largest worker; a plot goes to memory.svg in the folder of --keep."""
    with nginx(bench.images) as base, tempfile.TemporaryDirectory(dir=bench.folder) as work:
        names = [path.name for path in photographs(bench)]
        urls = write_list(bench.folder / "memory.parquet", base, names, bench.rows)
        with subprocess.Popen(
            our_command(urls, Path(work)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            sampler = Memory(run.pid)
            sampler.start()
        sampler.join()
    (bench.folder / "memory.svg").write_text(plot(sampler.samples))
    workers = [sample[1] / 1e6 for sample in sampler.samples]
    half = len(workers) // 2
    growth = max(workers[half:], default=0.0) / max(workers[len(workers) // 5 : half], default=1.0)
    return [
        claim(f"largest worker over {bench.rows} rows, MB", max(workers), goal=400, at_least=False),
        claim("its peak in the second half against the first", growth, goal=1.1, at_least=False),
    ]


def plot(samples: list[tuple[float, int, int]], most: float = 400.0) -> str:
    """An SVG of the largest worker's megabytes over the seconds of a run, with the goal as a line."""
    seconds = max(samples[-1][0], 1.0)
    points = " ".join(f"{40 + 550 * t / seconds:.1f},{190 - 170 * worker / 1e6 / most:.1f}" for t, worker, _ in samples)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 210" font-family="sans-serif" font-size="11">'
        '<rect width="600" height="210" fill="white"/><path d="M40 20H590M40 190H590" stroke="#999" stroke-dasharray="4"/>'
        f'<text x="5" y="24">{most:.0f}</text><text x="25" y="194">0</text><text x="40" y="14">MB of the largest worker</text>'
        f'<text x="540" y="206">{seconds:.0f} s</text><polyline points="{points}" fill="none" stroke="#06c" stroke-width="1.5"/>'
        "</svg>\n"
    )


def biglist(bench: Bench, rows: int = 10_000_000) -> Claims:
    """Seconds from the command to the first request, for a list of ten million rows."""
    body = images.encode_jpeg(np.full((64, 64, 3), 128, np.uint8), 90)
    with SlowHosts(1, 0.0, body) as host, tempfile.TemporaryDirectory(dir=bench.folder) as work:
        urls = _long_list(bench.folder / "biglist.parquet", f"http://{host.addresses[0]}:{host.port}/picture", rows)
        started = time.monotonic()
        with subprocess.Popen(
            our_command(urls, Path(work)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            sampler = Memory(run.pid)
            sampler.start()
            while not host.moments and run.poll() is None:
                time.sleep(0.05)
            run.terminate()
        if not host.moments:
            raise SystemExit("the run on the long list ended without a request")
        seconds = host.moments[0] - started
    main = max((sample[2] for sample in sampler.samples), default=0) / 1e6
    return [
        claim(f"seconds to the first request of a list of {rows} rows", seconds, goal=10, at_least=False),
        claim("memory of the planning process meanwhile, MB", main, goal=2500, at_least=False),
    ]


def _long_list(path: Path, base: str, rows: int) -> Path:
    with pq.ParquetWriter(path, pa.schema({"url": pa.string(), "caption": pa.string()})) as writer:
        for start in range(0, rows, 500_000):
            numbers = [str(i) for i in range(start, min(start + 500_000, rows))]
            urls = pa.array([f"{base}/{n}.jpg" for n in numbers])
            writer.write_table(
                pa.table({"url": urls, "caption": pa.array([f"a photograph of thing {n}" for n in numbers])})
            )
    return path


BENCHES: dict[str, Callable[[Bench], Claims]] = {
    "jpeg500": jpeg500, "jpeg2000": jpeg2000, "png": png, "webp": webp, "hosts": hosts, "memory": memory,
    "biglist": biglist,
}  # fmt: skip


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of {', '.join(BENCHES)}")
    originals = Path(os.environ.get("PAIRMILL_REAL_DATA", "")) / "originals"
    parser.add_argument(
        "--images", type=Path, default=originals, help="folder of photographs (PAIRMILL_REAL_DATA/originals)"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each client")
    parser.add_argument("--urls", type=int, default=3000, help="URLs a run")
    parser.add_argument("--rows", type=int, default=50_000, help="rows of the memory bench")
    parser.add_argument("--keep", type=Path, help="folder for sources and samples, kept (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHES):
        parser.error(f"expected names out of {', '.join(BENCHES)}, found {', '.join(sorted(unknown))}")
    claims: Claims = []
    with _folder(arguments.keep) as folder:
        bench = Bench(arguments.images, arguments.urls, arguments.rows, arguments.runs, folder)
        for name in arguments.names or BENCHES:
            claims += BENCHES[name](bench)
    print(json.dumps(claims, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
