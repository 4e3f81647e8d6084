"""Rows of one URL stay together, uids and types hold, and what will not be fetched is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import DataError, InputError
from core.storage import Folder
from ingest.config import IngestConfig
from ingest.urllist import has_captions, plan_rows, planning, read_unit, write_plan
from tests.ingest.lists import plan, write_csv

ROOT = Path(__file__).parents[2]
REAL = os.environ.get("PAIRMILL_REAL_DATA", "")


def test_columns_are_found_in_other_case_and_own_names_are_kept_free(tmp_path: Path) -> None:
    rows = [{"URL": "http://a.test/1", "TEXT": "x", "WIDTH": 7, "caption": "theirs", "uid": "ab12", "tags": ["a", "b"]}]
    path = tmp_path / "list.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    table = plan(tmp_path, path, caption_col="TEXT")
    assert table.to_pylist() == [
        {"row": 0, "uid": "ab12", "url": "http://a.test/1", "caption_raw": "x", "source_WIDTH": 7,
         "source_caption": "theirs", "tags": '["a", "b"]'}
    ]  # fmt: skip


def test_uids_are_unique_and_fit_file_names(tmp_path: Path) -> None:
    rows = [{"url": "http://a.test/1", "caption": "x", "uid": uid} for uid in ("same", "same", "a/b", "a/b", "")]
    uids = plan(tmp_path, write_csv(tmp_path / "list.csv", rows))["uid"].to_pylist()
    assert uids[0] == "same" and len(set(uids)) == 5
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", uid) for uid in uids)


@pytest.mark.parametrize("uid", ["user-7", "a/b", ""])
def test_a_uid_column_that_names_no_row_still_gives_every_row_its_own(tmp_path: Path, uid: str) -> None:
    rows = [{"url": f"http://a.test/{i}", "caption": "x", "uid": uid} for i in range(40)]
    table = plan(tmp_path, write_csv(tmp_path / "list.csv", rows), unit_urls=5)
    assert len(set(table["uid"].to_pylist())) == 40


def test_types_that_do_not_hold_to_the_end_become_text(tmp_path: Path) -> None:
    rows = [{"url": f"http://a.test/{i}", "caption": "x", "n": str(i), "zip": f"0{i}"} for i in range(60_000)]
    rows[-1]["n"] = "many"
    table = plan(tmp_path, write_csv(tmp_path / "list.csv", rows))
    assert table.schema.field("n").type == table.schema.field("zip").type == pa.string()
    assert table["n"].to_pylist()[-2:] == ["59998", "many"]
    assert table["row"].to_pylist() == list(range(60_000))
    assert table["url"].to_pylist() == [row["url"] for row in rows]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("7", "1.5"),
        ("7", "007"),
        ("7", "1234567890123456789"),
        ("0.5", "1234567890123456789"),
        ("0.5", "01.5"),
        ("true", "1"),
    ],
)
def test_no_word_of_the_list_is_changed_by_its_type(tmp_path: Path, first: str, last: str) -> None:
    """What types are guessed from is the beginning, which may say nothing of the end."""
    words = [first] * 20_001 + ["", last]
    rows = [{"url": f"http://a.test/{i}", "caption": "x", "n": word} for i, word in enumerate(words)]
    path = tmp_path / "list.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan(tmp_path, path)["n"].to_pylist()[-1] == last


def test_long_identifiers_are_text(tmp_path: Path) -> None:
    rows = [
        {
            "url": "http://a.test/1",
            "caption": "x",
            "id": "1234567890123456789",
            "n": "123456789012345678",
            "f": "-1.5e3",
        }
    ]
    row = plan(tmp_path, write_csv(tmp_path / "list.csv", rows)).to_pylist()[0]
    assert (row["id"], row["n"], row["f"]) == ("1234567890123456789", 123456789012345678, -1500.0)


def test_rows_of_one_url_share_a_unit_and_units_are_of_the_wanted_size(tmp_path: Path) -> None:
    rows = [{"url": f"http://a.test/{i % 500}", "caption": f"caption {i}"} for i in range(2000)]
    path = write_csv(tmp_path / "list.csv", rows)
    folder = Folder(tmp_path / "work")
    write_plan(IngestConfig(urls=str(path), unit_urls=50), folder)
    homes: dict[str, set[int]] = {}
    for number in range(len(plan_rows(folder))):
        unit = read_unit(folder, number)
        assert unit["row"].to_pylist() == sorted(unit["row"].to_pylist())
        for url in unit["url"].to_pylist():
            homes.setdefault(url, set()).add(number)
    assert len(homes) == 500 and all(len(units) == 1 for units in homes.values())
    assert 8 <= len(plan_rows(folder)) <= 12 and sum(plan_rows(folder)) == 2000


def test_the_same_list_gives_the_same_plan(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "list.csv", [{"url": f"http://a.test/{i}", "caption": "x"} for i in range(5000)])
    plans = []
    for name in ("one", "two"):
        folder = Folder(tmp_path / name)
        write_plan(IngestConfig(urls=str(path), unit_urls=700), folder)
        plans.append([folder.read(name) for name in folder.list("ingest/plan/*")])
    assert plans[0] == plans[1]


def test_units_can_be_read_before_the_plan_is_whole_and_another_run_finishes_it(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "list.csv", [{"url": f"http://a.test/{i}", "caption": "x"} for i in range(3000)])
    config, whole, cut = (
        IngestConfig(urls=str(path), unit_urls=20),
        Folder(tmp_path / "whole"),
        Folder(tmp_path / "cut"),
    )
    write_plan(config, whole)
    with planning(config, cut) as plan:
        plan.wait_for(0)
        assert read_unit(cut, 0).equals(read_unit(whole, 0)) and plan_rows(cut) == plan_rows(whole)
    names = whole.list("ingest/plan/*.parquet")
    assert len(names) > 3
    for name in names[2:]:
        cut.remove(name)  # as if the first run had been killed here
    with planning(config, cut) as plan:
        plan.wait_for(len(plan_rows(cut)) - 1)
    assert [cut.read(name) for name in cut.list("ingest/plan/*")] == [
        whole.read(n) for n in whole.list("ingest/plan/*")
    ]
    cut.remove(names[-1])
    write_csv(path, [{"url": f"http://a.test/{i}", "caption": "x"} for i in range(2999)])
    with pytest.raises(DataError, match="another list"), planning(config, cut) as plan:
        plan.wait_for(len(plan_rows(cut)) - 1)


def test_names_of_the_plans_own_columns_are_no_harm(tmp_path: Path) -> None:
    names = [
        "repeat",
        "source_uid",
        "unit",
        "row",
        "outcome",
        "select",
        'quo"te',
        "sp ace",
        "UID",
        "uid",
        "url ",
        "c0",
        "c1",
    ]
    rows = [{"url": "http://a.test/1", "caption": "x", **{name: f"is {name}" for name in names}}]
    found = plan(tmp_path, write_csv(tmp_path / "list.csv", rows)).to_pylist()[0]
    assert {f"is {name}" for name in names} - set(found.values()) == {"is UID"}  # which names the row
    assert found["url"] == "http://a.test/1" and found["row"] == 0


def test_a_list_without_captions(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("url\nhttp://a.test/1\n")
    table = plan(tmp_path, tmp_path / "list.csv", caption_col="")
    assert table["caption_raw"].to_pylist() == [None] and not has_captions(table.schema)


def test_what_will_not_be_fetched_is_told_beforehand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    urls = [
        "http://a.test/1",
        "//a.test/2",
        " HTTPS://a.test",
        "",
        "  ",
        "data:image/gif;base64,R0",
        "/3.jpg",
        "http://",
    ]
    rows = [{"url": url, "caption": "" if i == 1 else "x"} for i, url in enumerate(urls)]
    path = write_csv(tmp_path / "list.csv", rows)
    path.write_text(path.read_text() + "too,many,fields\n")
    caplog.set_level("INFO")
    plan(tmp_path, path)
    for words in (
        "1 lines of the list are not rows of it and were left out; the first: row", "3 fields, not 2: 'too,many,fields'",
        "2 rows have no URL", "3 rows have no http(s) URL and will be `bad_url`; the first: 'data:image",
        "1 rows have no caption",
    ):  # fmt: skip
        assert words in caplog.text


SMALL_DISK = """
mount -t tmpfs -o size=2m none "$1" || exit 77
TMPDIR="$1" "$2" -c "$3"
"""
PLAN_IN_LITTLE_ROOM = """
from core.errors import StorageError
from core.storage import Folder
from ingest import urllist
from ingest.config import IngestConfig

try:
    urllist.write_plan(IngestConfig(urls="{list}", work="{work}"), Folder("{work}"))
except StorageError as error:
    print(error)
"""


def test_a_full_temporary_disk_is_one_sentence(tmp_path: Path) -> None:
    urls = [f"http://a.test/{i * 7919 % 1_000_003}/{'x' * (i % 50)}" for i in range(600_000)]
    pq.write_table(pa.table({"url": urls, "caption": urls}), tmp_path / "list.parquet")
    (tmp_path / "disk").mkdir()
    code = PLAN_IN_LITTLE_ROOM.format(list=tmp_path / "list.parquet", work=tmp_path / "work")
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, "sh", str(tmp_path / "disk")]
    try:
        done = subprocess.run(
            [*command, sys.executable, code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare program to make a small disk with")
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert "the list does not fit into what is free in" in done.stdout and "set TMPDIR" in done.stdout, done
    assert not (tmp_path / "work/ingest/plan/00000.parquet").exists()


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found none"):
        plan(tmp_path, tmp_path / "missing-*.csv")


@pytest.mark.realdata
@pytest.mark.skipif(not REAL, reason="PAIRMILL_REAL_DATA is not set")
@pytest.mark.parametrize(
    ("name", "url_col", "caption_col", "rows"),
    [
        ("laion_10000.parquet", "URL", "TEXT", 10_000), ("laion_10000_urls_only.txt", "url", "caption", 10_000),
        ("cc3m_validation.tsv", "1", "0", 15_833), ("tate_artworks_20000.csv", "thumbnailUrl", "title", 20_000),
        ("shopify_apparel.csv", "Image Src", "Image Alt Text", 22), ("web_alt/*.csv.gz", "url", "alt", 38_000),
    ],
)  # fmt: skip
def test_real_lists_are_planned_whole(
    tmp_path: Path, name: str, url_col: str, caption_col: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    table = plan(tmp_path, Path(REAL) / "urllists" / name, url_col=url_col, caption_col=caption_col)
    assert table.num_rows == rows
    assert len(set(table["uid"].to_pylist())) == rows
    blank = sum(not (url or "").strip() for url in table["url"].to_pylist())
    assert (f"{blank:,} rows have no URL" in caplog.text) == bool(blank)
    assert "rows have no http(s) URL" in caplog.text or "web_alt" not in name


@pytest.mark.realdata
@pytest.mark.skipif(not REAL, reason="PAIRMILL_REAL_DATA is not set")
def test_no_real_list_is_left_out() -> None:
    known = {"README.md", "laion_10000.parquet", "laion_10000_urls_only.txt", "cc3m_validation.tsv", "web_alt"}
    known |= {"tate_artworks_20000.csv", "shopify_apparel.csv"}
    assert {path.name for path in (Path(REAL) / "urllists").iterdir()} <= known
