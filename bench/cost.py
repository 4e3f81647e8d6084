"""CPU seconds of a program with all its children, and their memory while it runs."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>


def timed(command: list[str], heard: Callable[[str], None] | None = None) -> tuple[str, float, float]:
    """(what it printed, CPU seconds, wall seconds) of a program and its children.

    `heard` is given each line of its standard error as it comes.

    Raises:
        SystemExit: it failed.
    """
    _adopt_orphans()
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    complaints = ""
    with tempfile.TemporaryFile("w+") as printed:
        with subprocess.Popen(command, stdout=printed, stderr=subprocess.PIPE, text=True) as program:
            assert program.stderr is not None
            for line in program.stderr:
                complaints = (complaints + line)[-2000:]
                if heard is not None:
                    heard(line)
        wall = time.monotonic() - started
        printed.seek(0)
        said = printed.read()
    _await_children()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if program.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {complaints}")
    return said, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def _adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends first, so that their CPU is counted too."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("this kernel does not hand orphans on, so a client's CPU cannot be counted; Linux is needed")


def _await_children() -> None:
    """Wait for orphans that have been handed on, but not for the web server."""
    servers = {child.pid for child in psutil.Process().children() if child.name() == "nginx"}
    while orphans := {child.pid for child in psutil.Process().children()} - servers:
        for pid in orphans:
            os.waitpid(pid, 0)


class Sampler(threading.Thread):
    """CPU seconds so far and memory of this process's descendants but for nginx, several times a second until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples: list[tuple[float, float, int]] = []
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.is_set():
            cpu, memory = 0.0, 0
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name() != "nginx":
                        cpu += sum(process.cpu_times()[:4])  # its own and that of children it has waited for
                        memory += process.memory_full_info().pss
                except psutil.Error:  # it has ended meanwhile
                    continue
            self._samples.append((time.monotonic(), cpu, memory))
            self._done.wait(0.25)

    def stop(self) -> list[tuple[float, float, int]]:
        """The samples: (monotonic seconds, CPU seconds so far, bytes of proportional set size)."""
        self._done.set()
        self.join()
        return self._samples
