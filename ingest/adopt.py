"""Stage `adopt`: shards of webdataset or img2dataset become ingest parts, and not a byte of their images is copied.

Way in: tars whose members share a key: a picture, `.txt` with the caption, `.json` with whatever else is known. Way out:
`ingest/parts`, one part a tar, whose rows point into the foreign tars.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from core import catalog, webdataset
from core.plan import Unit
from core.runner import run_units, tick
from core.schema import Outcome, pair_fields, sound
from core.storage import Folder, expand
from core.work import Stage, fingerprint, open_stage
from ingest import captions, staging
from ingest.config import check
from ingest.fetch import literal, one_thread_each, unit_id
from ingest.pictures import Picture, Rules, prepare
from ingest.unit import picture_columns
from ingest.urllist import UID, hashed

if TYPE_CHECKING:
    from ingest.config import AdoptConfig

log = logging.getLogger("pairmill.adopt")


def run(config: AdoptConfig) -> dict[str, Any]:
    """Take every sample of the shards in; returns the summary: pairs, shards, ok, outcomes, seconds.

    Raises:
        InputError: there is no tar at that place.
        WorkFolderError: the work folder holds the pairs of other shards, or of `ingest`.
    """
    check(config)
    tars = find_tars(config.shards)
    with open_stage(config, "adopt", home="ingest", inputs=_fingerprint(tars), redo=False) as stage:
        staging.refuse_other(stage.folder, "adopt")
        staging.claim(stage.folder, "adopt")
        if staging.is_whole(stage, "shards"):
            return stage.finished or {}
        stage.reopen()
        stage.folder.sweep(staging.PARTS)
        stage.share()
        return _adopt_all(config, stage, tars)


def find_tars(where: str) -> list[str]:
    """Tars in a folder, or by a glob, in order; absolute paths or URLs.

    Raises:
        InputError: there is none.
    """
    return expand(where if where.endswith(".tar") else f"{where.rstrip('/')}/*.tar")


def _fingerprint(tars: list[str]) -> str:
    return fingerprint(Folder("/"), *map(literal, tars))


def _adopt_all(config: AdoptConfig, stage: Stage, tars: list[str]) -> dict[str, Any]:
    started = time.monotonic()
    units = [Unit(unit_id(i), i, i + 1) for i in range(len(tars))]
    task = functools.partial(adopt_tar, config=config, folder=stage.folder, tars=tars)
    there = set(stage.folder.list(f"{staging.PARTS}/*.parquet"))
    for _ in run_units(
        units, task, done=lambda unit: staging.part_name(unit.id) in there, part=stage.part,
        workers=config.workers, engine=config.engine, label="adopt", unit_of_progress="tars",
    ):  # fmt: skip
        pass
    if partial := stage.left_to_others(lambda: len(tars) - len(stage.folder.list(f"{staging.PARTS}/*.parquet"))):
        return partial
    _part_uids(stage.folder)
    catalog.write(stage.folder)
    summary = staging.summary(stage.folder)
    return stage.finish(
        {"pairs": summary.pop("rows"), "shards": len(tars), **summary, "seconds": time.monotonic() - started}
    )


def _part_uids(folder: Folder) -> None:
    """Give pairs of different tars that came with one uid uids of their own, as `_make_unique` does within a tar.

    The first of them by unit and row keeps it, so a repetition after a kill ends at the same.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    places = 'row_number() OVER (PARTITION BY uid ORDER BY unit, "row") AS place'
    with catalog.connect(folder) as connection:
        found = connection.execute(
            f'SELECT unit, list("row") FROM (SELECT unit, "row", {places} FROM pairs) WHERE place > 1 GROUP BY unit'
        ).fetchall()
    for unit, rows in found:
        part = staging.read_part(folder, unit)
        again = pc.is_in(part["row"], pa.array(rows, pa.int64())).to_pylist()
        pairs = zip(part["uid"].to_pylist(), part["row"].to_pylist(), again, strict=True)
        uids = [hashed(f"{uid}\x00{row}") if repeated else uid for uid, row, repeated in pairs]
        field = part.schema.field("uid")
        with folder.staged(staging.part_name(unit)) as path:
            table = part.set_column(part.schema.get_field_index("uid"), field, pa.array(uids, pa.string()))
            pq.write_table(table, path, compression="zstd")


# ---- in a worker -------------------------------------------------------------------------------------------------------


def adopt_tar(unit: Unit, *, config: AdoptConfig, folder: Folder, tars: list[str]) -> Counter[str]:
    """Make the part of one tar; returns its outcomes."""
    one_thread_each()
    tar = tars[unit.start]
    rules = Rules(min_side=config.min_side)
    rows = []
    with Folder("/").open(tar) as file:
        reader = webdataset.Tar(tar, file)
        for number, sample in enumerate(reader.samples()):
            row = _row(sample, rules, allow_empty=config.allow_empty)
            rows.append({**row, "unit": unit.id, "row": (unit.start << 32) + number})
    if reader.damage:
        rows.append(_damage_row(reader, unit, len(rows)))
    rows.extend(_failure_rows(tar, unit, len(rows)))
    for row, lang in zip(rows, captions.languages([r["caption"] or "" for r in rows]), strict=True):
        row["lang"] = lang
    _publish(folder, unit, rows)
    outcomes = Counter(row["outcome"] for row in rows)
    tick(1, **outcomes)
    return outcomes


def _row(sample: webdataset.Sample, rules: Rules, *, allow_empty: bool) -> dict[str, Any]:
    known, raw = sample.notes(), sample.text()
    if raw is None:
        raw = next((known[n] for n in ("caption", "text", "alt") if known.get(n)), None)
    raw = raw if isinstance(raw, str) else None
    url = known["url"] if isinstance(known.get("url"), str) else None
    ending = sample.first(webdataset.PICTURES)
    caption = None if raw is None else captions.clean(raw)
    if ending is None:
        picture = Picture(Outcome.NOT_IMAGE, "no picture under this key")
    elif not caption and not allow_empty:
        picture = Picture(Outcome.EMPTY_CAPTION)
    else:
        picture = prepare(sample.read(ending), rules)
    row = {
        **dict.fromkeys(f.name for f in pair_fields()), **picture_columns(picture), "url": url, "caption": caption,
        "caption_raw": raw, "uid": _uid(known.get("uid"), url, raw, f"{sample.tar.name}#{sample.key}"), "attempts": 0,
        "source_key": sample.key, "source_json": json.dumps(known, ensure_ascii=False) if known else None,
    }  # fmt: skip
    if picture.outcome == Outcome.OK and ending is not None:
        offset, size = sample.members[ending]
        row |= {"tar": sample.tar.name, "tar_offset": offset, "tar_size": size}
    return row


def _uid(own: Any, url: str | None, raw: str | None, place: str) -> str:
    if isinstance(own, str) and UID.fullmatch(own):
        return own
    return hashed(f"{url if url is not None else place}\x00{raw or ''}")


def _damage_row(reader: webdataset.Tar, unit: Unit, number: int) -> dict[str, Any]:
    log.warning("%s is damaged, what lies behind is lost: %s", reader.name, reader.damage)
    return {
        **dict.fromkeys(f.name for f in pair_fields()), "uid": hashed(f"{reader.name}#damage"), "unit": unit.id,
        "row": (unit.start << 32) + number, "outcome": str(Outcome.TRUNCATED), "detail": sound(f"tar: {reader.damage}"),
        "attempts": 0, "source_key": None, "source_json": None,
    }  # fmt: skip


def _failure_rows(tar: str, unit: Unit, number: int) -> list[dict[str, Any]]:
    """What img2dataset could not fetch, by the table it leaves beside each tar; none where there is no such table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    beside, name = Folder("/"), tar.removesuffix(".tar") + ".parquet"
    if not beside.exists(name):
        return []
    try:
        with beside.open(name) as file:
            table = pq.read_table(file, use_threads=False)
        failed = [row for row in table.to_pylist() if row["status"] != "success"]
        return [_failure_row(row, unit, number + i) for i, row in enumerate(failed)]
    except (pa.ArrowException, KeyError) as error:
        log.warning("%s is not img2dataset's table, so its failures are not known: %s", name, error)
        return []


_REASONS = (
    (r"429", Outcome.HTTP_429), (r"HTTP Error 4", Outcome.HTTP_4XX), (r"HTTP Error 5", Outcome.HTTP_5XX),
    (r"timed out", Outcome.TIMEOUT), (r"Name or service|name resolution|getaddrinfo|No address", Outcome.DNS),
    (r"certificate|SSL", Outcome.TLS), (r"disallowed", Outcome.OPTED_OUT), (r"too small", Outcome.TOO_SMALL),
    (r"aspect ratio", Outcome.BAD_ASPECT), (r"unknown url type|no host", Outcome.BAD_URL),
    (r"decoding|NoneType", Outcome.CORRUPT),
)  # fmt: skip


def _failure_row(known: dict[str, Any], unit: Unit, number: int) -> dict[str, Any]:
    """One failure of img2dataset in our words: its messages are urllib's and its resizer's."""
    message = str(known.get("error_message") or known["status"])
    unknown = Outcome.CORRUPT if known["status"] == "failed_to_resize" else Outcome.CONNECT
    outcome = next((o for pattern, o in _REASONS if re.search(pattern, message)), unknown)
    raw, url = known.get("caption"), known.get("url")
    return {
        **dict.fromkeys(f.name for f in pair_fields()), "uid": _uid(known.get("uid"), url, raw, f"{known['key']}"),
        "unit": unit.id, "row": (unit.start << 32) + number, "url": url, "caption_raw": raw, "outcome": str(outcome),
        "caption": None if raw is None else captions.clean(raw), "detail": message[:200], "attempts": 1,
        "source_key": known["key"], "source_json": None,
    }  # fmt: skip


def _publish(folder: Folder, unit: Unit, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa

    _make_unique(rows)
    names = ("source_key", "source_json")
    source = pa.table({name: pa.array([row.pop(name) for row in rows], pa.string()) for name in names})
    staging.write_part(folder, unit.id, rows, source)


def _make_unique(rows: list[dict[str, Any]]) -> None:
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row["uid"]] += 1
        if seen[row["uid"]] > 1:
            row["uid"] = hashed(f"{row['uid']}\x00{seen[row['uid']]}")
