"""The open web, played by a real server: every misbehaviour ends in its outcome, within its limits, and no address that
is not public is connected to."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import aiohttp.abc
import pytest

from core.schema import Outcome
from ingest import http
from ingest.config import IngestConfig
from ingest.http import Fetched, Fetcher, address_problem, parse_url
from tests.ingest.server import Server, picture


def fetch(*urls: str, resolver: aiohttp.abc.AbstractResolver | None = None, **settings: Any) -> list[Fetched]:
    config = IngestConfig(urls="", **{"allow_private": True, "retries": 0, **settings})

    async def go() -> list[Fetched]:
        async with Fetcher(config, version="1", resolver=resolver) as fetcher:
            return list(await asyncio.gather(*map(fetcher.fetch, urls)))

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "GRACE_S", 0.4)


class Names(aiohttp.abc.AbstractResolver):
    """A resolver whose answers the test decides; each call of one name gives the next of its addresses."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        self.asked.append(host)
        answers = self.names[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            {"hostname": host, "host": a, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
            for a in addresses
        ]

    async def close(self) -> None:
        pass


def test_a_good_picture_comes_whole(server: Server) -> None:
    (got,) = fetch(server.url("/pic/7.jpg"), contact="https://example.org/bot")
    assert (got.outcome, got.status, got.attempts, got.body) == (Outcome.OK, 200, 1, picture(7))
    assert got.final_url == server.url("/pic/7.jpg")
    assert server.agents == {"pairmill/1 (+https://example.org/bot)"}


@pytest.mark.parametrize(
    ("kind", "outcome", "detail"),
    [
        ("missing", Outcome.HTTP_4XX, "HTTP 404 Not Found"),
        ("html", Outcome.OK, None),
        ("cut", Outcome.TRUNCATED, "the connection ended before the body did"),
        ("reset", Outcome.CONNECT, None),
        ("not_http", Outcome.CONNECT, None),
        ("drip", Outcome.TOO_SLOW, "less than 2,000 bytes/s"),
        ("stall", Outcome.TOO_SLOW, "no byte for 0 s"),
        ("silent", Outcome.TIMEOUT, None),
        ("endless", Outcome.TOO_LARGE, "more than 1,000,000 bytes"),
        ("liar", Outcome.TOO_LARGE, "99,000,000,000 bytes announced"),
        ("gzip_bomb", Outcome.TOO_LARGE, "more than 1,000,000 bytes after decompression"),
        ("later_429", Outcome.HTTP_429, "HTTP 429"),
    ],
)
def test_misbehaviour_ends_in_its_outcome(server: Server, kind: str, outcome: Outcome, detail: str | None) -> None:
    started = time.monotonic()
    (got,) = fetch(server.url(f"/fault/{kind}"), timeout=1.5, max_bytes=1_000_000)
    assert got.outcome == outcome, got
    assert detail is None or got.detail == detail
    assert "0x" not in (got.detail or "")
    assert time.monotonic() - started < 5
    assert len(got.body) <= 1_000_000


def test_a_coding_nobody_asked_for_is_undone(server: Server) -> None:
    (got,) = fetch(server.url("/fault/gzipped"))
    assert got.body == picture(5)


def test_passing_failures_are_tried_again_and_retry_after_is_kept(server: Server) -> None:
    once, often, down = fetch(
        server.url("/fault/once_503"), server.url("/fault/once_429"), server.url("/fault/until_well"), retries=2
    )
    assert (once.outcome, once.attempts) == (Outcome.OK, 2)
    assert (often.outcome, often.attempts) == (Outcome.OK, 2)
    assert often.elapsed_s >= 1.0
    assert (down.outcome, down.attempts, down.status) == (Outcome.HTTP_5XX, 3, 503)
    assert server.hits["/fault/until_well"] == 3


def test_a_host_that_asks_for_an_hour_is_left_alone(server: Server) -> None:
    (got,) = fetch(server.url("/fault/later_429"), retries=3)
    assert (got.outcome, got.attempts) == (Outcome.HTTP_429, 1)


def test_what_will_not_mend_is_not_tried_again(server: Server) -> None:
    (got,) = fetch(server.url("/fault/missing"), retries=3)
    assert (got.outcome, got.attempts) == (Outcome.HTTP_4XX, 1)


def test_redirects_are_followed_counted_and_judged(server: Server) -> None:
    to = server.url("/fault/redirect?to=")
    good, loop, relative, metadata, other = fetch(
        to + server.url("/pic/1.jpg"), server.url("/fault/loop"), to + "../pic/2.jpg",
        to + "http://169.254.169.254/latest/meta-data/", to + "file:///etc/passwd",
    )  # fmt: skip
    assert (good.outcome, good.final_url) == (Outcome.OK, server.url("/pic/1.jpg"))
    assert relative.outcome == Outcome.OK
    assert (metadata.outcome, metadata.status) == (Outcome.BLOCKED_ADDRESS, 302)
    assert other.outcome == Outcome.BAD_URL
    assert (loop.outcome, loop.detail) == (Outcome.HTTP_4XX, "more than 5 redirects")
    assert server.hits["/fault/loop"] == 6


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]",
     "[fe80::1]", "[fd00::1]", "224.0.0.1", "100.64.0.1", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"],
)  # fmt: skip
def test_no_address_but_a_public_one_is_connected_to(server: Server, host: str) -> None:
    (got,) = fetch(f"http://{host}:{server.port}/pic/1.jpg", allow_private=False)
    assert got.outcome == Outcome.BLOCKED_ADDRESS, got
    assert not server.hits


@pytest.mark.parametrize("host", ["2130706433", "0177.0.0.1", "127.1", "017700000001", "[::1"])
def test_addresses_in_disguise_are_no_urls(server: Server, host: str) -> None:
    (got,) = fetch(f"http://{host}:{server.port}/pic/1.jpg", allow_private=False)
    assert got.outcome in (Outcome.BAD_URL, Outcome.BLOCKED_ADDRESS), got
    assert not server.hits


def test_the_checked_address_is_the_one_that_is_used(server: Server) -> None:
    """A name is asked once and connected to as checked, whatever it answers later (DNS rebinding); of mixed answers the
    forbidden ones are left out; a redirect to a name is checked like any other."""
    names = Names(
        rebind_test=[["127.0.0.1"], ["169.254.169.254"]], mixed_test=[["169.254.169.254", "127.0.0.1"]],
        bad_test=[["169.254.169.254"]],
    )  # fmt: skip
    port = server.port
    hop = server.url(f"/fault/redirect?to=http://bad.test:{port}/pic/4.jpg")

    async def one_after_the_other() -> list[Fetched]:
        async with Fetcher(IngestConfig(urls="", allow_private=True, retries=0), resolver=names) as fetcher:
            urls = [f"http://{n}.test:{port}/pic/{i}.jpg" for i, n in enumerate(("rebind", "rebind", "mixed", "bad"))]
            return [await fetcher.fetch(url) for url in [*urls, hop]]

    got = asyncio.run(one_after_the_other())
    blocked, ok = Outcome.BLOCKED_ADDRESS, Outcome.OK
    assert [g.outcome for g in got] == [ok, ok, ok, blocked, blocked]
    assert names.asked.count("rebind.test") == 1
    assert server.hits["/pic/3.jpg"] == server.hits["/pic/4.jpg"] == 0


def test_metadata_addresses_stay_blocked_when_private_ones_are_allowed() -> None:
    for address in ("169.254.169.254", "fe80::1", "fd00:ec2::254", "224.0.0.1", "::ffff:169.254.169.254"):
        assert address_problem(address, allow_private=True), address
    for address in ("127.0.0.1", "10.0.0.1", "::1"):
        assert address_problem(address, allow_private=True) is None
        assert address_problem(address, allow_private=False), address
    for address in ("93.184.215.14", "2606:4700::6810:84e5"):
        assert address_problem(address, allow_private=False) is None


@pytest.mark.parametrize(
    ("url", "requested"),
    [
        ("http://a.test/x y,z.jpg", "http://a.test/x%20y,z.jpg"),
        ("  https://a.test/b.jpg\n", "https://a.test/b.jpg"),
        ("//cdn.test/b.jpg", "https://cdn.test/b.jpg"),
        ("http://bücher.test/ä.jpg", "http://xn--bcher-kva.test/%C3%A4.jpg"),
        ("http://a.test/b.jpg?x=1&y=%2F%7e#top", "http://a.test/b.jpg?x=1&y=%2F%7e"),
        ("http://a.test/100%.jpg", "http://a.test/100%25.jpg"),
        ("http://a.test", "http://a.test/"),
    ],
)
def test_urls_as_they_occur(url: str, requested: str) -> None:
    assert str(parse_url(url)) == requested


@pytest.mark.parametrize(
    "url",
    ["", "not a url", "/images/a.jpg", "http://", "ftp://a.test/b", "file:///etc/passwd", "data:image/gif;base64,R0lG",
     "javascript:alert(1)", "http://[::1/x", "http://a.test:99999/x", "www.a.test/x.jpg",
     "http://:]-_[.@", "HTTP://n[`Z@/pt"],
)  # fmt: skip
def test_what_is_no_url_is_said_to_be_none(url: str) -> None:
    (got,) = fetch(url)
    assert (got.outcome, got.attempts) == (Outcome.BAD_URL, 0)
    assert got.detail


def test_opt_outs_are_obeyed_before_the_body(server: Server) -> None:
    tagged = server.url("/fault/tagged?tag=")
    refused, scoped, free = fetch(tagged + "noai, max-snippet:-1", tagged + "otherbot: noindex", tagged + "all")
    assert (refused.outcome, refused.detail) == (Outcome.OPTED_OUT, "X-Robots-Tag: noai")
    assert scoped.outcome == free.outcome == Outcome.OK


def test_a_closed_port_and_an_unknown_name(server: Server) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/x.jpg"
        (refused,) = fetch(closed)
    assert refused.outcome == Outcome.CONNECT


def test_slots_of_one_host_bound_what_is_open_at_once(server: Server) -> None:
    server.delay = 0.02
    got = fetch(*[server.url(f"/pic/{i}.jpg") for i in range(40)], per_host=4)
    assert {g.outcome for g in got} == {Outcome.OK}
    assert server.peak <= 4
