"""DuckDB over the files of a work folder: views only, so that nothing here can lock or corrupt the facts.

`connect` gives a connection with every view whose files exist; `write` saves the same views as `catalog.duckdb`, which
any DuckDB shell opens. A view that is missing is explained by the verb that makes its files.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from core.errors import DataError, InputError, UsageError
from core.storage import Folder, temporary_name

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("pairmill.catalog")

# view -> (files, the function that reads them, the verb that makes them); names with a dot are what a killed writer left
_PARTS = "read_parquet({}, union_by_name=true)"
_TABLE = "read_parquet({})"
# The file of a live run may end in half a line, which becomes a row of nulls.
_LINES = "read_json_auto({}, format='newline_delimited', ignore_errors=true, union_by_name=true, filename=true)"
SCORES = "scores/[!.]*.parquet"  # `score`'s column, which `pairs` shows beside ingest's
# Every pair that dedup decided on; those without a row of `decisions` stay, like no other.
PAIRS = "dedup/pairs.parquet"
VIEWS: dict[str, tuple[str, str, str]] = {
    "pairs": ("ingest/parts/[!.]*.parquet", _PARTS, "ingest"),
    "signatures": ("dedup/signatures/[!.]*.parquet", _PARTS, "dedup"),
    "clusters": ("dedup/clusters.parquet", _TABLE, "dedup"),
    "decisions": ("dedup/decisions.parquet", _TABLE, "dedup"),
    "against": ("dedup/against.parquet", _TABLE, "dedup --against"),
    "samples": ("shards/samples.parquet", _TABLE, "shard"),
    "holdout": ("holdout/samples.parquet", _TABLE, "shard"),
    "steps": ("runs/*/metrics.jsonl", _LINES, "train"),
    "evals": ("runs/*/eval.jsonl", _LINES, "eval"),
}


def connect(
    folder: Folder, *, memory_gb: float | None = None, views: Collection[str] = VIEWS.keys()
) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB connection with those of `views` whose files are in `folder`.

    Spills go to a temporary folder of the system's, never into the work folder.

    Raises:
        DataError: a file of the folder is no whole table.
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
        connection.register_filesystem(folder.remembering())
    _make_views(connection, folder, views)
    return connection


def _make_views(connection: duckdb.DuckDBPyConnection, folder: Folder, views: Collection[str]) -> None:
    import duckdb

    for name, (pattern, reader, verb) in VIEWS.items():
        if name not in views or not _present(folder, pattern):
            continue
        source = reader.format(literal(folder, pattern))
        try:
            if name == "pairs" and _present(folder, SCORES):
                source = _scored(connection, source, _PARTS.format(literal(folder, SCORES)))
            elif name == "decisions" and _present(folder, PAIRS):
                source = _completed(source, _TABLE.format(literal(folder, PAIRS)))
            connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {source}")
        except duckdb.Error as error:
            raise DataError(
                f"the {name} of {folder} cannot be read; DuckDB says: {says(error)}; restore that file, or "
                f"delete it and run `pairmill {verb}` again"
            ) from error


def _scored(connection: duckdb.DuckDBPyConnection, parts: str, scores: str) -> str:
    """Pairs and their scores. A row whose part was made again since it was scored has none, by its uid."""
    known = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {parts}").fetchall()}
    own = "p.* EXCLUDE (clip_score)" if "clip_score" in known else "p.*"
    return f"""(SELECT {own}, s.clip_score FROM {parts} p LEFT JOIN {scores} s USING (unit, "row", uid))"""


def _completed(noted: str, pairs: str) -> str:
    """Decisions, a row a pair, from those that are noted (core.schema.decision_schema)."""
    return f"""(SELECT * FROM {noted} UNION ALL SELECT p.uid, true, false, NULL, NULL, p.uid, NULL, NULL, NULL
        FROM {pairs} p ANTI JOIN {noted} d ON p.uid = d.uid)"""


def says(error: Exception) -> str:
    """DuckDB's complaint on one line, without the piece of our SQL that it points at."""
    return " ".join(str(error).partition("\nLINE ")[0].split())


def literal(folder: Folder, pattern: str) -> str:
    """The files `pattern` of `folder` as an SQL string: the folder's own name is no pattern, whatever it is made of."""
    return _quoted(f"{_no_pattern(folder.url)}/{pattern}")


def file_list(paths: Iterable[str]) -> str:
    """These very files as an SQL list."""
    return f"[{', '.join(_quoted(_no_pattern(path)) for path in paths)}]"


def _quoted(text: str) -> str:
    """`text` as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def _no_pattern(path: str) -> str:
    return re.sub(r"[*?\[]", lambda found: f"[{found[0]}]", path)


def _present(folder: Folder, pattern: str) -> bool:
    parent, _, leaf = pattern.rpartition("/")
    if "*" not in parent:
        return bool(folder.list(pattern))
    above, _, below = parent.partition("/*")
    return any(folder.exists(f"{name}{below}/{leaf}") for name in folder.list(f"{above}/*"))


def errors(*names: str) -> tuple[type[Exception], ...]:
    """DuckDB's classes of these names, for an `except`, which asks for them when something is raised: importing DuckDB takes
    longer than some decisions that do without it."""
    import duckdb

    return tuple(getattr(duckdb, name) for name in names)


@contextlib.contextmanager
def reading(folder: Folder) -> Iterator[None]:
    """Where a file of `folder` turns out to be damaged, which DuckDB finds only as it reads the rows, raise DataError."""
    try:
        yield
    except errors("BinderException", "CatalogException", "ParserException", "OutOfMemoryException"):
        raise  # of our own SQL and of this machine, not of the files
    except errors("Error") as error:
        raise DataError(
            f"a file of {folder} is damaged; DuckDB says: {says(error)}; restore it, or make it again with --fresh"
        ) from error


def write(folder: Folder) -> None:
    """Save the views as `catalog.duckdb` beside the data (local folders only), replacing an older one.

    It holds no facts, so what keeps it from being written is said and stops nobody.
    """
    import duckdb

    if folder.local is None:
        return
    temporary = folder.local.absolute() / temporary_name("catalog.duckdb")
    try:
        temporary.unlink(missing_ok=True)
        with duckdb.connect(str(temporary)) as connection:
            _make_views(connection, Folder(folder.local.absolute()), VIEWS)
        temporary.replace(folder.local / "catalog.duckdb")
    except (OSError, duckdb.Error, DataError) as error:
        log.warning("catalog.duckdb of %s stays as it was: %s", folder, error)
        temporary.unlink(missing_ok=True)


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
