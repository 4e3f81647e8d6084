"""Ranks: start, stop, launch, and the few collectives outside the loss.

torch is imported inside the functions, because the launcher runs in a process that never needs it.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from core.allocator import keep_freed_memory
from core.errors import ConfigError, HardwareError
from train.config import Precision

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

log = logging.getLogger("pairmill.train")

TIMEOUT_S = 1800.0

PR_SET_PDEATHSIG = 1  # prctl.h

# CPU flags of units that multiply bf16: AMX and AVX-512 on x86, and Arm's.
BF16_UNITS = {"amx_bf16", "avx512_bf16", "bf16", "svebf16"}

# The compute capability of GPUs that multiply them: Ampere; Ada and Hopper.
EIGHT_BITS = {"int8": (8, 0), "fp8": (8, 9)}


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0


def ranks_from_env() -> tuple[int, int, int]:
    """(rank, size, local rank) as torchrun or srun set them; (0, 1, 0) outside of both."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", 0))
    return 0, 1, 0


def launched() -> bool:
    """Whether torchrun or srun started this process as a rank, be it the only one."""
    return ranks_from_env()[1] > 1 or ("LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ)


def choose_device(name: str, local_rank: int) -> torch.device:
    """ "auto" takes this rank's GPU if there is one, else the CPU; HardwareError when a named device is missing."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda; found {name!r}.")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise HardwareError(
            f"Local rank {local_rank} asks for GPU {local_rank}, but this machine shows {count}; "
            "start fewer ranks or choose --device cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """ "auto" takes bf16 where the device multiplies it, else fp16 on a GPU and fp32 on a CPU.

    A CPU without instructions for bf16 emulates it: some 80 times slower than fp32 (Zen 3).

    Raises:
        HardwareError: 8 bits were asked for, and the device has no such units.
    """
    import torch

    if name in EIGHT_BITS:
        needed, able = EIGHT_BITS[name], torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        if able < needed:
            found = f"one of {able[0]}.{able[1]}" if device.type == "cuda" else "a CPU"
            raise HardwareError(
                f"--precision {name} needs a GPU of compute capability {needed[0]}.{needed[1]} or more, found {found}; use "
                "--precision auto"
            )
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if BF16_UNITS & cpu_flags() else "fp32"


def cpu_flags() -> set[str]:
    """Instruction sets of this machine's CPU by Linux' names; empty on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":", 1)[1].split()}


@contextmanager
def world(device: str = "auto", timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """Join the ranks that the environment names, and leave them at the end: NCCL on GPUs, gloo on CPUs.

    Under srun set MASTER_ADDR and MASTER_PORT as for torchrun. A single process makes no group.
    """
    import torch.distributed as dist

    rank, size, local_rank = ranks_from_env()
    own = choose_device(device, local_rank)
    if own.type == "cpu":
        keep_freed_memory()
    if size > 1:
        end_with_parent()()
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"{size} ranks were started without {' and '.join(missing)}; set them, or use torchrun.")
        backend = "nccl" if own.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method="env://", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
    try:
        yield World(rank, size, local_rank, own)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def end_with_parent() -> Callable[[], None]:
    """What a process calls to be killed by the kernel when its parent dies (Linux; elsewhere nothing happens).

    torchrun gives every rank a session of its own, so neither kill -9 nor a closed terminal reaches the ranks: they
    would go on training, and hold the run's lock. The library is looked up here, because that is not safe after a fork.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return (lambda: None) if prctl is None else lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wrap(model: nn.Module, ranks: World, sharded: bool = False) -> nn.Module:
    """DDP around the model when there are several ranks, or FSDP2 inside it where it is to be `sharded`.

    Gradients are averaged, as `train.loss` expects.
    """
    from torch.nn.parallel import DistributedDataParallel

    from train.comm import watch_gradients

    model = model.to(ranks.device)
    if ranks.size == 1:
        return model
    if sharded:
        return _shard(model)
    device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    # torch renamed the setting in 2.13, where the older name warns
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    off: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True, **off)
    watch_gradients(wrapped)
    return wrapped


def _shard(model: nn.Module) -> nn.Module:
    """Each block's parameters shared out over the ranks, and gathered while it runs; the rest with the model itself.

    The scalars of the loss stay whole, because the loss reads them outside of the model's forward pass.
    """
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    scalars = {p for name, p in model.named_parameters() if name.startswith("logit_")}
    for scalar in scalars:
        scalar.register_post_accumulate_grad_hook(_averaged)
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block)
    fully_shard(model, ignored_params=scalars)
    for name in ("encode_image", "encode_text"):
        register_fsdp_forward_method(model, name)
    dist.barrier()
    return model


def _averaged(parameter: Tensor) -> None:
    import torch.distributed as dist

    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def is_sharded(model: nn.Module) -> bool:
    """Whether `wrap` shared out the parameters."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def barrier() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def gather_objects(value: Any) -> list[Any]:
    """One picklable value a rank, on every rank, in rank order."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def gather_rows(x_b: Tensor, pg: dist.ProcessGroup | None = None) -> Tensor:
    """The rows of all ranks, in rank order, on every rank; each must pass equally many."""
    import torch.distributed as dist

    world = dist.get_world_size(pg) if dist.is_initialized() else 1
    if world == 1:
        return x_b
    out = x_b.new_empty(world * x_b.shape[0], *x_b.shape[1:])
    # torch renamed both collectives in 2.13; the older names warn there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x_b.contiguous(), group=pg)
    return out


def scatter_sum(x_B: Tensor, pg: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over ranks, of which each receives the rows that `gather_rows` would have taken from it."""
    import torch.distributed as dist

    world = dist.get_world_size(pg) if dist.is_initialized() else 1
    if world == 1:
        return x_B
    out = x_B.new_empty(x_B.shape[0] // world, *x_B.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x_B.contiguous(), group=pg)
    return out


def mean(values: dict[str, float], ranks: World) -> dict[str, float]:
    """The mean over ranks of each number; every rank passes the same keys."""
    import torch
    import torch.distributed as dist

    if ranks.size == 1:
        return dict(values)
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=ranks.device)
    dist.all_reduce(packed)
    return dict(zip(values, (packed / ranks.size).tolist(), strict=True))


class Ended(NamedTuple):
    """How the ranks of a launch ended."""

    code: int
    """0, or the exit code of the first rank that failed (128 + n for signal n)."""
    rank: int | None = None
    """The first rank that failed, where one did."""
    signal: int = 0
    """The signal that killed it, if one did."""


def launch_ranks(argv: Sequence[str], ranks: int, env: dict[str, str] | None = None) -> Ended:
    """Run `python ARGV` once a rank on this machine through torchrun, and wait for the end.

    `argv` is a script with its arguments, or "-m", module, arguments. SIGINT and SIGTERM reach all ranks, SIGUSR1
    does as SIGTERM (torchrun would die of it), and when one rank or this process dies (kill -9 included) the others are
    ended. The cores are shared out evenly unless OMP_NUM_THREADS is set.

    Raises:
        KeyboardInterrupt: Ctrl-C, after all ranks have ended.
    """
    if ranks < 1:
        raise ConfigError(f"ranks must be at least 1, found {ranks}.")
    with tempfile.TemporaryDirectory(prefix="pairmill-") as scratch:
        report = Path(scratch) / "ended.json"
        command = [
            sys.executable,
            "-m",
            "train.distributed",
            str(report),
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        child = subprocess.Popen([*command, *argv], env=_rank_env(ranks, env), preexec_fn=end_with_parent())
        with _forwarded_signals(child) as forwarded:
            code = child.wait()
        log.debug("%d ranks ended with code %d", ranks, code)
        if signal.SIGINT in forwarded:
            raise KeyboardInterrupt
        found = json.loads(report.read_text()) if report.exists() else {}
    return Ended(code if code >= 0 else 128 - code, **found)


def main() -> None:
    """torchrun, which writes down which rank failed first: `python -m train.distributed REPORT TORCHRUN-ARGUMENTS`."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[2:])
    except ChildFailedError as error:
        # Killed ones before others, because who lost contact with them may have ended in the same second; SIGTERM last,
        # because that is how torchrun stops the rest.
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        order = {
            rank: (code == -signal.SIGTERM, code >= 0, error.failures[rank].timestamp) for rank, code in codes.items()
        }
        rank = min(order, key=order.__getitem__)
        code = codes[rank]
        Path(sys.argv[1]).write_text(json.dumps({"rank": rank, "signal": max(0, -code)}))
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as error:
        sys.exit(128 + error.sigval)


def _rank_env(ranks: int, extra: dict[str, str] | None) -> dict[str, str]:
    env = {**os.environ, **(extra or {})}
    cores = len(os.sched_getaffinity(0))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    return env


@contextmanager
def _forwarded_signals(child: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """Passes SIGINT and SIGTERM on, and SIGUSR1 as SIGTERM; yields the set of those that came."""
    came: set[int] = set()

    def forward(number: int, _: FrameType | None) -> None:
        came.add(number)
        child.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
