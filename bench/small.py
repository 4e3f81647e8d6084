"""A small list of pictures on a real web server, the data stages run over it, and their results in a form that compares.

For tests and benches of what must not change any byte: engines, parts, object stores, faults.
"""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.catalog import PAIRS
from core.images import encode_jpeg
from core.storage import Folder

ROOT = Path(__file__).parent.parent
PASSING = ("attempts", "elapsed_s", "fetched_at")  # columns of a download that another one cannot repeat
STAGES = ("ingest", "dedup", "shard")


class SmallList:
    """`pictures` pictures with a caption each, a fifth of the captions near-duplicates, served on loopback, `latency` seconds
    late."""

    latency = 0.0  # may be changed while pictures are served

    def __init__(self, home: Path, pictures: int = 60, address: str = "127.0.0.1") -> None:
        self.home, self.pictures = home, pictures
        self.bodies = [_picture(number) for number in range(pictures)]
        self._server = QuietServer((address, 0), functools.partial(_Late, self))
        self.list = home / "list.parquet"
        self.base = f"http://{address}:{self._server.server_port}"

    def __enter__(self) -> SmallList:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        table = {
            "url": [f"{self.base}/{number}.jpg" for number in range(self.pictures)],
            "caption": [caption(number) for number in range(self.pictures)],
        }
        self.home.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), self.list)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def settings(self, stage: str, work: str) -> dict[str, Any]:
        """Of one stage: a dozen units of ingest and dedup, two dozen shards, fifteen checkpoints. `score` reads weights that the
        caller wrote into `home`."""
        if stage == "ingest":
            return {
                "work": work, "urls": str(self.list), "allow_private": True, "size": 64, "concurrency": 4,
                "per_host": 64, "unit_urls": max(1, self.pictures // 12),
            }  # fmt: skip
        if stage == "shard":
            return {"work": work, "size": (48,), "samples_per_shard": max(1, self.pictures // 24)}
        if stage == "train":
            return {
                "work": work, "model": "test-32", "batch_size": 12, "steps": 30, "precision": "fp32", "device": "cpu",
                "threads": 1, "checkpoint_every": 2, "keep": 30,
            }  # fmt: skip
        if stage == "score":
            return {"work": work, "checkpoint": str(self.home / "weights"), "precision": "fp32", "device": "cpu"}
        return {"work": work, "threshold": 0.7} if stage == "dedup match" else {"work": work}

    def command(self, stage: str, work: str, *more: str, python: str = sys.executable) -> list[str]:
        """The stage as a command line."""
        settings = dict(self.settings(stage, work))
        words = [str(settings.pop("urls"))] if stage == "ingest" else []
        for name, value in settings.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{name}")
            else:
                words += [flag, str(value[0] if isinstance(value, tuple) else value)]
        return [python, "-m", "cli", stage, *words, "--json", *more]


def run(command: list[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a command line to its end; its summary.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command, cwd=ROOT, env=one_thread(environment), capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def start(command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command line in a process group of its own; what it says is kept."""
    return subprocess.Popen(
        command, cwd=ROOT, env=one_thread(environment), start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def one_thread(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which arithmetic libraries keep to one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(more or {})}


def results(work: str) -> dict[str, Any]:
    """Everything that the stages published in `work`, by name: bytes, and for downloads the rows without what passes."""
    folder, found = Folder(work), dict[str, Any]()
    for name in folder.list("ingest/parts/*"):
        data = folder.read(name)
        found[name] = data if name.endswith(".tar") else _rows(data)
    for name in folder.list("scores/*.parquet"):
        found[name] = _rows(
            folder.read(name)
        )  # marked with the downloads that they were made from, as the list of pairs is
    for name in folder.list("dedup/*.parquet"):
        data = folder.read(name)
        found[name] = _rows(data) if name == PAIRS else data
    for name in folder.list("shards/*"):
        if name.endswith((".tar", ".idx", ".parquet", ".json")) and not name.endswith("done.json"):
            found[name] = folder.read(name)
    for name in folder.list("runs/main/checkpoints/*"):
        found[name] = folder.read(f"{name}/model.safetensors")
    return found


def _rows(part: bytes) -> list[dict[str, Any]]:
    table = pq.read_table(io.BytesIO(part))
    return table.drop_columns([name for name in PASSING if name in table.column_names]).to_pylist()


def caption(number: int) -> str:
    """Every fifth says nearly what the one before it says."""
    about = number - 1 if number % 5 == 4 else number
    rng = np.random.default_rng(about)
    words = " ".join("".join(map(chr, rng.integers(97, 123, 6))) for _ in range(9))
    return f"a picture of {words}" + ("!" if about != number else "")


@functools.cache
def _picture(number: int) -> bytes:
    coarse = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return encode_jpeg(np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1)), 90)


class QuietServer(http.server.ThreadingHTTPServer):
    """Says nothing of clients that were killed."""

    def handle_error(self, *_: Any) -> None:
        pass


class _Late(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, small: SmallList, *more: Any) -> None:
        self._small = small
        super().__init__(*more)

    def do_GET(self) -> None:
        time.sleep(self._small.latency)
        name = self.path.strip("/").removesuffix(".jpg")
        known = name.isdigit() and int(name) < len(self._small.bodies)
        body = self._small.bodies[int(name)] if known else b""
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "image/jpeg")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
