"""What kill -9 costs: a download killed at 20 random moments, the downloads it repeats, and whether the result is the same.

Method: 200 hosts on 127.0.0.0/8 answer 200 ms late with one small JPEG each time (bench/web.py). `pairmill ingest` runs as a
program of its own with one worker and 64 downloads at once, first undisturbed. Then the same list is downloaded into
another folder, and the whole process group is killed after a random number of requests (a fixed seed), again and again, and
started once more to the end. What the servers were asked for beyond one request a URL was repeated; divided by the speed
that the latency allows (64 / 0.2 s) it is seconds of downloads. Tars must be equal byte by byte, and rows in all but what
passes (attempts, times). A journal keeps each picture as it comes, so what is repeated is what was under way.

    python -m bench.kill [--kills 20] [--urls 6000] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import claim
from bench.web import SlowHosts
from core.images import encode_jpeg

LATENCY_S = 0.2
AT_ONCE = 64
HOSTS = 200
PASSING = ["attempts", "elapsed_s", "fetched_at"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--urls", type=int, default=6000)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    picture = encode_jpeg(np.full((72, 96, 3), 128, np.uint8), 90)
    with tempfile.TemporaryDirectory() as place, SlowHosts(HOSTS, LATENCY_S, picture) as hosts:
        claims = measure(Path(place), hosts, kills=asked.kills, urls=asked.urls)
    print(json.dumps(claims) if asked.json else json.dumps(claims, indent=1))


def measure(place: Path, hosts: SlowHosts, *, kills: int, urls: int) -> list[dict[str, Any]]:
    """Both runs, and what they say."""
    rows = [f"http://{hosts.addresses[i % HOSTS]}:{hosts.port}/{i}.jpg" for i in range(urls)]
    pq.write_table(pa.table({"url": rows, "caption": [f"picture {i}" for i in range(urls)]}), place / "list.parquet")
    _finish(_start(place, "calm"))
    before, moments, spared = len(hosts.moments), random.Random(20), 0
    for _ in range(kills):
        process = _start(place, "killed")
        # the last kills may meet a run that is done; they are not counted
        if _kill_after(process, hosts, moments.randint(urls // (4 * kills), urls // kills)):
            spared += 1
    _finish(_start(place, "killed"))
    repeated = (len(hosts.moments) - before - urls) / (AT_ONCE / LATENCY_S)
    name = f"seconds of downloads that each of {kills - spared} kills repeats"
    equal = _result(place / "calm") == _result(place / "killed")
    return [
        claim(name, repeated / max(kills - spared, 1), goal=30.0, at_least=False),
        claim("the result after all kills equals the undisturbed one", float(equal), goal=1.0, at_least=True),
    ]


def _start(place: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cli", "ingest", str(place / "list.parquet"), "--work", str(place / name)]
    options = ["--workers", "1", "--allow-private", "--concurrency", str(AT_ONCE), "--json"]
    return subprocess.Popen(
        [*command, *options], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        raise SystemExit(f"ingest ended with code {process.returncode}")


def _kill_after(process: subprocess.Popen[bytes], hosts: SlowHosts, requests: int) -> bool:
    """Kill the process and its workers after so many requests more; True where it had ended before."""
    until = len(hosts.moments) + requests
    while len(hosts.moments) < until:
        if process.poll() is not None:
            return True
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return False


def _result(work: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    parts = work / "ingest/parts"
    tars = {path.name: path.read_bytes() for path in parts.glob("*.tar")}
    tables = [pq.read_table(path).drop_columns(PASSING) for path in sorted(parts.glob("*.parquet"))]
    return tars, pa.concat_tables(tables).to_pylist()


if __name__ == "__main__":
    main()
