"""Processes that decode for the one that trains: encoded pictures go to them, and pixels come back, in shared memory.

    Pool -> [a few jobs] -> worker -> [reasons of bad pictures] -> Pool        all of them map the batch's `Slot`

Threads of one interpreter wait for its lock, for each other's and the training loop's turn, and a codec that crashes takes them
all. The workers are forked from a process that imports torch once and does nothing else. multiprocessing has such a server,
too, but one for all: whoever asks first decides what its workers have imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from core.errors import ImageError, RunError

if TYPE_CHECKING:
    from train.decode_cpu import Picture, View

GREY = 128  # of the placeholder that stands in for a picture that cannot be decoded
CRASHED = "its decoder crashed"
SHARES = 2  # of a batch for each worker, so that none waits long for the last one
SHARE = 64  # pictures of one at most, so that a message never fills its socket and sending never waits
AHEAD = 2  # shares given to a worker, so that it need not wait for its next one
NICE = 10  # of the workers, more than the loop's
ROOM = 1.25  # size of a slot beside what its first batch takes: the next one's pictures may be larger

log = logging.getLogger("pairmill.train")
Pixels = npt.NDArray[np.uint8]
Render = Callable[[Pixels, bytes, "View"], None]
CODEC = "train.decode_cpu"  # whose `render_into` the workers call


class Slot:
    """Shared memory for a batch: its pixels, and behind them its pictures as encoded."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.file = os.memfd_create(f"pairmill-batch-{number}")
        os.ftruncate(self.file, size)
        self.memory = mmap.mmap(self.file, size)

    def __del__(self) -> None:
        os.close(self.file)


class Ring:
    """Slots in turn: one is used again as soon as nobody holds the pixels that were handed out in it."""

    def __init__(self) -> None:
        self.known: dict[int, Slot] = {}
        self._numbers, self._free, self._lock = itertools.count(), deque[Slot](), threading.Lock()

    def take(self, size: int) -> Slot:
        """A slot of at least so many bytes; smaller ones that are free are given up."""
        with self._lock:
            while self._free:
                slot = self._free.popleft()
                if slot.size >= size:
                    return slot
                del self.known[slot.number]
            slot = Slot(next(self._numbers), max(1, int(size * ROOM)))
            self.known[slot.number] = slot
            return slot

    def pixels(self, slot: Slot, count: int, side: int) -> Pixels:
        """The first `count` pictures of a slot, which is free again when the last array or tensor over them is gone."""
        pixels = np.ndarray((count, side, side, 3), np.uint8, slot.memory)
        weakref.finalize(pixels, self._free.append, slot).atexit = False
        return pixels


Job = tuple[int, int, int, tuple[Any, ...]]
"""A picture: its place in the batch, where its bytes begin and end in the slot, and the window to cut. What its header says is
read again where it is decoded, for less than it takes to send."""


class Task(NamedTuple):
    """What a worker is sent: some jobs of the batch in `slot`, and slots that are used no more."""

    slot: int
    forget: tuple[int, ...]
    side: int
    jobs: list[Job]


# ---- in the worker ------------------------------------------------------------------------------------------------------


def serve(control: socket.socket, codec: str) -> None:
    """Fork a worker for each connection that comes; when whoever sends them is gone, all workers go, too.

    Signals to all processes of a job (Slurm's, a terminal's) are for that one, which may still want a batch.
    """
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(one, signal.SIG_IGN)
    render_into = importlib.import_module(codec).render_into  # and torch with it, once for all workers
    children = set[int]()
    while files := socket.recv_fds(control, 1, 1)[1]:
        while children and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            children.remove(ended)
        pid = os.fork()
        if pid == 0:
            control.close()
            with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
                _work(Connection(files[0]), render_into)
            os._exit(0)
        children.add(pid)
        os.close(files[0])
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:  # so that whoever started all this is charged for it
        os.waitpid(pid, 0)


def _work(connection: Connection, render_into: Render) -> None:
    """Decode what comes, until nobody sends any more.

    With one thread: teams of several held up the model's, which waits for its slowest member again and again. And the model
    goes first: a loop that would wait still gets what is left.
    """
    import torch

    torch.set_num_threads(1)
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
    connection.send_bytes(str(os.getpid()).encode())
    slots: dict[int, mmap.mmap] = {}
    while True:
        task = connection.recv()
        for number in task.forget:
            del slots[number]
        if task.slot not in slots:
            file = recv_handle(connection)
            slots[task.slot] = mmap.mmap(file, 0)
            os.close(file)
        try:
            answer: dict[str, Any] = {"reasons": _decoded(task, slots[task.slot], render_into)}
        except Exception:  # a fault of ours, which ends the run where the batch was asked for
            answer = {"fault": traceback.format_exc()}
        connection.send_bytes(json.dumps(answer).encode())


def _decoded(task: Task, memory: mmap.mmap, render_into: Render) -> list[tuple[int, str]]:
    """Write the pixels of a task into its slot; places and reasons of pictures that could not be decoded, which are grey."""
    from train.decode_cpu import View

    reasons, area = [], task.side * task.side * 3
    for place, start, stop, view in task.jobs:
        pixels = np.ndarray((task.side, task.side, 3), np.uint8, memory, place * area)
        try:
            render_into(pixels, memory[start:stop], View(*view))
        except ImageError as error:
            pixels[:] = GREY
            reasons.append((place, error.detail))
    return reasons


# ---- in the process that trains -----------------------------------------------------------------------------------------


class _Server:
    """The process that workers are forked from; it ends with the one that started it, even by kill -9."""

    def __init__(self, codec: str) -> None:
        self.codec, self.owner = codec, os.getpid()
        self.control, theirs = socket.socketpair()
        call = f"decode_pool.serve(socket.socket(fileno={theirs.fileno()}), {codec!r})"
        code = f"import socket, sys; sys.path[:] = {sys.path!r}; from train import decode_pool; {call}"
        alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, **alone}, process_group=0,
            )  # fmt: skip
        atexit.register(self.close)

    def fork(self) -> Connection:
        """The connection of a worker that is to come."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # a server that has died is told of by the worker that never came
            socket.send_fds(self.control, [b"f"], [theirs.fileno()])
        return Connection(ours.detach())

    def close(self) -> None:
        if self.owner == os.getpid():
            self.control.close()
            self.process.wait()


_server: _Server | None = None
_lock = threading.Lock()


def _connect() -> Connection:
    global _server
    with _lock:
        if (
            _server is None
            or (_server.codec, _server.owner) != (CODEC, os.getpid())
            or _server.process.poll() is not None
        ):
            _server = _Server(CODEC)
        return _server.fork()


@dataclass(eq=False)
class Asked:
    """A batch on its way: the pixels so far, how many of its jobs are left, and pictures that workers died of in company."""

    slot: Slot
    pixels: Pixels
    left: int
    reasons: dict[int, str] = field(default_factory=dict)
    suspects: set[int] = field(default_factory=set)


Share = tuple[Asked, list[Job]]  # what a worker is given at a time


class Worker:
    """A process that decodes, and what it has been given to do."""

    def __init__(self) -> None:
        self.connection, self.shares = _connect(), deque[Share]()
        self._pid, self._slots = 0, set[int]()

    def send(self, known: Container[int], share: Share) -> None:
        """Give it something to do. That it has died is found out where its answer is missing."""
        self._pid = self._pid or self._greeting()
        self.shares.append(share)
        (asked, jobs), slot = share, share[0].slot
        forget = tuple(number for number in self._slots if number not in known)
        with contextlib.suppress(OSError):
            self.connection.send(Task(slot.number, forget, asked.pixels.shape[1], jobs))
            if slot.number not in self._slots:
                send_handle(self.connection, slot.file, self._pid)
        self._slots = {slot.number, *self._slots}.difference(forget)

    def _greeting(self) -> int:
        try:
            return int(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise RunError("a process to decode pictures in could not be started; what it said stands above") from None

    def answer(self) -> dict[int, str] | None:
        """Reasons of what it was given first, or None if it has died.

        Raises:
            RunError: a fault in the decoder itself.
        """
        try:
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        if "fault" in answer:
            raise RunError(f"decoding failed in a way that is no picture's fault:\n{answer['fault']}")
        return {place: reason for place, reason in answer["reasons"]}

    def close(self) -> None:
        if not self.shares:  # it waits, and ends where nothing more can come
            self.connection.close()
        elif self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class Pool:
    """Workers, and the memory that they share with the process that asks, any of whose threads may do so."""

    def __init__(self, workers: int) -> None:
        self._ring, self._crew = Ring(), [Worker() for _ in range(workers)]
        self._todo = deque[Share]()
        self._lock, self._closed = threading.Lock(), False

    def begin(self, pictures: Sequence[Picture | None], side: int) -> Callable[[], tuple[Pixels, dict[int, str]]]:
        """Begin to decode a batch. The result waits for it: pixels (B, side, side, 3), grey where there is none, and the reason
        of each picture that could not be decoded.

        A worker that dies is replaced; a picture that one has died of alone is bad.

        Raises:
            RunError: no process can be started, or a fault in the decoder itself.
        """
        stop = len(pictures) * side * side * 3
        slot = self._ring.take(stop + sum(len(picture.data) for picture in pictures if picture is not None))
        pixels, jobs = self._ring.pixels(slot, len(pictures), side), list[Job]()
        for place, picture in enumerate(pictures):
            if picture is None:
                pixels[place] = GREY
                continue
            start, stop = stop, stop + len(picture.data)
            slot.memory[start:stop] = picture.data
            jobs.append((place, start, stop, tuple(picture.view)))
        asked = Asked(slot, pixels, len(jobs))
        step = max(1, min(SHARE, len(jobs) // (SHARES * len(self._crew))))
        with self._lock:
            self._todo += [(asked, jobs[i : i + step]) for i in range(0, len(jobs), step)]
            self._give()
        return functools.partial(self._result, asked)

    def _result(self, asked: Asked) -> tuple[Pixels, dict[int, str]]:
        while asked.left:
            with self._lock:
                if asked.left:
                    self._take()
                    self._give()
        return asked.pixels, dict(sorted(asked.reasons.items()))

    def _give(self) -> None:
        """Give every worker what it may have before it."""
        for _, worker in itertools.product(range(AHEAD), self._crew):
            if self._todo and len(worker.shares) < AHEAD:
                worker.send(self._ring.known, self._todo.popleft())

    def _take(self) -> None:
        """Wait for an answer, and take what has come."""
        busy = {worker.connection: worker for worker in self._crew if worker.shares}
        try:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                reasons = worker.answer()
                if reasons is None:
                    self._replace(worker)
                else:
                    asked, jobs = worker.shares.popleft()
                    asked.left -= len(jobs)
                    asked.reasons |= reasons
        except BaseException:
            self.close()
            raise

    def _replace(self, dead: Worker) -> None:
        """Put a new worker in the place of one that has died, and what that one was at before all else, picture by picture."""
        if self._closed:
            raise RunError("the decoder was closed while a batch was being decoded")
        log.warning("a process that decoded pictures has died; another one takes its place")
        self._crew[self._crew.index(dead)] = Worker()
        (asked, jobs), *rest = dead.shares
        places = {job[0] for job in jobs}
        if len(jobs) == 1 and places <= asked.suspects:
            asked.pixels[jobs[0][0]], asked.reasons[jobs[0][0]] = GREY, CRASHED
            asked.left -= 1
            jobs = []
        asked.suspects |= places
        self._todo.extendleft(reversed([*((asked, [job]) for job in jobs), *rest]))

    def close(self) -> None:
        """End the workers, also those that hang in a picture."""
        self._closed = True
        for worker in self._crew:
            worker.close()
