"""Runs the data stages on a real Ray cluster of several nodes on this machine, killing a node in the middle of each.

Run by tests/test_ray.py and bench/faults.py with the Python of `.peers/ray`; prints one JSON object a stage: the summary, the
units there are, and of a killed node the units there were, those written again, and the seconds until the next one.

    python -m bench.ray_nodes SETTINGS.json NODES kill|calm
"""

from __future__ import annotations

import contextlib
import functools
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
from dedup import edges, publish, store

NOTES = "deciding"  # in the work folder: the nodes that began to publish decisions
PUBLISHED = {
    "ingest": "ingest/parts/*.parquet", "score": "scores/*.parquet", "dedup": "dedup/signatures/*.parquet",
    "dedup match": "dedup/edges/captions-*.units/*/*", "dedup keep": f"{NOTES}/*", "shard": "shards/parts/*.parquet",
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
    edges.KEYS, edges.GROUPED, edges.ROWS = 20, 10, 5  # so that a few captions are matched in many units
    for stage, values in settings.items():
        found, over = dict[str, Any](), threading.Event()
        given = (cluster, workers, stage, values["work"], found, over)
        killer = threading.Thread(target=_kill_in_the_middle, args=given)
        if kill:
            killer.start()
        if kill and stage == "dedup keep":
            _stand_still_in_the_middle_of_keep(Path(values["work"]) / NOTES)
        found["summary"] = _run(stage, {**values, "engine": "ray"})
        over.set()
        if kill:
            killer.join()
            workers.append(_node(cluster))  # Ray starts nodes from the main thread only
        after = found.pop("seen", {}) | _published(stage, values["work"])
        before = found.pop("before", {})
        found |= {"units": len(after), "lost": sum(after.get(name) != when for name, when in before.items())}
        print(json.dumps({stage: found}, default=str), flush=True)
    ray.shutdown()
    cluster.shutdown()


def _run(stage: str, values: dict[str, Any]) -> dict[str, Any]:
    config, module = STAGES[stage.partition(" ")[0]]
    return importlib.import_module(module).run(build(config, values, where=stage))


def _patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 seconds to start, which on a busy machine is not always enough."""
    for _ in range(3):
        with contextlib.suppress(Exception):
            return start()
    return start()


def _node(cluster: Cluster) -> Any:
    return _patiently(lambda: cluster.add_node(num_cpus=1))


def _kill_in_the_middle(
    cluster: Cluster, workers: list[Any], stage: str, work: str, found: dict[str, Any], over: threading.Event
) -> None:
    """Kill -9 a node and its workers once something is published, and look until all is: stages clear away some of it."""
    while not _published(stage, work):
        time.sleep(0.002)
    doomed = next((node for node in workers if node.node_id in str(_published(stage, work))), workers[0])
    workers.remove(doomed)
    cluster.remove_node(doomed, allow_graceful=False)
    before, began = _published(stage, work), time.monotonic()
    found |= {"before": before, "at_the_kill": len(before), "seen": dict(before)}
    while not over.wait(0.002):
        found["seen"] |= _published(stage, work)
        if "went_on" not in found and found["seen"].keys() > before.keys():
            found["went_on"] = round(time.monotonic() - began, 2)
    found.setdefault("went_on", round(time.monotonic() - began, 2))


def _stand_still_in_the_middle_of_keep(notes: Path) -> None:
    """From now on the first task that begins to publish decisions waits there for the death of its node."""
    alone = store.Store.alone

    def watched(self: store.Store, what: str, task: Callable[[], Any]) -> Any:
        return alone(self, what, functools.partial(_noted, task, notes) if what == "keep" else task)

    notes.mkdir()
    store.Store.alone = watched  # type: ignore[method-assign, assignment]


def _noted(decide: Callable[[], Any], notes: Path) -> Any:
    """On a node: decide, and note the node when the earlier decisions' mark is gone and their files are not yet replaced."""
    table = publish._cluster_table

    def slow(*given: Any) -> Any:
        first = not list(notes.iterdir())
        (notes / ray.get_runtime_context().get_node_id()).touch()
        time.sleep(600 if first else 0)
        return table(*given)

    publish._cluster_table = slow  # type: ignore[assignment]
    return decide()


def _published(stage: str, work: str) -> dict[str, int]:
    """Units that are there, and when they were written."""
    found = {}
    for path in Path(work).glob(PUBLISHED[stage]):
        with contextlib.suppress(FileNotFoundError):
            found[f"{path.parent.name}/{path.name}"] = path.stat().st_mtime_ns
    return found


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), sys.argv[3] == "kill")
