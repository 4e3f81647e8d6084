"""URL lists of every usual form, read in bounded memory, and the plan that ingest works from.

Way in: `planning` reads the list (parquet, csv, tsv, json, jsonl, txt; .gz, .zst; globs; any fsspec URL). Way out: the
folder `ingest/plan` with one row an input row and one row group a unit, in files of neighbouring units. All rows of one URL
lie in one unit, so that a picture with several captions is fetched once; units are taken by a hash of the URL, which also
mixes the hosts. How many units there are is known once the list is read, so its rows lie in temporary files meanwhile and
are sorted in two steps: by file of the plan, then by unit within it. The first units are fetched while the rest of the plan
is written.
"""

from __future__ import annotations

import contextlib
import itertools
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
from ingest.spool import Spool, ahead

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from ingest.config import IngestConfig

log = logging.getLogger("pairmill.ingest")

HOME = "ingest/plan"
INDEX = f"{HOME}/_units.json"  # readers of Parquet folders pass over such names
FILES = 64  # of a plan, at most
SMALLEST_FILE = 16  # units
PLAN_COLUMNS = ("row", "uid", "url", "caption_raw")
_CAPTIONS = b"pairmill.captions"
MEMORY_GB = 1.0  # for DuckDB, which keeps 8 bytes a row, and the source's own uids; beyond that it spills
CHUNK_BYTES = 1 << 26  # of rows that are sorted by file at once
PIECE_ROWS = 100_000  # that are sorted by unit and named at once
_WEB = r"^\s*(https?:)?//[^/?#\s]"
# nearly all, in a tenth of the time that the pattern takes
_PLAIN = "((url > 'http://A' AND url < 'http://{') OR (url > 'https://A' AND url < 'https://{'))"
UID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what may name a file; other ids of the source are carried and hashed
_WHOLE_UID = rf"\A{UID.pattern}\z"
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
    with _database() as connection, contextlib.ExitStack() as at_end:
        listed = _load_guessing(connection, config, at_end)
        if index is None:
            index = _begin(connection, config, folder, listed)
        by_file = _by_file(connection, index, listed.rows, _spool(at_end))
        for file in range(index.files):
            if not folder.exists(_file_name(file)):
                _publish(folder, index, file, by_file)
            yield index.units_of(file).stop


def _spool(at_end: contextlib.ExitStack) -> Spool:
    return Spool(at_end.enter_context(tempfile.TemporaryFile()))  # without a name: a killed run leaves none behind


@dataclass
class _Listed:
    """A list that is read: its `rows` in pieces (row, url, url_hash, caption_raw, source_uid, the source's own columns), how many
    of them have no URL, another than http(s), or no caption, and the first of the other URLs."""

    rows: Spool
    captions: bool
    no_url: int = 0
    other: int = 0
    example: str | None = None
    no_caption: int = 0


def _load_guessing(
    connection: duckdb.DuckDBPyConnection, config: IngestConfig, at_end: contextlib.ExitStack
) -> _Listed:
    """Read the list, its text columns as numbers where they hold nothing else."""
    import duckdb

    files = expand(config.urls)
    try:
        source = listfiles.open_list(files, config.url_col, config.caption_col)
        listed = _load(connection, source, _spool(at_end), guess_types=True)
    except duckdb.ConversionException as error:
        log.info("a column that began with numbers holds other words too, so all are kept as text: %s", error)
        at_end.pop_all().close()
        source = listfiles.open_list(files, config.url_col, config.caption_col)
        listed = _load(connection, source, _spool(at_end), guess_types=False)
    if source.refused:
        log.warning(
            "%d lines of the list are not rows of it and were left out; the first: %s",
            source.refused, source.first_refused,
        )  # fmt: skip
    return listed


def _begin(connection: duckdb.DuckDBPyConnection, config: IngestConfig, folder: Folder, listed: _Listed) -> _Index:
    """Tell what the list holds, and publish the index of its plan."""
    rows, distinct = connection.execute("SELECT count(*), approx_count_distinct(url_hash) FROM hashes").fetchall()[0]
    if not rows:
        raise InputError(f"expected a list of URLs at {config.urls}, found no row in it")
    divisor = max(1, -(-distinct // config.unit_urls))
    counts = [count for _, count in _units_of(connection, divisor)]
    index = _Index(divisor, max(SMALLEST_FILE, -(-len(counts) // FILES)), listed.captions, counts)
    log.info("%s: %s rows, about %s URLs, in %s units", config.urls, f"{rows:,}", f"{distinct:,}", f"{len(counts):,}")
    for words in _account(listed, captions=index.captions and not config.allow_empty):
        log.warning("%s", words)
    folder.write(INDEX, json.dumps(vars(index)).encode())
    return index


def _units_of(connection: duckdb.DuckDBPyConnection, divisor: int) -> list[tuple[int, int]]:
    """What the hash of a URL leaves, and how many rows, for each unit."""
    asked = f"SELECT url_hash % {divisor} AS place, count(*) FROM hashes GROUP BY place ORDER BY place"
    return connection.execute(asked).fetchall()


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
            f"what is kept of the list fits neither into {MEMORY_GB:g} GB of memory nor into what is free in {place}; free some "
            f"space there, or set TMPDIR to a folder on another disk (DuckDB says: {str(error).partition(chr(10))[0]})"
        ) from error


def _account(listed: _Listed, *, captions: bool) -> list[str]:
    """What will not be fetched, told before the first download: a wrong column shows here."""
    words = []
    if listed.no_url:
        words.append(f"{listed.no_url:,} rows have no URL and will be `bad_url`")
    if listed.other:
        words.append(
            f"{listed.other:,} rows have no http(s) URL and will be `bad_url`; the first: {(listed.example or '')[:100]!r}"
        )
    if captions and listed.no_caption:
        words.append(
            f"{listed.no_caption:,} rows have no caption and will be `empty_caption` (--allow-empty fetches them)"
        )
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


# ---- the list into temporary files -------------------------------------------------------------------------------------


def _load(
    connection: duckdb.DuckDBPyConnection, source: listfiles.ListSource, rows: Spool, *, guess_types: bool
) -> _Listed:
    """Read the list into `rows`; tables `hashes` (of URLs) and `repeats` (which rows have a uid that others have, too)."""
    first, batches = source.start()
    # by place, because DuckDB would take "URL" for "url"
    places = {name: f"c{place}" for place, name in enumerate(first.schema.names)}
    columns = [f"{places[source.url]}::VARCHAR AS url", "url_hash", f"{_text(places, source.caption)} AS caption_raw"]
    columns.append(f"nullif({_text(places, source.uid)}, '') AS source_uid")
    for name, own in _own_names(first.schema, source).items():
        kind = _kind(first.column(name)) if guess_types and source.text else ""
        columns.append(f"{_typed(places[name], kind) if kind else places[name]} AS {_quoted(own)}")
    listed, count = _Listed(rows, source.caption is not None), 0
    connection.execute("CREATE OR REPLACE TABLE hashes (url_hash UBIGINT)")
    connection.execute("CREATE OR REPLACE TABLE own (row BIGINT, source_uid VARCHAR)")
    chunks = (table.append_column("url_hash", _url_hashes(table[source.url])) for table in _chunks(batches))
    for table in ahead(chunks):
        connection.register("incoming", table.rename_columns([*places.values(), "url_hash"]))
        found = connection.sql(
            f"SELECT row_number() OVER () + {count - 1} AS row, {', '.join(columns)} FROM incoming"
        ).to_arrow_table()
        connection.register("found", found)
        connection.execute("INSERT INTO hashes SELECT url_hash FROM found")
        if source.uid is not None:
            connection.execute("INSERT INTO own SELECT row, source_uid FROM found WHERE source_uid IS NOT NULL")
        _count_unfit(connection, listed)
        rows.add(_one_batch(found))
        count += len(table)
    connection.execute(
        "CREATE OR REPLACE TABLE repeats AS SELECT row, row_number() OVER (PARTITION BY source_uid ORDER BY row) AS repeat "
        "FROM own SEMI JOIN (SELECT source_uid FROM own GROUP BY ALL HAVING count(*) > 1) USING (source_uid) ORDER BY row"
    )
    return listed


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """`batches` together, up to `CHUNK_BYTES`."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not len(batch):
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches()
    return batch


def _count_unfit(connection: duckdb.DuckDBPyConnection, listed: _Listed) -> None:
    """Add up what will not be fetched of the rows `found`."""
    no_url, other, example, no_caption = connection.execute(f"""
        SELECT count(*) FILTER (blank), count(*) FILTER (NOT blank AND NOT web),
               min_by(url, row) FILTER (NOT blank AND NOT web), count(*) FILTER (NOT blank AND web AND silent)
        FROM (SELECT row, url, CASE WHEN {_PLAIN} THEN false ELSE trim(coalesce(url, '')) = '' END AS blank,
                     CASE WHEN {_PLAIN} THEN true ELSE regexp_matches(coalesce(url, ''), '{_WEB}', 'i') END AS web,
                     CASE WHEN caption_raw > '!' THEN false ELSE trim(coalesce(caption_raw, '')) = '' END AS silent
              FROM found)""").fetchall()[0]
    listed.no_url += no_url
    listed.other += other
    listed.example = listed.example if listed.example is not None else example
    listed.no_caption += no_caption


def _url_hashes(urls: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    # DuckDB's own hash may change between its versions, its md5 takes six times as long
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import xxhash

    texts = pc.fill_null(urls.cast(pa.string()).cast(pa.binary()), b"").to_numpy(zero_copy_only=False)
    return pa.array(np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts)))


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


# ---- and out of them, file by file -------------------------------------------------------------------------------------


def _by_file(connection: duckdb.DuckDBPyConnection, index: _Index, rows: Spool, found: Spool) -> Spool:
    """`rows` with the number of their `unit` and which `repeat` of their source's uid they are, into `found`: each batch as one
    for every file of the plan.

    Raises:
        DataError: the units are not those of the index.
    """
    import numpy as np
    import pyarrow as pa

    units = _units_of(connection, index.divisor)
    if [count for _, count in units] != index.rows:
        raise DataError(f"the plan that {INDEX} began is of another list than the one that is there now; use --fresh")
    unit_of = np.zeros(index.divisor, np.int32)
    unit_of[[place for place, _ in units]] = np.arange(len(units), dtype=np.int32)

    def in_order(number: int) -> tuple[pa.RecordBatch, list[int]]:
        batch = rows[number]
        unit = unit_of[batch["url_hash"].to_numpy() % np.uint64(index.divisor)]
        file = (unit // index.per_file).astype(np.uint8)
        order = np.argsort(file, kind="stable")
        batch = batch.drop_columns(["url_hash"]).append_column("unit", pa.array(unit))
        batch = batch.append_column("repeat", _repeats(connection, batch)).take(pa.array(order))
        return batch, np.searchsorted(file[order], np.arange(index.files), "right").tolist()

    for batch, ends in ahead(map(in_order, range(len(rows)))):
        for begin, end in itertools.pairwise([0, *ends]):
            found.add(batch.slice(begin, end - begin))
    return found


def _repeats(connection: duckdb.DuckDBPyConnection, batch: pa.RecordBatch) -> pa.Array[Any]:
    """For rows that follow each other: 1, or how many rows of the list up to this one have its source's uid."""
    import numpy as np
    import pyarrow as pa

    first = batch["row"][0].as_py()
    asked = f"SELECT row - {first} AS place, repeat FROM repeats WHERE row BETWEEN {first} AND {first + len(batch) - 1}"
    found = connection.execute(asked).fetchnumpy()
    repeat = np.ones(len(batch), np.int64)
    repeat[found["place"]] = found["repeat"]
    return pa.array(repeat)


def _publish(folder: Folder, index: _Index, file: int, by_file: Spool) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    units = index.units_of(file)
    table = pa.Table.from_batches([by_file[n] for n in range(file, len(by_file), index.files)]).combine_chunks()
    place = (table["unit"].to_numpy() - units.start).astype(np.min_scalar_type(len(units)))
    order = np.argsort(place, kind="stable")  # of 16 bits by radix
    table = table.drop_columns(["unit"]).replace_schema_metadata({_CAPTIONS: b"yes" if index.captions else b"no"})
    pieces = _pieces(index.rows[units.start : units.stop])
    begins = itertools.accumulate(map(sum, pieces), initial=0)
    named = (
        _identified(table.take(pa.array(order[begin : begin + sum(piece)])))
        for begin, piece in zip(begins, pieces, strict=False)
    )
    with folder.staged(_file_name(file)) as path, contextlib.ExitStack() as at_end:
        writer = None
        for rows, piece in zip(ahead(named), pieces, strict=True):
            writer = writer or at_end.enter_context(pq.ParquetWriter(path, rows.schema, compression="zstd"))
            for count, end in zip(piece, itertools.accumulate(piece), strict=True):
                writer.write_table(rows.slice(end - count, count), row_group_size=count)


def _pieces(counts: list[int]) -> list[list[int]]:
    """Neighbouring units' `counts` together, up to `PIECE_ROWS`."""
    pieces: list[list[int]] = [[]]
    for count in counts:
        if sum(pieces[-1]) >= PIECE_ROWS:
            pieces.append([])
        pieces[-1].append(count)
    return pieces


def _identified(table: pa.Table) -> pa.Table:
    """Whole units with their uids: the source's own, else a hash of URL and raw caption; a repeated one is hashed again.

    Rows of one URL share a unit, so their hashes repeat within it; the source's own may repeat anywhere in the list.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    own = table["source_uid"].combine_chunks()
    if own.null_count == len(own):
        uids = _hashed_rows(table)
    elif pc.all(
        pc.and_(pc.match_substring_regex(own, _WHOLE_UID), pc.equal(table["repeat"], 1)), skip_nulls=False
    ).as_py():
        uids = own
    else:
        hashes = iter(_hashed_rows(table.filter(own.is_null())).to_pylist())
        uids = pa.array(
            next(hashes) if uid is None else _again(uid if UID.fullmatch(uid) else hashed(uid), repeat)
            for uid, repeat in zip(own.to_pylist(), table["repeat"].to_pylist(), strict=True)
        )
    return table.add_column(1, "uid", uids).drop_columns(["source_uid", "repeat"])


def _hashed_rows(table: pa.Table) -> pa.Array[Any]:
    """A uid for each row by its URL and caption."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import xxhash

    texts = pc.binary_join_element_wise(*(pc.fill_null(table[name], "") for name in ("url", "caption_raw")), "\x00")
    digests = list(map(xxhash.xxh3_128_digest, texts.cast(pa.binary()).to_pylist()))
    words = np.frombuffer(b"".join(digests), np.uint64)[::2]
    ordered = np.sort(words)
    seen: Counter[bytes] = Counter()
    for row in np.flatnonzero(np.isin(words, ordered[1:][ordered[1:] == ordered[:-1]])).tolist():
        digest = digests[row]
        seen[digest] += 1
        digests[row] = bytes.fromhex(_again(digest.hex(), seen[digest]))
    text = pa.py_buffer(b"".join(digests).hex().encode())
    return pa.StringArray.from_buffers(
        len(digests), pa.py_buffer(np.arange(len(digests) + 1, dtype=np.int32) * 32), text
    )


def _again(uid: str, repeat: int) -> str:
    """The uid of the row that is the `repeat`-th with this one."""
    return uid if repeat == 1 else hashed(f"{uid}\x00{repeat}")


def hashed(text: str) -> str:
    """32 hex characters of xxh3-128, the house's uid."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(text.encode())
