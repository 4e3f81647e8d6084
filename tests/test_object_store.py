"""The data stages with everything in S3, over HTTP, against a store that is slow, breaks connections and forgets answers."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.small import STAGES, SmallList, results, run, start
from bench.store import Store
from core.errors import StorageError
from core.storage import Folder
from core.work import SETTINGS
from ingest.config import IngestConfig
from ingest.fetch import run as ingest

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    found = Store()
    with found.serving("mill") as found.bucket:
        yield found


@pytest.fixture
def bucket(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")  # of botocore, for each of s3fs's five
    store.fault = lambda method, path: ""
    store.seen.clear()
    store.failed.clear()
    s3fs.S3FileSystem.clear_instance_cache()
    yield store.bucket
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def local(whole: Path) -> dict[str, Any]:
    return results(str(whole))


def test_every_stage_in_a_store_that_fails_one_request_in_twenty(
    small: SmallList, local: dict[str, Any], store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(8)
    Folder(bucket).write("lists/a.parquet", small.list.read_bytes())
    store.fault = lambda method, path: "" if chance.random() > 0.05 else chance.choice(("slow", "cut", "late"))
    monkeypatch.setattr(small, "list", f"{bucket}/lists/*.parquet")
    for stage in STAGES:
        environment = store.environment() | {"AWS_MAX_ATTEMPTS": "5"}  # its default
        run(small.command(stage, f"{bucket}/all", "--workers", "1"), environment)
    store.fault = lambda method, path: ""
    assert results(f"{bucket}/all") == local
    assert min(store.failed[kind] for kind in ("slow", "cut", "late")) > 0, store.failed
    saved = Folder(f"{bucket}/all").read(SETTINGS)
    assert b"test-secret" not in saved


def test_parts_in_a_store_wait_for_part_0(small: SmallList, local: dict[str, Any], store: Store, bucket: str) -> None:
    for stage in STAGES:
        running = []
        for part in ("1/2", "0/2"):
            command = small.command(stage, f"{bucket}/parts", "--workers", "1", "--part", part)
            running.append(start(command, store.environment()))
        said = [process.communicate(timeout=200) for process in running]
        assert [process.returncode for process in running] == [0, 0], said
    assert results(f"{bucket}/parts") == local


def test_a_store_that_says_slow_down_is_asked_again(store: Store, bucket: str) -> None:
    asked = itertools.count(1)
    store.fault = lambda method, path: "slow" if next(asked) <= 5 else ""
    Folder(bucket).write("slow/x", b"in the end")
    assert store.failed["slow"] == 5, "more than the two attempts that botocore was allowed"
    assert Folder(bucket).read("slow/x") == b"in the end"


def test_an_upload_that_breaks_leaves_the_old_object(store: Store, bucket: str) -> None:
    folder = Folder(f"{bucket}/broken")
    folder.write("x", b"old")
    store.fault = lambda method, path: "cut" if method in ("PUT", "POST") else ""
    with pytest.raises(StorageError, match="cannot write s3://"):
        folder.write("x", b"new" * 100_000)
    store.fault = lambda method, path: ""
    assert folder.read("x") == b"old"
    assert folder.list("*") == ["x"]


def test_an_upload_in_pieces_is_visible_only_whole(store: Store, bucket: str, tmp_path: Path) -> None:
    folder = Folder(f"{bucket}/large")
    body = random.Random(3).randbytes(1 << 20) * 120  # above what goes in one PUT
    store.fault = lambda method, path: "cut" if "partNumber=2" in path else ""
    with pytest.raises(StorageError, match="cannot write s3://"):
        folder.write("x", body)
    assert folder.list("*") == [] and not folder.exists("x")
    store.fault = lambda method, path: ""
    folder.write("x", body)
    assert store.seen["POST"] >= 2 and folder.read("x") == body


def test_removing_takes_a_file_a_folder_or_nothing_and_no_neighbour(store: Store, bucket: str) -> None:
    folder = Folder(f"{bucket}/gone")
    for name in ("one", "one-more", "d/one", "d/two/three", "d-more/one"):
        folder.write(name, b"x")
    store.seen.clear()
    folder.remove("one")
    assert store.seen == {"HEAD": 1, "DELETE": 1}, "a file is not looked for in a listing"
    for name in ("d", "nothing", "one", "d"):
        folder.remove(name)
    assert folder.list("*") == ["d-more", "one-more"] and folder.list("d-more/*") == ["d-more/one"]


def test_listings_do_not_grow_with_the_units(store: Store, bucket: str, tmp_path: Path) -> None:
    """Each unit is asked for by name, once whether it is there; all parts are listed as often for some 20 units as for 4."""
    listings, units = [], []
    for pictures in (4, 32):  # whose URLs fall into units by their hash, several into some
        with SmallList(tmp_path / str(pictures), pictures) as served:
            settings = {**served.settings("ingest", f"{bucket}/n{pictures}"), "unit_urls": 1, "workers": 1}
            whole = re.compile(rf"prefix=n{pictures}%2Fingest%2Fparts%2F&")
            paths, heads = list[str](), list[str]()
            store.fault = lambda method, path, to=(paths, heads): to[method == "HEAD"].append(path) or ""
            units.append(ingest(IngestConfig(**settings))["units"])
            listings.append(len([path for path in paths if "list-type" in path and whole.search(path)]))
            assert len([path for path in heads if "/ingest/parts/u" in path]) == units[-1]
    assert units[1] > 2 * units[0]
    assert listings[0] == listings[1] > 0, listings
