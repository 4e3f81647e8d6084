"""What a row costs as the list grows: CPU seconds of planning, of dedup and of writing shards' plan, and their slope.

Method: rows are generated, each stage runs as a process of its own, and its CPU seconds (user and system, children too) and
peak memory are read from the kernel. A straight line through log(seconds) over log(rows) has the slope 1 where a row costs
the same however many there are; what starting costs is measured with 100 rows and taken off (below 100,000 rows it would
hide what they cost). Captions are random words with
every tenth one repeated nearly; nothing is downloaded.

    python -m bench.scale [--rows 100000 300000 1000000] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import claim
from core.schema import decision_schema, pair_schema
from core.storage import Folder
from dedup.config import DedupConfig
from ingest.config import IngestConfig
from shardkit.config import ShardConfig

PART = 10_000
WORDS = 30_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    claims = measure(asked.rows)
    print(json.dumps(claims) if asked.json else json.dumps(claims, indent=1))


def measure(sizes: list[int]) -> list[dict[str, Any]]:
    """Slope and cost a row of each step."""
    found: dict[str, list[tuple[int, float, int]]] = {}
    for rows in [100, *sizes]:
        with tempfile.TemporaryDirectory() as place:
            write_list(Path(place), rows)
            for name, step in STEPS.items():
                found.setdefault(name, []).append((rows, *_cost(step, place)))
    claims = []
    for name, measured in found.items():
        _, begin, program = measured[0]
        seconds = [max(cpu - begin, 1e-4) for _, cpu, _ in measured[1:]]
        slope = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]) if len(sizes) > 1 else 1.0
        memory = (measured[-1][2] - program) / sizes[-1]
        last = f"{1e6 * seconds[-1] / sizes[-1]:.2f} microseconds and {memory:.0f} bytes of memory a row"
        claims.append(claim(f"{name}: slope of CPU seconds over rows ({last} at {sizes[-1]:,})", slope, goal=1.05,
                            at_least=False))  # fmt: skip
    return claims


def _cost(step: Callable[[str], None], place: str) -> tuple[float, int]:
    """CPU seconds and peak bytes of one step in a process of its own."""
    context = multiprocessing.get_context("spawn")
    there, here = context.Pipe()
    process = context.Process(target=_measured, args=(step, place, here))
    process.start()
    cost: tuple[float, int] = there.recv()
    process.join()
    return cost


def _measured(step: Callable[[str], None], place: str, pipe: Any) -> None:
    step(place)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    pipe.send((sum(u.ru_utime + u.ru_stime for u in used), 1024 * max(u.ru_maxrss for u in used)))


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


STEPS = {"plan of ingest": plan_ingest, "dedup": dedup, "plan of shards": plan_shards}

if __name__ == "__main__":
    main()
