"""Ranks started the way `train` starts them: through torchrun, as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from core.errors import ConfigError, HardwareError
from tests.train.ranks import Ranks
from train import checkpoint
from train.distributed import (
    World,
    choose_device,
    choose_precision,
    cpu_flags,
    is_sharded,
    launch_ranks,
    mean,
    ranks_from_env,
    world,
    wrap,
)
from train.gradcache import gradcache_step
from train.guard import clip_by_tower, total_norm
from train.loss import clip_loss
from train.models import model_config
from train.optim import make_optimizer
from train.towers import CLIP

ROOT = str(Path(__file__).parents[2])

RANK_SCRIPT = """
import os, signal, sys, time
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
    if mode == "killed" and w.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("die", "killed", "wait"):
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
    assert launch_ranks([script, str(tmp_path), "end"], 2, environment()) == (0, None, 0)
    expected = "[{'rank': 0}, {'rank': 1}] {'a': 0.5, 'b': 2.0} 1"
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == [expected] * 2


@pytest.mark.parametrize(("mode", "ended"), [("die", (3, 1, 0)), ("killed", (128 + signal.SIGKILL, 1, signal.SIGKILL))])
def test_one_dead_rank_ends_the_run_and_is_named(
    script: str, tmp_path: Path, mode: str, ended: tuple[int, int, int]
) -> None:
    started = time.monotonic()
    assert launch_ranks([script, str(tmp_path), mode], 2, environment()) == ended
    assert time.monotonic() - started < 100  # the other rank sleeps for 300 s


def test_ctrl_c_is_raised_after_the_ranks_have_ended(script: str, tmp_path: Path) -> None:
    code = "import sys; from train.distributed import launch_ranks; launch_ranks(sys.argv[1:], 2)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, script, str(tmp_path), "wait"],
        env={**os.environ, **environment()},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("*.txt"))) < 2:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in launcher.communicate(timeout=90)[1].splitlines()[-1]


@pytest.mark.parametrize(("number", "code_of"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_launcher_ends_all_ranks(
    script: str, tmp_path: Path, number: signal.Signals, code_of: int
) -> None:
    code = "import sys; from train.distributed import launch_ranks; sys.exit(launch_ranks(sys.argv[1:], 2).code)"
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
    assert launcher.wait(60) == code_of
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


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({"avx512_bf16"}, "bf16"),
        ({"amx_bf16"}, "bf16"),
        ({"svebf16"}, "bf16"),
        ({"avx512f", "avx2"}, "fp32"),
        (set(), "fp32"),
    ],
)
def test_bf16_is_chosen_where_the_cpu_multiplies_it(
    flags: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.distributed.cpu_flags", lambda: flags)
    assert choose_precision("auto", torch.device("cpu")) == chosen
    assert choose_precision("fp16", torch.device("cpu")) == "fp16"


def test_the_flags_of_this_cpu_are_those_that_torch_sees() -> None:
    flags, able = cpu_flags(), torch.cpu.get_capabilities()
    assert {name for name in ("avx2", "amx_bf16", "avx512_bf16") if able.get(name)} <= flags
    assert bool(able.get("avx512_bf16")) == ("avx512_bf16" in flags)


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


def sharded_steps(micro: int | None) -> tuple[list[float], dict[str, Any]]:
    """In a rank: three steps of a model whose parameters are shared out, saved and restored after the second."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    losses, model, optimizer = [], *_model_and_optimizer(World(rank, size, 0, torch.device("cpu")), sharded=True)
    assert is_sharded(model)
    pixels, tokens = _pairs()
    own = slice(rank * len(pixels) // size, (rank + 1) * len(pixels) // size)
    for step in range(3):
        optimizer.zero_grad()
        losses.append(float(gradcache_step(model, pixels[own], tokens[own], clip_loss, micro)))
        losses.append(float(total_norm(clip_by_tower(model, 0.5))))
        optimizer.step()
        if step == 1:
            saved = checkpoint.snapshot(model, optimizer)
            optimizer.step()  # is undone
            checkpoint.restore_model(model, saved[checkpoint.MODEL])
            checkpoint.restore_optimizer(model, optimizer, saved[checkpoint.OPTIMIZER])
    return losses, checkpoint.snapshot(model, optimizer)[checkpoint.MODEL]


def _model_and_optimizer(ranks: World, sharded: bool) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    clip = CLIP(replace(model_config("test-32"), vocab=64, context=12), "fp64").double()
    model = wrap(clip, ranks, sharded)
    return model, make_optimizer(clip, 1e-3)


def _pairs() -> tuple[Any, Any]:
    import torch

    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 62, (8, 12), generator=g)
    tokens[:, 11] = 63
    return torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=g), tokens


def test_parameters_shared_out_over_ranks_train_as_one_process_does() -> None:
    import torch

    model, optimizer = _model_and_optimizer(World(0, 1, 0, torch.device("cpu")), sharded=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(gradcache_step(model, *_pairs(), clip_loss)))
        losses.append(float(total_norm(clip_by_tower(model, 0.5))))
        optimizer.step()
    with Ranks(2) as ranks:
        for micro in (None, 3):
            for found, state in ranks.run(sharded_steps, micro):
                assert found == pytest.approx(losses, rel=1e-6)
                for name, value in model.state_dict().items():
                    torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-9)
