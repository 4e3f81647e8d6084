"""One unit at work: its rows, the downloads they need, and what is published when the last of them is known."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.schema import RETRYABLE, Outcome, pair_fields, sound
from core.storage import Folder
from ingest import captions, staging, urllist
from ingest.journal import Journal
from ingest.pictures import Picture

if TYPE_CHECKING:
    import pyarrow as pa

    from ingest.config import IngestConfig
    from ingest.http import Fetched

Row = dict[str, Any]
_KEPT = ["", "", {"outcome": str(Outcome.INTERNAL)}]  # a picture of the old tar, which a killed retry copies again
_COPIED = (
    "sha256", "format", "width", "height", "stored_width", "stored_height", "stored_sha256", "stored_crc32", "image_hash",
    "image_hash_mirrored",
)  # fmt: skip
_OF_THE_LIST = ("uid", "unit", "row", "url", "caption", "caption_raw", "lang")


@dataclass
class Job:
    """One URL to fetch, for the rows at these places in the unit."""

    url: str
    places: list[int] = field(default_factory=list)


@dataclass
class Unit:
    """Rows of a unit in the order of the list; `jobs` are the downloads still needed, `open_jobs` how many of them.

    `round` counts the rounds of `--retry-failed`; `source` holds the source's own columns. What is settled goes into the
    journal at once, and a unit that a killed run had begun takes it from there.
    """

    folder: Folder
    id: str
    rows: list[Row]
    source: pa.Table
    journal: Journal
    jobs: list[Job]
    open_jobs: int = 0
    round: int = 0
    old_tar: str | None = None
    _stored: dict[int, staging.Member] = field(default_factory=dict)

    def settled(self) -> Counter[str]:
        """Rows that need no download, by outcome."""
        waiting = {place for job in self.jobs for place in job.places}
        return Counter(row["outcome"] for place, row in enumerate(self.rows) if place not in waiting)

    def settle(self, job: Job, fetched: Fetched, picture: Picture) -> None:
        """Take in the result of one download; its rows share the stored bytes."""
        result: Row = {
            **picture_columns(picture), "status": fetched.status, "final_url": fetched.final_url,
            "attempts": fetched.attempts, "elapsed_s": fetched.elapsed_s, "fetched_at": datetime.datetime.now(datetime.UTC),
        }  # fmt: skip
        data = picture.data if picture.outcome == Outcome.OK else b""
        self._take(job, result, picture.ending, *self.journal.add([job.url, picture.ending, result], data))
        self.open_jobs -= 1

    def _take(self, job: Job, result: Row, ending: str, start: int, size: int) -> None:
        for place in job.places:
            self.rows[place].update(result)
        if result["outcome"] == Outcome.OK:
            member = staging.Member(f"{self.rows[job.places[0]]['uid']}.{ending}", start, size)
            self._stored.update(dict.fromkeys(job.places, member))

    def recover(self) -> None:
        """Take in what a killed run had settled, but for failures that another attempt may cure."""
        jobs = {job.url: job for job in self.jobs}
        for (url, ending, result), start, size in self.journal.records():
            if url in jobs and result["outcome"] not in RETRYABLE:
                self._take(jobs.pop(url), result, ending, start, size)
        self.jobs = list(jobs.values())
        self.open_jobs = len(self.jobs)

    def received(self) -> int:
        """Bytes of what needs no download any more."""
        return sum(member.size for member in set(self._stored.values()))

    def publish(self) -> None:
        """Write the tar, then the part; after a retry, remove the tar that the old part named."""
        for row, lang in zip(self.rows, captions.languages([r["caption"] or "" for r in self.rows]), strict=True):
            row["lang"] = lang
        self._write_tar()
        staging.write_part(self.folder, self.id, self.rows, self.source)
        if self.old_tar is not None and self.old_tar != staging.tar_name(self.id, self.round):
            self.folder.remove(self.old_tar)
        self.journal.close(done=True)

    def _write_tar(self) -> None:
        members = list(dict.fromkeys(self._stored[place] for place in sorted(self._stored)))
        if not members:
            return
        name = staging.tar_name(self.id, self.round)
        with self.folder.staged(name) as path:
            offsets = dict(zip(members, staging.write_tar(path, members, self.journal), strict=True))
        for place, member in self._stored.items():
            self.rows[place] |= {"tar": name, "tar_offset": offsets[member], "tar_size": member.size}


def picture_columns(picture: Picture) -> Row:
    """What a picture says of itself, by column."""
    return {
        **{name: getattr(picture, name) for name in _COPIED}, "outcome": str(picture.outcome),
        "detail": _one_line(picture.detail), "bytes": picture.received if picture.sha256 else None,
    }  # fmt: skip


def _one_line(words: str | None) -> str | None:
    """Words of a server or codec, which may hold anything."""
    return None if words is None else " ".join(sound(words).split())


def open_unit(folder: Folder, number: int, unit_id: str, config: IngestConfig) -> Unit | None:
    """The unit with the downloads it still needs; None where it is finished."""
    done = folder.exists(staging.part_name(unit_id))
    if done and not config.retry_failed:
        return None
    plan = urllist.read_unit(folder, number)
    source = plan.select([f.name for f in urllist.source_fields(plan.schema)])
    if done:
        return _reopened(folder, unit_id, source)
    rows = [_new_row(unit_id, row) for row in plan.select(list(urllist.PLAN_COLUMNS)).to_pylist()]
    allow_empty = config.allow_empty or not urllist.has_captions(plan.schema)
    return _unit(folder, unit_id, rows, source, _wanted(rows, allow_empty))


def _unit(folder: Folder, unit_id: str, rows: list[Row], source: pa.Table, wanted: list[int], round_: int = 0) -> Unit:
    jobs: dict[str, Job] = {}
    for place in wanted:
        url = rows[place]["url"] or ""
        jobs.setdefault(url, Job(url)).places.append(place)
    unit = Unit(
        folder, unit_id, rows, source, Journal(folder, f"{unit_id}.{round_}"), list(jobs.values()), round=round_
    )
    unit.recover()
    return unit


def _new_row(unit_id: str, planned: Row) -> Row:
    raw = planned["caption_raw"]
    return {
        **dict.fromkeys((f.name for f in pair_fields()), None), **planned, "unit": unit_id,
        "caption": None if raw is None else captions.clean(raw), "outcome": str(Outcome.INTERNAL),
    }  # fmt: skip


def _wanted(rows: list[Row], allow_empty: bool) -> list[int]:
    """Places of the rows to fetch; the others, without a caption, are settled here."""
    wanted = []
    for place, row in enumerate(rows):
        if row["caption"] or allow_empty:
            wanted.append(place)
        else:
            row["outcome"] = str(Outcome.EMPTY_CAPTION)
    return wanted


def _reopened(folder: Folder, unit_id: str, source: pa.Table) -> Unit | None:
    """A finished unit with the failures that another attempt may cure as its jobs, its good rows as they are."""
    part = staging.read_part(folder, unit_id)
    rows = part.select([f.name for f in pair_fields()]).to_pylist()
    again = [place for place, row in enumerate(rows) if row["outcome"] in RETRYABLE]
    if not again:
        return None
    old_tar = next((row["tar"] for row in rows if row["tar"]), None)
    blank = dict.fromkeys((f.name for f in pair_fields() if f.name not in _OF_THE_LIST), None)
    for place in again:
        rows[place] |= {**blank, "outcome": str(Outcome.INTERNAL)}
    unit = _unit(folder, unit_id, rows, source, again, staging.round_of(old_tar) + 1)
    unit.old_tar = old_tar
    _keep_pictures(unit)
    return unit


def _keep_pictures(unit: Unit) -> None:
    """Carry the pictures of the old tar over, byte by byte; rows of one URL share them as before."""
    kept: dict[int, staging.Member] = {}
    for place, row in enumerate(unit.rows):
        if row["tar"] is None:
            continue
        offset = row["tar_offset"]
        if offset not in kept:
            name, data = staging.read_member(unit.folder, row["tar"], offset, row["tar_size"])
            kept[offset] = staging.Member(name, *unit.journal.add(_KEPT, data))
        unit._stored[place] = kept[offset]
