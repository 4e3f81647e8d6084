"""A bare table of captions as the parts that signing reads, for `dedup --captions FILE`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from core import catalog
from core.errors import InputError, nearest
from core.schema import Outcome
from core.storage import Folder, expand
from dedup.sign import opened

if TYPE_CHECKING:
    import duckdb

    from dedup.config import DedupConfig

HOME = "dedup/captions"
ROWS = 200_000  # a part: some seconds of work
_GROUP = 10_000  # rows read for one caption
_READERS = {
    "parquet": "read_parquet({})",
    "csv": "read_csv({}, header = true, all_varchar = true)",
    "tsv": "read_csv({}, header = true, all_varchar = true, delim = '\t', quote = '', escape = '')",
    "jsonl": "read_json({}, format = 'newline_delimited')",
    "json": "read_json({})",
}


def fingerprint(pattern: str) -> str:
    """Digest of the names, sizes and last MiB of the files, as core.work.fingerprint makes it of parts.

    Raises:
        InputError: nothing is there, or it is of an unknown kind.
    """
    files = expand(pattern)
    _kind(files[0])
    digest = xxhash.xxh3_128()
    for path in files:
        parent, _, leaf = path.rpartition("/")
        folder = Folder(parent or ".")
        size = folder.size(leaf)
        digest.update(f"{path} {size}\n".encode())
        digest.update(folder.read_range(leaf, max(0, size - (1 << 20)), 1 << 20))
    return digest.hexdigest()


def stage(folder: Folder, config: DedupConfig) -> str:
    """Write the table as parts of uid, unit, row and caption, unless they are there; returns the folder of the parts.

    Rows without a uid of their own are named by their number, in twelve digits.

    Raises:
        InputError: a file of an unknown kind, one that DuckDB cannot read, or no such column.
    """
    if folder.exists(f"{HOME}/whole"):
        return HOME
    import duckdb

    folder.remove(HOME)
    source = _source(config.captions)
    try:
        with duckdb.connect() as connection:
            row = 0
            for number, batch in enumerate(_batches(connection, source, config)):
                _write(folder, number, row, batch)
                row += batch.num_rows
    except duckdb.Error as error:
        raise InputError(f"{config.captions} cannot be read; DuckDB says: {catalog.says(error)}") from error
    if not row:
        raise InputError(f"expected captions in {config.captions}, found no rows")
    folder.write(f"{HOME}/whole", b"")
    return HOME


def at(folder: Folder, parts: str, rows: npt.NDArray[np.integer[Any]]) -> pa.ChunkedArray:
    """The captions of these rows of the signatures of `parts`, part after part; no other part is read."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    start, found = 0, [pa.array([], pa.string())]
    for name in folder.list(f"{parts}/*.parquet"):
        with opened(folder, f"dedup/signatures/{name.rpartition('/')[2]}") as signed:
            stop = start + signed.metadata.num_rows
        wanted = ordered[np.searchsorted(ordered, start) : np.searchsorted(ordered, stop)] - start
        start = stop
        if len(wanted):
            with opened(folder, name) as file:
                if "outcome" in file.schema_arrow.names:
                    fetched = pc.equal(file.read(columns=["outcome"])["outcome"], Outcome.OK.value)
                    wanted = np.flatnonzero(fetched)[wanted]
                found += _rows(file, "caption", wanted).chunks
    back = np.empty(len(rows), np.int64)
    back[order] = np.arange(len(rows))
    return pa.chunked_array(found).take(pa.array(back))


def _rows(file: pq.ParquetFile, name: str, rows: npt.NDArray[np.integer[Any]]) -> pa.ChunkedArray:
    """A column at these rows, ascending; only their row groups are read."""
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    starts = np.cumsum(sizes) - sizes
    group = np.searchsorted(starts, rows, "right") - 1
    needed = np.flatnonzero(np.bincount(group))
    before = np.cumsum(np.asarray(sizes)[needed]) - np.asarray(sizes)[needed]
    inside = rows - starts[group] + before[np.searchsorted(needed, group)]
    return file.read_row_groups(needed.tolist(), columns=[name])[name].take(pa.array(inside))


def _batches(connection: duckdb.DuckDBPyConnection, source: str, config: DedupConfig) -> Iterator[pa.RecordBatch]:
    """The table in its own order, as batches of uid and caption."""
    names = [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
    if config.caption_col not in names:
        raise InputError(
            f"{config.captions} has no column {config.caption_col!r}: {nearest(config.caption_col, names)}; name it with "
            "--caption-col"
        )
    uid = "CAST(uid AS VARCHAR)" if "uid" in names else "CAST(NULL AS VARCHAR)"
    column = '"' + config.caption_col.replace('"', '""') + '"'
    reader: Any = connection.sql(f"SELECT {uid} AS uid, CAST({column} AS VARCHAR) AS caption FROM {source}")
    batches = iter(reader.to_arrow_reader(ROWS))
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:  # as which Arrow hands on what DuckDB says of a later row or file
            raise InputError(f"{config.captions} cannot be read; DuckDB says: {catalog.says(error)}") from error
        if batch is None:
            return
        yield batch


def _source(pattern: str) -> str:
    return reader_of(expand(pattern))


def reader_of(files: list[str]) -> str:
    """The DuckDB function that reads tables of one kind."""
    return _READERS[_kind(files[0])].format(catalog.file_list(files))


def _kind(path: str) -> str:
    ending = path.removesuffix(".gz").removesuffix(".zst").rsplit(".", 1)[-1].lower()
    kind = {"ndjson": "jsonl", "pq": "parquet"}.get(ending, ending)
    if kind not in _READERS:
        raise InputError(f"--captions: expected a file of {', '.join(_READERS)} (also .gz, .zst), found {path}")
    return kind


def _write(folder: Folder, number: int, first: int, batch: pa.RecordBatch) -> None:
    unit = f"u{number:06d}"
    rows = pa.array(np.arange(first, first + batch.num_rows))
    named = pc.utf8_lpad(rows.cast(pa.string()), 12, "0")
    uid = pc.coalesce(batch["uid"].cast(pa.string()), named)
    table = pa.table({"uid": uid, "unit": pa.repeat(unit, batch.num_rows), "row": rows, "caption": batch["caption"]})
    with folder.staged(f"{HOME}/{unit}.parquet") as path:
        # plain copies: the parts are read once, at once
        pq.write_table(
            table, path, compression="none", use_dictionary=["unit"], write_statistics=False, row_group_size=_GROUP
        )
