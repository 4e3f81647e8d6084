"""Runs the data stages on a real Ray cluster of several nodes on this machine, killing a node in the middle of each.

Run by tests/test_ray.py and bench/faults.py with the Python of `.peers/ray`; prints one JSON object a stage: the summary, the
units there are, and of a killed node the units there were, those written again, and the seconds until the next one.

    python -m bench.ray_nodes SETTINGS.json NODES kill|calm
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from cli import STAGES
from core.config import build

PUBLISHED = {
    "ingest": "ingest/parts/*.parquet", "score": "scores/*.parquet", "dedup": "dedup/signatures/*.parquet",
    "shard": "shards/parts/*.parquet",
}  # fmt: skip


def main(settings: dict[str, dict[str, Any]], nodes: int, kill: bool) -> None:
    if not nodes:
        for stage, values in settings.items():
            _run(stage, {**values, "workers": 1})
        return
    head = {"num_cpus": 0, "include_dashboard": False}  # all work is for nodes that may die
    cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    workers = [_node(cluster) for _ in range(nodes)]
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    for stage, values in settings.items():
        found: dict[str, Any] = {}
        killer = threading.Thread(target=_kill_in_the_middle, args=(cluster, workers, stage, values["work"], found))
        if kill:
            killer.start()
        found["summary"] = _run(stage, {**values, "engine": "ray"})
        if kill:
            killer.join()
            workers.append(_node(cluster))  # Ray starts nodes from the main thread only
        after = _published(stage, values["work"])
        before = found.pop("before", {})
        found |= {"units": len(after), "lost": sum(after.get(name) != when for name, when in before.items())}
        print(json.dumps({stage: found}, default=str), flush=True)
    ray.shutdown()
    cluster.shutdown()


def _run(stage: str, values: dict[str, Any]) -> dict[str, Any]:
    config, module = STAGES[stage]
    return importlib.import_module(module).run(build(config, values, where=stage))


def _patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 seconds to start, which on a busy machine is not always enough."""
    for _ in range(3):
        with contextlib.suppress(Exception):
            return start()
    return start()


def _node(cluster: Cluster) -> Any:
    return _patiently(lambda: cluster.add_node(num_cpus=1))


def _kill_in_the_middle(cluster: Cluster, workers: list[Any], stage: str, work: str, found: dict[str, Any]) -> None:
    """Kill -9 a node and its workers once something is published."""
    while not _published(stage, work):
        time.sleep(0.002)
    cluster.remove_node(workers.pop(0), allow_graceful=False)
    before, began = _published(stage, work), time.monotonic()
    while _published(stage, work).keys() <= before.keys() and time.monotonic() < began + 60:
        time.sleep(0.002)
    found |= {"before": before, "at_the_kill": len(before), "went_on": round(time.monotonic() - began, 2)}


def _published(stage: str, work: str) -> dict[str, int]:
    """Units that are there, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(work).glob(PUBLISHED[stage])}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), sys.argv[3] == "kill")
