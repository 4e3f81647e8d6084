"""The open web, played by a real server: every misbehaviour ends in its outcome, within its limits, and no address that
is not public is connected to."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import aiohttp.abc
import pytest
import uvloop

from core.schema import Outcome
from ingest import http, politeness
from ingest.config import IngestConfig
from ingest.http import Fetched, Fetcher, address_problem, parse_url
from tests.ingest.certificates import Authority
from tests.ingest.server import Server, picture

LIMIT = 100_000  # bytes, more than one block of input
NOISE = bytes(range(256)) * 350


def fetch(*urls: str, resolver: aiohttp.abc.AbstractResolver | None = None, **settings: Any) -> list[Fetched]:
    config = IngestConfig(urls="", **{"allow_private": True, "retries": 0, **settings})

    async def go() -> list[Fetched]:
        async with Fetcher(config, version="1", resolver=resolver) as fetcher:
            return list(await asyncio.gather(*map(fetcher.fetch, urls)))

    return uvloop.run(go())


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "GRACE_S", 0.4)
    monkeypatch.setattr(http, "MAX_BYTES", 1_000_000)


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
        ("bad_chunk", Outcome.TRUNCATED, "the connection ended before the body did"),
        ("slow_head", Outcome.TIMEOUT, "not whole within the time of one attempt"),
    ],
)
def test_misbehaviour_ends_in_its_outcome(server: Server, kind: str, outcome: Outcome, detail: str | None) -> None:
    started = time.monotonic()
    (got,) = fetch(server.url(f"/fault/{kind}"), timeout=1.5)
    assert got.outcome == outcome, got
    assert detail is None or got.detail == detail
    assert "0x" not in (got.detail or "")
    assert time.monotonic() - started < 5
    assert len(got.body) <= 1_000_000


def test_a_coding_nobody_asked_for_is_undone(server: Server) -> None:
    (got,) = fetch(server.url("/fault/gzipped"))
    assert got.body == picture(5)


@pytest.mark.parametrize(
    ("coding", "body", "outcome"),
    [
        ("gzip", gzip.compress(b"GIF8"), b"GIF8"), ("deflate", zlib.compress(b"GIF8"), b"GIF8"),
        ("deflate", zlib.compress(b"GIF8", wbits=-15), b"GIF8"), ("aws-chunked", b"\x89PNG", b"\x89PNG"),
        ("gzip", b"\xff\xd8\xff", b"\xff\xd8\xff"), ("identity,", b"any", b"any"), ("br", b"any", Outcome.UNSUPPORTED),
        ("gzip, gzip", b"any", Outcome.UNSUPPORTED), ("gzip", b"any", Outcome.CORRUPT),
        ("gzip", gzip.compress(b"GIF8")[:-9], Outcome.TRUNCATED), ("gzip", b"", Outcome.TRUNCATED),
        ("gzip", gzip.compress(bytes(200_000)), Outcome.TOO_LARGE),
        ("gzip", gzip.compress(b"GI") + gzip.compress(b"") + gzip.compress(b"F8"), b"GIF8"),
        ("gzip", gzip.compress(b"GIF8") + b"\0\0 what follows", b"GIF8"),
        ("gzip", gzip.compress(NOISE, 0) + gzip.compress(b"F8"), NOISE + b"F8"),
        ("gzip", gzip.compress(b"GI") + gzip.compress(b"F8")[:-1], Outcome.TRUNCATED),
        ("gzip", gzip.compress(b"GI") + b"\x1f\x8b\x07 no method", Outcome.CORRUPT),
        ("gzip", gzip.compress(bytes(60_000)) * 2, Outcome.TOO_LARGE),
        ("gzip", gzip.compress(b"") * 100_000, Outcome.BOMB),
    ],
)  # fmt: skip
def test_codings_as_servers_announce_them(coding: str, body: bytes, outcome: bytes | Outcome) -> None:
    if isinstance(outcome, bytes):
        assert http._decoded(body, coding, LIMIT) == outcome
    else:
        with pytest.raises(http._Failure) as failure:
            http._decoded(body, coding, LIMIT)
        assert failure.value.outcome == outcome


@pytest.mark.parametrize("kind", ["over", "over_at_once"])
def test_a_body_is_read_as_far_as_it_was_announced(server: Server, kind: str) -> None:
    (got,) = fetch(server.url(f"/fault/{kind}"))
    assert (got.outcome, got.body) == (Outcome.OK, picture(8)), got


def test_long_headers_are_no_fault(server: Server) -> None:
    (got,) = fetch(server.url("/fault/long_head"))
    assert (got.outcome, got.body) == (Outcome.OK, picture(9)), got


@pytest.mark.parametrize(
    ("kind", "words"),
    [("good", None), ("expired", "expired"), ("other_host", "mismatch"), ("self_signed", "self-signed")],
)
def test_certificates_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str | None
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    monkeypatch.setattr(http, "_tls_context", http._tls_context.__wrapped__)  # authorities are read once a process
    with Server(authority.context(kind)) as server:
        (got,) = fetch(server.url("/pic/1.jpg"), retries=2)
    if words is None:
        assert (got.outcome, got.body) == (Outcome.OK, picture(1)), got
    else:
        assert (got.outcome, got.attempts) == (Outcome.TLS, 1), got
        assert words in (got.detail or "")


def test_plain_http_where_tls_is_spoken_and_the_other_way_round(server: Server, tmp_path: Path) -> None:
    (got,) = fetch(server.url("/pic/1.jpg").replace("http:", "https:"))
    assert got.outcome == Outcome.TLS, got
    with Server(Authority(tmp_path).context("good")) as secure:
        (got,) = fetch(secure.url("/pic/1.jpg").replace("https:", "http:"))
    assert got.outcome in (Outcome.CONNECT, Outcome.HTTP_4XX), got


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


def test_a_host_that_is_down_is_soon_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows keep the outcome, say that they were not tried, and the host gets another chance later."""
    tried: list[int] = []

    class Down(Names):
        async def resolve(self, *arguments: Any, **named: Any) -> list[aiohttp.abc.ResolveResult]:
            tried.append(1)
            raise OSError("no such name")

    async def go() -> list[Fetched]:
        config = IngestConfig(urls="", retries=0, per_host=1)
        async with Fetcher(config, resolver=Down()) as fetcher:
            got = [await fetcher.fetch(f"http://down.test/{i}") for i in range(30)]
            monkeypatch.setattr(time, "monotonic", lambda: later)
            return [*got, *[await fetcher.fetch(f"http://down.test/{i}") for i in (30, 31)]]

    later = time.monotonic() + 1000.0
    got = asyncio.run(go())
    assert len(tried) == politeness.FAILURES + 1
    assert {g.outcome for g in got} == {Outcome.DNS}
    assert [g.attempts for g in got] == [1] * 10 + [0] * 20 + [1, 0]
    assert (got[15].detail or "").startswith("not tried: its host failed again and again")


def test_a_host_with_many_missing_files_is_not_down(server: Server) -> None:
    got = fetch(*[server.url(f"/fault/missing?{i}") for i in range(30)], server.url("/pic/1.jpg"))
    assert [g.outcome for g in got] == [Outcome.HTTP_4XX] * 30 + [Outcome.OK]


def test_a_host_that_asks_for_an_hour_is_asked_no_more(server: Server) -> None:
    async def go() -> list[Fetched]:
        async with Fetcher(IngestConfig(urls="", allow_private=True)) as fetcher:
            return [await fetcher.fetch(server.url(path)) for path in ("/fault/later_429", "/pic/1.jpg", "/pic/2.jpg")]

    started = time.monotonic()
    got = asyncio.run(go())
    assert time.monotonic() - started < 5  # nobody waits in a queue for it
    assert [(g.outcome, g.attempts) for g in got] == [
        (Outcome.HTTP_429, 1),
        (Outcome.HTTP_429, 0),
        (Outcome.HTTP_429, 0),
    ]
    assert (got[1].detail or "").startswith("not tried: its host asked for a long wait")
    assert server.hits.total() == 1


def test_a_redirect_is_a_visit_to_the_host_it_leads_to(server: Server) -> None:
    """Else a list of short links would meet one host with as many visits as there are short hosts."""
    names = Names(**{f"short{i}_test": [["127.0.0.1"]] for i in range(12)}, target_test=[["127.0.0.1"]])
    server.delay = 0.02
    target = f"http://target.test:{server.port}/pic/"
    urls = [f"http://short{i}.test:{server.port}/fault/redirect?to={target}{i}.jpg" for i in range(12)]
    got = fetch(*urls, resolver=names, per_host=2)
    assert {g.outcome for g in got} == {Outcome.OK}
    assert server.peaks["/pic"] <= 2


def test_robots_txt_is_read_once_and_obeyed(server: Server) -> None:
    server.robots = (200, "User-agent: *\nDisallow: /pic/1\nAllow: /pic/12\n")
    urls = [server.url(f"/pic/{i}.jpg") for i in (1, 12, 2, 13)]
    got = fetch(*urls, server.url("/fault/redirect?to=/pic/1.jpg"), robots=True)
    assert [g.outcome for g in got] == [Outcome.ROBOTS, Outcome.OK, Outcome.OK, Outcome.ROBOTS, Outcome.ROBOTS]
    assert got[0].detail == "robots.txt: Disallow: /pic/1"
    assert server.hits["/robots.txt"] == 1 and server.hits["/pic/1.jpg"] == 0
    assert fetch(urls[0])[0].outcome == Outcome.OK


@pytest.mark.parametrize(
    ("status", "outcome"), [(404, Outcome.OK), (403, Outcome.OK), (500, Outcome.HTTP_5XX), (429, Outcome.HTTP_429)]
)
def test_a_site_without_robots_txt_forbids_nothing_and_one_in_trouble_everything(
    server: Server, status: int, outcome: Outcome
) -> None:
    server.robots = (status, "User-agent: *\nDisallow: /\n")
    (got,) = fetch(server.url("/pic/1.jpg"), robots=True)
    assert got.outcome == outcome, got
    assert outcome == Outcome.OK or got.detail == f"robots.txt: HTTP {status}"


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


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0177.0.0.1", "127.1", "017700000001", "[::1", "0x7f.1", "0x7f000001", "①②⑦.⓪.⓪.①", "127。0。0。1",
     "[::ffff:7f00:1]", "[::127.0.0.1]", "user:word@127.0.0.1", "[::1%25lo]", "LOCALHOST"],
)  # fmt: skip
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
        ("HTTP://A.Test:80/B", "http://a.test/B"),
        ("http://a.test/x\n\ty.jpg", "http://a.test/xy.jpg"),
        ("http://a.test/\0.jpg", "http://a.test/%00.jpg"),
        ("http://a.test/a\\b|c^d`e{f}.jpg", "http://a.test/a%5Cb|c%5Ed%60e%7Bf%7D.jpg"),
        ("http://[2606:4700::6810:84e5]:8080/x", "http://[2606:4700::6810:84e5]:8080/x"),
        ("http://xn--bcher-kva.test/%C3%A4%zz", "http://xn--bcher-kva.test/%C3%A4%25zz"),
        ("http://me:secret@a.test/x", "http://me:secret@a.test/x"),
        ("http://a_b.test./x", "http://a_b.test./x"),
        ("http://a.test/?", "http://a.test/"),
        ("http://a.test/../../x/./y", "http://a.test/../../x/./y"),
    ],
)
def test_urls_as_they_occur(url: str, requested: str) -> None:
    assert str(parse_url(url)) == requested


@pytest.mark.parametrize(
    "url",
    ["", "not a url", "/images/a.jpg", "http://", "ftp://a.test/b", "file:///etc/passwd", "data:image/gif;base64,R0lG",
     "javascript:alert(1)", "http://[::1/x", "http://a.test:99999/x", "www.a.test/x.jpg",
     "http://:]-_[.@", "HTTP://n[`Z@/pt", "http://a.test:0/x", "http://a..test/x", "http://a.test:x/y", "http://%/", "//",
     "http:a.test/x", "http:///x.jpg", f"http://{'a' * 64}.test/", "http://" + "a." * 200 + "test/", "http://[::1]x/", "\0",
     "http://a b.test/x", "http://.../x"],
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


@pytest.mark.parametrize(("allow_private", "wait"), [(False, 0.02), (True, 0.0)])
def test_strangers_are_not_visited_faster_than_a_rate(allow_private: bool, wait: float) -> None:
    hosts = Fetcher(IngestConfig(urls="", per_host=4, allow_private=allow_private)).hosts

    async def last_of(visits: int) -> float:
        host = politeness._Host(asyncio.Semaphore(4))
        return [hosts._take_token(host) for _ in range(visits)][-1]

    assert asyncio.run(last_of(50)) == 0.0  # one second's worth at once
    assert asyncio.run(last_of(51)) == pytest.approx(wait, rel=0.5)
