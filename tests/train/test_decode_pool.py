"""The decoder's processes: whatever becomes of one, every picture gets its pixels or a reason, and nothing stays behind."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from core.errors import RunError
from core.images import Header
from tests.train.odd_codec import BURNT_S
from train import decode_pool
from train.decode_cpu import Picture, View
from train.decode_pool import CRASHED, GREY, NICE, Pool

SIDE = 8
VIEW = View(0, 0, SIDE, SIDE)


def said(words: str) -> Picture:
    return Picture(words.encode(), Header("jpeg", SIDE, SIDE), VIEW)


def fills(values: range | list[int]) -> list[Picture | None]:
    return [said(f"fill {value}") for value in values]


def colours(pixels: np.ndarray) -> list[int]:
    """The value of each picture, which has but one."""
    assert all(len(np.unique(one)) == 1 for one in pixels)
    return [int(one.flat[0]) for one in pixels]


@pytest.fixture(autouse=True)
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "CODEC", "tests.train.odd_codec")


@pytest.fixture
def pool() -> Iterator[Pool]:
    with closing(Pool(2)) as made:
        yield made


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 64, 1000])
def test_each_picture_of_a_batch_of_any_size_has_its_place(pool: Pool, count: int) -> None:
    pixels, reasons = pool.begin(fills([n % 251 for n in range(count)]), SIDE)()
    assert pixels.shape == (count, SIDE, SIDE, 3) and colours(pixels) == [n % 251 for n in range(count)] and not reasons


def test_batches_that_are_begun_before_others_are_finished_keep_apart(pool: Pool) -> None:
    results = [pool.begin(fills(range(n, n + 20)), SIDE) for n in range(8)]
    found = [result()[0] for result in reversed(results)]  # all held at once, and asked for in another order
    assert [colours(pixels) for pixels in reversed(found)] == [list(range(n, n + 20)) for n in range(8)]


def test_threads_may_share_a_pool(pool: Pool) -> None:
    wrong = []

    def ask(first: int) -> None:
        for n in range(30):
            values = [(first + n + i) % 251 for i in range(n % 7 + 1)]
            if colours(pool.begin(fills(values), SIDE)()[0]) != values:
                wrong.append(first)

    threads = [threading.Thread(target=ask, args=(60 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_used_again_only_when_nobody_holds_its_pixels(pool: Pool) -> None:
    held, _ = pool.begin(fills(range(10)), SIDE)()
    view = held[3:5]
    del held
    for n in range(50):
        assert colours(pool.begin(fills([n] * 10), SIDE)()[0]) == [n] * 10
    assert colours(view) == [3, 4]
    del view
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for n in range(50):
        pool.begin(fills([n] * (n % 10 + 1)), SIDE)()
    assert len(os.listdir("/proc/self/fd")) == files and len(pool._ring.known) <= 2


def test_a_larger_batch_takes_larger_memory_and_leaves_the_smaller(pool: Pool) -> None:
    for count in (1, 10, 100, 1000, 10):
        assert colours(pool.begin(fills([count % 251] * count), SIDE)()[0]) == [count % 251] * count
    gc.collect()
    assert len(pool._ring.known) == 1
    mapped = {pid: Path(f"/proc/{pid}/maps").read_text().count("pairmill-batch") for pid in pids(pool)}
    assert set(mapped.values()) <= {1, 2}, mapped  # a worker hears of what is gone with its next task


def test_what_is_missing_or_broken_is_grey_though_the_memory_was_used_before(pool: Pool) -> None:
    pool.begin(fills([9] * 4), SIDE)()
    pixels, reasons = pool.begin([said("fill 1"), None, said("half"), said("fill 2")], SIDE)()
    assert colours(pixels) == [1, GREY, GREY, 2] and reasons == {2: "only half of it"}


def test_a_worker_that_a_picture_crashes_costs_that_picture_alone(pool: Pool) -> None:
    for _ in range(2):  # and the pool goes on
        pictures = fills(range(40))
        pictures[5] = pictures[23] = said("crash")
        pixels, reasons = pool.begin(pictures, SIDE)()
        assert reasons == {5: CRASHED, 23: CRASHED}
        assert colours(pixels) == [GREY if i in reasons else i for i in range(40)]


def test_a_worker_killed_from_outside_costs_no_picture(pool: Pool, tmp_path: Path) -> None:
    pictures = fills(range(30))
    pictures[11] = said(f"once {tmp_path}/seen")
    pixels, reasons = pool.begin(pictures, SIDE)()
    assert not reasons and colours(pixels) == [7 if i == 11 else i for i in range(30)]
    for pid in pids(pool):  # between batches, all of them
        os.kill(pid, signal.SIGKILL)
    assert colours(pool.begin(fills(range(30)), SIDE)()[0]) == list(range(30))


def test_signals_to_the_whole_job_are_not_for_workers(pool: Pool) -> None:
    pool.begin(fills([1, 2]), SIDE)()
    assert decode_pool._server is not None
    before = pids(pool)
    for pid in (*before, decode_pool._server.process.pid):
        for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, one)
    time.sleep(0.2)
    assert colours(pool.begin(fills(range(20)), SIDE)()[0]) == list(range(20))
    assert pids(pool) == before and decode_pool._server.process.poll() is None


def test_a_fault_of_the_decoder_itself_is_no_bad_picture(pool: Pool) -> None:
    with pytest.raises(RunError, match=r"(?s)no picture's fault.*ZeroDivisionError: of the codec's own"):
        pool.begin([said("fault")], SIDE)()


def test_workers_leave_the_cores_to_the_loop(pool: Pool) -> None:
    pixels, _ = pool.begin([said("priority")] * 8, SIDE)()
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    assert {tuple(one[0, 0].tolist()) for one in pixels} == {(1, nice, 0)}


def test_close_ends_workers_also_those_that_hang_in_a_picture() -> None:
    pool = Pool(2)
    pool.begin(fills([1, 2]), SIDE)()
    workers = pids(pool)
    result = pool.begin([said("hang"), said("hang")], SIDE)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            result()
        except RunError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pool.close()
    waiting.join(60)
    assert not waiting.is_alive() and "closed" in str(told[0])
    until(lambda: all(gone(pid) for pid in workers))


KILLED = """
import os, sys
from train import decode_pool
decode_pool.CODEC = "tests.train.odd_codec"
from tests.train.test_decode_pool import fills, pids, said
pool = decode_pool.Pool(2)
pool.begin(fills([1, 2]), 8)()
print(*pids(pool), decode_pool._server.process.pid, flush=True)
pool.begin([said("hang"), said("fill 1")], 8)
{end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(0)", "os._exit(0)", "raise SystemExit('wrong')"])
def test_no_worker_outlives_the_process_that_asked(end: str) -> None:
    code = KILLED.replace("{end}", end)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=300, stdout=subprocess.PIPE, text=True
    )
    found = [int(pid) for pid in done.stdout.split()]
    assert len(found) == 3
    until(lambda: all(gone(pid) for pid in found))


def test_workers_that_cannot_start_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_pool, "CODEC", "tests.train.no_such_codec")
    with closing(Pool(1)) as pool, pytest.raises(RunError, match="could not be started"):
        pool.begin(fills([1]), SIDE)()
    assert "no_such_codec" in capfd.readouterr().err


def test_a_forked_child_has_workers_of_its_own(pool: Pool) -> None:
    pool.begin(fills([1]), SIDE)()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with closing(Pool(1)) as own:
            os.write(write, bytes(colours(own.begin(fills([5]), SIDE)()[0])))
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"\x05"
    os.close(read)
    assert colours(pool.begin(fills([6]), SIDE)()[0]) == [6]


def pids(pool: Pool) -> list[int]:
    return [worker._pid for worker in pool._crew]


def test_what_workers_compute_is_charged_to_the_process_that_asked() -> None:
    code = KILLED.replace('said("hang"), said("fill 1")', 'said("burn"), said("fill 1")').replace(
        "8)\n{end}", "8)()\n{end}"
    )
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    command = [sys.executable, "-c", code.replace("{end}", "sys.exit(0)")]
    subprocess.run(command, cwd=Path(__file__).parents[2], timeout=300, check=True, stdout=subprocess.DEVNULL)
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before > BURNT_S
