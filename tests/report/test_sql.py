from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

from core import catalog
from core.errors import ConfigError, DataError, InputError, UsageError
from core.storage import Folder
from report import audit, sql
from report import run as report
from report.config import AuditConfig, ReportConfig, SqlConfig
from tests.report.folder import HOSTILE, make_work, uid


def ask(work: Path, query: str, limit: int = 1000) -> dict:
    return sql.run(SqlConfig(work=str(work), query=query, limit=limit))


def test_rows_over_several_views(work: Path) -> None:
    found = ask(
        work,
        """SELECT p.caption, d.survivor FROM pairs p JOIN decisions d USING (uid)
        WHERE d.reason = 'image_duplicate' ORDER BY uid LIMIT 1""",
    )
    assert found["columns"] == ["caption", "survivor"]
    assert found["rows"] == [["a red ball", uid(0)]] and not found["more"]


def test_values_of_every_type_become_json(work: Path) -> None:
    query = """SELECT 1.5::DECIMAL(4, 2) AS a, TIMESTAMP '2026-01-02 03:04:05' AS b, [1, NULL] AS c, {'k': 'v'} AS d,
    'ab'::BLOB AS e, 'nan'::DOUBLE AS f, uuid() AS g, NULL AS h, interval 1 hour AS i"""
    (row,) = ask(work, query)["rows"]
    assert json.loads(json.dumps(row))[:6] == [1.5, "2026-01-02T03:04:05", [1, None], {"k": "v"}, "6162", None]


def test_every_query_of_the_guide_runs(work: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "audit.md"
    queries = re.findall(r"```sql\n(.*?)\n```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert len(queries) == 10
    for query in queries:
        assert ask(work, query)["columns"], query


def test_the_limit_is_said(work: Path) -> None:
    found = ask(work, "SELECT uid FROM pairs", limit=3)
    assert len(found["rows"]) == 3 and found["more"]
    assert len(ask(work, "SELECT uid FROM pairs", limit=0)["rows"]) == 72


@pytest.mark.parametrize(
    "query",
    [
        "COPY pairs TO '{}/stolen.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{}/stolen.csv'",
        "SELECT 1; COPY (SELECT 1) TO '{}/stolen.csv'",
        "CREATE TABLE t AS SELECT 1",
        "ATTACH '{}/x.duckdb'",
    ],
)
def test_it_only_reads(work: Path, tmp_path: Path, query: str) -> None:
    with pytest.raises(UsageError, match="only reads"):
        ask(work, query.format(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("query", "words"),
    [("SELECT", "selection list"), ("SELECT nothing FROM pairs", "nothing"), ("", "expected a query"),
     ("SELECT caption::INT FROM pairs", "Could not convert")],
)  # fmt: skip
def test_errors_are_duckdbs_words(work: Path, query: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ask(work, query)


def test_a_view_whose_stage_has_not_run(tmp_path: Path) -> None:
    make_work(tmp_path / "work", upto="ingest")
    with pytest.raises(InputError, match="pairmill dedup"):
        ask(tmp_path / "work", "SELECT * FROM decisions")


def test_the_table_shows_markup_as_text(work: Path) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(
            sql.render(ask(work, "SELECT caption, '[red]x' AS rich FROM pairs WHERE caption LIKE '<script>%'"))
        )
    assert HOSTILE in capture.get() and "[red]x" in capture.get()


@pytest.mark.parametrize("name", ["set [1]", "a*b", "it's", "plain"])
def test_a_folders_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    make_work(tmp_path / name)
    make_work(tmp_path / "set 1", upto="ingest")
    assert ask(tmp_path / name, "SELECT count(DISTINCT uid) FROM pairs JOIN decisions USING (uid)")["rows"] == [[60]]
    catalog.write(Folder(tmp_path / name))
    import duckdb

    with duckdb.connect(str(tmp_path / name / "catalog.duckdb")) as connection:
        assert connection.execute("SELECT count(*) FROM pairs").fetchall() == [(72,)]
    bare = audit.run(AuditConfig(folder=str(tmp_path / name / "shards")))
    assert bare["samples"]["samples"] > 0


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", ["ingest/parts/u000000.parquet", "dedup/decisions.parquet", "shards/samples.parquet"])
def test_a_file_that_is_no_whole_table_is_named(tmp_path: Path, name: str, keep: int) -> None:
    work = make_work(tmp_path)
    (work / name).write_bytes((work / name).read_bytes()[:keep])
    for look in (
        lambda: ask(work, "SELECT 1"),
        lambda: audit.run(AuditConfig(work=str(work))),
        lambda: report.run(ReportConfig(work=str(work))),
    ):
        with pytest.raises(DataError, match=Path(name).name):
            look()


def test_a_limit_that_makes_no_sense_is_refused(work: Path) -> None:
    with pytest.raises(ConfigError, match="--limit"):
        ask(work, "SELECT 1", limit=-1)


def test_the_saved_catalogue_knows_every_view_after_a_report(tmp_path: Path) -> None:
    import duckdb

    work = make_work(tmp_path)
    assert report.run(ReportConfig(work=str(work)))["bytes"] > 0
    with duckdb.connect(str(work / "catalog.duckdb"), read_only=True) as connection:
        for view in ("pairs", "decisions", "samples", "steps", "evals"):
            assert connection.execute(f"SELECT count(*) > 0 FROM {view}").fetchall() == [(True,)], view


def test_a_catalogue_that_cannot_be_saved_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    work = make_work(tmp_path, upto="ingest")
    (work / "catalog.duckdb").mkdir()
    catalog.write(Folder(work))
    assert "stays as it was" in caplog.text and not list(work.glob(".tmp-*"))


def test_a_file_damaged_inside_is_no_crash(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    rng = random.Random(3)
    for name in ("ingest/parts/u000000.parquet", "dedup/decisions.parquet", "shards/samples.parquet"):
        whole = (work / name).read_bytes()
        for _ in range(8):
            damaged, at = bytearray(whole), rng.randrange(4, len(whole) - 16)
            damaged[at : at + 8] = rng.randbytes(8)
            (work / name).write_bytes(damaged)
            with contextlib.suppress(DataError):  # some bytes matter to nobody
                report.run(ReportConfig(work=str(work)))
        (work / name).write_bytes(whole)
