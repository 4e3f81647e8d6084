"""`pairmill audit` over many rows: seconds for ten million pairs on two cores.

Method: ingest parts of 250,000 rows each to core's schema, with URLs of 50,000 hosts, captions of 3 to 16 words drawn by
Zipf's law (a tenth of them from 1,000 boilerplate texts), sizes, formats, languages, failures and times, and decisions with
clusters. Then `audit` as the command runs it, all sections, in DuckDB with its defaults; parts are warm in the page cache.
Time is linear in the rows from a million on, so a smaller run says what a large one takes.

    python -m bench.audit [--rows 10000000] [--json]

A million rows take about a minute to make and some seconds to audit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import claim
from core.schema import Outcome, decision_schema, pair_schema
from report.audit import run
from report.config import AuditConfig

PART = 250_000
OUTCOMES = (Outcome.OK, Outcome.HTTP_4XX, Outcome.TIMEOUT, Outcome.DNS, Outcome.NOT_IMAGE)


def make(work: Path, rows: int, seed: int = 3) -> None:
    """Parts and decisions of `rows` pairs."""
    for number in range(0, -(-rows // PART)):
        rng = np.random.default_rng((seed, number))
        table = _part(rng, min(PART, rows - number * PART), number)
        for name, made in (("ingest/parts", table), ("dedup", _decisions(table, rng))):
            path = work / name / (f"u{number:06d}.parquet" if name != "dedup" else f"part-{number:06d}.parquet")
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(made, path, compression="zstd", compression_level=1)
    _join(work / "dedup")


def _part(rng: np.random.Generator, n: int, number: int) -> pa.Table:
    outcome = rng.choice(len(OUTCOMES), n, p=(0.75, 0.1, 0.05, 0.05, 0.05))
    ok = outcome == 0
    words = np.minimum(rng.zipf(1.3, (n, 16)), 200_000)
    lengths = rng.integers(3, 17, n)
    captions = [" ".join(map(str, row[:k])) for row, k in zip(words.tolist(), lengths.tolist(), strict=True)]
    plain = rng.random(n) < 0.1
    fixed = rng.integers(0, 1000, n).tolist()
    captions = [
        f"image may contain thing {f}" if p else f"w{c}" for c, p, f in zip(captions, plain, fixed, strict=True)
    ]
    hosts, place = np.minimum(rng.zipf(1.2, n), 50_000).tolist(), rng.integers(0, 1 << 40, n).tolist()
    columns = {
        "uid": [f"{number:08x}{i:08x}{p:016x}" for i, p in enumerate(place)], "unit": [f"u{number:06d}"] * n,
        "row": np.arange(n), "url": [f"https://host{h}.example/images/{p:010x}.jpg" for h, p in zip(hosts, place, strict=True)],
        "caption": captions, "outcome": [str(OUTCOMES[o]) for o in outcome.tolist()],
        "bytes": pa.array(rng.lognormal(11, 1, n).astype(np.int64), mask=~ok),
        "width": pa.array(rng.integers(64, 2000, n).astype(np.int32), mask=~ok),
        "height": pa.array(rng.integers(64, 2000, n).astype(np.int32), mask=~ok),
        "format": pa.array(rng.choice(["jpeg", "png", "webp"], n), mask=~ok),
        "lang": rng.choice(["en", "de", "fr", "zh", "es"], n),
        "fetched_at": pa.array(1_700_000_000_000_000 + (number * n + np.arange(n)) * 1000, pa.timestamp("us", tz="UTC")),
    }  # fmt: skip
    arrays = {name: pa.array(value) for name, value in columns.items()}
    wanted = pair_schema()
    return pa.table(
        [arrays[f.name].cast(f.type) if f.name in arrays else pa.nulls(n, f.type) for f in wanted], schema=wanted
    )


def _decisions(part: pa.Table, rng: np.random.Generator) -> pa.Table:
    uid = part["uid"].combine_chunks().filter(pa.compute.equal(part["outcome"].combine_chunks(), "ok"))
    n = len(uid)
    kept, clustered = rng.random(n) > 0.2, rng.random(n) < 0.3
    near = np.maximum(np.arange(n) - rng.integers(0, 4, n), 0)
    reason = pa.array(rng.choice(["image_duplicate", "align:words", "caption_cap"], n), mask=kept)
    columns = {
        "uid": uid, "kept": kept, "holdout": np.zeros(n, bool), "reason": reason, "image_group": uid.take(pa.array(near)),
        "cluster": uid.take(pa.array(near, mask=~clustered)), "survivor": uid.take(pa.array(near, mask=kept)),
        "evidence": pa.array(np.full(n, "image_hash"), mask=kept), "similarity": pa.array(rng.random(n), mask=kept),
    }  # fmt: skip
    return pa.table([pa.array(columns[f.name]).cast(f.type) for f in decision_schema()], schema=decision_schema())


def _join(folder: Path) -> None:
    parts = sorted(folder.glob("part-*.parquet"))
    with pq.ParquetWriter(folder / "decisions.parquet", decision_schema()) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part))
            part.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="pairs to audit")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.rows)
        wall, cpu = time.perf_counter(), time.process_time()
        page = run(AuditConfig(work=folder))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert page["pairs"]["rows"] == arguments.rows
    scale = 10_000_000 / arguments.rows
    claims = [
        claim("seconds to audit ten million rows", wall * scale, goal=60, at_least=False),
        claim("CPU seconds to audit ten million rows", cpu * scale, goal=120, at_least=False),
    ]
    print(json.dumps(claims, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
