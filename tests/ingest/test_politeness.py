"""Opt-out headers as the specifications write them, waits as servers ask for them, slots that hold."""

from __future__ import annotations

import asyncio
import email.utils
import time

import pytest

from ingest.politeness import BACKOFF_S, Hosts, backoff, opt_out, retry_after, user_agent


@pytest.mark.parametrize(
    ("headers", "rule"),
    [
        ([], None), (["all"], None), (["noai"], "noai"), (["NoImageAI"], "noimageai"), (["none"], "none"),
        (["max-snippet:-1, noindex"], "noindex"), (["noai, max-snippet:-1"], "noai"),
        (["unavailable_after: 25 Jun 2030 15:00:00 PST"], None), (["nofollow, nosnippet"], None),
        (["googlebot: noindex"], None), (["googlebot: nofollow, noindex"], None), (["pairmill: noai"], "noai"),
        (["otherbot: noindex, pairmill: noimageindex"], "noimageindex"), (["*: noai"], "noai"),
        (["googlebot: noindex", "noimageindex"], "noimageindex"), (["notpairmill: noai"], None),
        (["PairMill/2.0: noai"], "noai"), (["otherbot: noindex, noai"], None), (["noai noimageai"], "noai"),
        (["unavailable_after: Wed, 25 Jun 2031 15:00:00 GMT, noai"], "noai"),
        (["otherbot: unavailable_after: 2031-06-25T15:00:00+00:00, noai"], None), ([" NOAI ,,"], "noai"), ([""], None),
        (["max-image-preview:none"], None), (["max-snippet: 0, none"], "none"), ([":, x:y:z, noai:"], None),
        (["all", "index", "noimageai"], "noimageai"), (["pairmill:otherbot:noai"], None),
    ],
)  # fmt: skip
def test_robots_tags(headers: list[str], rule: str | None) -> None:
    assert opt_out(headers) == (rule and f"X-Robots-Tag: {rule}")


@pytest.mark.parametrize(
    ("date", "past"),
    [("25 Jun 2010 15:00:00 PST", True), ("Wed, 25 Jun 2010 15:00:00 GMT", True), ("2010-06-25T15:00:00+00:00", True),
     ("25 Jun 2099 15:00:00 GMT", False), ("2099-06-25", False), ("2010-06-25", True), ("some day", False), ("", False)],
)  # fmt: skip
def test_what_has_expired_is_left_alone(date: str, past: bool) -> None:
    assert opt_out([f"unavailable_after: {date}"]) == (
        f"X-Robots-Tag: unavailable_after: {date.lower()}" if past else None
    )
    assert opt_out([f"otherbot: unavailable_after: {date}"]) is None


def test_reserved_rights() -> None:
    assert opt_out([], ["1"]) == opt_out([], ["0", " 1 "]) == "tdm-reservation: 1"
    assert opt_out([], ["0"]) is opt_out([], ["10"]) is opt_out([], []) is None


def test_retry_after_comes_as_seconds_or_as_a_date() -> None:
    assert retry_after(None) is None
    assert retry_after("7") == 7.0
    assert retry_after("soon") is retry_after("²") is None
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 57 < (retry_after(in_a_minute) or 0) <= 60
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_waits_double_and_differ() -> None:
    waits = [backoff(3) for _ in range(50)]
    assert len(set(waits)) == 50 and max(waits) <= BACKOFF_S * 8


def test_the_agent_says_who_and_where() -> None:
    assert user_agent("1.2", "mailto:me@example.org") == "pairmill/1.2 (+mailto:me@example.org)"
    assert user_agent("1.2", "").startswith("pairmill/1.2 ")


def test_a_slow_host_fills_its_own_queue_only_and_pauses_hold() -> None:
    async def go() -> tuple[int, float, float]:
        hosts = Hosts(per_host=2, total=3)
        inside = peak = 0
        started = time.monotonic()

        async def visit(name: str, seconds: float) -> float:
            nonlocal inside, peak
            async with hosts.visit(name):
                inside += 1
                peak = max(peak, inside)
                await asyncio.sleep(seconds)
                inside -= 1
            return time.monotonic() - started

        slow = [asyncio.create_task(visit("slow", 0.2)) for _ in range(6)]
        await asyncio.sleep(0.01)
        quick = await visit("quick", 0.0)
        hosts.pause("slow", 0.5)
        return peak, quick, max(await asyncio.gather(*slow))

    peak, quick, slowest = asyncio.run(go())
    assert peak <= 3
    assert quick < 0.15
    assert slowest > 0.5


def test_tokens_hold_a_host_to_its_rate_and_no_other() -> None:
    async def go() -> tuple[float, float]:
        hosts = Hosts(per_host=50, total=50, rate=20.0)
        started = time.monotonic()

        async def visit(name: str) -> float:
            async with hosts.visit(name):
                return time.monotonic() - started

        ends = await asyncio.gather(*(visit("a") for _ in range(31)), *(visit("b") for _ in range(5)))
        return max(ends[:31]), max(ends[31:])

    busy, other = asyncio.run(go())
    assert busy >= 0.5  # 20 at once, then 20 a second
    assert other < busy
