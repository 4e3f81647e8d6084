"""Dataset statistics: every number is aggregated in DuckDB over the Parquet files, so memory does not grow with rows.

Each section reads the few columns it needs and is left out where its files do not exist yet, so a work folder may be
audited at any stage, also while another stage is still filling it.
"""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import InputError
from core.storage import Folder
from report import foreign

if TYPE_CHECKING:
    import duckdb
    from rich.console import RenderableType

    from report.config import AuditConfig

HOST = r"lower(regexp_extract(url, '^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#@]*@)?(\[[^]]*\]|[^/?#:]+)', 1))"
BINS = 28
TOP = 20  # hosts, captions, words and the like that are listed; `sql` lists more
PICTURE_BYTES, PICTURES, LARGEST_CLUSTERS = 6_500_000, 6, 6  # of the HTML page; pictures of each reason
PERIODS, SPANS = (
    48,
    (1, 10, 60, 600, 3600, 21600, 86400, 604800),
)  # at most so many periods, of the first of these seconds
QUANTILES = (0.005, 0.05, 0.5, 0.95, 0.995)
# Words are counted on at most about this many captions: the list of frequent words is settled long before.
WORD_CAPTIONS = 2_000_000
MEASURES = {
    "width": ("width", "pixels"),
    "height": ("height", "pixels"),
    "aspect": ("least(width / nullif(height, 0), 100)", "width / height"),
    "bytes": ("bytes / 1000.0", "kB as received"),
    "caption_chars": ("length(caption)", "characters"),
    "caption_words": ("len(string_split(trim(caption), ' '))", "words"),
}
# A dropped pair whose reason ends so is a copy of one that was kept; any other reason is a filter's.
DUPLICATE = "reason LIKE '%duplicate'"


def run(config: AuditConfig) -> dict[str, Any]:
    """The whole page of statistics.

    Raises:
        InputError: nothing to look at in the folder.
        DataError: a file of it is no whole table.
    """
    start = time.perf_counter()
    folder = Folder(config.folder or config.work)
    connection = catalog.connect(folder)
    with catalog.reading(folder):
        if config.folder and not views(connection):
            foreign.make_views(connection, folder)
        page = gather(connection)
    if not page:
        raise InputError(f"{folder} holds nothing to audit yet; run `pairmill ingest` or name a folder of shards")
    page = {"folder": str(folder), **page, **conditions(folder)}
    if config.html:
        _write_html(connection, folder, page, Path(config.html))
        page["html"] = config.html
    return {**page, "seconds": round(time.perf_counter() - start, 3)}


def _write_html(connection: duckdb.DuckDBPyConnection, folder: Folder, page: dict[str, Any], path: Path) -> None:
    """The statistics with pictures: pairs that stay, pairs of each reason, and the largest clusters."""
    from report import gallery, html

    thumbnails = gallery.Thumbnails(folder, PICTURE_BYTES)
    largest = page.get("clusters", {}).get("largest", [])[:LARGEST_CLUSTERS]
    with catalog.reading(folder):
        shown = {
            "clusters": gallery.clusters(connection, thumbnails, largest, 2 * PICTURES),
            "dropped": [
                *gallery.kept(connection, thumbnails, 2 * PICTURES), *gallery.dropped(connection, thumbnails, PICTURES)
            ],
            "failures": gallery.failures(connection),
        }  # fmt: skip
    written = html.render({"audit": page, **shown}).encode("utf-8", "replace")  # captions may hold lone surrogates
    Folder(path.parent).write(path.name, written)


def conditions(folder: Folder) -> dict[str, Any]:
    """What the last `dedup` said of its conditions and evaluation sets; nothing where it did not run or had none."""
    try:
        noted = json.loads(folder.read("dedup/done.json")) if folder.exists("dedup/done.json") else {}
    except ValueError:
        return {}
    return {key: noted[key] for key in ("rules", "against") if isinstance(noted, dict) and noted.get(key)}


def gather(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """All sections that the connection's views allow, by name; rows are counts of pairs unless a key says otherwise."""
    have = views(connection)
    page: dict[str, Any] = {}
    if "pairs" in have:
        page |= pair_sections(connection)
    if "decisions" in have:
        page |= decision_sections(connection)
    for view in ("samples", "holdout"):
        if view in have:
            page[view] = sample_section(connection, view)
    if page:
        page = {"funnel": funnel(connection), **page}
    return page


def views(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Names of the views that have files."""
    rows = connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
    return {name for (name,) in rows}


def funnel(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """How many are left after each stage that ran: rows, fetched, unique, kept, sharded (pairs), seen (samples drawn).

    `unique` are the fetched pairs that are no copy of another; `kept` counts held-out rows too, as `sharded` does.
    `seen` is the latest figure of the run that saw most; it exceeds `sharded` where the run took several epochs.
    """
    have = views(connection)
    out: dict[str, int] = {}
    if "pairs" in have:
        out["rows"], out["fetched"] = _one(connection, "SELECT count(*), count(*) FILTER (outcome = 'ok') FROM pairs")
    if "decisions" in have:
        out["unique"], out["kept"] = _one(
            connection, f"SELECT count(*) FILTER (kept OR NOT {DUPLICATE}), count(*) FILTER (kept) FROM decisions"
        )
    if "samples" in have:
        held = "UNION ALL SELECT uids FROM holdout" if "holdout" in have else ""
        (out["sharded"],) = _one(
            connection, f"SELECT coalesce(sum(len(uids)), 0)::BIGINT FROM (SELECT uids FROM samples {held})"
        )
    if "steps" in have and "samples_seen" in catalog.columns(connection, "steps"):
        (out["seen"],) = _one(connection, "SELECT coalesce(max(samples_seen), 0)::BIGINT FROM steps")
    return out


def pair_sections(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """Statistics of `pairs`: totals, outcomes, hosts, formats, languages, histograms, captions and words."""
    known = set(catalog.columns(connection, "pairs"))
    size = "coalesce(sum(bytes), 0)::BIGINT" if "bytes" in known else "0::BIGINT"
    ok = "FROM pairs WHERE outcome = 'ok'"
    sections: dict[str, Any] = {
        "pairs": _records(
            connection,
            f"""SELECT count(*) AS rows, count(*) FILTER (outcome = 'ok') AS ok, count(DISTINCT url) AS urls,
            count(DISTINCT caption) AS captions, {size} AS bytes FROM pairs""",
        )[0],
        "outcomes": _records(
            connection,
            f"SELECT outcome AS name, count(*) AS rows, {size} AS bytes FROM pairs GROUP BY 1 ORDER BY rows DESC, name",
        ),
        "hosts": _records(
            connection,
            f"""SELECT {HOST} AS name, count(*) AS rows, count(*) FILTER (outcome = 'ok') AS ok, {size} AS bytes
            FROM pairs GROUP BY 1 ORDER BY rows DESC, name LIMIT {TOP}""",
        ),
    }
    for section, column in (("formats", "format"), ("languages", "lang")):
        if column in known:
            sections[section] = _records(
                connection,
                f"SELECT coalesce({column}, 'unknown') AS name, count(*) AS rows, {size} AS bytes {ok} "
                f"GROUP BY 1 ORDER BY rows DESC, name LIMIT {TOP}",
            )
    if "fetched_at" in known:
        sections["over_time"] = over_time(connection)
    sections["histograms"] = histograms(connection, known)
    sections["captions"] = _records(
        connection,
        f"""SELECT caption, count(*) AS rows {ok} AND caption <> '' GROUP BY 1 HAVING count(*) > 1
        ORDER BY rows DESC, caption LIMIT {TOP}""",
    )
    sections["words"] = words(connection, sections["pairs"]["ok"])
    return sections


def over_time(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """Attempts in periods of equal length, {seconds, periods: [{from (UTC), rows, ok, bytes}]}; empty where none is dated."""
    first, last = _one(connection, "SELECT min(epoch(fetched_at)), max(epoch(fetched_at)) FROM pairs")
    if first is None:
        return {}
    seconds = next((s for s in SPANS if (last - first) / s < PERIODS), math.ceil((last - first) / PERIODS))
    rows = _records(
        connection,
        f"""SELECT floor(epoch(fetched_at) / {seconds})::BIGINT * {seconds} AS start, count(*) AS rows,
        count(*) FILTER (outcome = 'ok') AS ok, coalesce(sum(bytes), 0)::BIGINT AS bytes
        FROM pairs WHERE fetched_at IS NOT NULL GROUP BY 1 ORDER BY 1""",
    )
    periods = [{"from": f"{datetime.fromtimestamp(row.pop('start'), UTC):%Y-%m-%d %H:%M:%S}", **row} for row in rows]
    return {"seconds": seconds, "periods": periods}


def histograms(connection: duckdb.DuckDBPyConnection, known: set[str]) -> dict[str, Any]:
    """Each measure of the fetched pairs as {unit, min, p05, p50, p95, max, bins: [{from, to, rows}]}.

    Bins are equally wide between the 0.5 and 99.5 percentiles; what lies beyond is counted in the outermost ones.
    """
    out: dict[str, Any] = {}
    for name, (sql, unit) in MEASURES.items():
        if not known.issuperset(_columns_of(name)):
            continue
        low, *at, high = _quantiles(connection, sql)
        if low is None:
            continue
        start, step = _bins(float(at[0]), float(at[4]), whole=name not in ("aspect", "bytes"))
        points = dict(zip(("p05", "p50", "p95"), (_round(v) for v in at[1:4]), strict=True))
        out[name] = {
            "unit": unit,
            "min": _round(low),
            **points,
            "max": _round(high),
            "bins": _binned(connection, sql, start, step),
        }
    return out


def _quantiles(connection: duckdb.DuckDBPyConnection, sql: str) -> tuple[Any, ...]:
    """Smallest value, the QUANTILES, largest value of the fetched pairs; None for each where there is no value.

    From counts of the different values: exact, unlike DuckDB's sketch, whose answer changes with the order of its threads,
    and without holding every value in memory.
    """
    points = ", ".join(f"min(value) FILTER (upto >= {q} * total)" for q in QUANTILES)
    return _one(
        connection,
        f"""WITH counts AS (SELECT {sql} AS value, count(*) AS n FROM pairs WHERE outcome = 'ok' GROUP BY 1)
        SELECT min(value), {points}, max(value) FROM (
            SELECT value, sum(n) OVER (ORDER BY value) AS upto, sum(n) OVER () AS total FROM counts WHERE value IS NOT NULL
        )""",
    )


def _columns_of(measure: str) -> tuple[str, ...]:
    return {"aspect": ("width", "height"), "caption_chars": ("caption",), "caption_words": ("caption",)}.get(
        measure, (measure,)
    )


def _bins(low: float, high: float, *, whole: bool) -> tuple[float, float]:
    """Start and width of about BINS bins over [low, high], on round numbers."""
    raw = max((high - low) / BINS, 1e-9)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    elif high - low < 1e-6:
        step = max(abs(low) * 0.05, 0.01)
    return math.floor(low / step) * step, step


def _binned(connection: duckdb.DuckDBPyConnection, sql: str, start: float, step: float) -> list[dict[str, Any]]:
    last = BINS + 1
    rows = connection.execute(
        f"""SELECT greatest(0, least({last}, floor(({sql} - {start}) / {step} + 1e-9)))::INTEGER AS bin, count(*)
        FROM pairs WHERE outcome = 'ok' AND {sql} IS NOT NULL GROUP BY 1 ORDER BY 1"""
    ).fetchall()
    counts = dict(rows)
    return [
        {"from": _round(start + b * step), "to": _round(start + (b + 1) * step), "rows": counts.get(b, 0)}
        for b in range(max(counts, default=-1) + 1)
    ]


def words(connection: duckdb.DuckDBPyConnection, captions: int) -> dict[str, Any]:
    """Most frequent words of the fetched captions, {sampled: share of captions looked at, top: [{word, rows}]}.

    Runs of letters and digits in any script, lower-cased; words of one letter are left out.
    """
    every = max(1, captions // WORD_CAPTIONS)
    chosen = f"AND hash(caption) % {every} = 0" if every > 1 else ""
    rows = _records(
        connection,
        rf"""SELECT word, count(*) AS rows FROM (
            SELECT unnest(regexp_extract_all(lower(caption), '[\p{{L}}\p{{N}}\p{{M}}]+')) AS word
            FROM pairs WHERE outcome = 'ok' {chosen}
        ) WHERE length(word) > 1 OR word > '~' GROUP BY 1 ORDER BY rows DESC, word LIMIT {TOP}""",
    )
    return {"sampled": round(1 / every, 4), "top": rows}


def decision_sections(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """Statistics of `decisions`: kept and held out, dropped by reason and evidence, clusters by size, largest groups."""
    totals = _records(
        connection,
        """SELECT count(*) AS pairs, count(*) FILTER (kept) AS kept, count(*) FILTER (holdout) AS holdout,
        count(*) FILTER (NOT kept) AS dropped, count(DISTINCT image_group) AS pictures FROM decisions""",
    )[0]
    dropped = _records(
        connection,
        """SELECT reason AS name, count(*) AS rows, round(avg(similarity), 4) AS similarity FROM decisions
        WHERE NOT kept GROUP BY 1 ORDER BY rows DESC, name""",
    )
    evidence = _records(
        connection,
        """SELECT evidence AS name, count(*) AS rows FROM decisions WHERE NOT kept AND evidence IS NOT NULL
        GROUP BY 1 ORDER BY rows DESC, name""",
    )
    sizes = _records(
        connection,
        """SELECT size, count(*) AS clusters FROM (
            SELECT count(*) AS size FROM decisions WHERE cluster IS NOT NULL GROUP BY cluster
        ) WHERE size > 1 GROUP BY 1 ORDER BY 1""",
    )
    largest = _records(
        connection,
        f"""SELECT cluster AS name, count(*) AS rows FROM decisions WHERE cluster IS NOT NULL
        GROUP BY 1 HAVING count(*) > 1 ORDER BY rows DESC, name LIMIT {TOP}""",
    )
    return {
        "decisions": totals,
        "dropped": dropped,
        "evidence": evidence,
        "clusters": {"clusters": sum(row["clusters"] for row in sizes), "sizes": sizes, "largest": largest},
    }


def sample_section(connection: duckdb.DuckDBPyConnection, view: str) -> dict[str, Any]:
    """Statistics of a shard set: samples, captions, shards, image bytes, captions a sample, picture sizes."""
    section = _records(
        connection,
        f"""SELECT count(*) AS samples, coalesce(sum(len(captions)), 0)::BIGINT AS captions,
        count(DISTINCT shard) AS shards, coalesce(sum(jpg_size), 0)::BIGINT AS bytes,
        min(width) AS width_min, max(width) AS width_max, min(height) AS height_min, max(height) AS height_max
        FROM {view}""",
    )[0]
    section["captions_a_sample"] = _records(
        connection,
        f"SELECT len(captions)::INTEGER AS captions, count(*) AS samples FROM {view} GROUP BY 1 ORDER BY 1 LIMIT 32",
    )
    return section


def render(page: dict[str, Any]) -> RenderableType:
    """The page as tables for a terminal."""
    from report import terminal

    return terminal.audit(page)


def _one(connection: duckdb.DuckDBPyConnection, sql: str) -> tuple[Any, ...]:
    row = connection.execute(sql).fetchone()
    assert row is not None
    return row


def _records(connection: duckdb.DuckDBPyConnection, sql: str) -> list[dict[str, Any]]:
    cursor = connection.execute(sql)
    names = [column[0] for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _round(value: Any) -> float | int:
    number = float(value)
    return int(number) if number == int(number) else float(f"{number:.6g}")
