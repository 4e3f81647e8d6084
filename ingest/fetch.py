"""Stage `ingest`: from a URL list to `ingest/parts`, every input row accounted for.

Way in: the plan that `urllist` writes. A unit is one row group of the plan and becomes one tar and one part. A worker
takes several neighbouring units at once and lets their downloads overlap, because the last slow host of a unit would
otherwise leave a whole process waiting; each unit is still published by itself, as soon as its last row is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import glob
import itertools
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from core import catalog
from core.errors import ConfigError, PairmillError
from core.plan import Part
from core.plan import Unit as Group
from core.runner import run_units, slots, tick
from core.schema import Outcome
from core.storage import Folder, expand
from core.work import Stage, fingerprint, open_stage, package_version
from ingest import decoding, journal, staging, tally, urllist
from ingest.config import check
from ingest.pictures import Picture, Rules, prepare
from ingest.room import Room
from ingest.tally import Report, check_success, render
from ingest.unit import Job, Unit, open_unit

if TYPE_CHECKING:
    from ingest.config import IngestConfig
    from ingest.http import Fetcher

__all__ = ["render", "run"]
Result = TypeVar("Result")
Numbers = Callable[[Group, int], list[int]]  # of the units in a run of units, of so many in all
log = logging.getLogger("pairmill.ingest")

WARM: tuple[str, ...] = ("ingest.warm",)  # modules that workers are forked with
SPAN_UNITS = 16  # units a worker takes at once, at most
DECODERS = 2  # threads a worker; the codecs release the GIL, so one of them runs beside the event loop
AHEAD = 4  # downloads asked for per download allowed at once, so that one host's queue does not starve the others


def run(config: IngestConfig) -> dict[str, Any]:
    """Fetch every URL of the list; returns the summary: rows, ok, outcomes, hosts, seconds, cpu_seconds, bytes, units.

    Raises:
        ConfigError: a number out of its range.
        InputError: the list cannot be read or lacks a column.
        WorkFolderError: the work folder holds another list or other settings.
        RunError: of at least `JUDGED_ROWS` rows, a smaller share than `MIN_SUCCESS` succeeds, and failures are not tried again.
    """
    check(config)
    if config.part and (config.retry_failed or config.engine == "img2dataset"):
        raise ConfigError("expected --part without --retry-failed and --engine img2dataset, which do the whole list")
    if config.engine == "img2dataset":
        from ingest import peer

        return peer.run(config)
    inputs = fingerprint_list(config.urls)
    with open_stage(config, "ingest", home="ingest", inputs=inputs, redo=False) as stage:
        staging.refuse_other(stage.folder, "ingest")
        lost = _drop_parts_without_tar(stage.folder)
        if stage.finished and staging.is_whole(stage, "units") and not (config.retry_failed or lost):
            tally.check_whole(stage.finished, stage.folder)
            return stage.finished
        stage.reopen()
        for place in ("ingest", urllist.HOME, staging.PARTS):
            stage.folder.sweep(place)
        staging.sweep_tars(stage.folder)
        with urllist.planning(config, stage.folder) as plan:
            staging.claim(stage.folder, "ingest")
            stage.share()
            return _fetch_all(config, stage, plan)


def fingerprint_list(urls: str) -> str:
    """What tells one list from another."""
    return fingerprint(Folder("/"), *map(literal, expand(urls)))


def literal(name: str) -> str:
    """`name` as a pattern that matches it alone."""
    parent, slash, leaf = name.rpartition("/")
    return f"{parent}{slash}{glob.escape(leaf)}"


def _fetch_all(config: IngestConfig, stage: Stage, plan: urllist.Planning) -> dict[str, Any]:
    started, cpu = time.monotonic(), time.process_time()
    rows = urllist.plan_rows(stage.folder)
    workers, part = slots(config.engine, config.workers), stage.part
    span = max(1, min(SPAN_UNITS, len(rows) // (4 * workers * part.count)))
    retryable = staging.retryable_units(stage.folder) if config.retry_failed else frozenset()

    def open_units() -> set[int]:
        # one listing, where asking for each takes hours on an object store
        there = set(stage.folder.list(f"{staging.PARTS}/*.parquet"))
        names = ((number, unit_id(number)) for number in range(len(rows)))
        return {number for number, name in names if name in retryable or staging.part_name(name) not in there}

    todo = open_units()
    total = Report()
    groups = spans(rows, span, part)
    mine = _for_one_worker(config, min(workers, len(groups)) * part.count)
    in_memory = stage.folder.url.startswith("memory:")  # which other processes do not see
    with contextlib.ExitStack() as at_end:
        notes = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        task = functools.partial(
            fetch_span,
            config=mine,
            folder=stage.folder,
            numbers=functools.partial(_numbers, span, part.count),
            notes=notes,
        )
        running = run_units(
            groups, task, done=lambda group: todo.isdisjoint(_numbers(span, part.count, group, len(rows))),
            before=lambda group: plan.wait_for(_numbers(span, part.count, group, len(rows))[-1]),
            workers=workers, engine=config.engine, label="ingest", describe=tally.progress_words,
            warm=WARM,
            survive=None if in_memory else functools.partial(decoding.survive, place=notes),
        )  # fmt: skip
        at_end.enter_context(contextlib.closing(running))
        for _, report in running:
            total.add(report)
            if not config.retry_failed:
                check_success(total)
    if partial := stage.left_to_others(lambda: len(open_units())):
        return partial
    stage.folder.remove(journal.HOME)
    summary = {**staging.summary(stage.folder), "hosts": tally.hosts(stage.folder)}
    catalog.write(stage.folder)
    if not config.retry_failed:
        tally.check_whole(summary, stage.folder)
    cpu_seconds = total.cpu_seconds + time.process_time() - cpu
    return stage.finish(
        {**summary, "seconds": time.monotonic() - started, "cpu_seconds": cpu_seconds, "units": len(rows)}
    )


def _for_one_worker(config: IngestConfig, workers: int) -> IngestConfig:
    """`config` with this worker's share of what is allowed at a host."""
    return dataclasses.replace(config, per_host=max(1, config.per_host // workers))


def _drop_parts_without_tar(folder: Folder) -> int:
    """Remove parts whose tar is gone, so that their units are fetched again; returns how many there were."""
    import pyarrow.compute as pc

    parts = {name.rpartition("/")[2].removesuffix(".parquet") for name in folder.list(f"{staging.PARTS}/*.parquet")}
    tars = {name.rpartition("/")[2].partition(".")[0] for name in folder.list(f"{staging.PARTS}/*.tar")}
    lost = [unit for unit in sorted(parts - tars) if pc.count(staging.read_part(folder, unit)["tar"]).as_py()]
    for unit in lost:
        log.warning("the tar of %s is gone, so its rows are fetched again", staging.part_name(unit))
        folder.remove(staging.part_name(unit))
    return len(lost)


def unit_id(number: int) -> str:
    return f"u{number:06d}"


def spans(rows: list[int], span: int, part: Part) -> list[Group]:
    """The units of a part, of `rows` rows each, in runs of `span`; a run is named by its first unit, and as long as all."""
    firsts = range(part.index, len(rows), span * part.count)
    sizes = [sum(rows[first : first + span * part.count : part.count]) for first in firsts]
    ends = itertools.accumulate(sizes)
    return [Group(unit_id(n), end - size, end) for n, size, end in zip(firsts, sizes, ends, strict=True)]


def _numbers(span: int, stride: int, group: Group, units: int) -> list[int]:
    """Numbers of the units in a run of `span`, `stride` apart."""
    first = int(group.id[1:])
    return list(range(first, min(first + span * stride, units), stride))


# ---- in a worker -------------------------------------------------------------------------------------------------------


def fetch_span(group: Group, *, config: IngestConfig, folder: Folder, numbers: Numbers, notes: Path) -> Report:
    """Do every unfinished unit of one run of units; `notes` is the folder of what is being decoded."""
    import uvloop

    one_thread_each()
    cpu = time.process_time()
    try:
        notes.mkdir(exist_ok=True)  # on another machine of a Ray cluster, where nobody will read it
        with decoding.Watch(notes, group.id) as watch:
            report = uvloop.run(_Span(config, folder, watch, decoding.blame(notes, group.id)).work(group, numbers))
    except BaseExceptionGroup as errors:
        raise _first_cause(errors) from errors
    if multiprocessing.parent_process() is not None:  # in the main process it is counted there
        report.cpu_seconds = time.process_time() - cpu
    return report


def one_thread_each() -> None:
    """Keep BLAS and torch to one thread in a worker process; call it before they are imported."""
    # every core has a worker already; more threads inside BLAS and torch would only fight over them
    if multiprocessing.parent_process() is not None:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")


def _first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = next((e for e in found.exceptions if isinstance(e, PairmillError)), found.exceptions[0])
    return found


class _Span:
    """Downloads and decoding of neighbouring units, overlapping."""

    def __init__(self, config: IngestConfig, folder: Folder, watch: decoding.Watch, blame: decoding.Blame) -> None:
        self._config, self._folder, self._watch, self._blame = config, folder, watch, blame
        self._rules = Rules(config.size, config.quality, config.keep_original, config.min_side)
        self._report = Report()
        self._room = Room(config.concurrency)
        self._ahead = asyncio.Semaphore(AHEAD * config.concurrency)

    async def work(self, group: Group, numbers: Numbers) -> Report:
        from ingest.http import Fetcher

        rows = urllist.plan_rows(self._folder)
        with ThreadPoolExecutor(1 if self._blame.alone else DECODERS, "decode") as self._pool:
            async with Fetcher(self._config, version=package_version()) as fetcher, asyncio.TaskGroup() as tasks:
                for number in numbers(group, len(rows)):
                    unit = await self._in_thread(open_unit, self._folder, number, unit_id(number), self._config)
                    if unit is None:
                        tick(rows[number])
                        continue
                    tick(0, bytes=unit.received())
                    for outcome, count in unit.settled().items():
                        tick(count, **{outcome: count})
                    if not unit.jobs:
                        await self._publish(unit)
                    for job in unit.jobs:
                        await self._ahead.acquire()
                        await self._room.enter()
                        tasks.create_task(self._one(fetcher, unit, job))
        return self._report

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _one(self, fetcher: Fetcher, unit: Unit, job: Job) -> None:
        fetched = await fetcher.fetch(job.url)
        size = len(fetched.body)
        self._room.arrived(size)
        picture = Picture(fetched.outcome, fetched.detail)
        if fetched.outcome == Outcome.OK:
            picture = await self._in_thread(self._decode, job.url, fetched.body)
        fetched.body = b""
        self._room.left(size)
        self._ahead.release()
        unit.settle(job, fetched, picture)
        tick(len(job.places), **{picture.outcome: len(job.places)}, bytes=size)
        if not unit.open_jobs:
            await self._publish(unit)

    def _decode(self, url: str, body: bytes) -> Picture:
        if decoding.key_of(url) in self._blame.keys:
            return decoding.refused(body)
        with self._watch.decoding(url):
            return prepare(body, self._rules)

    async def _publish(self, unit: Unit) -> None:
        await self._in_thread(unit.publish)
        for row in unit.rows:
            self._report.outcomes[row["outcome"]] += 1
            if row["outcome"] != Outcome.OK:
                self._report.failing_hosts[tally.host_of(row["final_url"] or row["url"] or "")] += 1
        if not self._config.retry_failed:
            check_success(self._report)
