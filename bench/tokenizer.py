"""CLIP's tokens: the same as open_clip's on every text of a file, and how much faster.

Method: open_clip's `SimpleTokenizer` encodes all texts in a side environment (bench/peers.py), one after another as its
loader does, and its rows are compared with ours, of both back-ends. Ours encode batches of 256, as the loader does.
Rates are texts a CPU second of one thread. Rows are compared whole: 77 numbers a text.

    python -m bench.tokenizer TEXTS.tsv.gz [--every 1] [--json]

The first column counts, and the first line is a heading. 400,000 texts take 90 CPU seconds, most of it open_clip's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import claim
from bench.peers import PLACE, peer_python

_PEER = """
import json, sys, time
import numpy as np
from open_clip.tokenizer import SimpleTokenizer
tokenizer, texts = SimpleTokenizer(), json.load(open(sys.argv[1]))
rows, start = np.zeros((len(texts), 77), np.int32), time.process_time()
for i, text in enumerate(texts):
    rows[i] = tokenizer(text)[0].numpy()
print(time.process_time() - start)
np.save(sys.argv[2], rows)
"""


def read_texts(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t")[0] for line in file][1:]


def ours(backend: str, texts: list[str]) -> tuple[np.ndarray[Any, Any], float]:
    """Rows of all texts, and texts a CPU second."""
    from train.tokenizer import Tokenizer

    tokenizer = Tokenizer(backend)
    start = time.process_time()
    rows = np.concatenate([tokenizer.encode(texts[i : i + 256]) for i in range(0, len(texts), 256)])
    return rows, len(texts) / (time.process_time() - start)


def open_clips(texts: list[str]) -> tuple[np.ndarray[Any, Any], float]:
    with tempfile.TemporaryDirectory(prefix="pairmill-tokens-") as folder:
        given, taken = Path(folder) / "texts.json", Path(folder) / "rows.npy"
        given.write_text(json.dumps(texts))
        command = [str(peer_python("open_clip")), "-c", _PEER, str(given), str(taken)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return np.load(taken), len(texts) / float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take every n-th text")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = read_texts(args.texts)[:: args.every]
    wanted, peer = open_clips(texts)
    # behind our own packages, so that only the vocabulary is found there
    sys.path.append(str(next((PLACE / "open_clip" / "lib").glob("python*")) / "site-packages"))
    claims = []
    for backend, goal in (("instant", 10), ("tokenizers", 3)):
        rows, rate = ours(backend, texts)
        different = np.flatnonzero((rows != wanted).any(axis=1))
        for i in different[:20]:
            print(f"{backend}: {texts[i]!r}", file=sys.stderr)
        claims += [
            claim(f"{backend}: texts of {len(texts)} with other tokens", len(different), goal=0, at_least=False),
            claim(f"{backend}: texts a CPU second, {goal} times", rate, goal=goal * peer, at_least=True, peer=peer),
        ]
    print(json.dumps(claims, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
