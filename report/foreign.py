"""A bare folder as views: shards with their samples.parquet, what img2dataset wrote, or any webdataset tars."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from core import catalog, webdataset
from core.errors import DataError, ImageError, InputError
from core.progress import Progress
from core.storage import Folder

if TYPE_CHECKING:
    import duckdb

BATCH = 20_000
HEAD = 1 << 16  # bytes of a picture in which its size is looked for, where the JSON beside it does not say it
SAMPLES = {"shard", "captions", "jpg_size", "width", "height", "uids"}  # what the page reads
COLUMNS = {
    "uid": "VARCHAR", "url": "VARCHAR", "caption": "VARCHAR", "outcome": "VARCHAR", "bytes": "BIGINT", "format": "VARCHAR",
    "width": "INTEGER", "height": "INTEGER", "tar": "VARCHAR", "tar_offset": "BIGINT", "tar_size": "BIGINT",
}  # fmt: skip


def make_views(connection: duckdb.DuckDBPyConnection, folder: Folder) -> None:
    """Make `samples` or `pairs` over a folder that is no work folder.

    Raises:
        InputError: it holds neither samples.parquet, nor img2dataset's Parquet files, nor tars.
        DataError: a file of it is damaged.
    """
    if folder.exists("samples.parquet"):
        _over(connection, "VIEW samples", folder, "samples.parquet")
        if missing := sorted(SAMPLES.difference(catalog.columns(connection, "samples"))):
            raise InputError(
                f"expected samples.parquet of {folder} as `pairmill shard` writes it, found it without {', '.join(missing)}"
            )
        return
    tars = folder.list("*.tar")
    if folder.list("*.parquet"):
        _over(connection, "TEMP VIEW foreign_rows", folder, "[!.]*.parquet")
        known = catalog.columns(connection, "foreign_rows")
        if "url" in known and "status" in known:
            connection.execute(
                f"CREATE OR REPLACE VIEW pairs AS SELECT {_img2dataset_columns(known)} FROM foreign_rows"
            )
            return
        if not tars:
            raise InputError(f"expected img2dataset's columns url and status in {folder}, found {', '.join(known)}")
    if not tars:
        raise InputError(
            f"expected samples.parquet, img2dataset's .parquet files or .tar shards in {folder}, found none of them"
        )
    _scan(connection, folder, tars)


def _over(connection: duckdb.DuckDBPyConnection, view: str, folder: Folder, pattern: str) -> None:
    import duckdb

    source = catalog.literal(folder, pattern)
    try:
        connection.execute(f"CREATE OR REPLACE {view} AS SELECT * FROM read_parquet({source}, union_by_name=true)")
    except duckdb.Error as error:
        raise DataError(f"{folder} holds no whole {pattern}; DuckDB says: {catalog.says(error)}") from error


def _img2dataset_columns(known: list[str]) -> str:
    outcome = "CASE WHEN status = 'success' THEN 'ok' ELSE coalesce(left(error_message, 40), status) END"
    wanted = {
        "url": "url",
        "caption": "caption",
        "outcome": outcome if "error_message" in known else "if(status = 'success', 'ok', status)",
        "width": "original_width" if "original_width" in known else "width",
        "height": "original_height" if "original_height" in known else "height",
    }
    return ", ".join(
        f"{expression} AS {name}" if name in ("url", "outcome") or expression in known else f"NULL AS {name}"
        for name, expression in wanted.items()
    )


# ---- tars --------------------------------------------------------------------------------------------------------------


def _scan(connection: duckdb.DuckDBPyConnection, folder: Folder, tars: list[str]) -> None:
    """`pairs` of what the tars hold, a row a caption; only names, captions and notes are read, hardly a picture."""
    import pyarrow as pa

    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    connection.execute(f"CREATE OR REPLACE TEMP TABLE scanned ({columns})")
    with Progress("audit", len(tars), "tars") as progress:
        for tar in tars:
            rows = _rows_of(folder.path(tar))
            while batch := list(islice(rows, BATCH)):
                columns_of = {name: [row[name] for row in batch] for name in COLUMNS}
                connection.register("batch", pa.table(columns_of))
                connection.execute("INSERT INTO scanned SELECT * FROM batch")
                connection.unregister("batch")
            progress.advance(1)
    connection.execute("CREATE OR REPLACE VIEW pairs AS SELECT * FROM scanned")


def _rows_of(tar: str) -> Iterator[dict[str, Any]]:
    for sample in webdataset.samples(tar):
        ending = sample.first(webdataset.PICTURES)
        notes = sample.notes()
        row: dict[str, Any] = {**dict.fromkeys(COLUMNS), "outcome": "not_image", "url": _words(notes.get("url"))}
        if ending is not None:
            offset, size = sample.members[ending]
            row |= {"outcome": "ok", "bytes": size, "tar": tar, "tar_offset": offset, "tar_size": size}
            row |= _shape(sample, ending, notes)
        for number, caption in enumerate(sample.captions(notes) or [None]):
            yield {**row, "uid": f"{tar}#{sample.key}#{number}", "caption": caption}


def _shape(sample: webdataset.Sample, ending: str, notes: dict[str, Any]) -> dict[str, Any]:
    """Format and size: as the notes say, else by the head of the picture."""
    from core import images

    for width, height in (("original_width", "original_height"), ("width", "height")):
        if all(sides := [webdataset.pixels(notes, name) for name in (width, height)]):
            kind = ending.rpartition(".")[2].replace("jpg", "jpeg")
            return {"format": kind, "width": sides[0], "height": sides[1]}
    try:
        header = images.read_header(sample.read(ending, HEAD))
    except ImageError as error:
        return {"outcome": str(error.outcome)}
    return {"format": header.format, "width": header.width, "height": header.height}


def _words(value: object) -> str | None:
    return value if isinstance(value, str) else None
