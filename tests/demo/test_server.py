"""The demo server, asked over real sockets: every planted way of going wrong does so."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from core.errors import InputError, RunError
from demo.faults import KINDS, Row
from demo.server import DemoServer
from demo.world import World

Rows = Callable[[str], list[Row]]
FileOf = Callable[[str], Path]


@pytest.fixture
def server(world: World) -> Iterator[DemoServer]:
    with DemoServer(world.folder) as running:
        yield running


def ask(server: DemoServer, path: str) -> tuple[HTTPResponse, bytes]:
    """The answer to one request (redirects are not followed) and its body."""
    connection = HTTPConnection(server.base_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_every_listed_good_picture_is_served_as_it_lies_on_disk(
    server: DemoServer, rows: Rows, file_of: FileOf
) -> None:
    good = rows("good")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda row: ask(server, row.path), good))
    types = {".jpg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
    for row, (answer, body) in zip(good, answers, strict=True):
        assert answer.status == 200 and body == file_of(row.path).read_bytes()
        assert answer.headers["Content-Type"] == types[Path(row.path).suffix]
    assert server.hits() == dict.fromkeys((row.path for row in good), 1)


@pytest.mark.parametrize("code", ["404", "410", "500"])
def test_status_faults_never_end(code: str, server: DemoServer, rows: Rows) -> None:
    for row in [*rows(code), *rows(code)]:
        assert ask(server, row.path)[0].status == int(code)
    assert set(server.hits().values()) == {2}


@pytest.mark.parametrize(("kind", "code"), [("503_once", 503), ("429_once", 429)])
def test_faults_that_happen_once(kind: str, code: int, server: DemoServer, rows: Rows, file_of: FileOf) -> None:
    for row in rows(kind):
        first, _ = ask(server, row.path)
        assert first.status == code and (first.headers["Retry-After"] == "1") == (code == 429)
        assert ask(server, row.path)[1] == file_of(row.path).read_bytes()
    server.reset()
    assert server.hits() == {}
    assert ask(server, rows(kind)[0].path)[0].status == code


def test_slow_drips_and_does_not_hold_up_the_end(world: World, rows: Rows) -> None:
    with DemoServer(world.folder) as server:
        connection = HTTPConnection(server.base_url.removeprefix("http://"), timeout=10)
        connection.request("GET", rows("slow")[0].path)
        answer = connection.getresponse()
        assert answer.length and answer.length > 1000
        start = time.monotonic()
        answer.read(3)
        assert 0.7 < time.monotonic() - start < 5
        start = time.monotonic()
    assert time.monotonic() - start < 3
    connection.close()


def test_cut_promises_more_than_it_sends(server: DemoServer, rows: Rows, file_of: FileOf) -> None:
    for row in rows("cut"):
        with pytest.raises(http.client.IncompleteRead) as cut:
            ask(server, row.path)
        body = file_of(row.path).read_bytes()
        assert cut.value.partial == body[: len(body) // 2]


@pytest.mark.parametrize("kind", ["truncated", "corrupt", "bomb", "tiny", "aspect", "exact", "reencoded", "mirrored"])
def test_broken_and_copied_files_arrive_whole(kind: str, server: DemoServer, rows: Rows, file_of: FileOf) -> None:
    for row in rows(kind):
        answer, body = ask(server, row.path)
        assert answer.status == 200 and body == file_of(row.path).read_bytes()
        assert int(answer.headers["Content-Length"]) == len(body)


def test_html_and_nothing_instead_of_a_picture(server: DemoServer, rows: Rows) -> None:
    answer, body = ask(server, rows("html")[0].path)
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/html") and b"<!doctype" in body
    answer, body = ask(server, rows("empty")[0].path)
    assert answer.status == 200 and body == b""


def test_redirects_lead_to_a_picture_in_circles_or_astray(server: DemoServer, rows: Rows, file_of: FileOf) -> None:
    for row in rows("redirect"):
        answer, _ = ask(server, row.path)
        assert answer.status == 302
        assert ask(server, answer.headers["Location"])[1] == file_of(row.path).read_bytes()
    loop = rows("loop")[0].path
    assert ask(server, loop)[0].headers["Location"] == loop
    assert ask(server, rows("private")[0].path)[0].headers["Location"].startswith("http://169.254.169.254/")


def test_each_kind_with_a_path_is_served_under_its_name(server: DemoServer, world: World) -> None:
    seen = {row.planted: row.path for row in world.rows() if row.path.startswith("/fault/")}
    assert set(seen) == set(KINDS) - {"bad_url", "captions"}
    assert all(path.split("/")[2] == kind for kind, path in seen.items())


@pytest.mark.parametrize(
    "path", ["/", "/i/none.jpg", "/i/..%2fworld.json", "/fault/exact/../../world.json", "/robots.txt"]
)
def test_nothing_else_is_served(path: str, server: DemoServer) -> None:
    assert ask(server, path)[0].status == 404


def test_delay_can_be_switched_while_serving(server: DemoServer, rows: Rows) -> None:
    path = rows("good")[0].path
    server.delay = 0.3
    start = time.monotonic()
    ask(server, path)
    assert time.monotonic() - start >= 0.3
    server.delay = 0.0


def test_two_servers_and_no_port_or_world(world: World, server: DemoServer, tmp_path: Path) -> None:
    port = int(server.base_url.rpartition(":")[2])
    with pytest.raises(RunError, match=f"127.0.0.1:{port}"), DemoServer(world.folder, port=port):
        pass
    with pytest.raises(InputError, match="found none"), DemoServer(tmp_path):
        pass
    with DemoServer(world.folder) as other:
        assert other.base_url != server.base_url
