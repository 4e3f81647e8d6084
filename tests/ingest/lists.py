"""URL lists of every form, and the plan of one as a table."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.storage import Folder
from ingest.config import IngestConfig
from ingest.urllist import plan_rows, read_unit, write_plan

ROWS = [
    {"url": "http://a.test/1,2.jpg", "caption": 'He said "hi", twice', "score": 0.25, "split": "train"},
    {"url": "http://a.test/ü .png", "caption": "tab\tand\nnew line", "score": 0.5, "split": "train"},
    {"url": "http://b.test/3.jpg", "caption": "", "score": 1.0, "split": "test"},
    {"url": "http://a.test/1,2.jpg", "caption": "second caption of the first", "score": 2.0, "split": "test"},
]


def plan(tmp_path: Path, urls: Path | str, **settings: Any) -> pa.Table:
    folder = Folder(tmp_path / "work")
    write_plan(IngestConfig(urls=str(urls), **settings), folder)
    return pa.concat_tables([read_unit(folder, i) for i in range(len(plan_rows(folder)))]).sort_by("row")


def write_csv(path: Path, rows: list[dict[str, Any]], *, header: bool = True, **dialect: Any) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], **dialect)
        if header:
            writer.writeheader()
        writer.writerows(rows)
    return path


def write(folder: Path, form: str) -> Path:
    path = folder / f"list.{form}"
    if form == "csv":
        return write_csv(path, ROWS)
    if form == "tsv":
        return write_csv(path, ROWS, dialect="excel-tab")
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif form == "json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def packed(path: Path, ending: str) -> Path:
    data = path.read_bytes()
    target = path.with_name(path.name + ending)
    target.write_bytes(gzip.compress(data) if ending == ".gz" else pa.Codec("zstd").compress(data, asbytes=True))
    path.unlink()
    return target
