"""A real S3 server on loopback (moto's) behind a proxy that counts requests and can fail them as object stores do."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bench.small import QuietServer

SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"""

Fault = Callable[[str, str], str]
"""Asked for each request, by (method, path with query), what is to become of it: "" (nothing), "slow" (503 SlowDown), "cut"
(the connection breaks in the middle of the body), or "late" (the store does it, and the answer is lost)."""


class Store:
    """`url` is its endpoint; `seen` counts requests by kind (`PUT`, `GET`, `HEAD`, `DELETE`, `POST`, `LIST`)."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address
        self.seen: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.fault: Fault = lambda method, path: ""

    def environment(self) -> dict[str, str]:
        """What a program needs to find this store."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    @contextlib.contextmanager
    def serving(self, bucket: str) -> Iterator[str]:
        """Serve while the block runs; gives the URL of an empty bucket."""
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
        behind = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        behind.start()
        self._behind = behind.get_host_and_port()
        bucket = f"{bucket}-{self._behind[1]}"  # all servers of a process share one store
        proxy = QuietServer((self._address, 0), lambda *given: _Proxy(self, *given))
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        self.url = f"http://{self._address}:{proxy.server_port}"
        try:
            self.ask("PUT", f"/{bucket}", b"", {})
            yield f"s3://{bucket}"
        finally:
            proxy.shutdown()
            proxy.server_close()
            behind.stop()

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, list[Any], bytes]:
        """The store's own answer: status, headers, body."""
        connection = http.client.HTTPConnection(*self._behind, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()


class _Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, store: Store, *given: Any) -> None:
        self._store = store
        super().__init__(*given)

    def _pass_on(self) -> None:
        kind = (
            "LIST" if self.command == "GET" and "list-type" in urllib.parse.urlsplit(self.path).query else self.command
        )
        self._store.seen[kind] += 1
        fault = self._store.fault(kind, self.path)
        if fault:
            self._store.failed[fault] += 1
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length) if self.headers.get("Transfer-Encoding") != "chunked" else self._chunks()
        if fault == "slow":
            self._answer(503, [("Content-Type", "application/xml")], SLOW_DOWN)
            return
        left_out = ("transfer-encoding", "connection", "content-length")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        status, found, data = self._store.ask(self.command, self.path, body, headers)
        if fault == "late":
            self.close_connection = True
            return
        self._answer(status, found, data)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        sizes = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        # the answer to HEAD names the length of a body that does not come
        self.send_header("Content-Length", sizes[0] if sizes and self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on

    def log_message(self, *_: Any) -> None:
        pass
