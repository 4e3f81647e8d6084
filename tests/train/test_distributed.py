"""Ranks started the way `train` starts them: through torchrun, as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from core.errors import ConfigError, HardwareError
from train.distributed import World, choose_device, launch_ranks, mean, ranks_from_env, world

ROOT = str(Path(__file__).parents[2])

RANK_SCRIPT = """
import sys, time
from pathlib import Path
from train.distributed import barrier, gather_objects, mean, world

folder, mode = Path(sys.argv[1]), sys.argv[2]
with world("cpu", timeout_s=60) as w:
    import torch
    assert (w.device.type, w.main, w.local_rank) == ("cpu", w.rank == 0, w.rank)
    everyone = gather_objects({"rank": w.rank})
    mid = mean({"a": float(w.rank), "b": 2.0}, w)
    barrier()
    (folder / f"{w.rank}.txt").write_text(f"{everyone} {mid} {torch.get_num_threads()}")
    if mode == "die" and w.rank == 1:
        sys.exit(3)
    if mode in ("die", "wait"):
        time.sleep(300)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "rank.py"
    path.write_text(RANK_SCRIPT)
    return str(path)


def environment() -> dict[str, str]:
    return {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


def test_ranks_meet_and_end_with_zero(script: str, tmp_path: Path) -> None:
    assert launch_ranks([script, str(tmp_path), "end"], 2, environment()) == 0
    expected = "[{'rank': 0}, {'rank': 1}] {'a': 0.5, 'b': 2.0} 1"
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == [expected] * 2


def test_one_dead_rank_ends_the_run(script: str, tmp_path: Path) -> None:
    started = time.monotonic()
    assert launch_ranks([script, str(tmp_path), "die"], 2, environment()) != 0
    assert time.monotonic() - started < 100  # the other rank sleeps for 300 s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_all_ranks(script: str, tmp_path: Path, number: signal.Signals) -> None:
    code = "import sys; from train.distributed import launch_ranks; sys.exit(launch_ranks(sys.argv[1:], 2))"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, script, str(tmp_path), "wait"],
        env={**os.environ, **environment()},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("*.txt"))) < 2:
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    launcher.send_signal(number)
    assert launcher.wait(60) != 0
    deadline = time.monotonic() + 10
    while left := [p.pid for p in psutil.process_iter(["cmdline"]) if script in (p.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, f"{left} live on"
        time.sleep(0.05)


def test_launching_does_not_import_torch() -> None:
    code = "import sys, train.distributed; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment()}, check=False).returncode == 0
    )


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with world("cpu") as alone:
        assert (alone.rank, alone.size, alone.main) == (0, 1, True)
        assert mean({"x": 3.0}, alone) == {"x": 3.0}


def test_ranks_come_from_torchrun_or_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_from_env() == (5, 8, 1)
    with pytest.raises(ConfigError, match="8 ranks were started without MASTER_PORT"), world("cpu"):
        pass
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_from_env() == (2, 4, 0)


def test_wrong_requests_are_sentences() -> None:
    import torch

    with pytest.raises(ConfigError, match="auto, cpu or cuda"):
        choose_device("tpu", 0)
    with pytest.raises(HardwareError, match="--device cpu"):
        choose_device("cuda", torch.cuda.device_count())
    with pytest.raises(ConfigError, match="ranks must be at least 1"):
        launch_ranks([], 0)
    assert World(1, 2, 1, torch.device("cpu")).main is False
