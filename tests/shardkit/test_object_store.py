"""Shards in S3, written, verified and repaired over HTTP against moto's server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from core.errors import DataError
from core.storage import Folder
from shardkit.config import ShardConfig, VerifyConfig
from shardkit.pack import run as pack
from shardkit.reader import ShardSet
from shardkit.verify import run as verify
from tests.ingest.test_object_store import bucket  # noqa: F401
from tests.shardkit.parts import contents, small_world

SETTINGS: dict[str, Any] = {"workers": 1, "samples_per_shard": 15, "ranks": 2, "size": (256, 24)}


def stored(folder: Folder, home: str) -> dict[str, bytes]:
    names = [name for name in folder.list(f"{home}/*") if name.rpartition(".")[2] in ("tar", "idx", "parquet", "json")]
    return {name: folder.read(name) for name in names if not name.endswith("done.json")}


def test_shards_in_an_object_store_are_those_of_a_disk(bucket: str, tmp_path: Path) -> None:  # noqa: F811
    local, remote = small_world(tmp_path / "work").write(), Folder(f"{bucket}/work")
    for path in [*local.glob("ingest/parts/*"), *local.glob("dedup/*")]:
        remote.write(str(path.relative_to(local)), path.read_bytes())
    pack(ShardConfig(work=str(local), **SETTINGS))
    summary = pack(ShardConfig(work=remote.url, **SETTINGS))
    assert summary["samples"] == 46
    for home in ("shards", "holdout", "shards-24", "holdout-24"):
        wanted = stored(Folder(local), home)
        assert stored(remote, home) == wanted and len(wanted) >= 5
    assert len(remote.list("shards/ranks/*")) == 2
    assert pack(ShardConfig(work=remote.url, **SETTINGS)) == {
        **summary,
        "seconds": pytest.approx(summary["seconds"], abs=60),
    }
    assert len(ShardSet.open(f"{remote.url}/shards")) == 46
    assert verify(VerifyConfig(work=remote.url, workers=1, deep=True))["bad"] == []
    whole = remote.read("shards/00001.tar")
    remote.write("shards/00001.tar", whole[:5000])
    remote.remove("shards/00000.tar")
    assert verify(VerifyConfig(work=remote.url, workers=1))["exit_code"] == 5
    assert verify(VerifyConfig(work=remote.url, workers=1, repair=True))["bad"] == []
    assert remote.read("shards/00001.tar") == whole


def test_shards_of_a_local_folder_may_come_from_staged_pictures_in_a_store(bucket: str, tmp_path: Path) -> None:  # noqa: F811
    work = small_world(tmp_path / "work").write()
    pack(ShardConfig(work=str(work), **SETTINGS))
    before = contents(work / "shards")
    for path in work.glob("ingest/parts/*.parquet"):
        tar = path.with_suffix(".tar")
        Folder(bucket).write(f"elsewhere/{tar.name}", tar.read_bytes())
        tar.unlink()
        table = pq.read_table(path)
        place = [f"{bucket}/elsewhere/{tar.name}" if found else None for found in table["tar"].to_pylist()]
        column = table.schema.get_field_index("tar")
        pq.write_table(table.set_column(column, table.schema.field("tar"), [place]), path)
    pack(ShardConfig(work=str(work), **SETTINGS, fresh=True))
    after = contents(work / "shards")
    assert after == before
    Folder(bucket).remove("elsewhere/u000001.tar")
    with pytest.raises(DataError, match=r"expected staged images in s3://.*u000001\.tar"):
        pack(ShardConfig(work=str(work), **SETTINGS, fresh=True))
