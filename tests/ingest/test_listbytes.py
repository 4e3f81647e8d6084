"""Encodings and compressions are told by the bytes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.ingest.lists import plan


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "txt.gz"])
def test_what_windows_writes_is_read(tmp_path: Path, encoding: str, form: str) -> None:
    text = {
        "csv": 'url,caption\r\nhttp://a.test/ü,"so, 日本"\r\n', "tsv": "url\tcaption\r\nhttp://a.test/ü\tso, 日本\r\n",
        "jsonl": '{"url": "http://a.test/ü", "caption": "so, 日本"}\r\n', "txt.gz": "http://a.test/ü\r\n\r\n",
        "json": '[{"url": "http://a.test/ü", "caption": "so, 日本"}]',
    }[form]  # fmt: skip
    data = text.encode(encoding)
    if encoding.endswith(("-le", "-be")):
        data = "\ufeff".encode(encoding) + data
    (tmp_path / f"list.{form}").write_bytes(gzip.compress(data) if form.endswith("gz") else data)
    row = plan(tmp_path, tmp_path / f"list.{form}").to_pylist()[0]
    assert row["url"] == "http://a.test/ü" and row["caption_raw"] in ("so, 日本", None)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("list.csv", gzip.compress), ("list.csv.gz", lambda d: gzip.compress(gzip.compress(d))),
        ("list.csv.gz.gz", lambda d: gzip.compress(gzip.compress(d))), ("my.gz.csv", bytes),
        ("list.csv.gz.zst", lambda d: pa.Codec("zstd").compress(gzip.compress(d), asbytes=True)),
        ("LIST.CSV.GZ", gzip.compress), ("list.tsv", bytes), ("list.csv", lambda d: d.replace(b",", b";")),
        ("list.csv", lambda d: d.replace(b",", b"\t")), ("list.csv", lambda d: d.replace(b"\n", b"\r")),
        ("list.csv", lambda d: b"\n\n" + d.replace(b"\n", b"\n\n")), ("list.csv", lambda d: d.removesuffix(b"\n")),
        ("list.csv.gz", lambda d: gzip.compress(d[:20]) + gzip.compress(d[20:])),
    ],
)  # fmt: skip
def test_wrong_names_and_wrappings_are_seen_through(tmp_path: Path, name: str, wrap: Any) -> None:
    (tmp_path / name).write_bytes(wrap(b"url,caption\nhttp://a.test/1,one\nhttp://a.test/2,two\n"))
    rows = plan(tmp_path, tmp_path / name).to_pylist()
    assert [(r["url"], r["caption_raw"]) for r in rows] == [("http://a.test/1", "one"), ("http://a.test/2", "two")]
