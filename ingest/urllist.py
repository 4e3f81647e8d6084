"""URL lists of every usual form, read in bounded memory, and the plan that ingest works from.

Way in: `write_plan` reads the list (parquet, csv, tsv, json, jsonl, txt; .gz, .zst; globs; any fsspec URL). Way out:
`ingest/plan.parquet`, one row an input row and one row group a unit. All rows of one URL lie in one unit, so that a
picture with several captions is fetched once; units are taken by a hash of the URL, which also mixes the hosts.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from core.errors import DataError, InputError, StorageError
from core.storage import Folder, expand
from ingest import listfiles

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ingest.config import IngestConfig

log = logging.getLogger("pairmill.ingest")

PLAN = "ingest/plan.parquet"
PLAN_COLUMNS = ("row", "uid", "url", "caption_raw")
_CAPTIONS = b"pairmill.captions"
MEMORY_GB = 2.0  # for DuckDB's sort; beyond that it spills
_WEB = r"^\s*(https?:)?//[^/?#\s]"
UID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what may name a file; other ids of the source are carried and hashed
# DuckDB type -> the words that it holds without loss. Leading zeros and many digits mean an identifier, not a number.
_FORMS = {
    "BIGINT": r"-?(0|[1-9][0-9]{0,17})",
    "DOUBLE": r"-?(0|[1-9][0-9]{0,14})(\.[0-9]*)?([eE][-+]?[0-9]+)?",
    "BOOLEAN": r"(?i:true|false)",
}


def write_plan(config: IngestConfig, folder: Folder) -> None:
    """Read the list of `config` and publish the plan; a plan that exists stays.

    Raises:
        InputError: no file, an empty list, a missing column, or a file that is not what its name says.
        StorageError: too little room for the plan, or for temporary files to sort the list in.
    """
    if folder.exists(PLAN):
        return
    import duckdb

    source = listfiles.open_list(expand(config.urls), config.url_col, config.caption_col)
    with _database() as connection:
        try:
            _load(connection, source, guess_types=True)
        except duckdb.ConversionException as error:
            log.info("a column that began with numbers holds other words too, so all are kept as text: %s", error)
            source = listfiles.open_list(expand(config.urls), config.url_col, config.caption_col)
            _load(connection, source, guess_types=False)
        rows, distinct = connection.execute("SELECT count(*), approx_count_distinct(url) FROM list").fetchall()[0]
        if source.refused:
            log.warning(
                "%d lines of the list are not rows of it and were left out; the first: %s",
                source.refused, source.first_refused,
            )  # fmt: skip
        if not rows:
            raise InputError(f"expected a list of URLs at {config.urls}, found no row in it")
        units = max(1, -(-distinct // config.unit_urls))
        log.info("%s: %s rows, about %s URLs, in %s units", config.urls, f"{rows:,}", f"{distinct:,}", f"{units:,}")
        for words in _account(connection, captions=source.caption is not None and not config.allow_empty):
            log.warning("%s", words)
        _publish(connection, folder, units, {_CAPTIONS: b"yes" if source.caption else b"no"})


@contextlib.contextmanager
def _database() -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory, and in temporary files beyond `MEMORY_GB`."""
    import duckdb

    place = tempfile.gettempdir()
    try:
        with duckdb.connect() as connection:
            connection.execute(f"SET memory_limit = '{MEMORY_GB}GB'")
            connection.execute(f"SET temp_directory = '{place}/pairmill-duckdb'")
            yield connection
    except (duckdb.OutOfMemoryException, duckdb.IOException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # not DuckDB's words, which Arrow hands on under this name
        raise StorageError(
            f"the list fits neither into {MEMORY_GB:g} GB of memory nor into what is free in {place}; free some space there, or "
            f"set TMPDIR to a folder on another disk (DuckDB says: {str(error).partition(chr(10))[0]})"
        ) from error


def _account(connection: duckdb.DuckDBPyConnection, *, captions: bool) -> list[str]:
    """What will not be fetched, told before the first download: a wrong column shows here."""
    no_url, other, example, no_caption = connection.execute(f"""
        SELECT count(*) FILTER (blank), count(*) FILTER (NOT blank AND NOT web),
               min_by(url, row) FILTER (NOT blank AND NOT web), count(*) FILTER (NOT blank AND web AND silent)
        FROM (SELECT row, url, trim(coalesce(url, '')) = '' AS blank, regexp_matches(coalesce(url, ''), '{_WEB}', 'i') AS web,
                     trim(coalesce(caption_raw, '')) = '' AS silent FROM list)""").fetchall()[0]
    words = []
    if no_url:
        words.append(f"{no_url:,} rows have no URL and will be `bad_url`")
    if other:
        words.append(f"{other:,} rows have no http(s) URL and will be `bad_url`; the first: {example[:100]!r}")
    if captions and no_caption:
        words.append(f"{no_caption:,} rows have no caption and will be `empty_caption` (--allow-empty fetches them)")
    return words


def plan_rows(folder: Folder) -> list[int]:
    """Rows of each unit of the plan, in order."""
    with _plan(folder) as plan:
        return [plan.metadata.row_group(i).num_rows for i in range(plan.num_row_groups)]


def read_unit(folder: Folder, number: int) -> pa.Table:
    """Rows of one unit of the plan, in the list's order."""
    with _plan(folder) as plan:
        return plan.read_row_group(number, use_threads=False)


@contextlib.contextmanager
def _plan(folder: Folder) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with folder.open(PLAN) as file, pq.ParquetFile(file) as plan:
            yield plan
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{folder.path(PLAN)} cannot be read ({' '.join(str(error).split())[:200]}); where it is damaged, restore it, or "
            "delete it and run the same command again"
        ) from error


def has_captions(schema: pa.Schema) -> bool:
    """Whether the list had a caption column; in one that has none, an empty caption is no fault."""
    return (schema.metadata or {}).get(_CAPTIONS) == b"yes"


def source_fields(schema: pa.Schema) -> list[pa.Field[Any]]:
    """The source's own columns in a plan."""
    return [f for f in schema if f.name not in PLAN_COLUMNS]


# ---- into DuckDB -------------------------------------------------------------------------------------------------------


def _load(connection: duckdb.DuckDBPyConnection, source: listfiles.ListSource, *, guess_types: bool) -> None:
    """The list as table `list`: row, url, caption_raw, source_uid where there is one, and the source's own columns."""
    import duckdb
    import pyarrow as pa

    first, batches = source.start()
    # by place, because DuckDB would take "URL" for "url"
    places = {name: f"c{place}" for place, name in enumerate(first.schema.names)}
    columns = [f"{places[source.url]}::VARCHAR AS url", f"{_text(places, source.caption)} AS caption_raw"]
    columns.append(f"nullif({_text(places, source.uid)}, '') AS source_uid")
    for name, own in _own_names(first.schema, source).items():
        kind = _kind(first.column(name)) if guess_types and source.text else ""
        columns.append(f"{_typed(places[name], kind) if kind else places[name]} AS {_quoted(own)}")
    problems: list[InputError] = []
    reader = pa.RecordBatchReader.from_batches(
        first.rename_columns(list(places.values())).schema,
        (batch.rename_columns(list(places.values())) for batch in _noting(batches, problems)),
    )
    connection.execute("DROP TABLE IF EXISTS list")
    connection.register("incoming", reader)
    try:
        connection.execute(
            f"CREATE TABLE list AS SELECT row_number() OVER () - 1 AS row, {', '.join(columns)} FROM incoming"
        )
    except duckdb.Error:
        if problems:
            raise problems[0] from None
        raise
    connection.unregister("incoming")


def _noting(batches: Iterator[pa.RecordBatch], problems: list[InputError]) -> Iterator[pa.RecordBatch]:
    """`batches`; what is wrong with the list is also added to `problems`, since DuckDB wraps it into an error of its own."""
    try:
        yield from batches
    except InputError as error:
        problems.append(error)
        raise


def _text(places: dict[str, str], name: str | None) -> str:
    return f"{places[name] if name else 'NULL'}::VARCHAR"


def _own_names(schema: pa.Schema, source: listfiles.ListSource) -> dict[str, str]:
    """Column of the source -> its name in the pairs; names that collide with ours get a prefix."""
    from core.schema import pair_fields

    taken = {f.name for f in pair_fields()} | {*PLAN_COLUMNS, "source_uid", "repeat"}  # the last two are the plan's own
    names: dict[str, str] = {}
    for name in schema.names:
        if name in (source.url, source.caption, source.uid) or name.startswith("__index_level_"):
            continue
        own = name
        while own.lower() in taken:  # DuckDB's names have no case
            own = f"source_{own}"
        taken.add(own.lower())
        names[name] = own
    return names


def _kind(column: pa.Array[Any]) -> str:
    """DuckDB type of a text column by its first values; "" for text."""
    values = [v for v in column.to_pylist() if v]
    fitting = (kind for kind, form in _FORMS.items() if all(re.fullmatch(form, v) for v in values))
    return next(fitting, "") if values else ""


def _typed(column: str, kind: str) -> str:
    """SQL for a text column as `kind`; a later word that it does not hold is a ConversionException, because a plain cast
    would make 2 of 1.5."""
    return (
        f"CAST(CASE WHEN coalesce({column}, '') = '' THEN NULL WHEN regexp_full_match({column}, '{_FORMS[kind]}') "
        f"THEN {column} ELSE 'not ' || {column} END AS {kind})"
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# ---- out of DuckDB, unit by unit ---------------------------------------------------------------------------------------


def _publish(connection: duckdb.DuckDBPyConnection, folder: Folder, units: int, metadata: dict[bytes, bytes]) -> None:
    import pyarrow.parquet as pq

    # md5, because DuckDB's own hash may change between its versions
    reader = connection.sql(
        f"SELECT (md5_number_lower(coalesce(url, '')) % {units})::BIGINT AS unit, *, CASE WHEN source_uid IS NULL THEN 1 "
        "ELSE row_number() OVER (PARTITION BY source_uid ORDER BY row) END AS repeat FROM list ORDER BY unit, row"
    ).to_arrow_reader(100_000)
    tables = (_identified(table).replace_schema_metadata(metadata) for table in _units(reader))
    with folder.staged(PLAN) as path:
        table = next(tables)
        with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
            writer.write_table(table, row_group_size=table.num_rows)
            for table in tables:
                writer.write_table(table, row_group_size=table.num_rows)


def _units(reader: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """Whole units from batches that cut them anywhere."""
    import pyarrow as pa
    import pyarrow.compute as pc

    held: list[pa.Table] = []
    current = None
    for batch in reader:
        table, start = pa.Table.from_batches([batch]), 0
        for run in pc.value_counts(batch["unit"]).to_pylist():  # sorted, so the rows of a unit are one run
            if held and run["values"] != current:
                yield pa.concat_tables(held).combine_chunks()
                held = []
            current = run["values"]
            held.append(table.slice(start, run["counts"]))
            start += run["counts"]
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _identified(table: pa.Table) -> pa.Table:
    """One unit with its uids: the source's own, else a hash of URL and raw caption; a repeated one is hashed again.

    Rows of one URL share a unit, so their hashes repeat within it; the source's own may repeat anywhere in the list.
    """
    import pyarrow as pa

    seen: Counter[str] = Counter()
    uids = []
    columns = (table[name].to_pylist() for name in ("url", "caption_raw", "source_uid", "repeat"))
    for url, caption, own, repeat in zip(*columns, strict=True):
        if own is None:
            uid = hashed(f"{url or ''}\x00{caption or ''}")
            seen[uid] += 1
            repeat = seen[uid]
        else:
            uid = own if UID.fullmatch(own) else hashed(own)
        uids.append(uid if repeat == 1 else hashed(f"{uid}\x00{repeat}"))
    table = table.add_column(2, "uid", pa.array(uids, pa.string()))
    return table.drop_columns(["unit", "source_uid", "repeat"])


def hashed(text: str) -> str:
    """32 hex characters of xxh3-128, the house's uid."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(text.encode())
