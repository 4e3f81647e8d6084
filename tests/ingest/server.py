"""A web server on 127.0.0.1 that does what servers on the open web do, on purpose and on cue.

`/pic/N.jpg` and `/pic/N.png` are pictures, `/fault/...` misbehaves. `hits` counts requests by path (with query),
`peak` the most requests that were open at once.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import io
import math
import ssl
import threading
from collections import Counter
from types import TracebackType

import numpy as np
from aiohttp import web
from PIL import Image

from core.images import encode_jpeg


def picture(number: int, width: int = 96, height: int = 72) -> bytes:
    """A JPEG of coarse noise that differs from number to number."""
    rng = np.random.Generator(np.random.PCG64(number))
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return encode_jpeg(np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1)), 90)


def as_png(number: int) -> bytes:
    """The same as PNG, which ingest encodes anew."""
    out = io.BytesIO()
    Image.open(io.BytesIO(picture(number))).save(out, "PNG")
    return out.getvalue()


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(out, "PNG")
    return out.getvalue()


@functools.cache
def gzip_bomb() -> bytes:
    return gzip.compress(bytes(4_000_000), 6)


class Server:
    """`tls` serves https with that certificate instead of http; `robots` is what /robots.txt answers: status and text."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.robots = (404, "")
        self.hits: Counter[str] = Counter()
        self.agents: set[str] = set()
        self.delay = 0.0
        self.limit = math.inf  # requests beyond so many wait until it is raised, so that a test can act meanwhile
        self.peak = self._open = 0
        self.peaks: Counter[str] = Counter()  # the same by the first folder of the path
        self._by_folder: Counter[str] = Counter()
        self.well = threading.Event()  # /fault/until_well answers 503 until this is set

    def url(self, path: str) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}{path}"

    def __enter__(self) -> Server:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._counted])
        app.router.add_get("/pic/{number:\\d+}.jpg", self._pic)
        app.router.add_get("/pic/{number:\\d+}.png", self._png)
        app.router.add_get("/fault/{kind}", self._fault)
        app.router.add_get("/robots.txt", self._robots)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _counted(self, request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
        self.hits[request.path_qs] += 1
        number = self.hits.total()
        self.agents.add(request.headers.get("User-Agent", ""))
        self._open += 1
        self.peak = max(self.peak, self._open)
        folder = "/" + request.path.split("/")[1]
        self._by_folder[folder] += 1
        self.peaks[folder] = max(self.peaks[folder], self._by_folder[folder])
        try:
            await asyncio.sleep(self.delay)
            while number > self.limit:
                await asyncio.sleep(0.005)
            return await handler(request)
        finally:
            self._open -= 1
            self._by_folder[folder] -= 1

    async def _pic(self, request: web.Request) -> web.Response:
        return web.Response(body=picture(int(request.match_info["number"])), content_type="image/jpeg")

    async def _png(self, request: web.Request) -> web.Response:
        return web.Response(body=as_png(int(request.match_info["number"])), content_type="image/png")

    async def _robots(self, request: web.Request) -> web.Response:
        status, text = self.robots
        return web.Response(status=status, text=text)

    async def _fault(self, request: web.Request) -> web.StreamResponse:
        return await getattr(self, f"fault_{request.match_info['kind']}")(request)

    # ---- answers that are whole --------------------------------------------------------------------------------------

    async def fault_missing(self, request: web.Request) -> web.Response:
        return web.Response(status=404)

    async def fault_html(self, request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><p>moved</p>", content_type="text/html")

    async def fault_once_503(self, request: web.Request) -> web.Response:
        first = self.hits[request.path_qs] == 1
        return web.Response(status=503) if first else web.Response(body=picture(1))

    async def fault_once_429(self, request: web.Request) -> web.Response:
        if self.hits[request.path_qs] == 1:
            return web.Response(status=429, headers={"Retry-After": "1"})
        return web.Response(body=picture(2))

    async def fault_always_429(self, request: web.Request) -> web.Response:
        return web.Response(status=429)

    async def fault_later_429(self, request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "3600"})

    async def fault_until_well(self, request: web.Request) -> web.Response:
        return web.Response(body=picture(3)) if self.well.is_set() else web.Response(status=503)

    async def fault_tagged(self, request: web.Request) -> web.Response:
        return web.Response(body=picture(4), headers={"X-Robots-Tag": request.query["tag"]})

    async def fault_redirect(self, request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": request.query["to"]})

    async def fault_loop(self, request: web.Request) -> web.Response:
        return web.Response(status=301, headers={"Location": "/fault/loop"})

    async def fault_gzip_bomb(self, request: web.Request) -> web.Response:
        return web.Response(body=gzip_bomb(), headers={"Content-Encoding": "gzip"})

    async def fault_gzipped(self, request: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(picture(5)), headers={"Content-Encoding": "gzip"})

    async def fault_tiny(self, request: web.Request) -> web.Response:
        return web.Response(body=png(4, 4))

    async def fault_half(self, request: web.Request) -> web.Response:
        body = picture(6)
        return web.Response(body=body[: len(body) // 2], content_type="image/jpeg")

    # ---- answers that never are --------------------------------------------------------------------------------------

    async def _raw(self, request: web.Request, head: str, *chunks: bytes, every: float = 0.0) -> web.StreamResponse:
        """Write below aiohttp, then cut the connection; an empty line is added to `head` unless it ends in a new line."""
        assert request.transport is not None
        head += "" if head.endswith("\n") else "\n\n"
        request.transport.write(head.replace("\n", "\r\n").encode())
        for chunk in chunks:
            await asyncio.sleep(every)
            if request.transport.is_closing():
                break
            request.transport.write(chunk)
        await asyncio.sleep(0.05)
        request.transport.abort()
        raise asyncio.CancelledError

    async def fault_cut(self, request: web.Request) -> web.StreamResponse:
        return await self._raw(request, "HTTP/1.1 200 OK\nContent-Length: 100000", bytes(500))

    async def fault_reset(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise asyncio.CancelledError

    async def fault_not_http(self, request: web.Request) -> web.StreamResponse:
        return await self._raw(request, "SSH-2.0-OpenSSH_9.9", b"hello\r\n\r\n")

    async def fault_over(self, request: web.Request) -> web.StreamResponse:
        """A picture, and more than its Content-Length says."""
        body = picture(8)
        return await self._raw(request, f"HTTP/1.1 200 OK\nContent-Length: {len(body)}", body + b"HTTP/1.1 and more")

    async def fault_over_at_once(self, request: web.Request) -> web.StreamResponse:
        body = picture(8)
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b and more" % (len(body), body))
        await asyncio.sleep(0.05)
        request.transport.abort()
        raise asyncio.CancelledError

    async def fault_bad_chunk(self, request: web.Request) -> web.StreamResponse:
        return await self._raw(request, "HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"zz\r\nhello\r\n", every=0.05)

    async def fault_slow_head(self, request: web.Request) -> web.StreamResponse:
        """Slow-loris: a header that never ends."""
        chunks = [b"X-Header: %d\r\n" % i for i in range(100)]
        return await self._raw(request, "HTTP/1.1 200 OK\n", *chunks, every=0.05)

    async def fault_long_head(self, request: web.Request) -> web.StreamResponse:
        body = picture(9)
        head = f"HTTP/1.1 200 OK\nContent-Security-Policy: {'x' * 20_000}\nContent-Length: {len(body)}"
        return await self._raw(request, head, body)

    async def fault_drip(self, request: web.Request) -> web.StreamResponse:
        return await self._raw(request, "HTTP/1.1 200 OK\nContent-Length: 100000", *[b"x"] * 400, every=0.05)

    async def fault_stall(self, request: web.Request) -> web.StreamResponse:
        return await self._raw(request, "HTTP/1.1 200 OK\nContent-Length: 100000", b"x", b"y", every=20.0)

    async def fault_silent(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(20.0)
        return web.Response()

    async def fault_endless(self, request: web.Request) -> web.StreamResponse:
        return await self._raw(request, "HTTP/1.1 200 OK\nConnection: close", *[bytes(100_000)] * 1000, every=0.001)

    async def fault_liar(self, request: web.Request) -> web.StreamResponse:
        return await self._raw(request, "HTTP/1.1 200 OK\nContent-Length: 99000000000", b"x")
