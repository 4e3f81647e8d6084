"""Serves a demo world on 127.0.0.1, faults included.

    /i/NAME              the file of that name, whatever its kind
    /fault/KIND/NAME     the kind's way of going wrong, or its (broken) file as it is

Every answer depends on the path and on how often that path was asked for, on nothing else. The server runs in a thread
of its own, so that a test or the demo needs no second program; `hits` counts the requests by path.
"""

from __future__ import annotations

import asyncio
import mimetypes
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from core.errors import InputError, RunError
from demo.faults import HTML_PAGE, KINDS, PRIVATE_ADDRESS

if TYPE_CHECKING:
    from aiohttp import web

_START_SECONDS = 30.0
_DRIP_SECONDS = 0.5


class DemoServer:
    """`with DemoServer(world.folder) as server:` serves until the block ends; `server.base_url` has no slash at its end.

    delay: seconds before each answer, may be changed at any time (makes runs last for tests that interrupt them).
    port: 0 takes a free one. Raises InputError when `folder` holds no world, RunError when the port cannot be had.
    """

    def __init__(self, folder: Path, *, delay: float = 0.0, port: int = 0) -> None:
        self.folder = Path(folder)
        self.delay = delay
        self.base_url = ""
        self._port = port
        self._hits: Counter[str] = Counter()
        self._files: dict[str, Path] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> DemoServer:
        if not (self.folder / "world.json").exists():
            raise InputError(f"Expected a demo world (world.json) in {self.folder}, found none: make one there first.")
        self._files = {path.name: path for sub in ("pictures", "faults") for path in (self.folder / sub).rglob("*.*")}
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="demo-server", daemon=True)
        self._thread.start()
        started.wait(_START_SECONDS)
        if not self.base_url:
            self.close()
            raise RunError(
                f"The demo server could not listen on 127.0.0.1:{self._port} ({self._failure}): free that port."
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving; open (slow) answers are cut off. Harmless when already stopped."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def hits(self) -> dict[str, int]:
        """Requests by path since the start or the last reset."""
        return dict(self._hits)

    def reset(self) -> None:
        """Forgets all requests: faults that happen once happen again."""
        self._hits.clear()

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._serve(started))
        except OSError as error:
            self._failure = error
        finally:
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        from aiohttp import web

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", self._port)
            await site.start()
            self._port = runner.addresses[0][1]
            self.base_url = f"http://127.0.0.1:{self._port}"
            started.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        self._hits[request.path] += 1
        if self.delay:
            await asyncio.sleep(self.delay)
        head, _, name = request.path.rpartition("/")
        kind = head.removeprefix("/fault/")
        if kind in _WAYS and kind in KINDS:
            return await _WAYS[kind](self, request, name)
        if head == "/i" or kind in KINDS:
            return self._picture(name)
        return web.Response(status=404, text="no such path")

    def _picture(self, name: str) -> web.Response:
        from aiohttp import web

        # names are looked up among the world's files, so that no path leads out of its folder
        path = self._files.get(name)
        if path is None:
            return web.Response(status=404, text="no such picture")
        return web.Response(body=path.read_bytes(), content_type=mimetypes.guess_type(name)[0] or "image/webp")


# ---------------------------------------------------------------------------------------------------------------------
# ways of going wrong


def _status(code: int) -> _Way:
    async def way(server: DemoServer, request: web.Request, name: str) -> web.StreamResponse:
        from aiohttp import web

        return web.Response(status=code, text=f"always {code}")

    return way


def _once(code: int, headers: dict[str, str]) -> _Way:
    async def way(server: DemoServer, request: web.Request, name: str) -> web.StreamResponse:
        from aiohttp import web

        if server._hits[request.path] == 1:
            return web.Response(status=code, headers=headers, text="ask again")
        return server._picture(name)

    return way


def _redirect(target: Callable[[str], str]) -> _Way:
    async def way(server: DemoServer, request: web.Request, name: str) -> web.StreamResponse:
        from aiohttp import web

        return web.Response(status=302, headers={"Location": target(name)})

    return way


async def _html(server: DemoServer, request: web.Request, name: str) -> web.StreamResponse:
    from aiohttp import web

    return web.Response(body=HTML_PAGE, content_type="text/html")


async def _empty(server: DemoServer, request: web.Request, name: str) -> web.StreamResponse:
    from aiohttp import web

    return web.Response(body=b"", content_type="image/jpeg")


async def _slow(server: DemoServer, request: web.Request, name: str) -> web.StreamResponse:
    """A right header, then one byte every half second."""
    from aiohttp import web

    body = server._files[name].read_bytes()
    answer = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "image/jpeg"})
    await answer.prepare(request)
    for at in range(len(body)):
        await answer.write(body[at : at + 1])
        await asyncio.sleep(_DRIP_SECONDS)
    return answer


async def _cut(server: DemoServer, request: web.Request, name: str) -> web.StreamResponse:
    """Promises the whole file, sends half of it and closes the connection."""
    from aiohttp import web

    body = server._files[name].read_bytes()
    answer = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "image/jpeg"})
    await answer.prepare(request)
    await answer.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return answer


_Way = Callable[[DemoServer, "web.Request", str], Awaitable["web.StreamResponse"]]
_WAYS: dict[str, _Way] = {
    "404": _status(404),
    "410": _status(410),
    "500": _status(500),
    "503_once": _once(503, {}),
    "429_once": _once(429, {"Retry-After": "1"}),
    "slow": _slow,
    "cut": _cut,
    "html": _html,
    "empty": _empty,
    "redirect": _redirect(lambda name: f"/i/{name}"),
    "loop": _redirect(lambda name: f"/fault/loop/{name}"),
    "private": _redirect(lambda name: PRIVATE_ADDRESS),
}
