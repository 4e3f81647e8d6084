"""The peers' two steps between download and training; each runs in the environment of its packages (bench/peers.py).

    python chain_peer.py dedup SHARDS KEPT.txt      datasketch: keys of the samples that stay, of img2dataset's tables
    python chain_peer.py reshard SHARDS KEPT.txt OUT SAMPLES   webdataset: those samples into new shards

datasketch is used as its documentation shows: 128 permutations of word sets, MinHashLSH at Jaccard 0.8, a caption goes
where an earlier one is reported for it.
"""

import sys
from pathlib import Path

THRESHOLD = 0.8


def dedup(shards: Path, kept: Path) -> None:
    import pyarrow.parquet as pq
    from dedup_peer import datasketch  # type: ignore[import-not-found]

    keys, captions = [], []
    for path in sorted(shards.glob("*.parquet")):
        table = pq.read_table(path, columns=["key", "caption"], filters=[("status", "=", "success")])
        keys += table["key"].to_pylist()
        captions += table["caption"].to_pylist()
    removed = set(datasketch(captions, THRESHOLD))
    kept.write_text("".join(f"{key}\n" for row, key in enumerate(keys) if row not in removed))


def reshard(shards: Path, kept: Path, out: Path, samples: int) -> None:
    import webdataset  # type: ignore[import-not-found]

    keys = set(kept.read_text().split())
    out.mkdir(parents=True)
    with webdataset.ShardWriter(f"{out}/%05d.tar", maxcount=samples) as sink:
        for sample in webdataset.WebDataset([str(path) for path in sorted(shards.glob("*.tar"))], shardshuffle=False):
            if sample["__key__"] in keys:
                sink.write({name: sample[name] for name in ("__key__", "jpg", "txt", "json")})


if __name__ == "__main__":
    step, *rest = sys.argv[1:]
    if step == "dedup":
        dedup(Path(rest[0]), Path(rest[1]))
    else:
        reshard(Path(rest[0]), Path(rest[1]), Path(rest[2]), int(rest[3]))
