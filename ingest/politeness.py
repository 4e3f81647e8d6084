"""What a guest owes its hosts: an honest name, few visits at once, waiting when told to, and leaving when unwelcome."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import random
import re
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from core.schema import Outcome

AGENT = "pairmill"
_REFUSALS = frozenset({"noai", "noimageai", "noindex", "noimageindex", "none"})
_VALUED = frozenset({"max-snippet", "max-image-preview", "max-video-preview"})
# `agent: directives`, told from the colons of dates and of directives with a value by its form
_SCOPED = re.compile(r"(\*|[a-z][a-z0-9_.-]*(?:/[a-z0-9_.-]*)?)\s*:\s*(.*)", re.DOTALL)
BACKOFF_S = 0.5
LONGEST_WAIT_S = 30.0  # a host that asks for more is left alone instead, and --retry-failed has its rows
LONGEST_SHUN_S = 3600.0
RATE = 12.5  # visits a second for each download that is allowed at once at a host, which hosts of 80 ms come to by themselves
FAILURES = 10  # attempts in a row that a host may leave unanswered before its rows are no longer tried
SHUN_S = 60.0
# What says that the host, not this one file, is in trouble.
_TROUBLE = frozenset({Outcome.DNS, Outcome.CONNECT, Outcome.TLS, Outcome.TIMEOUT, Outcome.HTTP_429, Outcome.HTTP_5XX})


def user_agent(version: str, contact: str) -> str:
    """The name we go by, with the page or mail address where the operator can be reached."""
    return f"{AGENT}/{version} (+{contact})" if contact else f"{AGENT}/{version} (image-text data set builder)"


def opt_out(robots_tags: Iterable[str], tdm_reservation: Iterable[str] = ()) -> str | None:
    """The rule by which a response says that it is not to be used, or None.

    Args:
        robots_tags: every X-Robots-Tag header of the response: comma lists of directives, each optionally after
            `agent:`, which then holds for the directives up to the next agent (Google, Robots meta tag specification).
        tdm_reservation: every header of that name (W3C TDM Reservation Protocol); "1" reserves the rights.
    """
    for header in robots_tags:
        if (rule := _refusal(header)) is not None:
            return f"X-Robots-Tag: {rule}"
    return "tdm-reservation: 1" if any(value.strip() == "1" for value in tdm_reservation) else None


def _refusal(header: str) -> str | None:
    """The directive of one X-Robots-Tag header that refuses us."""
    for_us = True
    words = header.lower()
    if expiry := re.search(r"unavailable_after\s*:\s*(.*)", words, re.DOTALL):
        # its date may hold commas, so it is taken out before the list is cut at them
        date = re.match(r"[a-z]{3,9}, [^,]*|[^,]*", expiry[1])
        assert date is not None
        words = words[: expiry.start()] + expiry[1][date.end() :]
        if _is_past(date[0]) and _scope(words[: expiry.start()]):
            return f"unavailable_after: {date[0].strip()}"
    for item in words.split(","):
        scoped = _SCOPED.match(item.strip())
        if scoped and scoped[1] not in _VALUED:
            for_us, item = _is_us(scoped[1]), scoped[2]
        if for_us and (found := _REFUSALS.intersection(item.split())):
            return min(found)
    return None


def _scope(words: str) -> bool:
    """Whether a directive that comes after `words` in its header holds for us."""
    scopes = [m[1] for item in words.split(",") if (m := _SCOPED.match(item.strip())) and m[1] not in _VALUED]
    return not scopes or _is_us(scopes[-1])


def _is_us(agent: str) -> bool:
    return agent == "*" or agent.partition("/")[0] == AGENT


def _is_past(date: str) -> bool:
    for parse in (email.utils.parsedate_to_datetime, datetime.datetime.fromisoformat):
        try:
            moment = parse(date.strip().upper())
        except ValueError:
            continue
        return _aware(moment) < datetime.datetime.now(datetime.UTC)
    return False


def _aware(moment: datetime.datetime) -> datetime.datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


def retry_after(value: str | None) -> float | None:
    """Seconds a Retry-After header asks for, given as seconds or as a date; None where it says neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (_aware(moment) - datetime.datetime.now(datetime.UTC)).total_seconds())


def backoff(attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1): doubling, with full jitter, so that hosts are not
    hit by all our rows at the same moment."""
    return random.uniform(0.0, BACKOFF_S * 2**attempt)


@dataclass
class _Host:
    slots: asyncio.Semaphore
    not_before: float = 0.0
    bucket: float = 0.0  # when the token bucket will be full again
    waiting: int = field(default=0)


class Hosts:
    """Slots a host and in all. A place at the host is taken first, so that a slow host fills its own queue only.

    Args:
        rate: visits a second to one host, in the mean over a second; 0 for as many as its slots allow.
    """

    def __init__(self, *, per_host: int, total: int, rate: float = 0.0) -> None:
        self._per_host, self._rate = per_host, rate
        self._total = asyncio.Semaphore(total)
        self._hosts: dict[str, _Host] = {}

    @contextlib.asynccontextmanager
    async def visit(self, name: str) -> AsyncIterator[None]:
        """Hold one of the host's slots and one of all slots, after any pause the host has asked for."""
        host = self._hosts.setdefault(name, _Host(asyncio.Semaphore(self._per_host)))
        host.waiting += 1
        try:
            async with host.slots:
                await asyncio.sleep(self._take_token(host))
                while (pause := host.not_before - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                async with self._total:
                    yield
        finally:
            host.waiting -= 1
            if not host.waiting and max(host.not_before, host.bucket) < time.monotonic():
                del self._hosts[name]  # millions of hosts pass by in one run

    def _take_token(self, host: _Host) -> float:
        """Seconds until there is a token for one more visit; a full bucket holds those of one second."""
        if not self._rate:
            return 0.0
        now = time.monotonic()
        host.bucket = max(host.bucket, now) + 1 / self._rate
        return max(0.0, host.bucket - now - max(1.0, 1 / self._rate))

    def pause(self, name: str, seconds: float) -> None:
        """No new visit to the host for `seconds`."""
        if name in self._hosts:
            host = self._hosts[name]
            host.not_before = max(host.not_before, time.monotonic() + seconds)


@dataclass
class _Record:
    """Attempts in a row that ended in trouble; until when the host is left alone, and with what words."""

    failures: int = 0
    until: float = 0.0
    outcome: Outcome = Outcome.CONNECT
    detail: str = ""


class Breaker:
    """Spares hosts that are down or want to be left alone, and spares us the wait for them.

    After `FAILURES` attempts in a row without an answer, a host's rows get its last outcome untried for `SHUN_S`; then
    one more failure shuts it again.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def verdict(self, host: str) -> tuple[Outcome, str] | None:
        """The outcome of a row of `host` that is not to be tried, or None."""
        record = self._records.get(host)
        if record is None or record.until <= time.monotonic():
            return None
        return record.outcome, f"not tried: {record.detail}"

    def answered(self, host: str) -> None:
        """The host has sent what we asked for, or has at least said no to this one file."""
        self._records.pop(host, None)

    def failed(self, host: str, outcome: Outcome, detail: str) -> int:
        """Note how an attempt ended; returns how many have failed in a row."""
        if outcome not in _TROUBLE:
            self.answered(host)
            return 0
        record = self._records.setdefault(host, _Record())
        record.failures += 1
        if record.failures >= FAILURES:
            self._shut(record, SHUN_S, outcome, f"its host failed again and again, last with {detail!r}")
        return record.failures

    def shun(self, host: str, seconds: float, outcome: Outcome) -> None:
        """Leave the host alone for `seconds` (at most an hour), as it has asked."""
        record = self._records.setdefault(host, _Record())
        self._shut(record, min(seconds, LONGEST_SHUN_S), outcome, "its host asked for a long wait (Retry-After)")

    def _shut(self, record: _Record, seconds: float, outcome: Outcome, detail: str) -> None:
        record.until, record.outcome, record.detail = time.monotonic() + seconds, outcome, detail
