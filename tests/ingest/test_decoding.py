"""A codec that crashes or never ends costs its own row and nothing else."""

from __future__ import annotations

import functools
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.plan import Unit
from ingest import decoding
from tests.ingest.deadly import CRASHES, NEVER_ENDS
from tests.ingest.server import picture

ROOT = Path(__file__).parent.parent.parent


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    """Twelve pictures as files, three of them deadly, and the base URL under which they are served."""
    folder = tmp_path / "files"
    folder.mkdir()
    deadly = {3: CRASHES, 7: NEVER_ENDS, 8: CRASHES}
    for i in range(12):
        (folder / f"{i}.jpg").write_bytes(picture(i) + deadly.get(i, b""))
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("workers", [1, 2])
def test_deadly_pictures_cost_their_rows_only(tmp_path: Path, files: str, workers: int) -> None:
    urls = [f"{files}/{i}.jpg" for i in range(12)]
    pq.write_table(pa.table({"url": urls, "caption": [f"picture {i}" for i in range(12)]}), tmp_path / "list.parquet")
    settings = {
        "urls": str(tmp_path / "list.parquet"), "work": str(tmp_path / "work"), "workers": workers, "unit_urls": 6,
        "allow_private": True, "lang": False,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.ingest.run_deadly", json.dumps(settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"ok": 9, "corrupt": 3}
    parts = sorted((tmp_path / "work/ingest/parts").glob("*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    bad = {row["url"].rpartition("/")[2]: row for row in rows if row["outcome"] != "ok"}
    assert sorted(bad) == ["3.jpg", "7.jpg", "8.jpg"]
    for name, row in bad.items():
        assert row["detail"] == "its decoder crashed or did not end" and row["tar"] is None
        assert row["bytes"] == (tmp_path / "files" / name).stat().st_size


def test_one_death_condemns_nobody(tmp_path: Path) -> None:
    """Whoever runs out of memory kills workers at any moment."""
    unit = Unit("u000000", 0, 2)
    with decoding.Watch(tmp_path, unit.id) as watch, watch.decoding("a"):
        assert decoding.survive(unit, place=tmp_path)
        assert decoding.blame(tmp_path, unit.id) == decoding.Blame([], alone=True)


def test_with_two_suspects_none_is_condemned(tmp_path: Path) -> None:
    unit = Unit("u000000", 0, 2)
    watch = decoding.Watch(tmp_path, unit.id)
    both = threading.Barrier(2)

    def other() -> None:
        with watch.decoding("b"):
            both.wait()
            both.wait()

    with watch:
        thread = threading.Thread(target=other)
        with watch.decoding("a"):
            thread.start()
            both.wait()
            for _ in range(2):
                assert decoding.survive(unit, place=tmp_path)
                assert decoding.blame(tmp_path, unit.id) == decoding.Blame([], alone=True)
            both.wait()
            thread.join()
            assert decoding.survive(unit, place=tmp_path)
            assert decoding.blame(tmp_path, unit.id) == decoding.Blame([decoding.key_of("a")], alone=True)


def test_a_worker_killed_between_pictures_is_followed_by_another_a_few_times(tmp_path: Path) -> None:
    unit = Unit("u000000", 0, 2)
    assert [decoding.survive(unit, place=tmp_path) for _ in range(5)] == [True, True, True, False, False]
    assert decoding.blame(tmp_path, unit.id).keys == [] and not decoding.blame(tmp_path, unit.id).alone
