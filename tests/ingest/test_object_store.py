"""Lists and work folders in S3, spoken over HTTP with moto's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import InputError, StorageError
from core.storage import Folder
from ingest import fetch, staging
from ingest.config import IngestConfig
from tests.ingest.server import Server, picture

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(f"pairs-{port}")  # all servers of a process share one store
    yield f"s3://pairs-{port}"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_list_and_a_work_folder_in_s3(bucket: str, server: Server, tmp_path: Path) -> None:
    rows = [{"url": server.url(f"/pic/{i}.jpg"), "caption": f"picture {i}"} for i in range(12)]
    rows.append({"url": server.url("/fault/until_well"), "caption": "later"})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "list.parquet")
    Folder(bucket).write("lists/a.parquet", (tmp_path / "list.parquet").read_bytes())
    config = {
        "urls": f"{bucket}/lists/*.parquet", "work": f"{bucket}/work", "allow_private": True, "workers": 1, "retries": 0,
        "size": 72, "min_side": 16, "timeout": 60.0, "unit_urls": 5,
    }  # fmt: skip
    assert fetch.run(IngestConfig(**config))["outcomes"] == {"ok": 12, "http_5xx": 1}
    server.well.set()
    assert fetch.run(IngestConfig(**config, retry_failed=True))["outcomes"] == {"ok": 13}
    hits = server.hits.total()
    assert fetch.run(IngestConfig(**config))["ok"] == 13
    assert server.hits.total() == hits == 14
    work = Folder(f"{bucket}/work")
    units = [name.rpartition("/")[2].removesuffix(".parquet") for name in work.list(f"{staging.PARTS}/*.parquet")]
    found = [row for unit in units for row in staging.read_part(work, unit).to_pylist()]
    for row in found:
        number = 3 if row["caption"] == "later" else int(row["caption"].split()[1])
        assert work.read_range(row["tar"], row["tar_offset"], row["tar_size"]) == picture(number)


def test_what_is_not_there_is_one_sentence(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found none"):
        fetch.run(IngestConfig(urls=f"{bucket}/lists/*.csv", work=str(tmp_path)))
    (tmp_path / "list.txt").write_text("http://a.test/1\n")
    with pytest.raises(StorageError):
        fetch.run(IngestConfig(urls=str(tmp_path / "list.txt"), work="s3://nobody-has-this/work"))
