"""What a guest owes its hosts: an honest name, few visits at once, waiting when told to, and leaving when unwelcome."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

AGENT = "pairmill"
_REFUSALS = frozenset({"noai", "noimageai", "noindex", "noimageindex", "none"})
_VALUED = frozenset({"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"})
BACKOFF_S = 0.5
LONGEST_WAIT_S = 30.0  # a host that asks for more gets its rows back with --retry-failed


def user_agent(version: str, contact: str) -> str:
    """The name we go by, with the page or mail address where the operator can be reached."""
    return f"{AGENT}/{version} (+{contact})" if contact else f"{AGENT}/{version} (image-text data set builder)"


def opt_out(robots_tags: Iterable[str], tdm_reservation: str | None = None) -> str | None:
    """The rule by which a response says that it is not to be used, or None.

    Args:
        robots_tags: every X-Robots-Tag header of the response: comma lists of directives, each optionally after
            `agent:`, which then holds for the directives up to the next agent (Google, Robots meta tag specification).
        tdm_reservation: the header of that name (W3C TDM Reservation Protocol); "1" reserves the rights.
    """
    for header in robots_tags:
        for_us = True
        for item in header.split(","):
            name, colon, value = item.strip().lower().partition(":")
            if colon and name.strip() not in _VALUED:
                for_us, name = AGENT in name or name.strip() == "*", value
            if for_us and name.strip() in _REFUSALS:
                return f"X-Robots-Tag: {name.strip()}"
    return "tdm-reservation: 1" if (tdm_reservation or "").strip() == "1" else None


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
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())


def backoff(attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1): doubling, with full jitter, so that hosts are not
    hit by all our rows at the same moment."""
    return random.uniform(0.0, BACKOFF_S * 2**attempt)


@dataclass
class _Host:
    slots: asyncio.Semaphore
    not_before: float = 0.0
    waiting: int = field(default=0)


class Hosts:
    """Slots a host and in all. A place at the host is taken first, so that a slow host fills its own queue only."""

    def __init__(self, *, per_host: int, total: int) -> None:
        self._per_host = per_host
        self._total = asyncio.Semaphore(total)
        self._hosts: dict[str, _Host] = {}

    @contextlib.asynccontextmanager
    async def visit(self, name: str) -> AsyncIterator[None]:
        """Hold one of the host's slots and one of all slots, after any pause the host has asked for."""
        host = self._hosts.setdefault(name, _Host(asyncio.Semaphore(self._per_host)))
        host.waiting += 1
        try:
            async with host.slots:
                while (pause := host.not_before - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                async with self._total:
                    yield
        finally:
            host.waiting -= 1
            if not host.waiting and host.not_before < time.monotonic():
                del self._hosts[name]  # millions of hosts pass by in one run

    def pause(self, name: str, seconds: float) -> None:
        """No new visit to the host for `seconds`."""
        if name in self._hosts:
            host = self._hosts[name]
            host.not_before = max(host.not_before, time.monotonic() + seconds)
