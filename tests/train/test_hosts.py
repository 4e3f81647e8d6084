"""Training on two hosts by torchrun; one is killed, and the other goes on by itself with the same global batches."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.hosts import Host, Hosts, why_not
from core.config import is_stable
from core.metrics import Jsonl
from tests.train.shards import make_work
from train.config import TrainConfig
from train.run import run

ROOT = Path(__file__).resolve().parents[2]
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"  # quicker than the usual 30 and 15 s
STEPS, KILLED_AFTER = 60, 15

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")


def settings(work: Path, name: str) -> TrainConfig:
    return TrainConfig(
        work=str(work), name=name, model="test-32", batch_size=24, steps=STEPS, lr=1e-3, precision="fp32", log_every=1,
        checkpoint_every=10, workers=1, device="cpu",
    )  # fmt: skip


def torchrun(host: Host, config: TrainConfig, meeting: Host) -> subprocess.Popen[bytes]:
    """One agent of an elastic job of one or two hosts, a rank each, as docs/guide/cluster.md has it."""
    words = [f"--{key.replace('_', '-')}={value}" for key, value in changed(config).items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint={meeting.address}:29400",
        f"--rdzv-conf=is_host={int(host == meeting)},{RENDEZVOUS}", f"--local-addr={host.address}", "-m", "cli", "train", *words,
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": host.device}
    return subprocess.Popen(host.command(*command), env=os.environ | environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip


def changed(config: TrainConfig) -> dict[str, Any]:
    fields = [f for f in dataclasses.fields(config) if getattr(config, f.name) != f.default]
    assert any(is_stable(f) for f in fields)
    return {f.name: getattr(config, f.name) for f in fields}


def rows(work: Path, name: str) -> list[dict[str, Any]]:
    return Jsonl(work / f"runs/{name}/metrics.jsonl").rows()


@pytest.mark.timeout(600)
def test_one_of_two_hosts_is_killed_and_the_other_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work", 110)
    run(settings(work, "alone"))
    with Hosts(2) as (first, second):
        config = settings(work, "two")
        agents = [torchrun(host, config, meeting=first) for host in (first, second)]
        deadline = time.monotonic() + 400
        while len(rows(work, "two")) < KILLED_AFTER and time.monotonic() < deadline and agents[0].poll() is None:
            time.sleep(0.01)
        second.kill()
        agents[1].communicate()
        before = rows(work, "two")
        said = agents[0].communicate(timeout=400)[0].decode()
    assert agents[0].returncode == 0, said[-4000:]
    assert KILLED_AFTER <= len(before) < STEPS, "killed in the middle"
    assert "continuing after step 10" in said or "continuing after step 20" in said, said[-4000:]
    assert "lost contact with another rank" in said and "Traceback" not in said
    after, alone = rows(work, "two"), rows(work, "alone")
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    assert [row["batch_hash"] for row in after] == [row["batch_hash"] for row in alone]
    assert [row["loss"] for row in after] == pytest.approx([row["loss"] for row in alone], rel=1e-3)
