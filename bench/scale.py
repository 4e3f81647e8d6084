"""What a row costs as the list grows: CPU seconds of every step of the data stages, and their slope.

Method: rows are generated, each stage runs as a process of its own, and its CPU seconds (user and system, children too) and
peak memory are read from the kernel. A straight line through log(seconds) over log(rows) has the slope 1 where a row costs
the same however many there are. What starting costs would hide what 10,000 rows cost, so every process takes 100 rows
through the same steps first, which is not counted, and what 100 rows cost then is taken off. Captions are random words with
every tenth one repeated nearly; nothing is downloaded. What a stage does with pictures is measured apart, since each row of
it costs a download: from nginx on this machine, which is not counted, of pictures of 128 by 96 pixels that become 85 by 64;
there nothing is run first.

    python -m bench.scale [--rows 10000 100000 1000000] [--plot docs/scale.svg] [--json]
    python -m bench.scale --fetch 10000 30000 100000   ingest, dedup and shard with their downloads instead; 9 minutes
    python -m bench.scale --plan 100000000    the plan of a list that is made while it is read and never stored; 30 GB of disk
    python -m bench.scale --match 100000000   one unit of matching and one of comparing, among random word sets; 4 GB of disk
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.machine import claim
from bench.web import nginx
from core.images import encode_jpeg
from core.schema import decision_schema, pair_schema
from core.storage import Folder
from dedup import bands, edges, match
from dedup.config import DedupConfig
from dedup.tokens import Sets
from ingest import listfiles, urllist
from ingest.config import IngestConfig
from shardkit.config import ShardConfig

PART = 10_000
WORDS = 30_000
BATCH = 1_000_000  # generated rows at a time
# Works in a folder; gives its CPU seconds where it knows of processes that the kernel does not count to it.
Step = Callable[[str], float | None]
Steps = dict[str, Step]
Listed = Callable[[Path, int], contextlib.AbstractContextManager[None]]
WIDTH = 10  # words of a generated set
ROUNDS = 3  # of which the least counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--fetch", type=int, nargs="+", help="instead: so many rows with their downloads")
    parser.add_argument("--plot", default="", help="SVG file to draw the costs into")
    parser.add_argument("--plan", type=int, default=0, help="instead: plan so many generated rows")
    parser.add_argument("--match", type=int, default=0, help="instead: match so many generated word sets")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.plan:
        claims = planned(asked.plan)
    elif asked.match:
        claims = matched(asked.match)
    else:
        rows, how = (asked.fetch, (serve_list, FETCHING)) if asked.fetch else (asked.rows, (made_list, STEPS))
        claims = measure(rows, asked.plot, *how)
    print(json.dumps(claims) if asked.json else json.dumps(claims, indent=1))


def measure(sizes: list[int], plot: str, listed: Listed, steps: Steps) -> list[dict[str, Any]]:
    """Slope and cost a row of each step, one after the other in the folder where `listed` has put so many rows."""
    found: dict[str, list[tuple[int, float, int]]] = {}
    for rows in [100, *sizes]:
        rounds: dict[str, list[tuple[float, int]]] = {}
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as place, listed(Path(place), rows):
                for number, (name, step) in enumerate(steps.items()):
                    before = list(steps.values())[: number + 1] if steps is STEPS else []
                    rounds.setdefault(name, []).append(_apart(functools.partial(_measured, step, place, before)))
        for name, costs in rounds.items():
            found.setdefault(name, []).append((rows, *min(costs)))
    claims, drawn = [], dict[str, list[float]]()
    for name, measured in found.items():
        _, begin, program = measured[0]
        seconds = [max(cpu - begin, 1e-4) for _, cpu, _ in measured[1:]]
        slope = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]) if len(sizes) > 1 else 1.0
        drawn[f"{name}, slope {slope:.2f}"] = seconds
        memory = (measured[-1][2] - program) / sizes[-1]
        last = f"{1e6 * seconds[-1] / sizes[-1]:.2f} microseconds and {memory:.0f} bytes of memory a row"
        claims.append(claim(f"{name}: slope of CPU seconds over rows ({last} at {sizes[-1]:,})", slope, goal=1.05,
                            at_least=False))  # fmt: skip
    if plot:
        Path(plot).write_text(picture(sizes, drawn))
    return claims


def picture(sizes: list[int], lines: dict[str, list[float]]) -> str:
    """CPU seconds over rows, both by their logarithms, as an SVG."""
    every = [second for seconds in lines.values() for second in seconds]
    low, high = np.floor(np.log10(min(every))), np.ceil(np.log10(max(every)))
    left, right = np.log10(sizes[0]), np.log10(sizes[-1])

    def spot(rows: float, seconds: float) -> tuple[float, float]:
        return 60 + 360 * (np.log10(rows) - left) / (right - left), 260 - 220 * (np.log10(seconds) - low) / (high - low)

    parts = [f'<text x="{spot(n, 1)[0]:.0f}" y="280" text-anchor="middle">{n:,}</text>' for n in sizes]
    for power in range(int(low), int(high) + 1):
        _, y = spot(sizes[0], 10.0**power)
        parts.append(
            f'<path d="M60,{y:.0f}H420" stroke="#ddd"/><text x="54" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g} s</text>'
        )
    for (name, seconds), colour in zip(lines.items(), ("#36c", "#c63", "#393", "#939"), strict=False):
        spots = [spot(*both) for both in zip(sizes, seconds, strict=True)]
        parts.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in spots)}" fill="none" stroke="{colour}"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        parts.append(f'<text x="428" y="{spots[-1][1] + 4:.0f}" fill="{colour}">{name}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="290" font-family="sans-serif" font-size="11">'
    title = '<rect width="640" height="290" fill="#fff"/><text x="60" y="20">CPU seconds by rows</text>'
    return f"{head}{title}{''.join(parts)}</svg>\n"


def _apart(do: Callable[[], Any]) -> Any:
    """What `do` returns in a process of its own."""
    context = multiprocessing.get_context("spawn")
    there, here = context.Pipe()
    process = context.Process(target=_telling, args=(do, here))
    process.start()
    here.close()
    told = there.recv()
    process.join()
    return told


def _telling(do: Callable[[], Any], pipe: Any) -> None:
    pipe.send(do())


def _measured(step: Step, place: str, before: Sequence[Step]) -> tuple[float, int]:
    """CPU seconds and peak bytes of a step, after `before` were run on 100 rows, for what is imported and started once."""
    with tempfile.TemporaryDirectory() as small:
        if before:
            with made_list(Path(small), 100):
                for one in before:
                    one(small)
    begun = _used()
    told = step(place)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return _used() - begun if told is None else told, 1024 * peak


def _used() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


# ---- a hundred million ------------------------------------------------------------------------------------------------


def planned(rows: int) -> list[dict[str, Any]]:
    """Time to the first unit and to the whole plan, and memory, of a list of `rows` rows."""
    with tempfile.TemporaryDirectory() as place:
        first, cpu_first, whole, cpu, peak = _apart(functools.partial(_plan, rows, place))
    words = f"plan of {rows:,} generated rows"
    return [
        claim(f"{words}: seconds to the first unit ({cpu_first:.0f} CPU seconds)", first, goal=300, at_least=False),
        claim(f"{words}: seconds to the last ({cpu:.0f} CPU seconds)", whole, goal=300, at_least=False),
        claim(f"{words}: GB of memory", peak / 1e9, goal=3, at_least=False),
    ]


def _plan(rows: int, place: str) -> tuple[float, float, float, float, int]:
    def generated(files: list[str], url_col: str, caption_col: str) -> listfiles.ListSource:
        return listfiles.ListSource([], "url", "caption", text=False, _batches=_rows(rows))

    (Path(place) / "list.parquet").touch()
    urllist.listfiles.open_list = generated  # the one place where a list comes from a generator
    begin = time.monotonic()
    steps = urllist._steps(IngestConfig(urls=f"{place}/list.parquet"), Folder(f"{place}/planned"))
    next(steps)
    first, cpu_first = time.monotonic() - begin, time.process_time()
    print(f"{rows:,} rows: first unit after {first:.0f} s, {cpu_first:.0f} CPU seconds", file=sys.stderr, flush=True)
    for _ in steps:
        pass
    used = resource.getrusage(resource.RUSAGE_SELF)
    return first, cpu_first, time.monotonic() - begin, used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss


def _rows(rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, BATCH // 10):
        number = np.arange(start, min(rows, start + BATCH // 10))
        spread = (number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
        text, host, more = (pa.array(values).cast(pa.string()) for values in (number, number % 99_991, spread))
        urls = pc.binary_join_element_wise("https://host", host, ".test/pictures/", text, ".jpg", "")
        captions = pc.binary_join_element_wise("a picture of number", text, "that nobody took", more, " ")
        yield pa.record_batch([urls, captions], ["url", "caption"])


def matched(count: int) -> list[dict[str, Any]]:
    """CPU seconds and memory of one unit of matching and of one of comparing, among `count` word sets, and of them all."""
    with tempfile.TemporaryDirectory() as place:
        _write_sets(Path(place) / "words", count)
        units, band, pairs, compare, memory = _apart(functools.partial(_match, count, place))
    words = f"{count:,} generated word sets"
    ranges = -(-count // edges.ROWS)
    return [
        claim(f"{words}: GB of memory of a unit of matching ({units} of them, {pairs:,} pairs each, {band:.0f} CPU s each)",
              memory / 1e9, goal=8, at_least=False),
        claim(f"{words}: CPU hours of all units ({ranges} of comparing, {compare:.1f} CPU s each)",
              (units * band + ranges * compare) / 3600, goal=1, at_least=False),
    ]  # fmt: skip


def _write_sets(path: Path, count: int) -> None:
    """Sets of WIDTH words; every tenth is the one before it with another last word."""
    rng = np.random.default_rng(count)
    with path.open("wb") as file:
        for start in range(0, count, BATCH):
            words = rng.integers(1, 1 << 32, (min(BATCH, count - start), WIDTH), np.uint32)
            words[9::10, :-1] = words[8::10, :-1][: len(words[9::10])]
            file.write(words.data)


def _match(count: int, place: str) -> tuple[int, float, int, float, int]:
    flat = np.memmap(f"{place}/words", np.uint32, "r")
    sets = Sets(flat, np.arange(count) * WIDTH, np.full(count, WIDTH))
    shares = 1 << ((count - 1) // edges.GROUPED).bit_length()
    _, rows = bands.rows_for(0.8)
    with _Anonymous() as memory:
        begin = time.process_time()
        found = match.caption_candidates(sets, 0.8, range(1), (0, shares))
        band = time.process_time() - begin
    mine = found[found < np.uint64(edges.ROWS << 32)]
    begin = time.process_time()
    alike = match.jaccard(sets, *bands.unpair(mine))
    compare = (
        (time.process_time() - begin) * 60 / rows
    )  # the pairs of one band; at worst those of the others are others
    assert (alike > 0.8).any()
    return 60 // rows * shares, band, len(found), compare, memory.peak


class _Anonymous:
    """The most memory that is no mapped file, while the block runs."""

    peak = 0

    def __enter__(self) -> _Anonymous:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self.peak = max(self.peak, 1024 * int(line.split()[1]))


# ---- every step -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def made_list(place: Path, rows: int) -> Iterator[None]:
    write_list(place, rows)
    yield


@contextlib.contextmanager
def serve_list(place: Path, rows: int) -> Iterator[None]:
    """A list of so many different pictures, which nginx serves while the body runs."""
    shown = place / "shown"
    shown.mkdir()
    rng = np.random.default_rng(rows)
    for number in range(rows):
        coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
        (shown / f"{number}.jpg").write_bytes(encode_jpeg(np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1)), 90))
    with nginx(shown) as base:
        urls = [f"{base}/{number}.jpg" for number in range(rows)]
        captions = [f"picture {number}" for number in range(rows)]
        pq.write_table(pa.table({"url": urls, "caption": captions}), place / "list.parquet")
        yield


def write_list(place: Path, rows: int) -> None:
    """A list of URLs, and the parts that ingest would make of it, with no pictures behind them."""
    rng = np.random.default_rng(rows)
    words = np.array([f"w{number:x}" for number in range(WORDS)])
    parts = place / "work/ingest/parts"
    parts.mkdir(parents=True)
    tables = []
    for number, start in enumerate(range(0, rows, PART)):
        count = min(PART, rows - start)
        drawn = words[(WORDS * rng.random((count, 10)) ** 2).astype(int)]
        captions = [" ".join(line) for line in drawn]
        captions[9::10] = [caption + " again" for caption in captions[8::10]][: len(captions[9::10])]
        urls = [f"http://host{(start + i) % 997}.test/{start + i}.jpg" for i in range(count)]
        tables.append(pa.table({"url": urls, "caption": captions}))
        unit = f"u{number:06d}"
        columns: dict[str, Any] = {
            "uid": [f"{start + i:032x}" for i in range(count)], "unit": [unit] * count, "row": range(start, start + count),
            "url": urls, "caption": captions, "outcome": ["ok"] * count, "sha256": [f"{start + i:064x}" for i in range(count)],
            "width": [256] * count, "height": [256] * count, "tar": [f"ingest/parts/{unit}.tar"] * count,
            "tar_offset": range(512, 512 + 10_240 * count, 10_240), "tar_size": [9_000] * count,
        }  # fmt: skip
        table = pa.table({f.name: pa.array(columns.get(f.name, [None] * count), f.type) for f in pair_schema()})
        pq.write_table(table.cast(pair_schema()), parts / f"{unit}.parquet", compression="zstd")
    pq.write_table(pa.concat_tables(tables), place / "list.parquet")


def plan_ingest(place: str) -> None:
    from ingest.urllist import write_plan

    write_plan(IngestConfig(urls=f"{place}/list.parquet"), Folder(f"{place}/planned"))


def dedup(place: str) -> None:
    from dedup.keep import run

    run(DedupConfig(work=f"{place}/work", workers=1))


def plan_shards(place: str) -> None:
    from shardkit.plan import write_plans

    work = Folder(f"{place}/work")
    assert pq.read_schema(work.path("dedup/decisions.parquet")).equals(decision_schema())
    write_plans(work, ShardConfig(work=work.url))


def ingest(place: str) -> float:
    from ingest.fetch import run

    config = IngestConfig(urls=f"{place}/list.parquet", work=f"{place}/work", workers=1, size=64, allow_private=True)
    summary = run(config)
    assert set(summary["outcomes"]) == {"ok"}
    return float(summary["cpu_seconds"])


def shard(place: str) -> None:
    from shardkit.pack import run

    config = ShardConfig(work=f"{place}/work", workers=1, samples_per_shard=1000)
    assert run(config)["samples"] > 0


STEPS: Steps = {"plan of ingest": plan_ingest, "dedup": dedup, "plan of shards": plan_shards}
FETCHING: Steps = {"ingest": ingest, "dedup of what was fetched": dedup, "shard": shard}

if __name__ == "__main__":
    main()
