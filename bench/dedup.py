"""Near-duplicate captions: speed, recall and precision against an exact oracle, and datasketch beside it.

Method: captions of 5 to 20 words drawn from a Zipf-like vocabulary of 50,000; 30 % are earlier captions with one or two
words changed, dropped or added. `pairmill dedup --captions` runs on them in one process and one thread, in CPU seconds from the
file to the decisions, imports left out. The oracle joins all captions through their rare words (prefix filter) and
compares word sets. datasketch (MinHash.bulk, 128 permutations, MinHashLSH at 0.8) gets a tenth of the captions and only
does what it does: signatures, inserts, queries; its tables are then smaller than ours, in its favour.

    OMP_NUM_THREADS=1 python -m bench.dedup [--captions 200000] [--json]

Pin it to one core (taskset) on a busy machine. 200,000 captions take about a minute and 1.5 GB, most of it the oracle.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import claim
from dedup.clusters import components
from dedup.config import DedupConfig
from dedup.keep import run

THRESHOLD = 0.8
VOCABULARY = 50_000


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


def ours(folder: Path, captions: list[str]) -> tuple[float, float, float, float]:
    """(captions per CPU second, times faster to decide anew, recall, precision)."""
    pq.write_table(pa.table({"caption": captions}), folder / "captions.parquet")
    pq.write_table(pa.table({"caption": captions[:2000]}), folder / "few.parquet")
    _timed(DedupConfig(work=str(folder / "few"), captions=str(folder / "few.parquet"), workers=1))  # imports
    settings: dict[str, Any] = {
        "work": str(folder / "work"),
        "captions": str(folder / "captions.parquet"),
        "workers": 1,
    }
    seconds = _timed(DedupConfig(**settings, threshold=THRESHOLD, method="components"))
    truth = oracle(captions)
    table = pq.read_table(folder / "work" / "dedup" / "decisions.parquet")
    kept = table["kept"].to_numpy()
    survivor = np.array([int(s) if s else i for i, s in enumerate(table["survivor"].to_pylist())])
    rows = np.arange(len(captions))
    right = ~kept & (truth[survivor] == truth)
    again = _timed(DedupConfig(**settings, threshold=0.9))
    removable = len(rows) - len(np.unique(truth))
    return len(captions) / seconds, seconds / again, float(right.sum() / removable), float(right.sum() / (~kept).sum())


def _timed(config: DedupConfig) -> float:
    start = time.process_time()
    run(config)
    return time.process_time() - start


def peer(captions: list[str]) -> float:
    """Captions per CPU second of datasketch."""
    from datasketch import MinHash, MinHashLSH

    start = time.process_time()
    lsh = MinHashLSH(threshold=THRESHOLD, num_perm=128)
    documents: Iterable[list[bytes]] = [[w.encode() for w in set(c.split())] for c in captions]
    for i, signature in enumerate(MinHash.bulk(documents, num_perm=128)):
        lsh.query(signature)
        lsh.insert(i, signature)
    return len(captions) / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=200_000, help="captions to deduplicate")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    captions = planted(arguments.captions)
    with tempfile.TemporaryDirectory() as folder:
        rate, again, recall, precision = ours(Path(folder), captions)
    theirs = peer(captions[: max(len(captions) // 10, 1000)])
    claims = [
        claim("captions a second on one core, file to decisions", rate, goal=150_000, at_least=True, peer=theirs),
        claim("times as fast as datasketch", rate / theirs, goal=12, at_least=True),
        claim("recall of the oracle's removals", recall, goal=0.995, at_least=True),
        claim("precision of the removals", precision, goal=1.0, at_least=True),
        claim("times as fast to decide anew at 0.9", again, goal=20, at_least=True),
    ]
    print(json.dumps(claims, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
