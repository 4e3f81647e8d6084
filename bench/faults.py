"""Faults of every kind at random moments of every stage: what was lost, how long until it went on, and the final bytes.

Method: a list of pictures on a server of this machine goes through ingest, dedup, shard and train undisturbed. Then each
trial runs one stage again in a new folder as a program of its own, and at a random moment (a fixed seed; a moment is a number
of published units) something fails: workers or the driver are killed with SIGKILL, the disk is full or read-only (a tmpfs),
the object store fails, the network is cut for some seconds (the stage runs in a network namespace, its store and its web
servers outside), the wall clock jumps by up to a day either way, a node of a Ray cluster is killed, a finished file is
damaged. The command is then started again where it ended, as the guide says (after a damaged file is removed or repaired,
where the error says so). Counted are finished units that were done again (Ray repeats one whose node died between its
publishing and its report), and the seconds from the fault (of networks and stores, from its end) to the next published unit or
the end of the stage. The results must be those of the undisturbed run: bytes, and rows without what passes (attempts, times).

Needs root (tmpfs, namespaces), a C compiler and `python -m bench.peers ray`; kinds that cannot be had here are named and
left out.

    python -m bench.faults [--faults 120] [--seed 0] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import hosts, peers
from bench.hosts import Host, Hosts
from bench.machine import claim
from bench.small import ROOT, SmallList, one_thread, results, run, start
from bench.store import Store
from core.storage import Folder
from train import checkpoint

_ROW = (
    "{fault:22} {stage:7} lost {lost:2} units, went on after {seconds:5.1f} s, same bytes: {same}, in the middle: {met}"
)
DATA = ("ingest", "dedup", "shard")
STAGES = (*DATA, "train")
PUBLISHED = {
    "ingest": "ingest/parts/*.parquet", "dedup": "dedup/signatures/*.parquet", "shard": "shards/*.tar",
    "train": "runs/main/checkpoints/*",
}  # fmt: skip
HOMES = {"ingest": ("ingest",), "dedup": ("dedup",), "shard": ("shards", "holdout"), "train": ("runs",)}
CLOCK = Path(__file__).with_name("shifted_clock.c")
PATIENCE_S = 240


@dataclass
class Trial:
    """One fault. `stage` runs in `work`, whose inputs are copied from the undisturbed run."""

    small: SmallList
    calm: Path
    work: str
    stage: str
    moments: random.Random
    store: Store | None = None
    host: Host | None = None
    clock: Path | None = None
    lost: int = 0
    seconds: float = 0.0
    met: bool = True  # whether the stage was still at work when the fault came

    @property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.store:
            found |= self.store.environment() | {"AWS_MAX_ATTEMPTS": "2"}
        if self.clock:
            found |= {"LD_PRELOAD": str(self.clock.with_suffix(".so")), "CLOCK_OFFSET": str(self.clock)}
        return found

    def command(self) -> list[str]:
        command = self.small.command(self.stage, self.work, *(() if self.stage == "train" else ("--workers", "2")))
        return self.host.command(*command) if self.host else command

    def published(self) -> dict[str, float]:
        """Units that are there, and when they were written."""
        folder, found = Folder(self.work), dict[str, float]()
        parts = {name.rpartition("/")[2].partition(".")[0] for name in folder.list("shards/parts/*.parquet")}
        closed = self.stage != "shard" or folder.exists("shards/shards.json")
        for name in folder.list(PUBLISHED[self.stage]):
            if not closed and name.rpartition("/")[2].partition(".")[0] not in parts:
                continue  # a tar without its part is not finished
            with contextlib.suppress(OSError):
                place = f"{name}/{checkpoint.MARKER}" if self.stage == "train" else name
                found[name] = Path(self.work, place).stat().st_mtime_ns if folder.local else folder.size(name)
        return found

    def until(self, process: subprocess.Popen[str], first: int = 1) -> None:
        """Wait for a random moment of a run, when it has published `first` to ten units."""
        moment = self.moments.randint(first, 10)
        while process.poll() is None and len(self.published()) < moment:
            time.sleep(0.005)
        self.met = process.poll() is None

    def finish(self) -> None:
        """Run to the end after a fault; notes what was lost, and for how long the stage stood still."""
        before, began = self.published(), time.monotonic()
        self.follow(start(self.command(), self.environment), before, began)

    def follow(self, process: subprocess.Popen[str], before: dict[str, float], began: float) -> None:
        """Watch a stage go on to its end: when its next unit came, and what of `before` was written again."""
        seen = self.published()
        while process.poll() is None and self.published().items() <= seen.items():
            time.sleep(0.005)
        self.seconds += time.monotonic() - began
        said = process.communicate(timeout=PATIENCE_S)[1]
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
    _mount(disk, lambda: f"remount,size={_used(disk) + 4096}")
    _one_sentence(trial, process)
    _mount(disk, lambda: "remount,size=1g")
    trial.finish()


def read_only_disk(trial: Trial) -> None:
    """The machine dies and comes back with its disk read-only, as after a damaged journal; then it is writable again."""
    disk = Path(trial.work).parent
    process = start(trial.command(), trial.environment)
    trial.until(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    _mount(disk, lambda: "remount,ro")
    _one_sentence(trial, start(trial.command(), trial.environment))
    _mount(disk, lambda: "remount,rw")
    trial.finish()


def _one_sentence(trial: Trial, process: subprocess.Popen[str]) -> None:
    said = process.communicate()[1]
    if "Traceback" in said or process.returncode not in (0, 3):  # 0: it was through before it met the disk
        raise RuntimeError(f"{trial.stage} ended with {process.returncode}: {said[-2000:]}")


def _used(disk: Path) -> int:
    usage = os.statvfs(disk)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _mount(disk: Path, options: Callable[[], str]) -> None:
    for _ in range(100):  # busy with a file that is being written, or fuller than a moment ago
        command = ["mount", "-o", options(), str(disk)]
        if not (done := subprocess.run(command, capture_output=True, text=True)).returncode:
            return
        time.sleep(0.02)
    raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")


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


def network_cut(trial: Trial) -> None:
    """Nothing reaches the stage for two to eight seconds; it goes on by itself, or is started again."""
    assert trial.host is not None
    process = start(trial.command(), trial.environment)
    trial.until(process)
    trial.host.cut()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=trial.moments.uniform(2, 8))
    trial.host.mend()
    before, began = trial.published(), time.monotonic()
    if process.poll():
        _one_sentence(trial, process)
        trial.finish()
    else:
        trial.follow(process, before, began)


def clock_jump(trial: Trial) -> None:
    """The wall clock of all processes of the stage jumps by up to a day, forwards or backwards."""
    assert trial.clock is not None
    _set_clock(trial.clock, 0)
    library = str(trial.clock.with_suffix(".so"))
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, str(CLOCK)], check=True)
    process = start(trial.command(), trial.environment)
    trial.until(process)
    _set_clock(trial.clock, trial.moments.choice((-1, 1)) * trial.moments.randint(60, 86_400))
    trial.follow(process, trial.published(), time.monotonic())


def _set_clock(clock: Path, offset: int) -> None:
    with clock.open("r+b" if clock.exists() else "wb") as file:
        file.write(offset.to_bytes(8, sys.byteorder, signed=True))


def ray_node_killed(trial: Trial) -> None:
    """One of two nodes of a Ray cluster is killed in the middle, and Ray gives its units to the other."""
    settings = Path(trial.work).parent / "settings.json"
    settings.write_text(json.dumps({trial.stage: trial.small.settings(trial.stage, trial.work)}))
    more = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(settings.parent)}
    command = [str(peers.ready("ray")), "-m", "bench.ray_nodes", str(settings), "2", "kill"]
    done = subprocess.run(command, cwd=ROOT, env=one_thread(more), capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{trial.stage} did not go on: {done.stderr[-1000:]}")
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))[trial.stage]
    trial.met, trial.seconds = said["at_the_kill"] < said["units"], said["went_on"]
    trial.lost = said["lost"]


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


def damaged_checkpoint(trial: Trial) -> None:
    """The run is killed and its newest checkpoint damaged: it goes on from the one before, and makes the damaged one anew."""
    process = start(trial.command())
    trial.until(process, first=2)
    process.kill()
    process.communicate()
    newest = max(Path(trial.work, name) for name in trial.published())
    _damage(trial.moments.choice(sorted(newest.iterdir())), trial.moments)
    before = {name: when for name, when in trial.published().items() if Path(trial.work, name) != newest}
    trial.follow(start(trial.command()), before, time.monotonic())


KINDS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "kill -9 of a worker": (kill_worker, DATA),
    "kill -9 of the driver": (kill_driver, STAGES),
    "kill -9 of all": (kill_everything, STAGES),
    "full disk": (full_disk, DATA),
    "read-only disk": (read_only_disk, STAGES),
    "store fails": (store_fails, DATA),
    "network cut": (network_cut, DATA),
    "clock jump": (clock_jump, STAGES),
    "Ray node killed": (ray_node_killed, DATA),
    "damaged part": (damaged_part, ("dedup",)),
    "damaged shard": (damaged_shard, ("shard",)),
    "damaged checkpoint": (damaged_checkpoint, ("train",)),
}


def impossible() -> dict[str, str]:
    """Kinds that cannot be had on this machine, and why."""
    found: dict[str, str] = {}
    if os.geteuid():
        found |= dict.fromkeys(("full disk", "read-only disk"), "needs root to mount a tmpfs")
    if reason := hosts.why_not():
        found["network cut"] = reason
    if shutil.which("cc") is None:
        found["clock jump"] = "needs a C compiler"
    if peers.ready("ray") is None:
        found["Ray node killed"] = "needs Ray beside pairmill: python -m bench.peers ray"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = measure(Path(place), faults=asked.faults, seed=asked.seed, show=not asked.json)
    claims = summary(rows)
    if not asked.json:
        print(table(rows))
    print(json.dumps(claims) if asked.json else json.dumps(claims, indent=1))


def measure(place: Path, *, faults: int, seed: int, show: bool) -> list[dict[str, Any]]:
    """So many faults, kind by kind in turn; a row each."""
    missing = impossible()
    for kind, reason in missing.items():
        print(f"left out: {kind}, {reason}", file=sys.stderr)
    plan = [
        (kind, stages[turn % len(stages)])
        for turn in range(len(STAGES) * len(DATA))
        for kind, (_, stages) in KINDS.items()
        if kind not in missing
    ]
    moments, rows = random.Random(seed), list[dict[str, Any]]()
    with contextlib.ExitStack() as held:
        far = [] if "network cut" in missing else held.enter_context(Hosts(1))
        address = Hosts.address if far else "127.0.0.1"
        store, small = Store(address), held.enter_context(SmallList(place / "list", address=address))
        bucket = held.enter_context(store.serving("faults"))
        calm = place / "calm"
        for stage in STAGES:
            run(small.command(stage, str(calm)))
        small.latency = 0.02
        wanted = results(str(calm))
        for number in range(faults):
            kind, stage = plan[number % len(plan)]
            with _place(place / f"trial{number}", kind, f"{bucket}/{number}") as work:
                trial = Trial(small, calm, work, stage, random.Random(moments.random()))
                trial.store = store if "://" in work else None
                trial.host = far[0] if kind == "network cut" else None
                trial.clock = Path(work).parent / "clock" if kind == "clock jump" else None
                rows.append(_tried(trial, kind, wanted))
            if show:
                print(_ROW.format(**rows[-1]), flush=True)
    return rows


def _tried(trial: Trial, kind: str, wanted: dict[str, Any]) -> dict[str, Any]:
    mine, ours = tuple(f"{home}/" for home in HOMES[trial.stage]), dict[str, Any]()
    with _keys(trial.store.environment() if trial.store else {}):
        _copy_inputs(trial)
        try:
            KINDS[kind][0](trial)
            ours = results(trial.work)
        except RuntimeError as error:  # is a row like others, and no reason to give the rest up
            print(f"{kind}, {trial.stage}: {error}", file=sys.stderr)
    names = [name for name in ours.keys() | wanted.keys() if name.startswith(mine)]
    other = sorted(name for name in names if ours.get(name) != wanted.get(name))
    if other:
        print(f"{kind}, {trial.stage}: not as undisturbed: {', '.join(other)}", file=sys.stderr)
    return {
        "fault": kind,
        "stage": trial.stage,
        "lost": trial.lost,
        "seconds": round(trial.seconds, 2),
        "same": not other,
        "met": trial.met,
    }


def _copy_inputs(trial: Trial) -> None:
    folder = Folder(trial.work)
    for stage in STAGES[: STAGES.index(trial.stage)]:
        for path in sorted((trial.calm / HOMES[stage][0]).rglob("*")):
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
    if kind in ("store fails", "network cut"):
        yield remote
        return
    home.mkdir()
    disk = kind.endswith("disk")
    if disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(home)], check=True)
    try:
        yield str(home / "work")
    finally:
        if disk:
            subprocess.run(["umount", "-l", str(home)], check=True)
        shutil.rmtree(home, ignore_errors=True)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What all faults together say."""
    rows = [row for row in rows if row["met"]]
    lost = max(row["lost"] for row in rows)
    same = sum(row["same"] for row in rows) / len(rows)
    slowest = max(row["seconds"] for row in rows)
    kinds = Counter(row["fault"] for row in rows)
    return [
        claim("faults that met a stage at work", float(len(rows)), goal=100.0, at_least=True),
        claim(
            f"most finished units that one of {len(rows)} faults of {len(kinds)} kinds made be done again",
            float(lost),
            goal=1.0,
            at_least=False,
        ),
        claim("share of faults after which the results are those of an undisturbed run", same, goal=1.0, at_least=True),
        claim("seconds until the slowest stage went on after a fault", slowest, goal=60.0, at_least=False),
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """A line a kind in Markdown: faults that met the stage, units lost, median and longest seconds, same bytes."""
    lines = [
        "| fault | stages | met | finished units done again | went on after, median (longest) | same bytes |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [row for row in rows if row["fault"] == kind and row["met"]]
        if of_kind:
            seconds = [row["seconds"] for row in of_kind]
            stages = ", ".join(stage for stage in STAGES if stage in {row["stage"] for row in of_kind})
            lines.append(
                f"| {kind} | {stages} | {len(of_kind)} | {sum(row['lost'] for row in of_kind)} | "
                f"{statistics.median(seconds):.1f} s ({max(seconds):.1f} s) | {sum(row['same'] for row in of_kind)} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
