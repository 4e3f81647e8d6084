"""Real gloo processes for tests: started once, then any number of functions run in them.

    with Ranks(4) as ranks:
        results = ranks.run(function, *args)      # one result a rank; `function` must be importable

A failure in any rank is raised in the test with that rank's traceback; the processes end with the test's.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 120.0


class Ranks:
    """`size` spawned processes in one gloo group, one thread each."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pairmill-ranks-")
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(theirs, rank, size, store), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank at once; the results in rank order (pickled, so tensors are copies)."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(DEADLINE_S):
            return False, f"no answer within {DEADLINE_S} s"
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return False, "the process died"

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """One function on `size` fresh ranks."""
    with Ranks(size) as ranks:
        return ranks.run(function, *args)


_groups: dict[int, Any] = {}


def first_ranks(count: int) -> Any:
    """The group of the first `count` ranks, None on the others; every rank must call it, in the same order."""
    import torch.distributed as dist

    if count == dist.get_world_size():
        return dist.group.WORLD
    if count not in _groups:
        group = dist.new_group(list(range(count)))
        _groups[count] = group if dist.get_rank() < count else None
    return _groups[count]


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
