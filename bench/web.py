"""Web servers on loopback for the download benches: nginx with files, and thousands of slow hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_NGINX = """\
{user}
daemon off;
pid {home}/pid;
error_log stderr crit;
worker_processes 1;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000;
    open_file_cache max=10000;
    types {{ image/jpeg jpg; image/png png; image/webp webp; }}
    client_body_temp_path {home}/a; proxy_temp_path {home}/b; fastcgi_temp_path {home}/c; uwsgi_temp_path {home}/d;
    scgi_temp_path {home}/e;
    server {{ listen 127.0.0.1:{port} backlog=4096; root {root}; }}
}}
"""


def nginx_program() -> str | None:
    """Where nginx is, which Debian puts outside a user's path; None where it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def nginx(root: Path) -> Iterator[str]:
    """Serve `root` on loopback; gives the base URL without a slash at its end.

    Raises:
        SystemExit: nginx is not installed, or does not start.
    """
    program = nginx_program()
    if program is None:
        raise SystemExit("the download benches need nginx; on Debian: apt-get install nginx")
    with tempfile.TemporaryDirectory() as home, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        user = "user root;" if os.geteuid() == 0 else ""  # the files may lie where nginx's own user must not look
        config = Path(home, "nginx.conf")
        config.write_text(_NGINX.format(user=user, home=home, port=port, root=root.resolve()))
        server = subprocess.Popen([program, "-e", "stderr", "-c", str(config), "-p", home])
        try:
            _await_port(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit("nginx did not start; its reason stands above")


class SlowHosts:
    """`count` listening sockets on as many addresses of 127.0.0.0/8, each of which answers `latency` seconds late.

    Only GET requests that come in one piece are understood. `served` is the number of answers so far; `moments` holds the
    time.monotonic() of each request's arrival.
    """

    def __init__(self, count: int, latency: float, body: bytes) -> None:
        self.addresses = [f"127.{1 + i // 62500}.{i // 250 % 250}.{1 + i % 250}" for i in range(count)]
        self.moments: list[float] = []
        self.served = 0
        self._latency = latency
        head = f"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: {len(body)}\r\n\r\n"
        self._answer = head.encode() + body
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    def __enter__(self) -> SlowHosts:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    async def _listen(self) -> None:
        for address in self.addresses:
            server = await self._loop.create_server(lambda: _LateAnswer(self), address, self.port, backlog=16)
            self.port = self.port or server.sockets[0].getsockname()[1]

    def answer(self, transport: asyncio.WriteTransport) -> None:
        self.moments.append(time.monotonic())
        self._loop.call_later(self._latency, self._send, transport)

    def _send(self, transport: asyncio.WriteTransport) -> None:
        transport.write(self._answer)
        self.served += 1

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class _LateAnswer(asyncio.Protocol):
    def __init__(self, hosts: SlowHosts) -> None:
        self._hosts = hosts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"\r\n\r\n"):
            self._hosts.answer(self._transport)
