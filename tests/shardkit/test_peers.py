"""Peers of other versions read our shards unchanged, each with its own packages: `make peers` sets them up."""

from __future__ import annotations

import hashlib
import json
import subprocess

import pytest

from bench.peers import ready
from shardkit.config import ShardConfig
from shardkit.pack import run
from tests.shardkit.parts import World, small_world

_WEBDATASET = """
import hashlib, json, sys
import webdataset
dataset = webdataset.WebDataset(sys.argv[1], shardshuffle=False)
for sample in dataset:
    notes = json.loads(sample["json"])
    print(json.dumps([sample["__key__"], hashlib.sha256(sample["jpg"]).hexdigest(), sample["txt"].decode(), notes["uid"]]))
"""

# open_clip_train's own loader: the picture comes back as its pixels' digest, the caption as the tokenizer was given it.
_OPEN_CLIP = """
import argparse, hashlib, json, sys
import numpy, torch
from open_clip_train.data import get_wds_dataset
args = argparse.Namespace(
    train_data=sys.argv[1], val_data=sys.argv[1], train_num_samples=None, val_num_samples=None, dataset_resampled=False,
    train_data_upsampling_factors=None, seed=0, workers=0, batch_size=4, world_size=1)
digest = lambda image: hashlib.sha256(numpy.asarray(image).tobytes()).hexdigest()
words = lambda text: [text]
for is_train in (False, True):
    data = get_wds_dataset(args, lambda image: [int(b) for b in bytes.fromhex(digest(image))], is_train, tokenizer=words)
    print(json.dumps({"samples": data.dataloader.num_samples if is_train else None}))
    for images, texts in data.dataloader:
        for image, text in zip(torch.as_tensor(numpy.array(images)).tolist(), texts):
            print(json.dumps([bytes(image).hex(), text]))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = small_world(tmp_path_factory.mktemp("peers"))
    run(ShardConfig(work=str(world.write()), workers=1, samples_per_shard=15))
    return world


def peer(name: str, program: str, shards: str) -> list[str]:
    python = ready(name)
    if python is None:
        pytest.skip(f"the peer {name} is not there: make peers")
    done = subprocess.run([python, "-c", program, shards], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def samples(world: World) -> list[tuple[str, str, str, str]]:
    """(key, sha256 of the picture, caption, uid), in the order of the shards."""
    import pyarrow.parquet as pq

    rows = pq.read_table(world.work / "shards/samples.parquet").to_pylist()
    picture = [hashlib.sha256(world.pictures[row["url"]]).hexdigest() for row in rows]
    return [(row["key"], digest, row["caption"], row["uid"]) for row, digest in zip(rows, picture, strict=True)]


def pattern(world: World) -> str:
    return f"{world.work}/shards/{{00000..{len(list(world.work.glob('shards/*.tar'))) - 1:05d}}}.tar"


@pytest.mark.parametrize("version", ["webdataset0", "webdataset1"])
def test_webdataset_of_both_lines_reads_every_sample(world: World, version: str) -> None:
    found = [tuple(json.loads(line)) for line in peer(version, _WEBDATASET, pattern(world))]
    assert found == samples(world)


def test_open_clip_trains_on_every_sample(world: World) -> None:
    import simplejpeg

    wanted = sorted(
        (hashlib.sha256(simplejpeg.decode_jpeg(body, "RGB").tobytes()).hexdigest(), caption)
        for body, caption in ((world.pictures[url_of(world, uid)], caption) for _, _, caption, uid in samples(world))
    )
    found = [json.loads(line) for line in peer("open_clip", _OPEN_CLIP, pattern(world))]
    start = next(i for i, line in enumerate(found) if isinstance(line, dict) and line["samples"] is not None)
    seen, trained = found[1:start], found[start + 1 :]
    assert found[start]["samples"] == 48  # 46, of sizes.json, filled up to whole batches of 4
    texts = {text for _, text in trained}
    assert texts <= {text for _, text in wanted} and len(texts) >= 44 and len(trained) == 48  # whole batches only
    # simplejpeg and Pillow bring the same libjpeg-turbo, so even the pixels are equal
    assert sorted(map(tuple, seen)) == wanted


def url_of(world: World, uid: str) -> str:
    return str(next(pair["url"] for pair in world.pairs if pair["uid"] == uid))
