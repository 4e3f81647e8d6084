"""DuckDB over the files of a work folder: views only, so that nothing here can lock or corrupt the facts.

`connect` gives a connection with every view whose files exist; `write` saves the same views as `catalog.duckdb`, which
any DuckDB shell opens. A view that is missing is explained by the verb that makes its files.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from core.errors import InputError, UsageError, nearest
from core.storage import TEMPORARY, Folder

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("pairmill.catalog")

# view -> (files, the function that reads them, the verb that makes them); names with a dot are what a killed writer left
_PARTS = "read_parquet('{}', union_by_name=true)"
_TABLE = "read_parquet('{}')"
# The file of a live run may end in half a line, which becomes a row of nulls.
_LINES = "read_json_auto('{}', format='newline_delimited', ignore_errors=true, union_by_name=true, filename=true)"
VIEWS: dict[str, tuple[str, str, str]] = {
    "pairs": ("ingest/parts/[!.]*.parquet", _PARTS, "ingest"),
    "signatures": ("dedup/signatures/[!.]*.parquet", _PARTS, "dedup"),
    "clusters": ("dedup/clusters.parquet", _TABLE, "dedup"),
    "decisions": ("dedup/decisions.parquet", _TABLE, "dedup"),
    "samples": ("shards/samples.parquet", _TABLE, "shard"),
    "holdout": ("holdout/samples.parquet", _TABLE, "shard"),
    "steps": ("runs/*/metrics.jsonl", _LINES, "train"),
    "evals": ("runs/*/eval.jsonl", _LINES, "eval"),
}


def connect(folder: Folder, *, memory_gb: float | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB connection with the views of `folder`.

    Spills go to a temporary folder of the system's, never into the work folder.
    """
    import tempfile

    import duckdb

    connection = duckdb.connect()
    connection.execute("SET preserve_insertion_order = false")
    connection.execute("SET enable_progress_bar = false")  # it draws on stdout, where --json promises its object
    connection.execute(f"SET temp_directory = '{tempfile.gettempdir()}/pairmill-duckdb'")
    if memory_gb is not None:
        connection.execute(f"SET memory_limit = '{memory_gb}GB'")
    if folder.local is None:
        connection.register_filesystem(folder._remote("")[0])
    _make_views(connection, folder)
    return connection


def _make_views(connection: duckdb.DuckDBPyConnection, folder: Folder) -> None:
    for name, (pattern, reader, _) in VIEWS.items():
        if _present(folder, pattern):
            source = reader.format(folder.path(pattern).replace("'", "''"))
            connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {source}")


def _present(folder: Folder, pattern: str) -> bool:
    parent, _, leaf = pattern.rpartition("/")
    if "*" not in parent:
        return bool(folder.list(pattern))
    above, _, below = parent.partition("/*")
    return any(folder.exists(f"{name}{below}/{leaf}") for name in folder.list(f"{above}/*"))


def write(folder: Folder) -> None:
    """Save the views as `catalog.duckdb` beside the data (local folders only), replacing an older one."""
    import duckdb

    if folder.local is None:
        return
    temporary = folder.local.absolute() / f"{TEMPORARY}catalog.duckdb"
    temporary.unlink(missing_ok=True)
    with duckdb.connect(str(temporary)) as connection:
        _make_views(connection, Folder(folder.local.absolute()))
    temporary.replace(folder.local / "catalog.duckdb")


def require(connection: duckdb.DuckDBPyConnection, view: str) -> None:
    """Raise InputError, naming the verb to run first, where `view` has no files yet."""
    rows = connection.execute("SELECT 1 FROM duckdb_views() WHERE view_name = ?", [view]).fetchall()
    if not rows:
        raise InputError(f"this work folder has no {view} yet; run `pairmill {VIEWS[view][2]}` first")


def query(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyConnection:
    """Run a user's SQL; DuckDB's complaints become one sentence with the place.

    Raises:
        InputError: the query names a view whose files are not there yet.
        UsageError: any other error of the query.
    """
    import duckdb

    try:
        return connection.execute(sql)
    except duckdb.CatalogException as error:
        for view, (_, _, verb) in VIEWS.items():
            if f"with name {view} " in str(error):
                raise InputError(f"this work folder has no {view} yet; run `pairmill {verb}` first") from error
        raise UsageError(f"DuckDB cannot run the query: {error}") from error
    except duckdb.Error as error:
        raise UsageError(f"DuckDB cannot run the query: {error}") from error


def columns(connection: duckdb.DuckDBPyConnection, view: str) -> list[str]:
    """Column names of a view."""
    return [row[0] for row in connection.execute(f"DESCRIBE {view}").fetchall()]


def require_column(connection: duckdb.DuckDBPyConnection, view: str, column: str, hint: str = "") -> None:
    """Raise InputError naming the nearest column where `view` lacks `column`."""
    known = columns(connection, view)
    if column not in known:
        raise InputError(f"{view} has no column {column!r}: {nearest(column, known)}{'; ' + hint if hint else ''}")
