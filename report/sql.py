"""`sql`: any query over the catalogue of a work folder."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import ConfigError, UsageError
from core.storage import Folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from report.config import SqlConfig


def run(config: SqlConfig) -> dict[str, Any]:
    """Rows of the query as {columns: [...], rows: [[...]], more: whether the limit left some out}, fit for JSON.

    Raises:
        UsageError: DuckDB refuses the query, or it would write.
        InputError: it names a view whose files are not there yet.
    """
    if config.limit < 0:
        raise ConfigError(f"expected --limit of at least 0, found {config.limit}")
    connection = catalog.connect(Folder(config.work))
    _require_reading(connection, config.query)
    cursor = catalog.query(connection, config.query)
    columns = [column[0] for column in cursor.description or []]
    try:
        rows = cursor.fetchmany(config.limit + 1) if config.limit else cursor.fetchall()
    except Exception as error:  # a cast or an overflow is found only while rows are made
        import duckdb

        if isinstance(error, duckdb.Error):
            raise UsageError(f"DuckDB cannot run the query: {error}") from error
        raise
    kept = rows[: config.limit] if config.limit else rows
    return {"columns": columns, "rows": [[_plain(v) for v in row] for row in kept], "more": len(rows) > len(kept)}


def _require_reading(connection: Any, query: str) -> None:
    """Refuse statements that could write: a work folder's files are facts that only stages make."""
    import duckdb

    allowed = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise UsageError(f"DuckDB cannot read the query: {error}") from error
    if not statements:
        raise UsageError(
            "expected a query, found nothing; try: pairmill sql 'SELECT outcome, count(*) FROM pairs GROUP BY 1'"
        )
    for statement in statements:
        runs_its_query = statement.type == duckdb.StatementType.EXPLAIN and "analyze" in statement.query.lower()
        if statement.type not in allowed or runs_its_query:
            raise UsageError(
                f"`sql` only reads, and this query holds a {statement.type.name} statement; for anything else open "
                "catalog.duckdb of the work folder in DuckDB's own shell"
            )


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value)


def render(summary: dict[str, Any]) -> RenderableType:
    """The rows as a table for a terminal."""
    from report import terminal

    return terminal.rows(summary)
