"""Faults of every kind at random moments of every stage: what was lost, how long until it went on, and the final bytes.

Method: a list of pictures on a loopback server goes through ingest, dedup and shard undisturbed. Then each trial runs one
stage again in a new folder as a program of its own, and at a random moment (a fixed seed; a moment is a number of published
units) something fails: workers or the driver are killed with SIGKILL, the disk is full or read-only (a tmpfs, which needs
root), the object store fails, a finished file is damaged. The command is then started again, as the guide says (after a
damaged file is removed or repaired, where the error says so). Lost are units that were published before and were written again;
seconds until it went on run from the fault to the next published unit, or to the end of the stage. The results must be
those of the undisturbed run: bytes, and rows without what passes (attempts, times).

    python -m bench.faults [--faults 100] [--seed 0] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.machine import claim
from bench.small import STAGES, SmallList, results, run, start
from bench.store import Store
from core.storage import Folder

_ROW = (
    "{fault:22} {stage:7} lost {lost:2} units, went on after {seconds:5.1f} s, same bytes: {same}, in the middle: {met}"
)
PUBLISHED = {"ingest": "ingest/parts/*.parquet", "dedup": "dedup/signatures/*.parquet", "shard": "shards/*.tar"}
HOMES = {"ingest": ("ingest",), "dedup": ("dedup",), "shard": ("shards", "holdout")}


@dataclass
class Trial:
    """One fault. `stage` runs in `work`, whose inputs are copied from the undisturbed run."""

    small: SmallList
    calm: Path
    work: str
    stage: str
    moments: random.Random
    store: Store | None = None
    lost: int = 0
    seconds: float = 0.0
    met: bool = True  # whether the stage was still at work when the fault came

    @property
    def environment(self) -> dict[str, str]:
        return self.store.environment() | {"AWS_MAX_ATTEMPTS": "2"} if self.store else {}

    def command(self) -> list[str]:
        return self.small.command(self.stage, self.work, "--workers", "2")

    def published(self) -> dict[str, float]:
        """Units that are there, and when they were written."""
        folder, found = Folder(self.work), dict[str, float]()
        parts = {name.rpartition("/")[2].partition(".")[0] for name in folder.list("shards/parts/*.parquet")}
        closed = self.stage != "shard" or folder.exists("shards/shards.json")
        for name in folder.list(PUBLISHED[self.stage]):
            if not closed and name.rpartition("/")[2].partition(".")[0] not in parts:
                continue  # a tar without its part is not finished
            with contextlib.suppress(OSError):
                found[name] = Path(self.work, name).stat().st_mtime_ns if folder.local else folder.size(name)
        return found

    def until(self, process: subprocess.Popen[str]) -> None:
        """Wait for a random moment of a run."""
        moment = self.moments.randint(1, 10)
        while process.poll() is None and len(self.published()) < moment:
            time.sleep(0.005)
        self.met = process.poll() is None

    def finish(self) -> None:
        """Run to the end after a fault; notes what was lost, and for how long the stage stood still."""
        before, began = self.published(), time.monotonic()
        process = start(self.command(), self.environment)
        while process.poll() is None and self.published().keys() <= before.keys():
            time.sleep(0.005)
        self.seconds += time.monotonic() - began
        said = process.communicate()[1]
        if process.returncode:
            raise RuntimeError(f"{self.stage} did not go on: {said[-1000:]}")
        after = self.published()
        self.lost += sum(after.get(name) != moment for name, moment in before.items())


Fault = Callable[[Trial], None]


def kill_driver(trial: Trial) -> None:
    process = start(trial.command(), trial.environment)
    trial.until(process)
    process.kill()
    process.communicate()
    trial.finish()


def kill_worker(trial: Trial) -> None:
    process = start(trial.command(), trial.environment)
    trial.until(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        workers = [
            p for p in psutil.Process(process.pid).children(recursive=True) if "resource_tracker" not in _line(p)
        ]
        if workers:
            os.kill(trial.moments.choice(workers).pid, signal.SIGKILL)
    process.communicate()
    trial.finish()


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def kill_everything(trial: Trial) -> None:
    process = start(trial.command(), trial.environment)
    trial.until(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    trial.finish()


def full_disk(trial: Trial) -> None:
    """No block is left from some moment on; room is made, and the stage goes on."""
    disk = Path(trial.work).parent
    process = start(trial.command(), trial.environment)
    trial.until(process)
    usage = os.statvfs(disk)
    _mount(disk, f"remount,size={(usage.f_blocks - usage.f_bfree + 1) * usage.f_frsize}")
    _one_sentence(trial, process)
    _mount(disk, "remount,size=200m")
    trial.finish()


def read_only_disk(trial: Trial) -> None:
    """The machine dies and comes back with its disk read-only, as after a damaged journal; then it is writable again."""
    disk = Path(trial.work).parent
    process = start(trial.command(), trial.environment)
    trial.until(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    _mount(disk, "remount,ro")
    _one_sentence(trial, start(trial.command(), trial.environment))
    _mount(disk, "remount,rw")
    trial.finish()


def _one_sentence(trial: Trial, process: subprocess.Popen[str]) -> None:
    said = process.communicate()[1]
    if "Traceback" in said or process.returncode not in (0, 3):  # 0: it was through before it met the disk
        raise RuntimeError(f"{trial.stage} ended with {process.returncode}: {said[-2000:]}")


def _mount(disk: Path, options: str) -> None:
    for _ in range(100):  # busy with a file that is being written, for a moment
        if not (done := subprocess.run(["mount", "-o", options, str(disk)], capture_output=True, text=True)).returncode:
            return
        time.sleep(0.02)
    raise RuntimeError(f"mount -o {options} failed: {done.stderr}")


def store_fails(trial: Trial) -> None:
    """The store refuses, breaks off or forgets every answer for as long as the run has patience, then a tenth of them."""
    assert trial.store is not None
    chance, kinds = trial.moments, ("slow", "cut", "late")
    process = start(trial.command(), trial.environment)
    trial.until(process)
    trial.store.fault = lambda method, path: chance.choice(kinds)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    trial.store.fault = lambda method, path: chance.choice(kinds) if chance.random() < 0.1 else ""
    process.communicate()
    trial.store.fault = lambda method, path: ""
    trial.finish()


def _damage(path: Path, moments: random.Random) -> None:
    body = bytearray(path.read_bytes())
    if moments.random() < 0.5:
        body = body[: moments.randrange(len(body))]
    else:
        at = moments.randrange(max(1, len(body) - 200))
        body[at : at + 200] = moments.randbytes(200)
    path.write_bytes(body)


def damaged_part(trial: Trial) -> None:
    """A part of ingest that dedup meets: it refuses; the part is deleted and fetched again."""
    victim = trial.moments.choice(sorted(Path(trial.work, "ingest/parts").glob("*.parquet")))
    _damage(victim, trial.moments)
    try:
        run(trial.command())
    except RuntimeError as error:
        if "Traceback" in str(error):
            raise
    victim.unlink()
    began = time.monotonic()
    run(trial.small.command("ingest", trial.work, "--workers", "2"))
    trial.finish()
    trial.seconds = time.monotonic() - began


def damaged_shard(trial: Trial) -> None:
    """A finished shard: verify finds and repairs it."""
    run(trial.command())
    victim = trial.moments.choice(sorted(Path(trial.work, "shards").glob("*.tar")))
    _damage(victim, trial.moments)
    began = time.monotonic()
    run([*trial.command()[:3], "verify", "--work", trial.work, "--repair", "--json"])
    trial.seconds = time.monotonic() - began
    trial.finish()


KINDS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "kill -9 of a worker": (kill_worker, STAGES),
    "kill -9 of the driver": (kill_driver, STAGES),
    "kill -9 of all": (kill_everything, STAGES),
    "full disk": (full_disk, STAGES),
    "read-only disk": (read_only_disk, STAGES),
    "store fails": (store_fails, STAGES),
    "damaged part": (damaged_part, ("dedup",)),
    "damaged shard": (damaged_shard, ("shard",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = measure(Path(place), faults=asked.faults, seed=asked.seed, show=not asked.json)
    claims = summary(rows)
    print(json.dumps(claims) if asked.json else json.dumps(claims, indent=1))


def measure(place: Path, *, faults: int, seed: int, show: bool) -> list[dict[str, Any]]:
    """So many faults, kind by kind in turn; a row each."""
    plan = [(kind, stages[turn % len(stages)]) for turn in range(len(STAGES)) for kind, (_, stages) in KINDS.items()]
    store, moments, rows = Store(), random.Random(seed), list[dict[str, Any]]()
    with SmallList(place / "list") as small, store.serving("faults") as bucket:
        calm = place / "calm"
        for stage in STAGES:
            run(small.command(stage, str(calm), "--workers", "2"))
        small.latency = 0.02
        wanted = results(str(calm))
        for number in range(faults):
            kind, stage = plan[number % len(plan)]
            with _place(place / f"trial{number}", kind, f"{bucket}/{number}") as work:
                trial = Trial(
                    small, calm, work, stage, random.Random(moments.random()), store if "://" in work else None
                )
                rows.append(_tried(trial, kind, wanted))
            if show:
                print(_ROW.format(**rows[-1]), flush=True)
    return rows


def _tried(trial: Trial, kind: str, wanted: dict[str, Any]) -> dict[str, Any]:
    with _keys(trial.environment):
        _copy_inputs(trial)
        KINDS[kind][0](trial)
        ours = results(trial.work)
    mine = tuple(f"{home}/" for home in HOMES[trial.stage])
    same = {k: v for k, v in ours.items() if k.startswith(mine)} == {
        k: v for k, v in wanted.items() if k.startswith(mine)
    }
    return {
        "fault": kind,
        "stage": trial.stage,
        "lost": trial.lost,
        "seconds": round(trial.seconds, 2),
        "same": same,
        "met": trial.met,
    }


def _copy_inputs(trial: Trial) -> None:
    folder = Folder(trial.work)
    for stage in STAGES[: STAGES.index(trial.stage)]:
        for path in sorted((trial.calm / stage).rglob("*")):
            if path.is_file():
                folder.write(str(path.relative_to(trial.calm)), path.read_bytes())
    if trial.stage != "ingest":
        folder.write("pairmill.toml", (trial.calm / "pairmill.toml").read_bytes())


@contextlib.contextmanager
def _keys(environment: dict[str, str]) -> Iterator[None]:
    """What this process needs to look into the store."""
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _place(home: Path, kind: str, remote: str) -> Iterator[str]:
    """A work folder for one trial: on a disk of its own, in the store, or a plain one."""
    if kind == "store fails":
        yield remote
        return
    home.mkdir()
    disk = kind.endswith("disk")
    if disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(home)], check=True)
    try:
        yield str(home / "work")
    finally:
        if disk:
            subprocess.run(["umount", "-l", str(home)], check=True)
        shutil.rmtree(home, ignore_errors=True)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What all faults together say."""
    rows = [row for row in rows if row["met"]]
    lost = sum(row["lost"] for row in rows)
    same = sum(row["same"] for row in rows) / len(rows)
    slowest = max(row["seconds"] for row in rows)
    kinds = Counter(row["fault"] for row in rows)
    return [
        claim(
            f"finished units that {len(rows)} faults of {len(kinds)} kinds cost", float(lost), goal=0.0, at_least=False
        ),
        claim("share of faults after which the results are those of an undisturbed run", same, goal=1.0, at_least=True),
        claim("seconds until the slowest stage went on after a fault", slowest, goal=60.0, at_least=False),
    ]


if __name__ == "__main__":
    main()
