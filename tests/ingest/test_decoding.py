"""A codec that crashes or never ends costs its own row and nothing else."""

from __future__ import annotations

import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.plan import Unit
from ingest import decoding
from tests.ingest.deadly import CRASHES, NEVER_ENDS, STOP, WAITS
from tests.ingest.server import picture

ROOT = Path(__file__).parent.parent.parent


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    """The base URL under which `tmp_path / "files"` is served."""
    folder = tmp_path / "files"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def command(tmp_path: Path, files: str, marks: dict[int, bytes], work: str, workers: int) -> list[str]:
    """A run on twelve pictures, of which some carry a mark."""
    for i in range(12):
        (tmp_path / "files" / f"{i}.jpg").write_bytes(picture(i) + marks.get(i, b""))
    urls = [f"{files}/{i}.jpg" for i in range(12)]
    pq.write_table(pa.table({"url": urls, "caption": [f"picture {i}" for i in range(12)]}), tmp_path / "list.parquet")
    settings = {
        "urls": str(tmp_path / "list.parquet"), "work": str(tmp_path / work), "workers": workers, "unit_urls": 6,
        "allow_private": True,
    }  # fmt: skip
    return [sys.executable, "-m", "tests.ingest.run_deadly", json.dumps(settings)]


def rows(work: Path) -> dict[str, dict[str, Any]]:
    """Rows by the name of their file, each with its stored bytes, and without what another run may know differently."""
    found = {}
    for part in sorted((work / "ingest/parts").glob("*.parquet")):
        for row in pq.read_table(part).drop_columns(["attempts", "elapsed_s", "fetched_at"]).to_pylist():
            tar, offset, size = (row.pop(name) for name in ("tar", "tar_offset", "tar_size"))
            data = None if tar is None else (work / tar).read_bytes()[offset : offset + size]
            found[row["url"].rpartition("/")[2]] = {**row, "data": data}
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_deadly_pictures_cost_their_rows_only(tmp_path: Path, files: str, workers: int) -> None:
    marks = {3: CRASHES, 7: NEVER_ENDS, 8: CRASHES}
    run = command(tmp_path, files, marks, "work", workers)
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"ok": 9, "corrupt": 3}
    bad = {name: row for name, row in rows(tmp_path / "work").items() if row["outcome"] != "ok"}
    assert sorted(bad) == ["3.jpg", "7.jpg", "8.jpg"]
    for name, row in bad.items():
        assert row["detail"] == "its decoder crashed or did not end" and row["data"] is None
        assert row["bytes"] == (tmp_path / "files" / name).stat().st_size


@pytest.mark.parametrize("kills", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_while_it_decodes_costs_one_row_at_most(
    tmp_path: Path, files: str, workers: int, kills: int
) -> None:
    """kill -9 of the very process, in the middle of a picture: once, it costs nothing; twice, this one picture."""
    stop = tmp_path / "stop"
    stop.mkdir()
    environment = {**os.environ, STOP: str(stop)}

    def start(work: str) -> subprocess.Popen[str]:
        run = command(tmp_path, files, {4: WAITS}, work, workers)
        return subprocess.Popen(
            run, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    process = start("work")
    killed: set[str] = set()
    while len(killed) < kills:
        assert process.poll() is None, process.communicate()
        for pid in {path.name for path in stop.iterdir()} - killed:
            os.kill(int(pid), signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.005)
    (stop / "go").touch()
    output, complaints = process.communicate(timeout=200)
    assert process.returncode == 0, complaints
    assert complaints.count("a worker died while decoding") == kills
    calm = start("calm")
    assert calm.communicate(timeout=200)[0] and calm.returncode == 0
    found, undisturbed = rows(tmp_path / "work"), rows(tmp_path / "calm")
    assert {row["outcome"] for row in undisturbed.values()} == {"ok"}
    if kills == 2:
        lost = found.pop("4.jpg")
        assert (lost["outcome"], lost["detail"]) == ("corrupt", "its decoder crashed or did not end")
        assert lost["sha256"] == undisturbed.pop("4.jpg")["sha256"]
    assert json.loads(output)["ok"] == 13 - kills
    assert found == undisturbed


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
