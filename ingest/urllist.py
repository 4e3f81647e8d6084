"""URL lists of every usual form, read in bounded memory, and the plan that ingest works from.

Way in: `planning` reads the list (parquet, csv, tsv, json, jsonl, txt; .gz, .zst; globs; any fsspec URL). Way out: the
folder `ingest/plan` with one row an input row and one row group a unit, in files of neighbouring units. All rows of one URL
lie in one unit, so that a picture with several captions is fetched once; units are taken by a hash of the URL, which also
mixes the hosts. How many rows a unit has is known once the list is read; sorting rows into files takes longer by far, so
the first units are fetched while the rest of the plan is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import DataError, InputError, StorageError
from core.storage import Folder, expand
from ingest import listfiles

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from ingest.config import IngestConfig

log = logging.getLogger("pairmill.ingest")

HOME = "ingest/plan"
INDEX = f"{HOME}/_units.json"  # readers of Parquet folders pass over such names
FILES = 64  # of a plan, at most: each is one look through the whole list, a tenth of a second for ten million rows
SMALLEST_FILE = 16  # units
PLAN_COLUMNS = ("row", "uid", "url", "caption_raw")
_CAPTIONS = b"pairmill.captions"
MEMORY_GB = 2.0  # for DuckDB's sort; beyond that it spills
_WEB = r"^\s*(https?:)?//[^/?#\s]"
_PLAIN = "(starts_with(url, 'http://') OR starts_with(url, 'https://')) AND url[9] > '/'"  # nearly all, in a tenth of the time
UID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what may name a file; other ids of the source are carried and hashed
# DuckDB type -> the words that it holds without loss. Leading zeros and many digits mean an identifier, not a number.
_FORMS = {
    "BIGINT": r"-?(0|[1-9][0-9]{0,17})",
    "DOUBLE": r"-?(0|[1-9][0-9]{0,14})(\.[0-9]*)?([eE][-+]?[0-9]+)?",
    "BOOLEAN": r"(?i:true|false)",
}


@dataclass(frozen=True)
class _Index:
    """What is known of a plan before its files are written: `rows` of each unit, and how rows fall into units.

    A row belongs to the place of its hash modulo `divisor`; places without rows are no units. A file holds `per_file` units.
    """

    divisor: int
    per_file: int
    captions: bool
    rows: list[int]

    def units_of(self, file: int) -> range:
        return range(file * self.per_file, min((file + 1) * self.per_file, len(self.rows)))

    @property
    def files(self) -> int:
        return -(-len(self.rows) // self.per_file)


class Planning:
    """A plan that is being written in a thread of this process; `wait_for(unit)` returns when the unit can be read."""

    def __init__(self, steps: Generator[int, None, None]) -> None:
        self._steps, self._ready = steps, next(steps)
        self._changed, self._over = threading.Condition(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        error: BaseException | None = None
        try:
            for ready in self._steps:
                with self._changed:
                    self._ready = ready
                    self._changed.notify_all()
                if self._over:
                    break
            self._steps.close()
        except BaseException as found:
            error = found
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for(self, unit: int) -> None:
        """Raises what stopped the plan, where it was stopped before it came to the unit."""
        with self._changed:
            self._changed.wait_for(lambda: unit < self._ready or self._error is not None)
            if unit >= self._ready and self._error is not None:
                raise self._error

    def close(self) -> None:
        """Leave the rest of the plan to the next run."""
        self._over = True
        self._thread.join()


@contextlib.contextmanager
def planning(config: IngestConfig, folder: Folder) -> Iterator[Planning]:
    """Read the list of `config`, and write its plan while the body runs; files of the plan that exist stay.

    Raises:
        InputError: no file, an empty list, a missing column, or a file that is not what its name says.
        StorageError: too little room for the plan, or for temporary files to sort the list in.
        DataError: a plan that was begun does not belong to this list.
    """
    with contextlib.closing(Planning(_steps(config, folder))) as plan:
        yield plan


def write_plan(config: IngestConfig, folder: Folder) -> None:
    """The whole plan at once; raises as `planning`."""
    for _ in _steps(config, folder):
        pass


def _steps(config: IngestConfig, folder: Folder) -> Generator[int, None, None]:
    """Write the plan; gives, file by file, the number of units that can be read."""
    index = _read_index(folder) if folder.exists(INDEX) else None
    if index is not None and set(map(_file_name, range(index.files))) <= set(folder.list(f"{HOME}/*.parquet")):
        yield len(index.rows)
        return
    with _database() as connection:
        source = _load_guessing(connection, config)
        if index is None:
            index = _begin(connection, config, folder, source)
        keys = _unit_keys(connection, index)
        for file in range(index.files):
            if not folder.exists(_file_name(file)):
                _publish(connection, folder, index, file, keys)
            yield index.units_of(file).stop


def _load_guessing(connection: duckdb.DuckDBPyConnection, config: IngestConfig) -> listfiles.ListSource:
    """The list as table `list`, its text columns as numbers where they hold nothing else."""
    import duckdb

    files = expand(config.urls)
    try:
        source = listfiles.open_list(files, config.url_col, config.caption_col)
        _load(connection, source, guess_types=True)
    except duckdb.ConversionException as error:
        log.info("a column that began with numbers holds other words too, so all are kept as text: %s", error)
        source = listfiles.open_list(files, config.url_col, config.caption_col)
        _load(connection, source, guess_types=False)
    if source.refused:
        log.warning(
            "%d lines of the list are not rows of it and were left out; the first: %s",
            source.refused, source.first_refused,
        )  # fmt: skip
    return source


def _begin(
    connection: duckdb.DuckDBPyConnection, config: IngestConfig, folder: Folder, source: listfiles.ListSource
) -> _Index:
    """Tell what the list holds, and publish the index of its plan."""
    rows, distinct = connection.execute("SELECT count(*), approx_count_distinct(url_hash) FROM list").fetchall()[0]
    if not rows:
        raise InputError(f"expected a list of URLs at {config.urls}, found no row in it")
    divisor = max(1, -(-distinct // config.unit_urls))
    counts = [n for (n,) in connection.execute(_UNITS.format(divisor=divisor, what="count(*)")).fetchall()]
    index = _Index(divisor, max(SMALLEST_FILE, -(-len(counts) // FILES)), source.caption is not None, counts)
    log.info("%s: %s rows, about %s URLs, in %s units", config.urls, f"{rows:,}", f"{distinct:,}", f"{len(counts):,}")
    for words in _account(connection, captions=index.captions and not config.allow_empty):
        log.warning("%s", words)
    folder.write(INDEX, json.dumps(vars(index)).encode())
    return index


_UNITS = "SELECT {what} FROM list GROUP BY url_hash % {divisor} ORDER BY url_hash % {divisor}"


def _unit_keys(connection: duckdb.DuckDBPyConnection, index: _Index) -> list[int]:
    """What the hash of a URL leaves, for each unit.

    Raises:
        DataError: the units are not those of the index.
    """
    found = connection.execute(
        _UNITS.format(divisor=index.divisor, what=f"url_hash % {index.divisor}, count(*)")
    ).fetchall()
    if [rows for _, rows in found] != index.rows:
        raise DataError(f"the plan that {INDEX} began is of another list than the one that is there now; use --fresh")
    return [key for key, _ in found]


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
        FROM (SELECT row, url, CASE WHEN {_PLAIN} THEN false ELSE trim(coalesce(url, '')) = '' END AS blank,
                     CASE WHEN {_PLAIN} THEN true ELSE regexp_matches(coalesce(url, ''), '{_WEB}', 'i') END AS web,
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
    return _read_index(folder).rows


def read_unit(folder: Folder, number: int) -> pa.Table:
    """Rows of one unit of the plan, in the list's order."""
    import pyarrow.parquet as pq

    file, place = divmod(number, _read_index(folder).per_file)
    with (
        _undamaged(folder, _file_name(file)),
        folder.open(_file_name(file)) as opened,
        pq.ParquetFile(opened) as plan,
    ):
        return plan.read_row_group(place, use_threads=False)


def _read_index(folder: Folder) -> _Index:
    with _undamaged(folder, INDEX):
        return _Index(**json.loads(folder.read(INDEX)))


def _file_name(file: int) -> str:
    return f"{HOME}/{file:05d}.parquet"


@contextlib.contextmanager
def _undamaged(folder: Folder, name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{folder.path(name)} cannot be read ({' '.join(str(error).split())[:200]}); where it is damaged, restore it, or "
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
    """The list as table `list`: row, url, url_hash, caption_raw, source_uid where there is one, the source's own columns."""
    import duckdb
    import pyarrow as pa

    first, batches = source.start()
    # by place, because DuckDB would take "URL" for "url"
    places = {name: f"c{place}" for place, name in enumerate(first.schema.names)}
    columns = [f"{places[source.url]}::VARCHAR AS url", "url_hash", f"{_text(places, source.caption)} AS caption_raw"]
    columns.append(f"nullif({_text(places, source.uid)}, '') AS source_uid")
    for name, own in _own_names(first.schema, source).items():
        kind = _kind(first.column(name)) if guess_types and source.text else ""
        columns.append(f"{_typed(places[name], kind) if kind else places[name]} AS {_quoted(own)}")
    problems: list[InputError] = []
    schema = first.rename_columns(list(places.values())).schema.append(pa.field("url_hash", pa.uint64()))
    reader = pa.RecordBatchReader.from_batches(
        schema,
        (
            pa.record_batch([*batch.columns, _url_hashes(batch.column(source.url))], schema=schema)
            for batch in _noting(batches, problems)
        ),
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
    connection.execute(
        "CREATE OR REPLACE TABLE repeats AS SELECT row, row_number() OVER (PARTITION BY source_uid ORDER BY row) AS repeat "
        "FROM list SEMI JOIN (SELECT source_uid FROM list WHERE source_uid IS NOT NULL GROUP BY ALL HAVING count(*) > 1) "
        "USING (source_uid)"
    )


def _url_hashes(urls: pa.Array[Any]) -> pa.Array[Any]:
    # DuckDB's own hash may change between its versions, its md5 takes six times as long
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import xxhash

    texts = pc.fill_null(urls.cast(pa.string()).cast(pa.binary()), b"").to_numpy(zero_copy_only=False)
    return pa.array(np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts)))


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

    taken = {f.name for f in pair_fields()} | {*PLAN_COLUMNS, "unit", "url_hash", "source_uid", "repeat"}
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


def _publish(connection: duckdb.DuckDBPyConnection, folder: Folder, index: _Index, file: int, keys: list[int]) -> None:
    import pyarrow.parquet as pq

    units = index.units_of(file)
    reader = connection.sql(
        f"SELECT (url_hash % {index.divisor})::BIGINT AS unit, list.* EXCLUDE (url_hash), coalesce(repeat, 1) AS repeat "
        f"FROM list LEFT JOIN repeats USING (row) WHERE url_hash % {index.divisor} BETWEEN {keys[units[0]]} AND "
        f"{keys[units[-1]]} ORDER BY unit, row"
    ).to_arrow_reader(100_000)
    metadata = {_CAPTIONS: b"yes" if index.captions else b"no"}
    tables = (_identified(table).replace_schema_metadata(metadata) for table in _units(reader))
    with folder.staged(_file_name(file)) as path:
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
