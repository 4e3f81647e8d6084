"""open_clip's own training loader over webdataset shards; run by `bench.loader` with the Python of a side environment.

    python bench/loader_peer.py SHARDS WEBDATASET_PACKAGES SIZE BATCH WORKERS WARM IMAGES

Prints {"images", "seconds", "cpu"}: CPU seconds of this process and its workers, while IMAGES were taken after WARM.
"""

import importlib.machinery
import json
import os
import sys
import time
import types
from pathlib import Path


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of the processes, from /proc (proc(5), fields 14 and 15)."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    shards, packages, size, batch, workers, warm, images = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:8])
    sys.path.append(packages)
    pandas = sys.modules["pandas"] = types.ModuleType("pandas")  # imported for csv files only, which nobody reads here
    pandas.__spec__ = importlib.machinery.ModuleSpec("pandas", None)
    import open_clip  # type: ignore[import-not-found]
    import torch
    from open_clip_train.data import get_wds_dataset  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    args = types.SimpleNamespace(
        train_data=shards, train_num_samples=1_000_000, dataset_resampled=True, train_data_upsampling_factors=None,
        seed=0, batch_size=batch, workers=workers, world_size=1,
    )  # fmt: skip
    transform = open_clip.image_transform(size, is_train=True)
    info = get_wds_dataset(args, transform, is_train=True, tokenizer=open_clip.get_tokenizer("ViT-B-32"))
    batches = iter(info.dataloader)
    for _ in range(-(-warm // batch)):
        next(batches)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    pids = [os.getpid(), *map(int, children)]
    cpu, start, taken = cpu_seconds(pids), time.perf_counter(), 0
    while taken < images:
        pixels, tokens = next(batches)
        assert pixels.shape[1:] == (3, size, size) and tokens.shape[1] == 77
        taken += len(pixels)
    print(json.dumps({"images": taken, "seconds": time.perf_counter() - start, "cpu": cpu_seconds(pids) - cpu}))
    os._exit(0)  # workers that run ahead of nobody need no farewell


if __name__ == "__main__":
    main()
