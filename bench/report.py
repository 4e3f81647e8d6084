"""The report of a work folder of a million rows: how long it takes to make, and how large the page is.

The rows are made by DuckDB (hosts, outcomes, languages and sizes of usual skew), a fifth of them dropped as copies, and all
of them share 60 real pictures in one tar, so that every thumbnail is read and encoded as in a real folder.

    python -m bench.report [--rows 1000000] [--json]

About a minute and 1 GB on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import duckdb

from bench.machine import claim
from core import schema
from report import html, run
from report.config import ReportConfig
from tests.report.folder import make_work, uid

PICTURES = 30  # in the tar of the first unit


def million(folder: Path, rows: int) -> None:
    """A work folder of `rows` pairs in 100 units, with decisions."""
    make_work(folder, upto="ingest")
    parts = folder / "ingest" / "parts"
    connection = duckdb.connect()
    known = ", ".join(repr(uid(i)) for i in range(PICTURES))
    first = f"'{parts}/u000000.parquet'"
    connection.execute(
        f"""CREATE TABLE pictures AS SELECT row_number() OVER () - 1 AS n, tar, tar_offset, tar_size FROM {first}
        WHERE uid IN ({known})"""
    )
    types = {field.name: field.type for field in schema.pair_schema([])}
    columns = {
        "uid": "printf('%032x', i)", "unit": "printf('u%06d', i // 10000)", "row": "i",
        "url": "'http://host' || (pow(random(), 4) * 5000)::INT || '.example/pictures/' || i || '.jpg'",
        "caption": "'photograph of ' || (pow(random(), 3) * 20000)::INT || ' things on ' || (random() * 300)::INT || ' grounds'",
        "outcome": "CASE WHEN i % 10 < 8 THEN 'ok' WHEN i % 10 = 8 THEN 'http_4xx' ELSE 'timeout' END",
        "status": "200", "attempts": "1", "elapsed_s": "0.1", "bytes": "(20000 + random() * 400000)::INT",
        "format": "CASE WHEN i % 7 = 0 THEN 'png' ELSE 'jpeg' END", "width": "(200 + random() * 1800)::INT",
        "height": "(200 + random() * 1400)::INT", "lang": "CASE WHEN i % 12 = 0 THEN 'de' ELSE 'en' END",
        "tar": "p.tar", "tar_offset": "p.tar_offset", "tar_size": "p.tar_size",
    }  # fmt: skip
    chosen = ", ".join(f"{sql} AS {name}" for name, sql in columns.items() if name in types)
    for unit in range(100):
        low, high = unit * rows // 100, (unit + 1) * rows // 100
        connection.execute(
            f"""COPY (SELECT {chosen} FROM range({low}, {high}) t(i) JOIN pictures p ON p.n = i % {PICTURES})
            TO '{parts}/u{unit + 1:06d}.parquet'"""
        )
    (folder / "dedup").mkdir()
    connection.execute(
        f"""COPY (SELECT printf('%032x', i) AS uid, i % 5 <> 0 AS kept, i % 100 = 1 AS holdout,
        CASE WHEN i % 5 = 0 THEN 'image_duplicate' END AS reason, printf('%032x', i) AS image_group,
        CASE WHEN i % 5 < 2 THEN printf('%032x', i - i % 5 + 1) END AS cluster,
        CASE WHEN i % 5 = 0 THEN printf('%032x', i + 1) END AS survivor,
        CASE WHEN i % 5 = 0 THEN 'image_hash' END AS evidence, CASE WHEN i % 5 = 0 THEN 0.97 END AS similarity
        FROM range({rows}) t(i) WHERE i % 10 < 8) TO '{folder}/dedup/decisions.parquet'"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the URL list")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pairmill-bench-") as folder:
        million(Path(folder), arguments.rows)
        made = run.run(ReportConfig(work=folder))
    claims = [
        claim(f"seconds to make the report of {arguments.rows:,} rows", made["seconds"], goal=20, at_least=False),
        claim("bytes of that page", made["bytes"], goal=html.MAX_BYTES, at_least=False),
    ]
    print(json.dumps(claims, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
