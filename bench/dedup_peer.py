"""What datasketch and rensa do with a table of captions; run by bench.dedup in the peers' own environment.

    python dedup_peer.py PACKAGE CAPTIONS.parquet THRESHOLD     prints {"rate": captions per CPU second, "removed": [rows]}

Each is used as its documentation shows: datasketch's MinHash.bulk with 128 permutations into MinHashLSH, rensa's
RMinHashDeduplicator with its own settings, on sets of words. A row is removed where an earlier one is reported for it.
"""

import json
import sys
import time

import pyarrow.parquet as pq


def datasketch(captions: list[str], threshold: float) -> list[int]:
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(threshold=threshold, num_perm=128)
    documents = [[word.encode() for word in set(caption.split())] for caption in captions]
    removed = []
    for row, signature in enumerate(MinHash.bulk(documents, num_perm=128)):
        if lsh.query(signature):
            removed.append(row)
        lsh.insert(row, signature)
    return removed


def rensa(captions: list[str], threshold: float) -> list[int]:
    from rensa import RMinHashDeduplicator

    found = RMinHashDeduplicator(threshold, 128, True)
    new = found.add_pairs((str(row), caption.split()) for row, caption in enumerate(captions))
    return [row for row, is_new in enumerate(new) if not is_new]


def main() -> None:
    package, path, threshold = sys.argv[1:]
    captions = pq.read_table(path)["caption"].to_pylist()
    run = {"datasketch": datasketch, "rensa": rensa}[package]
    run(captions[:100], float(threshold))  # imports
    start = time.process_time()
    removed = run(captions, float(threshold))
    print(json.dumps({"rate": len(captions) / (time.process_time() - start), "removed": removed}))


if __name__ == "__main__":
    main()
