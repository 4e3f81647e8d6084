"""Bodies in memory: many small ones at once, few large ones, and never none."""

from __future__ import annotations

import asyncio

from ingest.room import FIRST_GUESS, Room


def most_at_once(size: int, limit: int, downloads: int = 400, at_once: int = 64) -> int:
    """Bytes in memory at most, when every body weighs `size` and is held for two turns of the loop."""
    held = most = 0

    async def download(room: Room, slots: asyncio.Semaphore) -> None:
        nonlocal held, most
        async with slots:
            held += size
            most = max(most, held)
            await asyncio.sleep(0)
        room.arrived(size)
        await asyncio.sleep(0)
        held -= size
        room.left(size)

    async def main() -> None:
        room, slots = Room(at_once, limit), asyncio.Semaphore(at_once)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(downloads):
                await room.enter()
                tasks.create_task(download(room, slots))

    asyncio.run(asyncio.wait_for(main(), 30))
    return most


def test_small_bodies_are_not_held_up() -> None:
    assert most_at_once(1000, 96 * FIRST_GUESS) >= 64 * 1000


def test_large_bodies_stay_near_the_limit() -> None:
    limit = 20 * FIRST_GUESS
    assert most_at_once(FIRST_GUESS, limit) <= limit
    after_learning = most_at_once(5 * FIRST_GUESS, limit, downloads=20, at_once=2)
    assert after_learning <= limit


def test_a_body_beyond_the_limit_comes_alone_and_not_never() -> None:
    assert most_at_once(FIRST_GUESS, FIRST_GUESS // 10, downloads=5) <= 2 * FIRST_GUESS
