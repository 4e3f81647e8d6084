"""The readers of others take our shards as they are: webdataset, and DALI with our index."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from shardkit.config import ShardConfig
from shardkit.pack import run
from tests.shardkit.parts import World, small_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = small_world(tmp_path_factory.mktemp("elsewhere"))
    run(ShardConfig(work=str(world.write()), workers=1, samples_per_shard=15))
    return world


def rows(work: Path) -> list[dict[str, Any]]:
    return pq.read_table(work / "shards/samples.parquet").to_pylist()


# webdataset leaves the files it has read for the garbage collector to close
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_webdataset_reads_the_same_bytes_and_captions(world: World) -> None:
    webdataset = pytest.importorskip("webdataset")
    wanted = rows(world.work)
    last = wanted[-1]["shard"].removesuffix(".tar")
    dataset = webdataset.WebDataset(f"{world.work}/shards/{{00000..{last}}}.tar", shardshuffle=False, empty_check=False)
    found = list(dataset)
    del dataset
    gc.collect()
    assert [sample["__key__"] for sample in found] == [row["key"] for row in wanted]
    for sample, row in zip(found, wanted, strict=True):
        assert sample["jpg"] == world.pictures[row["url"]]
        assert sample["txt"].decode() == row["captions"][0]
        assert json.loads(sample["json"])["captions"] == row["captions"]


def test_dali_reads_the_same_bytes_through_our_index(world: World) -> None:
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, pipeline_def

    wanted = rows(world.work)
    paths = sorted(str(p) for p in (world.work / "shards").glob("*.tar"))

    @pipeline_def(batch_size=len(wanted), num_threads=1, device_id=None)
    def graph() -> Any:
        images, texts = fn.readers.webdataset(
            paths=paths, index_paths=[p.replace(".tar", ".idx") for p in paths], ext=["jpg", "txt"], name="shards"
        )
        return images, texts

    pipeline = graph()
    pipeline.build()
    assert pipeline.epoch_size("shards") == len(wanted)
    images, texts = pipeline.run()
    for i, row in enumerate(wanted):
        assert images.at(i).tobytes() == world.pictures[row["url"]]
        assert texts.at(i).tobytes().decode() == row["captions"][0]
