"""Near-duplicate captions: speed, recall and precision against an exact oracle, datasketch and rensa beside it; memory and
time up to ten million.

Method: captions of 5 to 20 words drawn from a Zipf-like vocabulary of 50,000; 30 % are earlier captions with one or two
words changed, dropped or added. `pairmill dedup --captions` runs on them in one process and one thread, in CPU seconds from
the file to the decisions, imports left out. The oracle joins all captions through their rare words (prefix filter) and
compares word sets. The peers run in an environment of their own (bench.peers); datasketch gets a tenth of the captions: its
tables are then smaller than ours, in its favour.

    taskset -c 1 python -m bench.dedup [--captions 200000] [--json]
    taskset -c 1 python -m bench.dedup --sizes 1000000,2000000,5000000,10000000 --plot docs/results/dedup-scale.svg

The first takes about two minutes and 1.5 GB, most of it the oracle. The second generates the captions in blocks of 200,000,
runs each size in a process of its own with 3 GB for DuckDB, and takes about 10 minutes and 3 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.machine import claim
from bench.peers import peer_python
from bench.sides import in_a_process
from dedup import keep
from dedup.clusters import components
from dedup.config import DedupConfig

THRESHOLD = 0.8
VOCABULARY = 50_000
BLOCK = 200_000
PEER = Path(__file__).with_name("dedup_peer.py")


def planted(n: int, seed: int = 5) -> list[str]:
    """`n` captions, 30 % of them edits of an earlier one."""
    rng = np.random.default_rng(seed)
    weight = 1 / (np.arange(VOCABULARY) + 20.0)
    lengths = rng.integers(5, 21, n)
    drawn = np.split(rng.choice(VOCABULARY, int(lengths.sum()), p=weight / weight.sum()), np.cumsum(lengths)[:-1])
    documents: list[list[int]] = []
    for i, fresh in enumerate(drawn):
        if i and rng.random() < 0.3:
            documents.append(_edited(documents[int(rng.integers(i))], rng))
        else:
            documents.append(fresh.tolist())
    return [" ".join(f"w{word}" for word in words) for words in documents]


def _edited(words: list[int], rng: np.random.Generator) -> list[int]:
    words = list(words)
    for _ in range(int(rng.integers(1, 3))):
        place, edit, word = int(rng.integers(len(words))), rng.random(), int(rng.integers(VOCABULARY))
        if edit < 0.5:
            words[place] = word
        elif edit < 0.75 and len(words) > 5:
            del words[place]
        else:
            words.insert(place, word)
    return words


def oracle(captions: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The component of each caption when every pair at or above the threshold is an edge."""
    sets = [frozenset(c.split()) for c in captions]
    count = Counter(word for s in sets for word in s)
    index: dict[str, list[int]] = {}
    for i, words in enumerate(sets):
        rare = sorted(words, key=lambda w: (count[w], w))
        for word in rare[: len(words) - int(np.ceil(THRESHOLD * len(words) - 1e-9)) + 1]:
            index.setdefault(word, []).append(i)
    edges = {pair for rows in index.values() for pair in combinations(rows, 2) if _alike(sets, *pair)}
    first: dict[frozenset[str], int] = {}
    edges |= {(first[s], i) for i, s in enumerate(sets) if first.setdefault(s, i) != i}
    both = np.array(sorted(edges), np.int64).reshape(-1, 2)
    return components(len(sets), both[:, 0], both[:, 1])


def _alike(sets: list[frozenset[str]], i: int, j: int) -> bool:
    a, b = sets[i], sets[j]
    return min(len(a), len(b)) >= 5 and len(a & b) >= THRESHOLD * len(a | b) - 1e-9


def ours(folder: Path, captions: list[str], truth: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float]:
    """Captions per CPU second, times faster to decide anew, recall, precision."""
    write(folder / "captions.parquet", [captions])
    _warm(folder)
    settings: dict[str, Any] = {
        "work": str(folder / "work"),
        "captions": str(folder / "captions.parquet"),
        "workers": 1,
    }
    seconds = _timed(DedupConfig(**settings, threshold=THRESHOLD, method="components"))
    noted = pq.read_table(folder / "work" / "dedup" / "decisions.parquet")
    gone = noted.filter(pc.invert(noted["kept"]))
    removed, survivor = (gone[name].cast(pa.int64()).to_numpy() for name in ("uid", "survivor"))
    right = truth[survivor] == truth[removed]
    again = _decided_anew(settings)
    removable = len(captions) - len(np.unique(truth))
    return {
        "rate": len(captions) / seconds,
        "again": seconds / again,
        "recall": float(right.sum() / removable),
        "precision": float(right.mean()),
    }


def write(path: Path, blocks: Iterable[list[str]]) -> None:
    """A Parquet file with a column of captions, a row group a block."""
    with pq.ParquetWriter(path, pa.schema([("caption", pa.string())])) as file:
        for captions in blocks:
            file.write_table(pa.table({"caption": captions}))


def _warm(folder: Path) -> None:
    """One small run, for the imports."""
    write(folder / "few.parquet", [planted(2000)])
    _timed(DedupConfig(work=str(folder / "few"), captions=str(folder / "few.parquet"), workers=1))


def _timed(config: DedupConfig) -> float:
    start = time.process_time()
    keep.run(config)
    return time.process_time() - start


def _decided_anew(settings: dict[str, Any]) -> float:
    """CPU seconds of a decision at 0.9: the median of three, each after one at 0.95."""
    seconds = []
    for _ in range(3):
        for threshold in (0.95, 0.9):
            seconds.append(_timed(DedupConfig(**{**settings, "method": "components"}, threshold=threshold)))
    return statistics.median(seconds[1::2])


def peer(package: str, path: Path, truth: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, float]:
    """Captions per CPU second of `package`, and the recall and precision of what it would remove."""
    command = [str(peer_python("dedup")), str(PEER), package, str(path), str(THRESHOLD)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    later = truth < np.arange(len(truth))
    right = later[found["removed"]].sum()
    return {"rate": found["rate"], "recall": right / later.sum(), "precision": right / max(len(found["removed"]), 1)}


def beside_peers(count: int) -> list[dict[str, Any]]:
    """Our claims at `count` captions, with the peers on the same machine right behind us."""
    captions = planted(count)
    truth = oracle(captions)
    few = max(count // 10, 1000)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        we = ours(folder, captions, truth)
        write(folder / "tenth.parquet", [captions[:few]])
        sketch = peer("datasketch", folder / "tenth.parquet", oracle(captions[:few]))
        rensa = peer("rensa", folder / "captions.parquet", truth)
    claims = [
        claim(
            "captions a second on one core, file to decisions",
            we["rate"],
            goal=150_000,
            at_least=True,
            peer=rensa["rate"],
        ),
        claim("times datasketch's rate", we["rate"] / sketch["rate"], goal=12, at_least=True),
        claim("times as fast to decide anew at 0.9", we["again"], goal=20, at_least=True),
    ]
    for name, found in (("datasketch", sketch), ("rensa", rensa)):
        for figure, goal in (("recall", 0.995), ("precision", 1.0)):
            text = f"{figure} of the removals (peer: {name})"
            claims.append(claim(text, we[figure], goal=goal, at_least=True, peer=found[figure]))
    return claims


def one_size(path: str) -> dict[str, float]:
    """CPU seconds, peak memory in GB, and what the built-in oracle measured, of one run in this process."""
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        _warm(Path(folder))
        settings: dict[str, Any] = {"work": f"{folder}/work", "captions": path, "workers": 1, "method": "components"}
        start = time.process_time()
        summary = keep.run(DedupConfig(**settings, threshold=THRESHOLD))
        seconds = time.process_time() - start
        again = _decided_anew(settings)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "captions": summary["pairs"],
        "seconds": seconds,
        "again": again,
        "peak_gb": peak,
        **summary["measured"],
    }


def by_size(sizes: list[int], plot: str) -> list[dict[str, Any]]:
    """Time and memory at each size, each in a process of its own."""
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder) / "captions.parquet"
            write(path, (planted(min(BLOCK, size - first), first) for first in range(0, size, BLOCK)))
            points.append(in_a_process("dedup", "--one", str(path), one_thread=False))
            print(points[-1], file=sys.stderr)
    if plot:
        Path(plot).write_text(drawn(points))
    first, last = (point["seconds"] / point["captions"] for point in (points[0], points[-1]))
    most, least = f"{sizes[-1]:,}", f"{sizes[0]:,}"
    recall, precision = points[-1]["recall"], points[-1]["precision"]
    return [
        claim(
            f"GB of memory at {most} captions, 3 of them DuckDB's limit", points[-1]["peak_gb"], goal=4, at_least=False
        ),
        claim(f"seconds a caption at {most} over those at {least}", last / first, goal=1.15, at_least=False),
        claim(f"recall at {most}, on the built-in oracle's sample", recall, goal=0.995, at_least=True),
        claim(f"precision at {most}, on the built-in oracle's sample", precision, goal=1, at_least=True),
    ]


def drawn(points: list[dict[str, float]]) -> str:
    """CPU seconds and peak memory over captions, as an SVG of two panels."""
    panels = []
    for left, key, unit in ((60, "seconds", "CPU seconds"), (400, "peak_gb", "peak memory, GB")):
        wide, high = max(p["captions"] for p in points), max(p[key] for p in points)
        spots = [(left + 260 * p["captions"] / wide, 220 - 180 * p[key] / high, p) for p in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
        marks = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/><text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="end">{p[key]:.3g}</text>'
            f'<text x="{x:.1f}" y="238" text-anchor="middle">{p["captions"] / 1e6:g}M</text>'
            for x, y, p in spots
        )
        axes = f'<path d="M{left},30V220H{left + 270}" fill="none" stroke="#888"/>'
        panels.append(
            f'{axes}<polyline points="{line}" fill="none" stroke="#36c"/>{marks}<text x="{left}" y="20">{unit}</text>'
        )
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="250" font-family="sans-serif" font-size="11">'
    return f'{head}<rect width="720" height="250" fill="#fff"/>{"".join(panels)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=200_000, help="captions to deduplicate")
    parser.add_argument("--sizes", default="", help="instead: time and memory at these numbers of captions")
    parser.add_argument("--plot", default="", help="SVG file to draw them into")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    if arguments.one:
        keep.DUCKDB_GB = 3
        print(json.dumps(one_size(arguments.one)))
        return
    if arguments.sizes:
        claims = by_size([int(size) for size in arguments.sizes.split(",")], arguments.plot)
    else:
        claims = beside_peers(arguments.captions)
    print(json.dumps(claims, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
