"""Hosts of a network on one machine: network namespaces on a bridge, whose links can be cut and whose processes killed.

Needs root and iproute2. Processes of a host see its own interface only, and reach this process at `Hosts.address`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass

NETWORK = "198.18.77"  # of the range that RFC 2544 keeps for benchmarks


@dataclass(frozen=True)
class Host:
    """One namespace: the address by which others reach it, and its interface."""

    name: str
    address: str
    device: str

    def command(self, *argv: str) -> list[str]:
        """`argv`, to be run on this host."""
        return ["ip", "netns", "exec", self.name, *argv]

    def cut(self) -> None:
        """Nothing comes or goes any more, and nobody is told: as where a cable is pulled at the far end."""
        _ip("link", "set", f"{self.device}x", "down")

    def mend(self) -> None:
        _ip("link", "set", f"{self.device}x", "up")

    def kill(self) -> None:
        """SIGKILL to every process on it; the kernel then closes their connections."""
        for pid in subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


class Hosts:
    """`count` hosts while the block runs; what still runs on them at its end is killed."""

    address = f"{NETWORK}.254"

    def __init__(self, count: int) -> None:
        self._bridge = f"pm{os.getpid()}"
        names = [f"{self._bridge}-{number}" for number in range(count)]
        self._hosts = [
            Host(name, f"{NETWORK}.{number + 1}", f"{self._bridge}v{number}") for number, name in enumerate(names)
        ]

    def __enter__(self) -> list[Host]:
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            _ip("link", "add", self._bridge, "type", "bridge")
            undo.callback(_ip, "link", "del", self._bridge)
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host in self._hosts:
                _ip("netns", "add", host.name)
                undo.callback(_ip, "netns", "del", host.name)
                undo.callback(host.kill)
                _ip("link", "add", f"{host.device}x", "type", "veth", "peer", "name", host.device, "netns", host.name)
                undo.callback(_ip, "link", "del", f"{host.device}x")
                _ip("link", "set", f"{host.device}x", "master", self._bridge, "up")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
                for device in ("lo", host.device):
                    _ip("-n", host.name, "link", "set", device, "up")
            self._undo = undo.pop_all()
        return self._hosts

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def why_not() -> str:
    """Why no hosts can be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "needs iproute2"
    try:
        with Hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces ({error.stderr.strip()})"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
