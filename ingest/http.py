"""Fetches URLs: safe addresses only, streamed, bounded in time and size, retried politely.

Way in: `Fetcher.fetch(url)`. Way out: `Fetched` with a body or a closed outcome; no exception for anything a server,
a resolver or a URL can do. One `Fetcher` holds the session, the connections and the resolved names of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
import zlib
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import aiohttp
import aiohttp.abc
import aiohttp.client_proto
import aiohttp.resolver
import yarl

from core.schema import Outcome
from ingest import politeness, robots

if TYPE_CHECKING:
    from ingest.config import IngestConfig

GRACE_S = 3.0  # slow starts are no slow downloads: the minimum rate holds after this long, a silent body ends after it
CONNECT_S = 10.0
DNS_CACHE_S = 600
REDIRECTS = 5
MIN_RATE = 2000  # bytes a second of a body, below which it is given up
MAX_BYTES = 32_000_000  # of a body, counted while it arrives and after decompression
HEADER_BYTES = 65_536  # aiohttp's own limit of 8 KB is less than some content security policies
_REDIRECTING = frozenset({301, 302, 303, 307, 308})
_NAME = re.compile(r"([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)  # as its last label, it makes a host an address (WHATWG)
_MEMBERS = 10_000  # of one gzip body; a body of empty ones alone would take seconds of the event loop
_BLOCK = 1 << 16
_PICTURES = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8")
# Tried again within the run. Time-outs and certificates rarely mend within seconds; `--retry-failed` has them.
_TRY_AGAIN = frozenset({Outcome.DNS, Outcome.CONNECT, Outcome.TRUNCATED, Outcome.HTTP_429, Outcome.HTTP_5XX})


@dataclass
class Fetched:
    """What became of one URL. `body` is whole where `outcome` is ok; `elapsed_s` spans all attempts and waits."""

    outcome: Outcome
    detail: str | None = None
    status: int | None = None
    final_url: str | None = None
    body: bytes = b""
    attempts: int = 0
    elapsed_s: float = 0.0


class _Failure(Exception):
    """One attempt that ended without a body. `wait` is what its server asked for, in seconds; `tried` is False where the
    server was not asked at all."""

    def __init__(self, outcome: Outcome, detail: str, *, wait: float | None = None, tried: bool = True) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.wait, self.tried = outcome, detail, wait, tried


class BlockedAddress(OSError):
    """A name that resolves to an address we do not connect to. OSError, because aiohttp passes those of a resolver on."""


def parse_url(url: str) -> yarl.URL:
    """`url` as it can be requested: trimmed, IRIs and spaces encoded, `//host/path` taken as https.

    Raises:
        ValueError: no http(s) URL with a host; the message says what it is instead.
    """
    text = re.sub(r"[\t\r\n]", "", url).strip()
    try:
        parsed = yarl.URL("https:" + text if text.startswith("//") else text)
    except IndexError as error:  # what yarl 1.24 makes of `http://a[b@/`
        raise ValueError("stray brackets in the host") from error
    if parsed.scheme not in ("http", "https"):
        missing = "no scheme" if text else "no URL"
        raise ValueError(f"scheme {parsed.scheme!r} is not http(s)" if parsed.scheme else missing)
    host = parsed.raw_host or ""
    if not host:
        raise ValueError("no host")
    if ":" in host or _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]):
        ipaddress.ip_address(host.split("%")[0])  # 2130706433, 0177.0.0.1 and 0x7f.1 are loopback to the C library
    elif len(host) > 253 or not _NAME.fullmatch(host):
        raise ValueError("the host is no name")
    if parsed.port == 0:  # and reading it raises where it is out of range
        raise ValueError("port 0")
    # yarl decodes what need not be encoded; signed URLs break by that, so path and query go out as they came
    pieces = urllib.parse.urlsplit(text)
    return yarl.URL.build(
        scheme=parsed.scheme,
        authority=parsed.raw_authority,
        path=_encoded(pieces.path) or "/",
        query_string=_encoded(pieces.query),
        encoded=True,
    )


def _encoded(part: str) -> str:
    """Percent-encode what may not stand in a URL and nothing that is encoded already."""
    return urllib.parse.quote(re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", part), safe="%/:=&?~+!$,;'@()*|[]")


def address_problem(address: str, *, allow_private: bool) -> str | None:
    """Why not to connect to `address`, or None. Link-local addresses (cloud metadata lives there) are never allowed."""
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or _nat64(ip)
        if embedded is not None:
            ip = embedded
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or str(ip) in ("fd00:ec2::254", "100.100.100.200"):
        return f"{address} is link-local, multicast or a metadata service"
    if not allow_private and (not ip.is_global or ip.is_private or ip.is_loopback or ip.is_reserved):
        return f"{address} is not a public address"
    return None


def _nat64(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    well_known = ip in ipaddress.IPv6Network("64:ff9b::/96")
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if well_known else None


class GuardedResolver(aiohttp.abc.AbstractResolver):
    """Resolves through `inner` and hands on only addresses we may connect to.

    aiohttp connects to exactly what its resolver returns, so the checked address is the one that is used, whatever the
    name resolves to a moment later.
    """

    def __init__(self, inner: aiohttp.abc.AbstractResolver, *, allow_private: bool) -> None:
        self._inner, self._allow_private = inner, allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        problems = [address_problem(r["host"], allow_private=self._allow_private) for r in found]
        allowed = [r for r, problem in zip(found, problems, strict=True) if problem is None]
        if not allowed:
            raise BlockedAddress(next((p for p in problems if p), f"{host} has no address"))
        return allowed

    async def close(self) -> None:
        await self._inner.close()


class _Protocol(aiohttp.client_proto.ResponseHandler):
    """Takes the head of a response and what came with it one after the other.

    A body longer than its Content-Length is an error to the parser, which then forgets what else came in the same
    packet; fed apart, a small picture from such a server is read as far as it was announced, as browsers do.
    """

    def data_received(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4 if data.startswith(b"HTTP/") else 0
        if 4 <= end < len(data):
            super().data_received(data[:end])
            data = data[end:]
        super().data_received(data)
        if (error := self.exception()) is not None and self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(aiohttp.ClientPayloadError(str(error)))  # else its reader would wait for ever


class Fetcher:
    """Fetches URLs with the limits of `config`; an async context manager.

    Args:
        resolver: what turns names into addresses, before the guard; the system's by default.
    """

    def __init__(
        self, config: IngestConfig, *, version: str = "0", resolver: aiohttp.abc.AbstractResolver | None = None
    ) -> None:
        self._config = config
        self._version = version
        self._resolver = resolver
        rate = 0.0 if config.allow_private else politeness.RATE * config.per_host
        self.hosts = politeness.Hosts(per_host=config.per_host, total=config.concurrency, rate=rate)
        self.breaker = politeness.Breaker()
        self._robots: dict[yarl.URL, asyncio.Task[robots.Rules]] = {}

    async def __aenter__(self) -> Fetcher:
        resolver = GuardedResolver(
            self._resolver or aiohttp.resolver.DefaultResolver(), allow_private=self._config.allow_private
        )
        connector = aiohttp.TCPConnector(
            limit=0, resolver=resolver, ttl_dns_cache=DNS_CACHE_S, ssl=_tls_context(), keepalive_timeout=5.0
        )
        factory: Any = functools.partial(_Protocol, loop=asyncio.get_running_loop())
        connector._factory = factory
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # decompression is counted here, so that a bomb cannot grow behind our back
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            headers={
                "User-Agent": politeness.user_agent(self._version, self._config.contact),
                "Accept": "image/avif,image/webp,image/*;q=0.9,*/*;q=0.5",
                "Accept-Encoding": "identity",
            },
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._robots.values():
            task.cancel()
        await asyncio.gather(*self._robots.values(), return_exceptions=True)
        await self._session.close()

    async def fetch(self, url: str) -> Fetched:
        """Fetch `url`, with redirects followed and passing failures tried again."""
        started = time.monotonic()
        try:
            parsed = parse_url(url)
        except ValueError as error:
            return Fetched(Outcome.BAD_URL, str(error)[:200])
        result = Fetched(Outcome.INTERNAL)
        for attempt in range(1, self._config.retries + 2):
            result, failure = await self._attempt(parsed)
            result.attempts, result.elapsed_s = attempt, time.monotonic() - started
            if failure is None:
                break
            result.attempts -= not failure.tried
            wait = failure.wait or 0.0
            mends = failure.tried and failure.outcome in _TRY_AGAIN and wait <= politeness.LONGEST_WAIT_S
            if not mends or attempt > self._config.retries:
                break
            await asyncio.sleep(wait or politeness.backoff(attempt))
        return result

    async def _attempt(self, url: yarl.URL) -> tuple[Fetched, _Failure | None]:
        """One attempt, and how it failed where it did."""
        result = Fetched(Outcome.INTERNAL, final_url=str(url))
        try:
            result.body = await self._follow(url, result)
        except _Failure as failure:
            result.outcome, result.detail = failure.outcome, failure.detail
            return result, failure
        except Exception as error:  # the boundary of one row: whatever the client does, the run goes on
            result.detail = f"{type(error).__name__}: {error}"[:200]
            return result, _Failure(Outcome.INTERNAL, result.detail)
        result.outcome = Outcome.OK
        return result, None

    async def _follow(self, url: yarl.URL, result: Fetched) -> bytes:
        """The body at the end of all redirects. Each hop is a visit to its own host; waiting for one costs no time."""
        left = self._config.timeout
        for _ in range(REDIRECTS + 1):
            result.final_url = str(url)
            self._check_literal(url)
            async with self.hosts.visit(url.raw_host or ""):
                started = time.monotonic()
                answer = await self._visit(url, result, left)
                left -= time.monotonic() - started
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise _Failure(Outcome.HTTP_4XX, f"more than {REDIRECTS} redirects")

    async def _visit(self, url: yarl.URL, result: Fetched, seconds: float) -> bytes | yarl.URL:
        """One request of at most `seconds`, whose end goes into the record of its host: the body, or the next hop."""
        site = f"{url.raw_host}:{url.port}"
        if verdict := self.breaker.verdict(site):
            raise _Failure(*verdict, tried=False)
        try:
            async with asyncio.timeout(seconds):
                if self._config.robots:
                    await self._ask_robots(url)
                answer = await self._request(url, result)
        except _Failure as error:
            failure = error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            failure = _Failure(*_classify(error))
        else:
            self.breaker.answered(site)
            return answer
        self._note(site, url.raw_host or "", failure)
        raise failure

    def _note(self, site: str, host: str, failure: _Failure) -> None:
        failures = self.breaker.failed(site, failure.outcome, failure.detail)
        if failure.outcome == Outcome.HTTP_429 and failure.wait is None:
            failure.wait = politeness.backoff(min(failures, 5))
        if failure.wait and failure.wait > politeness.LONGEST_WAIT_S:
            self.breaker.shun(site, failure.wait, failure.outcome)
        elif failure.wait:
            self.hosts.pause(host, failure.wait)

    async def _request(self, url: yarl.URL, result: Fetched) -> bytes | yarl.URL:
        async with self._session.get(url, allow_redirects=False) as response:
            result.status = response.status
            if response.status not in _REDIRECTING:
                return await self._receive(response)
            return _next_hop(url, response)

    async def _ask_robots(self, url: yarl.URL) -> None:
        """Raise _Failure where robots.txt of the site forbids `url`; the file is read once."""
        origin = url.origin()
        if origin not in self._robots:
            self._robots[origin] = asyncio.create_task(self._read_robots(origin))
        task = self._robots[origin]
        try:
            rules = await asyncio.shield(task)  # others wait for the same file
        except Exception:
            if self._robots.get(origin) is task:
                del self._robots[origin]
            raise
        if (rule := rules.refusal(url.raw_path_qs)) is not None:
            raise _Failure(Outcome.ROBOTS, f"robots.txt: {rule}")

    async def _read_robots(self, origin: yarl.URL) -> robots.Rules:
        """RFC 9309: what is not there or leads nowhere forbids nothing; a server in trouble forbids everything for now."""
        url = origin / "robots.txt"
        async with asyncio.timeout(self._config.timeout):
            for _ in range(REDIRECTS + 1):
                self._check_literal(url)
                async with self._session.get(url, allow_redirects=False) as response:
                    if response.status == 429 or 500 <= response.status < 600:
                        outcome = Outcome.HTTP_429 if response.status == 429 else Outcome.HTTP_5XX
                        raise _Failure(outcome, f"robots.txt: HTTP {response.status}")
                    if response.status == 200:
                        return robots.parse(await _beginning(response, robots.LIMIT), politeness.AGENT)
                    if response.status not in _REDIRECTING:
                        break
                    url = _next_hop(url, response)
        return robots.Rules()

    def _check_literal(self, url: yarl.URL) -> None:
        # aiohttp does not ask the resolver about hosts that are addresses already
        with contextlib.suppress(ValueError):
            if problem := address_problem(url.raw_host or "", allow_private=self._config.allow_private):
                raise _Failure(Outcome.BLOCKED_ADDRESS, problem)

    async def _receive(self, response: aiohttp.ClientResponse) -> bytes:
        """The body, decoded; the status and the opt-out headers are judged before any of it is read."""
        status = response.status
        if status == 429 or 500 <= status < 600:
            outcome = Outcome.HTTP_429 if status == 429 else Outcome.HTTP_5XX
            wait = politeness.retry_after(response.headers.get("Retry-After"))
            raise _Failure(outcome, f"HTTP {status}", wait=wait)
        if status not in (200, 203):
            raise _Failure(Outcome.HTTP_4XX, f"HTTP {status} {response.reason or ''}".strip())
        headers = response.headers
        if rule := politeness.opt_out(headers.getall("X-Robots-Tag", ()), headers.getall("tdm-reservation", ())):
            raise _Failure(Outcome.OPTED_OUT, rule)
        if (response.content_length or 0) > MAX_BYTES:
            raise _Failure(Outcome.TOO_LARGE, f"{response.content_length:,} bytes announced")
        return _decoded(await self._stream(response), headers.get("Content-Encoding"), MAX_BYTES)

    async def _stream(self, response: aiohttp.ClientResponse) -> bytes:
        # details hold no counts of bytes or seconds, so that a repeated run writes the same rows
        chunks: list[bytes] = []
        size, started = 0, time.monotonic()
        while chunk := await _next_chunk(response):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_BYTES:
                raise _Failure(Outcome.TOO_LARGE, f"more than {MAX_BYTES:,} bytes")
            elapsed = time.monotonic() - started
            if elapsed > GRACE_S and size < elapsed * MIN_RATE:
                raise _Failure(Outcome.TOO_SLOW, f"less than {MIN_RATE:,} bytes/s")
        return b"".join(chunks)


def _next_hop(url: yarl.URL, response: aiohttp.ClientResponse) -> yarl.URL:
    location = response.headers.get("Location", "")
    try:
        return parse_url(urllib.parse.urljoin(str(url), location))
    except ValueError as error:
        raise _Failure(Outcome.BAD_URL, f"redirected to {location[:100]!r}: {error}") from error


async def _beginning(response: aiohttp.ClientResponse, size: int) -> bytes:
    """The first `size` bytes of the body, or all of it."""
    data = b""
    while len(data) < size and (chunk := await _next_chunk(response)):
        data += chunk
    return data[:size]


async def _next_chunk(response: aiohttp.ClientResponse) -> bytes:
    """The next bytes of the body, none at its end."""
    try:
        async with asyncio.timeout(GRACE_S):
            return await response.content.readany()
    except TimeoutError:
        raise _Failure(Outcome.TOO_SLOW, f"no byte for {GRACE_S:.0f} s") from None
    except (aiohttp.ClientPayloadError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, OSError) as error:
        raise _Failure(Outcome.TRUNCATED, "the connection ended before the body did") from error


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # one for all requests of a process: making one costs 24 ms


def _decoded(body: bytes, coding: str | None, limit: int) -> bytes:
    """`body` without its Content-Encoding, never growing beyond `limit` bytes.

    Raises:
        _Failure: too_large, truncated, corrupt, bomb, or unsupported for a coding that we did not ask for and do not know.
    """
    names = [
        name for part in (coding or "").lower().split(",") if (name := part.strip()) not in ("", "identity", "none")
    ]
    if not names or body.startswith(_PICTURES):
        return body  # some servers announce a coding (aws-chunked, utf-8, gzip) and send the picture as it is
    if len(names) > 1 or names[0] not in ("gzip", "x-gzip", "deflate"):
        raise _Failure(Outcome.UNSUPPORTED, f"Content-Encoding {coding}"[:80])
    raw = names[0] == "deflate" and body[:1] != b"\x78"  # without the zlib header that the name stands for
    try:
        return _inflated(body, -zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32, limit)
    except zlib.error as error:
        raise _Failure(Outcome.CORRUPT, f"Content-Encoding {coding}: {error}") from error


def _inflated(body: bytes, wbits: int, limit: int) -> bytes:
    """All members of `body` (RFC 1952 lets gzip have several); what follows them and begins none is left out, as gzip does.

    Raises:
        _Failure: too_large, truncated, or bomb for members without end.
        zlib.error: a member is damaged.
    """
    data, view, place = bytearray(), memoryview(body), 0
    for _ in range(_MEMBERS):
        decompressor = zlib.decompressobj(wbits=wbits)
        while not decompressor.eof:
            block = view[place : place + _BLOCK]  # of which zlib copies what follows the member
            if not block:
                raise _Failure(Outcome.TRUNCATED, "Content-Encoding: the compressed body ends early")
            data += decompressor.decompress(block, limit + 1 - len(data))
            if len(data) > limit:
                raise _Failure(Outcome.TOO_LARGE, f"more than {limit:,} bytes after decompression")
            place += len(block) - len(decompressor.unused_data)
        if body[place : place + 2] != b"\x1f\x8b":
            return bytes(data)
    raise _Failure(Outcome.BOMB, f"more than {_MEMBERS:,} gzip members in one body")


def _classify(error: BaseException) -> tuple[Outcome, str]:
    """The outcome of what aiohttp, the resolver or TLS raised, and its words without object addresses."""
    words = str(error)[:200] or type(error).__name__
    cause: Any = error
    while cause is not None:
        if isinstance(cause, BlockedAddress):
            return Outcome.BLOCKED_ADDRESS, str(cause)
        cause = cause.__cause__ or getattr(cause, "os_error", None)
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return Outcome.DNS, words
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return Outcome.TLS, words
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT, str(error)[:200] or "not whole within the time of one attempt"
    if isinstance(error, aiohttp.InvalidURL | UnicodeError):
        return Outcome.BAD_URL, words
    return Outcome.CONNECT, words
