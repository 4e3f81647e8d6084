"""Runs units on local processes or on Ray, skipping finished ones, with one progress line for all of them.

A task is a picklable function of one unit; it publishes its own outputs and returns a small summary. Which units are
done is read from what lies on disk, never remembered here, so a killed run simply continues.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import multiprocessing
import multiprocessing.queues
import os
import queue
import socket
import sys
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from core.errors import ConfigError, HardwareError, PairmillError, RunError
from core.plan import WHOLE, Part, Unit
from core.progress import Describe, Progress
from core.storage import is_of_a_store

log = logging.getLogger("pairmill.runner")
Task = Callable[[Unit], Any]
FLUSH_S = 0.25

_outbox: multiprocessing.queues.Queue[dict[str, int]] | None = None
_pending: Counter[str] = Counter()
_flushed = 0.0


def tick(n: int = 1, **counts: int) -> None:
    """Called by a task, in whatever process it runs: `n` more things are done, and other counts of interest.

    Cheap enough for every row: sent on a few times a second.
    """
    global _flushed
    _pending.update({"": n, **counts})
    now = time.monotonic()
    if _outbox is not None and now - _flushed > FLUSH_S:
        _flushed = now
        _flush()


def _flush() -> None:
    if _outbox is not None and _pending:
        _outbox.put(dict(_pending))
        _pending.clear()


def cores() -> int:
    """Cores this process may use, which in a container or under Slurm is fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def run_units(
    units: Sequence[Unit],
    task: Task,
    *,
    done: Callable[[Unit], bool],
    before: Callable[[Unit], None] | None = None,
    workers: int,
    engine: str,
    label: str,
    unit_of_progress: str = "rows",
    describe: Describe | None = None,
    warm: Sequence[str] = (),
    survive: Callable[[Unit], bool] | None = None,
    part: Part = WHOLE,
    gpu: bool = False,
) -> Generator[tuple[Unit, Any], None, None]:
    """Run `task` on every unit that is not `done`; yields (unit, what the task returned) as they finish, in any order.

    An error, a stop from the keyboard, or closing the generator ends the other workers at once: what they were at is
    published whole or not at all.

    Args:
        before: called in this process before a unit is handed out; returns when the unit can begin.
        warm: modules that are imported once, in a process that all local workers are forked from.
        survive: asked when a local worker died in the middle of a unit whether the unit may be begun again; with it even
            a single worker is a process of its own.
        part: which of the units are this run's.
        gpu: whether a unit uses a GPU where there is one; on Ray it then has one to itself, with its share of the cores.

    Raises:
        ConfigError: an unknown engine, or fewer than no workers.
        HardwareError: Ray was asked for and is not installed.
        RunError: a worker process died.
    """
    if engine not in ("local", "ray"):
        raise ConfigError(f"expected --engine local or ray, found {engine!r}")
    if workers < 0:
        raise ConfigError(f"expected --workers from 0 up, found {workers}")
    units = part.of(units)
    finished = [done(unit) for unit in units]
    todo = [unit for unit, is_done in zip(units, finished, strict=True) if not is_done]
    rows_done = sum(unit.rows for unit, is_done in zip(units, finished, strict=True) if is_done)
    if rows_done:
        log.info("%s: %d of %d units are already there", label, len(units) - len(todo), len(units))
    total = sum(unit.rows for unit in units)
    with Progress(label, total, unit_of_progress, done=rows_done, describe=describe) as progress:
        coming = _in_time(todo, before)
        if engine == "ray":
            yield from _on_ray(coming, task, workers or len(todo), progress, gpu)
        else:
            workers = min(workers or cores(), len(todo))
            if workers <= 1 and survive is None:
                yield from _in_this_process(coming, task, progress)
            else:
                yield from _on_processes(coming, task, workers, progress, warm, survive or _never)


def _in_time(todo: Sequence[Unit], before: Callable[[Unit], None] | None) -> Iterator[Unit]:
    """`todo` one by one, each when it can begin."""
    for unit in todo:
        if before is not None:
            before(unit)
        yield unit


def _in_this_process(todo: Iterator[Unit], task: Task, progress: Progress) -> Iterator[tuple[Unit, Any]]:
    with _collecting(queue.Queue(), progress) as outbox:
        _start_worker(outbox)
        try:
            for unit in todo:
                result = task(unit)
                _flush()
                yield unit, result
        finally:
            _start_worker(None)


def _never(unit: Unit) -> bool:
    return False


def _on_processes(
    todo: Iterator[Unit],
    task: Task,
    workers: int,
    progress: Progress,
    warm: Sequence[str],
    survive: Callable[[Unit], bool],
) -> Iterator[tuple[Unit, Any]]:
    # forking a process with DuckDB, Arrow or torch threads may deadlock; the fork server has none of them
    context = multiprocessing.get_context("forkserver" if warm else "spawn")
    if warm:
        context.set_forkserver_preload(list(warm))
    others = set(multiprocessing.active_children())
    with _collecting(context.Queue(), progress) as outbox:
        outbox.cancel_join_thread()  # a killed worker may hold the queue's lock for ever
        crew = _Crew(context, outbox, functools.partial(_task_in_worker, task), workers)
        try:
            yield from crew.work(todo, survive)
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise
        finally:
            crew.dismiss()


class _Crew:
    """Worker processes in a pool each, so that the death of one is nobody else's."""

    def __init__(self, context: Any, outbox: Any, task: Task, workers: int) -> None:
        self._context, self._outbox, self._task = context, outbox, task
        self._pools = [self._pool() for _ in range(workers)]

    def _pool(self) -> concurrent.futures.ProcessPoolExecutor:
        return concurrent.futures.ProcessPoolExecutor(
            1, self._context, initializer=_start_process, initargs=(self._outbox, dict(os.environ))
        )

    def work(self, todo: Iterator[Unit], survive: Callable[[Unit], bool]) -> Iterator[tuple[Unit, Any]]:
        again: deque[Unit] = deque()  # whose worker died
        free = deque(range(len(self._pools)))
        running: dict[concurrent.futures.Future[Any], tuple[int, Unit]] = {}
        while True:
            while free and (found := again.popleft() if again else next(todo, None)):
                worker = free.popleft()
                with _nameless_main():
                    running[self._pools[worker].submit(self._task, found)] = worker, found
            if not running:
                return
            for future in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
                worker, unit = running.pop(future)
                free.append(worker)
                try:
                    result = future.result()
                except BrokenProcessPool as error:
                    if not survive(unit):
                        raise RunError(
                            "a worker process died (killed, out of memory, or crashed in a codec); finished units are "
                            "safe, run the same command again to continue"
                        ) from error
                    self._pools[worker].shutdown()
                    self._pools[worker] = self._pool()
                    again.append(unit)
                else:
                    yield unit, result

    def dismiss(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _nameless_main() -> Iterator[None]:
    """Hide the main module from a process that is started meanwhile, which would import it: for a command line 0.2 s."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_process(outbox: Any, environment: dict[str, str]) -> None:
    """Begin a worker process, which ends when its parent does, even by kill -9: the parent's lock is free by then, and
    the next run must not meet this one's workers."""
    # a fork server hands on the environment of the moment when it began: yesterday's keys of an object store
    os.environ.clear()
    os.environ.update(environment)
    _start_worker(outbox)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _task_in_worker(task: Task, unit: Unit) -> Any:
    try:
        return task(unit)
    finally:
        _flush()


def _start_worker(outbox: Any) -> None:
    global _outbox
    _outbox = outbox
    _pending.clear()


class _collecting:
    """Moves counts from a queue to the progress line in a thread while the body runs."""

    def __init__(self, outbox: Any, progress: Progress) -> None:
        self.outbox, self.progress = outbox, progress
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while (counts := self.outbox.get()) is not None:
            self.progress.advance(counts.pop("", 0), counts=counts)

    def __enter__(self) -> Any:
        self._thread.start()
        return self.outbox

    def __exit__(self, *_: object) -> None:
        self.outbox.put(None)
        self._thread.join(timeout=5)


def slots(engine: str, workers: int) -> int:
    """How many units are at work at once where `workers` were asked for: one a core of this machine, or of the cluster."""
    if workers:
        return workers
    return int(_ray().cluster_resources().get("CPU", 1)) if engine == "ray" else cores()


def _ray() -> Any:
    """Ray, connected to the cluster that RAY_ADDRESS names; without it to one of this machine's own."""
    try:
        import ray
    except ImportError as error:
        raise HardwareError(
            "--engine ray needs Ray, which is not installed; run: pip install 'pairmill[ray]'"
        ) from error
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "")
        try:
            _reach(address)
            ray.init(log_to_driver=False)
        except (OSError, ValueError) as error:
            words = " ".join(str(error).split())
            raise HardwareError(
                f"expected a Ray cluster at {address!r} (--ray-address or RAY_ADDRESS), which cannot be reached ({words}); "
                "start one with `ray start --head`, or leave the address out to use this machine alone"
            ) from error
    return ray


def _reach(address: str) -> None:
    """Raises OSError where nobody listens at `host:port`; Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


RAY_RETRIES = 10  # of a unit whose node died; spot instances die often


def _on_ray(coming: Iterator[Unit], task: Task, most: int, progress: Progress, gpu: bool) -> Iterator[tuple[Unit, Any]]:
    ray = _ray()
    has = ray.cluster_resources()
    gpus = int(has.get("GPU", 0)) if gpu else 0
    needs = {"num_cpus": max(1, int(has.get("CPU", 0)) // gpus), "num_gpus": 1} if gpus else {"num_cpus": 1}

    def work(unit: Unit) -> tuple[Any, dict[str, int]]:
        return _counted(task, unit)

    # Ray takes plain functions only, and our tasks are partial ones
    remote = ray.remote(max_retries=RAY_RETRIES, **needs)(work)
    waiting = {remote.remote(unit): unit for unit in itertools.islice(coming, most)}
    try:
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            for reference in ready:
                unit = waiting.pop(reference)
                result, counts = _ray_result(ray, reference)
                progress.advance(counts.pop("", 0), counts=counts)
                waiting.update((remote.remote(more), more) for more in itertools.islice(coming, 1))
                yield unit, result
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def _counted(task: Task, unit: Unit) -> tuple[Any, dict[str, int]]:
    """The result of one unit with what it told `tick`, for an engine without a queue between processes."""
    _pending.clear()
    result = task(unit)
    counts = dict(_pending)
    _pending.clear()
    return result, counts


def _ray_result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (PairmillError, OSError)) or (isinstance(cause, Exception) and is_of_a_store(cause)):
            raise cause from error  # Ray's own carries a traceback for a sentence
        raise
    except ray.exceptions.RayError as error:  # nodes or workers died, too often to be tried again
        raise RunError(
            f"Ray gave a unit up ({type(error).__name__}) after {RAY_RETRIES} retries; finished units are safe, run the same "
            "command again to continue"
        ) from error
