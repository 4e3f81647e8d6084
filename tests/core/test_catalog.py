"""The catalogue: views over the files that are there, a clear word about those that are not."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core import catalog
from core.errors import InputError, UsageError
from core.storage import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    parts = tmp_path / "it's a folder" / "ingest" / "parts"
    parts.mkdir(parents=True)
    pq.write_table(pa.table({"uid": ["a", "b"], "outcome": ["ok", "dns"]}), parts / "u000000.parquet")
    pq.write_table(pa.table({"uid": ["c"], "outcome": ["ok"], "extra": [1]}), parts / "u000001.parquet")
    runs = parts.parents[1] / "runs" / "one"
    runs.mkdir(parents=True)
    (runs / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}\n')
    return Folder(parts.parents[1])


def test_views_over_parts_and_runs(folder: Folder) -> None:
    connection = catalog.connect(folder)
    rows = catalog.query(connection, "SELECT outcome, count(*) FROM pairs GROUP BY 1 ORDER BY 1").fetchall()
    assert rows == [("dns", 1), ("ok", 2)]
    assert catalog.query(connection, "SELECT max(loss) FROM steps").fetchone() == (2.5,)
    assert catalog.columns(connection, "pairs") == ["uid", "outcome", "extra"]


def test_a_view_without_files_names_the_verb(folder: Folder) -> None:
    connection = catalog.connect(folder)
    for ask in (
        lambda: catalog.query(connection, "SELECT * FROM samples"),
        lambda: catalog.require(connection, "samples"),
    ):
        with pytest.raises(InputError, match="no samples yet; run `pairmill shard`"):
            ask()


def test_an_error_in_sql_keeps_duckdbs_words(folder: Folder) -> None:
    with pytest.raises(UsageError, match="syntax error at or near"):
        catalog.query(catalog.connect(folder), "SELEC 1")
    with pytest.raises(UsageError, match="outcom"):
        catalog.query(catalog.connect(folder), "SELECT outcom FROM pairs")


def test_the_saved_catalogue_opens_anywhere(folder: Folder) -> None:
    catalog.write(folder)
    with duckdb.connect(folder.path("catalog.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM pairs").fetchone() == (3,)
