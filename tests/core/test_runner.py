"""Units: cut without gaps, run once each on any number of workers, a dead worker is an error and not a hang."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.errors import ConfigError, RunError
from core.plan import Unit, cut
from core.runner import run_units, tick


def write_unit(folder: Path, unit: Unit) -> int:
    for _ in range(unit.rows):
        tick(1, ok=1)
    (folder / unit.id).write_text(f"{unit.start}-{unit.stop}")
    return os.getpid()


def die(unit: Unit) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(unit: Unit) -> None:
    raise ConfigError(f"unit {unit.id} is odd")


def test_cut_covers_every_row_once() -> None:
    for rows in (0, 1, 6, 7, 8, 70):
        units = cut(rows, 7)
        assert [r for u in units for r in range(u.start, u.stop)] == list(range(rows))
        assert len({u.id for u in units}) == len(units)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_unit_runs_once_and_finished_ones_not_at_all(tmp_path: Path, workers: int) -> None:
    units = cut(40, 7)
    (tmp_path / units[2].id).write_text("there before")
    results = run_units(
        units,
        functools.partial(write_unit, tmp_path),
        done=lambda unit: (tmp_path / unit.id).exists(),
        workers=workers,
        engine="local",
        label="test",
    )
    ran = {unit.id: pid for unit, pid in results}
    assert set(ran) == {u.id for u in units} - {units[2].id}
    assert (tmp_path / units[2].id).read_text() == "there before"
    assert (os.getpid() in ran.values()) == (workers == 1)


def test_a_killed_worker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="worker process died"):
        list(run_units(cut(4, 1), die, done=lambda unit: False, workers=2, engine="local", label="test"))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_unit_arrives_as_itself(workers: int) -> None:
    with pytest.raises(ConfigError, match="is odd"):
        list(run_units(cut(2, 1), fail, done=lambda unit: False, workers=workers, engine="local", label="test"))


def word_of_environment(unit: Unit) -> str | None:
    return os.environ.get("PAIRMILL_WORD")


def test_forked_workers_have_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that they are forked from began long ago; keys of an object store may be newer."""
    for word in ("one", "two", None):
        monkeypatch.delenv("PAIRMILL_WORD", raising=False)
        if word:
            monkeypatch.setenv("PAIRMILL_WORD", word)
        ran = run_units(
            cut(2, 1), word_of_environment, done=lambda unit: False, workers=2, engine="local", label="test",
            warm=("ingest.warm",),
        )  # fmt: skip
        assert [found for _, found in ran] == [word, word]


def slow_unless_first(folder: Path, unit: Unit) -> None:
    if unit.start == 0:
        while len(list(folder.iterdir())) < 1:
            time.sleep(0.01)
        raise ConfigError("the first is odd")
    (folder / f"{os.getpid()}").touch()
    time.sleep(60)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_error_does_not_wait_for_what_the_others_are_at(tmp_path: Path) -> None:
    started = time.monotonic()
    task = functools.partial(slow_unless_first, tmp_path)
    with pytest.raises(ConfigError, match="the first is odd"):
        list(run_units(cut(2, 1), task, done=lambda unit: False, workers=2, engine="local", label="test"))
    assert time.monotonic() - started < 30


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """After kill -9 the next run may start at once, so nobody may still be writing."""
    code = (
        "import functools, pathlib; from core.plan import cut; from core.runner import run_units\n"
        "from tests.core.test_runner import slow_unless_first\n"
        "if __name__ == '__main__':\n"
        f"    task = functools.partial(slow_unless_first, pathlib.Path({str(tmp_path)!r}))\n"
        "    units = cut(4, 1)[1:]\n"
        "    list(run_units(units, task, done=lambda unit: False, workers=2, engine='local', label='test'))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    while len(pids := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ray_runs_the_same_units_and_hands_errors_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray would leave files of its own
    (tmp_path / "out").mkdir()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        task = functools.partial(write_unit, tmp_path / "out")
        found = run_units(cut(8, 2), task, done=lambda unit: not unit.start, workers=1, engine="ray", label="test")
        assert sorted(unit.id for unit, _ in found) == ["u000001", "u000002", "u000003"]
        with pytest.raises(ConfigError, match=r"^unit u00000\d is odd$"):
            list(run_units(cut(2, 1), fail, done=lambda unit: False, workers=1, engine="ray", label="test"))
    finally:
        ray.shutdown()


def test_fewer_than_no_workers() -> None:
    with pytest.raises(ConfigError, match="found -1"):
        list(run_units(cut(2, 1), fail, done=lambda unit: False, workers=-1, engine="local", label="test"))


def test_an_unknown_engine() -> None:
    with pytest.raises(ConfigError, match="found 'spark'"):
        list(run_units(cut(2, 1), fail, done=lambda unit: False, workers=1, engine="spark", label="test"))
