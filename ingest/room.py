"""How much of a worker's memory bodies may take: those that wait for a decoder, and those under way."""

from __future__ import annotations

import asyncio

LIMIT = 96_000_000  # bytes a worker; with its code, models and two pictures being decoded it stays below 400 MB
FIRST_GUESS = 1_000_000  # bytes of a body, before the first has come
_WEIGHT = 0.05  # of the newest body in the average


class Room:
    """Admits downloads while their bodies are likely to fit; one at least is always admitted.

    What a body will weigh is known when it has come, so those under way are taken to weigh the average of those before.

    Args:
        at_once: downloads that really run at once; more may be admitted, which then wait elsewhere and weigh nothing.
    """

    def __init__(self, at_once: int, limit: int = LIMIT) -> None:
        self._at_once, self._limit = at_once, limit
        self._average = float(FIRST_GUESS)
        self._under_way = self._held = 0
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        """Wait for room for one more download; for one waiting task at a time."""
        while self._under_way and self._expected() > self._limit:
            self._changed.clear()
            await self._changed.wait()
        self._under_way += 1

    def _expected(self) -> float:
        return self._held + min(self._under_way + 1, self._at_once) * self._average

    def arrived(self, size: int) -> None:
        """A download has ended with a body of `size` bytes, 0 for none."""
        self._under_way -= 1
        self._held += size
        if size:
            self._average += _WEIGHT * (size - self._average)
        self._changed.set()

    def left(self, size: int) -> None:
        """A body of `size` bytes is no longer held."""
        self._held -= size
        self._changed.set()
