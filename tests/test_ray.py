"""The data stages on a real Ray cluster of several nodes: the same bytes as locally, also where nodes die.

Needs the side environment `.peers/ray` (`make peers`, or `python -m bench.peers ray`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers import ROOT, ready
from bench.sides import first_weights
from bench.small import SmallList, caption, one_thread, results

PYTHON = ready("ray")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="needs Ray beside pairmill: python -m bench.peers ray"),
    pytest.mark.timeout(900),  # nodes start slowly on a busy machine
]


# deciding again at another threshold finds all signatures there, and matches by other bands; under other conditions it finds
# those, too, and only decides
STAGES = ("ingest", "score", "dedup", "dedup match", "dedup keep", "shard")


@pytest.fixture(scope="module")
def local(small: SmallList) -> dict[str, Any]:
    """What the local engine makes, with the same versions of all packages."""
    first_weights(small.home / "weights", "test-32", 1)
    stages_in_ray_s_environment(small, small.home / "local/work", 0, "calm")
    found = results(str(small.home / "local/work"))
    assert {name.partition("/")[0] for name in found} == {"ingest", "scores", "dedup", "shards"}
    return found


def stages_in_ray_s_environment(small: SmallList, work: Path, nodes: int, kill: str) -> dict[str, dict[str, Any]]:
    """Run every stage on so many nodes, with none by the local engine; what bench/ray_nodes.py says of each."""
    home = work.parent / "home"  # where Ray would leave files of its own
    home.mkdir(parents=True)
    settings = work.parent / "settings.json"
    values = {stage: small.settings(stage, str(work)) for stage in STAGES}
    leaks = work.parent / "leaks.csv"
    leaks.write_text("caption\n" + caption(12) + "\n")
    values["dedup keep"] = {**values["dedup match"], "where": "uid > '2'", "against": [str(leaks)]}
    settings.write_text(json.dumps(values))
    environment = one_thread({"HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"})
    command = [str(PYTHON), "-m", "bench.ray_nodes", str(settings), str(nodes), kill]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_cluster_makes_what_this_machine_makes(
    small: SmallList, local: dict[str, Any], tmp_path: Path, nodes: int
) -> None:
    said = stages_in_ray_s_environment(small, tmp_path / "work", nodes, "calm")
    assert results(str(tmp_path / "work")) == local
    assert said["ingest"]["summary"]["outcomes"] == {"ok": small.pictures}
    assert said["ingest"]["summary"]["cpu_seconds"] > 0
    assert min(said["dedup keep"]["summary"]["dropped"][why] for why in ("where", "against:leaks")) > 0


def test_two_nodes_of_which_one_is_killed_in_every_stage(
    small: SmallList, local: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "latency", 0.1)
    said = stages_in_ray_s_environment(small, tmp_path / "work", 2, "kill")
    for stage in STAGES:
        assert 0 < said[stage]["at_the_kill"] < said[stage]["units"], (stage, said[stage])
    assert results(str(tmp_path / "work")) == local
    assert not list((tmp_path / "work/ingest").glob("journal/*")), "what the killed node had begun is cleared away"


@pytest.mark.parametrize("told", [[], ["--ray-address", "127.0.0.1:9"]])
def test_a_cluster_that_is_not_there_is_one_sentence(small: SmallList, tmp_path: Path, told: list[str]) -> None:
    command = small.command("ingest", str(tmp_path), "--engine", "ray", *told, python=str(PYTHON))
    environment = one_thread({"HOME": str(tmp_path), "RAY_ADDRESS": "127.0.0.1:8" if told else "127.0.0.1:9"})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 6, done.stderr[-2000:]
    assert (
        "expected a Ray cluster at '127.0.0.1:9' (--ray-address or RAY_ADDRESS), which cannot be reached"
        in done.stderr.splitlines()[-1]
    )
    assert "Traceback" not in done.stderr


def test_without_ray_one_sentence_says_what_to_install(small: SmallList, tmp_path: Path) -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        command = small.command("ingest", str(tmp_path), "--engine", "ray", python=sys.executable)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 6
        assert "pip install 'pairmill[ray]'" in done.stderr.splitlines()[-1]


FAULTS = """
import sys
from core.plan import Unit
from core.runner import run_units
def task(unit):
    raise eval(unit.id, {"__import__": __import__})
for words in sys.argv[1:]:
    try:
        list(run_units([Unit(words, 0, 1)], task, done=lambda _: False, workers=1, engine="ray", label="test"))
    except Exception as error:
        print(type(error).__name__, str(error).splitlines(), flush=True)
"""


def test_a_fault_of_a_disk_or_a_store_in_a_task_comes_back_as_itself(tmp_path: Path) -> None:
    lost = "__import__('botocore.exceptions', fromlist=['x']).NoCredentialsError()"
    environment = one_thread({"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"})
    command = [str(PYTHON), "-c", FAULTS, "PermissionError(13, 'Permission denied', 'part.parquet')", lost]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.stdout.splitlines() == [
        "PermissionError [\"[Errno 13] Permission denied: 'part.parquet'\"]",
        "NoCredentialsError ['Unable to locate credentials']",
    ], done.stderr[-2000:]
