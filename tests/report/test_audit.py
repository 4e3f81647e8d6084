from __future__ import annotations

import io
import json
import math
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from core import catalog, schema
from core.errors import DataError, InputError
from core.storage import Folder
from report import audit
from report.config import AuditConfig
from tests.report.folder import FAILED, HOSTILE, PAIRS, make_work, picture


def page_of(work: Path) -> dict:
    return audit.run(AuditConfig(work=str(work)))


def test_funnel_counts_what_each_stage_left(work: Path) -> None:
    funnel = page_of(work)["funnel"]
    assert list(funnel) == ["rows", "fetched", "unique", "kept", "sharded", "seen"]
    lost = sum(FAILED.values())
    assert funnel == {"rows": PAIRS + lost, "fetched": PAIRS, "unique": 50, "kept": 46, "sharded": 46, "seen": 1600}


def test_counts_and_bytes_by_outcome_host_format_and_language(work: Path) -> None:
    page = page_of(work)
    assert {row["name"]: row["rows"] for row in page["outcomes"]} == {"ok": PAIRS, **FAILED}
    hosts = {row["name"]: row for row in page["hosts"]}
    assert hosts["host1.example"]["rows"] == hosts["host1.example"]["ok"] == 20
    assert hosts["lost.example"]["rows"] == 12 and hosts["lost.example"]["ok"] == 0
    assert {row["name"]: row["rows"] for row in page["formats"]} == {"jpeg": 45, "png": 15}
    assert {row["name"]: row["rows"] for row in page["languages"]} == {"en": 55, "de": 5}
    staged = pa.concat_tables(map(pq.read_table, (work / "ingest/parts").glob("*.parquet"))).column("bytes")
    assert page["pairs"]["bytes"] == sum(v for v in staged.to_pylist() if v)


def test_histograms_hold_every_fetched_pair(work: Path) -> None:
    histograms = page_of(work)["histograms"]
    assert set(histograms) == set(audit.MEASURES)
    for name, h in histograms.items():
        assert sum(b["rows"] for b in h["bins"]) == PAIRS, name
        assert all(a["to"] == pytest.approx(b["from"]) for a, b in zip(h["bins"], h["bins"][1:], strict=False)), name
    width = histograms["width"]
    assert (width["min"], width["max"]) == (384, 416)
    held = {b["from"]: b["rows"] for b in width["bins"] if b["rows"]}
    assert held == {384: 12, 392: 12, 400: 12, 408: 12, 416: 12}


def test_captions_words_and_clusters(work: Path) -> None:
    page = page_of(work)
    assert page["captions"][0]["rows"] == 2
    words = {row["word"]: row["rows"] for row in page["words"]["top"]}
    assert words["ball"] == PAIRS - 1 and "a" not in words
    assert {row["name"]: row["rows"] for row in page["dropped"]} == {"image_duplicate": 10, "align:aspect": 4}
    assert page["clusters"]["clusters"] == 8
    assert page["clusters"]["sizes"] == [{"size": 2, "clusters": 7}, {"size": 6, "clusters": 1}]
    assert page["holdout"]["samples"] == 5


@pytest.mark.parametrize(
    ("upto", "missing"),
    [("ingest", {"dropped", "samples"}), ("dedup", {"samples", "holdout"}), ("shard", {"seen"})],
)
def test_a_folder_that_is_not_finished(tmp_path: Path, upto: str, missing: set[str]) -> None:
    page = page_of(make_work(tmp_path / "work", upto=upto))
    assert not missing & (set(page) | set(page["funnel"]))
    assert page["funnel"]["fetched"] == PAIRS


def test_the_page_is_json_and_a_table(work: Path) -> None:
    page = page_of(work)
    assert json.loads(json.dumps(page)) == page
    console = Console(width=100)
    with console.capture() as capture:
        console.print(audit.render(page))
    text = capture.get()
    assert "Funnel" in text and "image_duplicate" in text and "caption, words" in text


def test_html_of_the_statistics(work: Path, tmp_path: Path) -> None:
    page = audit.run(AuditConfig(work=str(work), html=str(tmp_path / "audit.html")))
    text = Path(page["html"]).read_text()
    assert "Caption length" in text and HOSTILE not in text


def test_a_bare_folder_of_shards(work: Path) -> None:
    page = audit.run(AuditConfig(work="nowhere", folder=str(work / "shards")))
    assert page["samples"]["samples"] == 41 and page["samples"]["shards"] == 1
    assert "pairs" not in page


def test_what_img2dataset_wrote(tmp_path: Path) -> None:
    rows = {
        "url": ["http://a.example/1.jpg", "http://a.example/2.jpg"],
        "caption": ["a dog", "a cat"],
        "status": ["success", "failed_to_download"],
        "error_message": [None, "HTTP Error 404"],
        "original_width": [640, None],
        "original_height": [480, None],
        "width": [256, None],
        "height": [256, None],
    }
    pq.write_table(pa.table(rows), tmp_path / "00000.parquet")
    page = audit.run(AuditConfig(folder=str(tmp_path)))
    assert {row["name"]: row["rows"] for row in page["outcomes"]} == {"ok": 1, "HTTP Error 404": 1}
    assert page["histograms"]["width"]["max"] == 640


def test_a_table_of_samples_that_is_not_ours_is_a_sentence(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "width": [2]}), tmp_path / "samples.parquet")
    with pytest.raises(InputError, match="without captions, height"):
        audit.run(AuditConfig(folder=str(tmp_path)))


def test_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pairmill ingest"):
        page_of(tmp_path)
    with pytest.raises(InputError, match=r"samples.parquet, img2dataset.*or .tar shards"):
        audit.run(AuditConfig(folder=str(tmp_path)))


def test_distinct_counts_are_exact_and_hosts_may_be_addresses(tmp_path: Path) -> None:
    parts = tmp_path / "ingest" / "parts"
    parts.mkdir(parents=True)
    rows = [
        {"uid": f"{i:032x}", "unit": "u000000", "row": i, "url": f"http://[::1]:80/{i % 1009}", "outcome": "ok",
         "caption": f"words {i % 1013}"}
        for i in range(1500)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=schema.pair_schema()), parts / "u000000.parquet")
    page = page_of(tmp_path)
    assert (page["pairs"]["urls"], page["pairs"]["captions"]) == (1009, 1013)
    assert [row["name"] for row in page["hosts"]] == ["[::1]"]


def test_quantiles_are_exact_and_do_not_depend_on_threads(tmp_path: Path) -> None:
    parts = tmp_path / "ingest" / "parts"
    parts.mkdir(parents=True)
    rng = np.random.default_rng(1)
    widths = rng.integers(50, 9000, 250_000).astype(np.int32)
    n = len(widths)
    for unit, mine in enumerate(np.split(widths, 5)):
        columns = {
            "uid": [f"{unit:06d}{i}" for i in range(len(mine))], "unit": ["u"] * len(mine), "row": range(len(mine)),
            "outcome": ["ok"] * len(mine), "width": mine,
        }  # fmt: skip
        table = pa.table({k: pa.array(v) for k, v in columns.items()})
        pq.write_table(table, parts / f"u{unit:06d}.parquet")
    with catalog.connect(Folder(tmp_path)) as connection:
        found = audit.histograms(connection, {"width"})["width"]
    ordered = np.sort(widths)
    wanted = [int(ordered[math.ceil(q * n) - 1]) for q in (0.05, 0.5, 0.95)]
    assert [found[k] for k in ("min", "p05", "p50", "p95", "max")] == [ordered[0], *wanted, ordered[-1]]
    assert sum(b["rows"] for b in found["bins"]) == n


def _write_tars(folder: Path) -> None:
    """Two samples with notes, one without, one without a picture, one of a damaged picture."""
    files = {
        "a.jpg": picture(1), "a.json": b'{"url": "http://h.example/a", "width": 640, "height": 480, "captions": ["x", "y"]}',
        "b.png": picture(2), "b.txt": b"a red ball", "c.txt": b"no picture", "d.jpg": b"GIF89a", "d.txt": b"broken",
    }  # fmt: skip
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))


def test_any_webdataset_tars(tmp_path: Path) -> None:
    _write_tars(tmp_path)
    page = audit.run(AuditConfig(folder=str(tmp_path), html=str(tmp_path / "audit.html")))
    assert {row["name"]: row["rows"] for row in page["outcomes"]} == {"ok": 3, "not_image": 1, "corrupt": 1}
    assert {row["name"]: row["rows"] for row in page["formats"]} == {"jpeg": 3}
    assert page["histograms"]["width"]["max"] == 640 and page["histograms"]["width"]["min"] == 100
    assert page["pairs"]["bytes"] > len(picture(1)) + len(picture(2))
    assert {row["name"] for row in page["hosts"]} >= {"h.example"}
    assert Path(page["html"]).read_text().count("data:image/jpeg") == 3
    (tmp_path / "00001.tar").write_bytes((tmp_path / "00000.tar").read_bytes()[:1200])
    with pytest.raises(DataError, match=r"00001\.tar"):
        audit.run(AuditConfig(folder=str(tmp_path)))


def test_success_over_time(tmp_path: Path) -> None:
    parts = tmp_path / "ingest" / "parts"
    parts.mkdir(parents=True)
    begin = datetime(2026, 3, 1, 12, tzinfo=UTC)
    rows = [
        {"uid": f"{i}", "unit": "u", "row": i, "url": "http://x/", "outcome": "ok" if i % 4 or i < 600 else "timeout",
         "bytes": 10, "fetched_at": begin + timedelta(seconds=i)}
        for i in range(1200)
    ]  # fmt: skip
    rows.append({"uid": "never", "unit": "u", "row": 1200, "outcome": "empty_caption"})
    pq.write_table(pa.Table.from_pylist(rows, schema.pair_schema()), parts / "u000000.parquet")
    page = page_of(tmp_path)
    found = page["over_time"]
    assert found["seconds"] == 60 and len(found["periods"]) == 20
    assert found["periods"][0] == {"from": "2026-03-01 12:00:00", "rows": 60, "ok": 60, "bytes": 600}
    assert [row["ok"] for row in found["periods"][10:]] == [45] * 10
    console = Console(width=200)
    with console.capture() as capture:
        console.print(audit.render(page))
    assert "75% to 100%" in capture.get()


def test_what_each_condition_dropped_and_pictures_in_html(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work", upto="dedup")
    done = json.loads((work / "dedup" / "done.json").read_text())
    rules = [{"rule": "align:aspect", "alone": 5, "in_sequence": 4}]
    sets = [{"set": "coco", "items": 9, "items_matched": 1, "matched": 2, "removed": 2, "evidence": {"image_hash": 2}}]
    (work / "dedup" / "done.json").write_text(json.dumps({**done, "rules": rules, "against": sets}))
    page = audit.run(AuditConfig(work=str(work), html=str(tmp_path / "audit.html")))
    assert page["rules"] == rules and page["against"] == sets
    console = Console(width=120)
    with console.capture() as capture:
        console.print(audit.render(page))
    assert "align:aspect" in capture.get() and "coco" in capture.get()
    text = (tmp_path / "audit.html").read_text()
    assert (
        text.count("data:image/jpeg") > 20 and 'data-reason="kept"' in text and 'data-reason="image_duplicate"' in text
    )
