"""Lists of every form give the same plan; rows of one URL stay together; bad lists get one sentence."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from core.errors import DataError, InputError
from core.storage import Folder
from ingest.config import IngestConfig
from ingest.urllist import has_captions, plan_rows, planning, read_unit, write_plan

ROOT = Path(__file__).parents[2]
REAL = os.environ.get("PAIRMILL_REAL_DATA", "")
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


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_every_form_gives_the_same_plan(tmp_path: Path, form: str, ending: str) -> None:
    if form == "parquet" and ending:
        pytest.skip("parquet is compressed inside")
    path = write(tmp_path, form)
    table = plan(tmp_path, packed(path, ending) if ending else path)
    expected = [{"url": r["url"], "caption_raw": r["caption"], "score": r["score"], "split": r["split"]} for r in ROWS]
    assert table.drop_columns(["row", "uid"]).to_pylist() == expected
    assert table["row"].to_pylist() == [0, 1, 2, 3]
    assert table["uid"][0].as_py() == xxhash.xxh3_128_hexdigest(f"{ROWS[0]['url']}\x00{ROWS[0]['caption']}".encode())
    assert has_captions(table.schema)


def test_any_line_of_a_txt_is_a_url(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfhttp://a.test/1,2.jpg\r\n\n  http://a.test/x y.jpg\nnot\xff a url\n")
    table = plan(tmp_path, path)
    assert table["url"].to_pylist() == ["http://a.test/1,2.jpg", "http://a.test/x y.jpg", "not\ufffd a url"]
    assert table["caption_raw"].to_pylist() == [None] * 3
    assert not has_captions(table.schema)


def test_unquoted_tabs_keep_their_quotes(tmp_path: Path) -> None:
    path = tmp_path / "list.tsv"
    path.write_text('caption\turl\n"so he said\thttp://a.test/1\n5" disc\thttp://a.test/2\n"quoted"\thttp://a.test/3\n')
    table = plan(tmp_path, path)
    assert table["caption_raw"].to_pylist() == ['"so he said', '5" disc', '"quoted"']


def test_lists_without_a_header_go_by_number(tmp_path: Path) -> None:
    path = tmp_path / "list.tsv"
    path.write_text("a dog\thttp://a.test/1\tx\na cat\thttp://a.test/2\ty\n")
    table = plan(tmp_path, path, url_col="1", caption_col="0")
    assert table["caption_raw"].to_pylist() == ["a dog", "a cat"]
    assert table["2"].to_pylist() == ["x", "y"]


def test_a_glob_is_one_list(tmp_path: Path) -> None:
    for i in range(3):
        write_csv(tmp_path / f"part-{i}.csv", [{"url": f"http://a.test/{i}", "caption": str(i)}])
    table = plan(tmp_path, tmp_path / "part-*.csv")
    assert table["url"].to_pylist() == [f"http://a.test/{i}" for i in range(3)]


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


@pytest.mark.parametrize(
    ("header", "own"),
    [
        (",url,caption", ["column_0"]), ("k,url,caption,k", ["k", "k_2"]), ("URL,url,caption", ["source_URL"]),
        ("Tag,url,caption,tag", ["Tag", "source_tag"]), ("url,url,caption", ["url_2"]),
        (",url,caption,", ["column_0", "column_3"]),
        ('"a\nb",url,caption', ["a\nb"]), ("\n\nk,url,caption", ["k"]),
    ],
)  # fmt: skip
def test_names_without_a_meaning_or_used_twice_lose_nothing(tmp_path: Path, header: str, own: list[str]) -> None:
    path = tmp_path / "list.csv"
    names = next(filter(None, csv.reader(io.StringIO(header))))
    cells = [{"url": "http://a.test/1", "caption": "x"}.get(name, f"cell {i}") for i, name in enumerate(names)]
    if names.count("url") == 2:
        cells[1] = "cell 1"
    path.write_text(f"{header}\n{','.join(cells)}\n")
    table = plan(tmp_path, path)
    assert table["url"].to_pylist() == ["http://a.test/1"] and table["caption_raw"].to_pylist() == ["x"]
    assert table.schema.names[4:] == own
    assert [table[name][0].as_py() for name in own] == [cell for cell in cells if cell.startswith("cell")]


def test_parquet_files_in_other_order_and_of_other_types_are_one_list(tmp_path: Path) -> None:
    first = pa.table({"url": ["http://a.test/1"], "caption": ["x"], "n": [1], "note": pa.nulls(1)})
    second = pa.table(
        {"note": ["hm"], "n": [2.0], "caption": pa.array(["y"], pa.large_string()), "url": ["http://a.test/2"]}
    )
    pq.write_table(first, tmp_path / "1.parquet")
    pq.write_table(second, tmp_path / "2.parquet")
    rows = plan(tmp_path, tmp_path / "*.parquet").drop_columns(["row", "uid"]).to_pylist()
    assert rows == [
        {"url": "http://a.test/1", "caption_raw": "x", "n": 1, "note": None},
        {"url": "http://a.test/2", "caption_raw": "y", "n": 2, "note": "hm"},
    ]


@pytest.mark.parametrize("empty", [["1"], ["2"], ["1", "3"]])
@pytest.mark.parametrize(
    ("form", "data", "nothing"),
    [
        ("csv", b"url,caption\nhttp://a.test/1,x\n", b""), ("csv.gz", gzip.compress(b"caption,url\nx,http://a.test/1\n"), b""),
        ("csv", b"url,caption\nhttp://a.test/1,x\n", b"url,caption\n"), ("tsv", b"url\tcaption\nhttp://a.test/1\tx\n", b"\n"),
        ("jsonl", b'{"url": "http://a.test/1", "caption": "x"}\n', b""), ("txt", b"http://a.test/1\n", b""),
        ("json", b'[{"url": "http://a.test/1", "caption": "x"}]', b"[]"),
    ],
)  # fmt: skip
def test_empty_parts_among_others_are_no_fault(
    tmp_path: Path, form: str, data: bytes, nothing: bytes, empty: list[str]
) -> None:
    """Spark leaves them."""
    for name in ("1", "2", "3"):
        wrapped = gzip.compress(nothing) if form.endswith("gz") else nothing
        (tmp_path / f"{name}.{form}").write_bytes(wrapped if name in empty else data)
    table = plan(tmp_path, tmp_path / f"*.{form}")
    assert table["url"].to_pylist() == ["http://a.test/1"] * (3 - len(empty))


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "binary", "large_binary"])
def test_parquet_text_that_is_not_utf_8_is_replaced(tmp_path: Path, kind: str) -> None:
    """Writers mark bytes of any encoding as strings, and nobody checks."""
    words = pa.array([b"caf\xe9", None, b"caf\xc3\xa9"], pa.binary())
    texts = pa.StringArray.from_buffers(3, words.buffers()[1], words.buffers()[2], words.buffers()[0])
    forms = {"binary": words, "large_binary": words.cast(pa.large_binary()), "string": texts}
    column = forms.get(kind, texts.cast(pa.large_string()) if kind == "large_string" else texts.dictionary_encode())
    urls = pa.array([f"http://a.test/{i}" for i in range(3)])
    pq.write_table(pa.table({"url": urls, "caption": column, "note": column}), tmp_path / "list.parquet")
    table = plan(tmp_path, tmp_path / "list.parquet")
    assert table["caption_raw"].to_pylist() == table["note"].to_pylist() == ["caf\ufffd", None, "café"]


def test_parquet_columns_of_any_type_are_carried(tmp_path: Path) -> None:
    columns = {
        "url": pa.array([1]), "caption": pa.array(["x"]), "half": pa.array([0.5], pa.float16()),
        "span": pa.array([3], pa.duration("s")), "when": pa.array([0], pa.date64()), "bytes": pa.array([b"ab"], pa.binary(2)),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    row = plan(tmp_path, tmp_path / "list.parquet").to_pylist()[0]
    assert (row["url"], row["half"], row["span"], row["source_bytes"]) == ("1", 0.5, "3", "ab")


A_LIST = b"url,caption\nhttp://a.test/1,x\n"
MANY_LINES = b"".join(b"http://a.test/%d\n" % (i * 7919 % 1_000_003) for i in range(100_000))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"1.csv": A_LIST, "2.csv": b"url,text\nhttp://a.test/1,x\n"}, "1.csv in .*2.csv, found url, text"),
        ({"1.parquet": [1], "2.parquet": [1.5]}, "differ in the type of a column"),
        ({"1.parquet": [1], "2.parquet": None}, "1.parquet in .*2.parquet, found url, caption"),
        ({"1.parquet": [1], "2.parquet": b"junk"}, "2.parquet cannot be read as its ending says"),
        ({"1.txt.gz": gzip.compress(MANY_LINES, 1)[:-100_000]}, "1.txt.gz cannot be read as its ending says"),
        ({"1.txt.zst": pa.Codec("zstd").compress(MANY_LINES, asbytes=True)[:-20]}, "cannot be read as its ending says"),
        ({"1.jsonl.zst": pa.Codec("zstd").compress(b'{"url": "u"}', asbytes=True)[:-4]}, "cannot be read as its ending"),
        ({"1.csv": b"x" * 200_000}, "cannot be read as its ending says"),
        ({"1.json": b"[" * 100_000}, "cannot be read as its ending says"),
    ],
)  # fmt: skip
def test_what_is_wrong_behind_the_first_rows_is_one_sentence_too(
    tmp_path: Path, files: dict[str, Any], words: str
) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            more = {} if content is None else {"n": content}
            pq.write_table(pa.table({"url": ["http://a.test/1"], "caption": ["x"], **more}), tmp_path / name)
    ending = next(iter(files)).partition(".")[2]
    with pytest.raises(InputError, match=words) as error:
        plan(tmp_path, tmp_path / f"*.{ending}")
    assert "\n" not in str(error.value) and "Traceback" not in str(error.value)


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


def test_lines_that_are_no_rows_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "list.csv"
    path.write_bytes(b"url,caption\nhttp://a.test/1,good\nhttp://a.test/2,too,many\nhttp://a.test/3,\xff\xfe bytes\n")
    assert plan(tmp_path, path)["caption_raw"].to_pylist() == ["good", "\ufffd\ufffd bytes"]
    assert "1 lines of the list are not rows" in caplog.text


@pytest.mark.parametrize("url_first", [True, False])
@pytest.mark.parametrize("closing", ["", '5" disc', 'the "end"', '""', '"quoted, too"', '"two{}lines"', 'disc 5"'])
@pytest.mark.parametrize(
    ("gap", "delimiter", "line_end"), [(0, ",", "\n"), (3, ";", "\r\n"), (1, ",", "\r"), (40_000, ",", "\n")]
)
def test_a_quote_without_end_costs_its_own_line(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    gap: int,
    closing: str,
    url_first: bool,
    delimiter: str,
    line_end: str,
) -> None:
    captions = ["first", '"two{}lines, one row"', '"open', *["between"] * gap, *[closing] * bool(closing), "last"]
    rows = [(f"http://a.test/{i}", caption.format(line_end)) for i, caption in enumerate(captions)]
    cells = [("url", "caption"), *rows]
    path = tmp_path / "list.csv"
    text = "".join(delimiter.join(cell if url_first else cell[::-1]) + line_end for cell in cells)
    path.write_bytes(text.encode())
    table = plan(tmp_path, path)
    assert table["url"].to_pylist() == [url for url, caption in rows if caption != '"open']
    assert "1 lines of the list are not rows" in caplog.text
    assert "line 5 of" in caplog.text and "opens a quote" in caplog.text


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_line_of_many_megabytes_costs_itself(
    ending: str, newline: str, place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Arrow gives a file up whose row does not fit into its block."""
    mark = {"csv": ",", "tsv": "\t"}[ending]
    rows = [f"http://a.test/{i}{mark}caption {i}" for i in range(1, 6)]
    rows[place - 1] += "x" * 9_000_000
    path = tmp_path / f"list.{ending}"
    path.write_bytes(newline.join([f"url{mark}caption", *rows, ""]).encode())
    table = plan(tmp_path, path)
    assert table["caption_raw"].to_pylist() == [f"caption {i}" for i in range(1, 6) if i != place]
    assert "has more than 2 MB" in caplog.text


def test_a_quote_that_ends_far_away_costs_its_own_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = "x" * 200_000
    (tmp_path / "list.csv").write_text(
        f'url,caption\nhttp://a.test/1,"open\nhttp://a.test/2,{long}"\nhttp://a.test/3,x\n'
    )
    assert plan(tmp_path, tmp_path / "list.csv")["url"].to_pylist() == ["http://a.test/2", "http://a.test/3"]
    assert "line 2 of" in caplog.text


def test_a_quote_without_end_in_the_first_row_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text('url,"caption\nhttp://a.test/1,x\n')
    with pytest.raises(InputError, match="row 1 has a stray quote"):
        plan(tmp_path, tmp_path / "list.csv")


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_columns_that_appear_late_are_carried(tmp_path: Path, form: str) -> None:
    records: list[dict[str, Any]] = [{"url": f"http://a.test/{i}", "caption": "x"} for i in range(25_000)]
    records[1500]["late"], records[-1]["last"] = "a", 7
    for name, part in (("1", records), ("2", [{"url": "http://a.test/other", "caption": "y", "other": "b"}])):
        text = json.dumps(part) if form == "json" else "".join(json.dumps(record) + "\n" for record in part)
        (tmp_path / f"{name}.{form}").write_text(text)
    table = plan(tmp_path, tmp_path / f"*.{form}")
    assert table.num_rows == 25_001
    found = {name: [str(v) for v in table[name].to_pylist() if v is not None] for name in ("late", "last", "other")}
    assert found == {"late": ["a"], "last": ["7"], "other": ["b"]}


def test_lone_surrogates_of_json_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text('{"url": "http://a.test/1", "caption": "half a pair: \\ud83d"}\n[1]\n')
    assert plan(tmp_path, path)["caption_raw"].to_pylist() == ["half a pair: ?"]


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


def test_fields_hold_what_they_like(tmp_path: Path) -> None:
    captions = ["nul \0 byte", "x" * 1_000_000, "tab\tand\r\nnew line", '"', "", " ", "\ufeff", "é" * 70_000, "\u202e"]
    rows = [{"url": f"http://a.test/\0{i}\t", "caption": caption} for i, caption in enumerate(captions)]
    table = plan(tmp_path, write_csv(tmp_path / "list.csv", rows))
    assert table["caption_raw"].to_pylist() == captions
    assert table["url"].to_pylist() == [row["url"] for row in rows]


@pytest.mark.parametrize(
    "line", ['{"n": ' + "9" * 5000 + "}", "[" * 100_000, "{", "\0", "7"], ids=lambda line: line[:9]
)
def test_a_line_that_is_no_record_costs_itself(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    good = '{"url": "http://a.test/1", "caption": "x"}\n'
    (tmp_path / "list.jsonl").write_text(f"{good}{line}\n{good}")
    assert plan(tmp_path, tmp_path / "list.jsonl").num_rows == 2
    assert "1 lines of the list are not rows" in caplog.text


def test_records_of_mixed_kinds(tmp_path: Path) -> None:
    lines = [
        '{"url": 7, "caption": ["a", "b"]}', '{"url": null, "caption": {"en": "x"}, "more": 1}', '{"caption": true}', "",
        '{"url": "http://a.test/1", "url": "http://a.test/2", "caption": NaN}', "null", "[]", '"http://a.test"', "{",
        '{"url": ["http://a.test/3"], "caption": 12345678901234567890123}', '{"URL": "http://a.test/4"}', "[" * 100_000,
    ]  # fmt: skip
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    table = plan(tmp_path, tmp_path / "list.jsonl")
    assert table["url"].to_pylist() == ["7", None, None, "http://a.test/2", '["http://a.test/3"]', None]
    assert table["caption_raw"].to_pylist() == [
        '["a", "b"]',
        '{"en": "x"}',
        "true",
        "NaN",
        "12345678901234567890123",
        None,
    ]


def test_parquet_of_every_kind(tmp_path: Path) -> None:
    n = 3
    urls = [f"http://a.test/{i}" for i in range(n)]
    table = pa.table(
        {
            "url": pa.array(urls).dictionary_encode(), "caption": pa.array([b"one", b"\xff", None], pa.binary()),
            "nothing": pa.nulls(n), "list": pa.array([[1], [], None]), "nested": pa.array([{"a": {"b": [1]}}, None, {}]),
            "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
            "big": pa.array([2**64 - 1, 0, None], pa.uint64()), "half": pa.array([0.5, None, 1.0], pa.float16()),
            "when": pa.array([0, 1, None], pa.timestamp("ns", "Europe/Berlin")), "time": pa.array([1, 2, None], pa.time64("us")),
            "span": pa.array([1, 2, None], pa.duration("s")), "day": pa.array([1, 2, None], pa.date32()),
            "price": pa.array(["1.50", None, "2.25"]).cast(pa.decimal128(10, 2)), "large": pa.array(urls, pa.large_string()),
            "view": pa.array(urls, pa.string_view()), "fixed": pa.array([b"ab", b"cd", None], pa.binary(2)),
            "kind": pa.array(["x", None, "x"]).dictionary_encode(), "true": pa.array([True, False, None]),
        }
    )  # fmt: skip
    pq.write_table(table, tmp_path / "list.parquet")
    found = plan(tmp_path, tmp_path / "list.parquet")
    assert found["url"].to_pylist() == urls and found["caption_raw"].to_pylist() == ["one", "\ufffd", None]
    assert found["big"].to_pylist() == [2**64 - 1, 0, None] and found["price"].to_pylist() == [1.5, None, 2.25]
    assert found["nested"].to_pylist()[0] == '{"a": {"b": [1]}}' and found["kind"].to_pylist() == ["x", None, "x"]
    assert set(table.schema.names) - {"caption"} <= set(found.schema.names)


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


def test_empty_files_among_others_and_one_huge_row_group(tmp_path: Path) -> None:
    table = pa.table({"url": [f"http://a.test/{i % 150_000}" for i in range(200_000)], "caption": ["x"] * 200_000})
    pq.write_table(table.slice(0, 0), tmp_path / "0.parquet")
    pq.write_table(table, tmp_path / "1.parquet", row_group_size=200_000)
    pq.write_table(table.slice(0, 0), tmp_path / "2.parquet")
    folder = Folder(tmp_path / "work")
    write_plan(IngestConfig(urls=str(tmp_path / "*.parquet"), unit_urls=50_000), folder)
    assert sum(plan_rows(folder)) == 200_000 and len(plan_rows(folder)) in (3, 4)


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


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("list.csv", b"link,alt\nhttp://a.test/1,x\n", "has no column 'url'; it has 'link', 'alt'"),
        ("list.csv", b"url,captoin\nhttp://a.test/1,x\n", "did you mean 'captoin'?"),
        ("list.csv", b"url,caption\n", "found no row"),
        ("list.csv", b"", "found no row"),
        ("list.txt", b"\n\n", "found no row"),
        ("list.parquet", b"url,caption\n", "cannot be read as its ending says"),
        ("list.csv.gz", b"url,caption\n", "cannot be read as its ending says"),
        ("list.json", b"[{]", "cannot be read as its ending says"),
        ("list.json", b'{"images": []}', "expected a list of records"),
        ("list.xlsx", b"", "expected a list ending in"),
        ("list.csv", b"http://a.test/1,a dog\n", "goes by column numbers from 0, as in --url-col 0"),
        ("list.csv", b"url\nhttp://a.test/1\n", "or '' where there are no captions"),
        ("list.csv", b"PK\x03\x04 and so on", "found a zip archive"),
        ("list.csv", b"PAR1 and so on", "found parquet"),
        ("list.jsonl.gz", gzip.compress(b'{"url": "x", "caption": "y"}')[:-9], "cannot be read as its ending says"),
        ("list.csv", b"\xff\xfe", "found no row"),
        ("list.csv", b"\0" * 100, "has no column 'url'"),
        ("listing", b"url,caption\n", "expected a list ending in"),
    ],
)
def test_bad_lists_get_one_sentence(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        plan(tmp_path, tmp_path / name)
    assert words in str(error.value) and "\n" not in str(error.value)


SMALL_DISK = """
mount -t tmpfs -o size=2m none "$1" || exit 77
TMPDIR="$1" "$2" -c "$3"
"""
PLAN_IN_LITTLE_MEMORY = """
from core.errors import StorageError
from core.storage import Folder
from ingest import urllist
from ingest.config import IngestConfig

urllist.MEMORY_GB = 0.05
try:
    urllist.write_plan(IngestConfig(urls="{list}", work="{work}"), Folder("{work}"))
except StorageError as error:
    print(error)
"""


def test_a_full_temporary_disk_is_one_sentence(tmp_path: Path) -> None:
    urls = [f"http://a.test/{i * 7919 % 1_000_003}/{'x' * (i % 50)}" for i in range(600_000)]
    pq.write_table(pa.table({"url": urls, "caption": urls}), tmp_path / "list.parquet")
    (tmp_path / "disk").mkdir()
    code = PLAN_IN_LITTLE_MEMORY.format(list=tmp_path / "list.parquet", work=tmp_path / "work")
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, "sh", str(tmp_path / "disk")]
    try:
        done = subprocess.run(
            [*command, sys.executable, code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare program to make a small disk with")
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert "fits neither into 0.05 GB of memory nor" in done.stdout and "set TMPDIR" in done.stdout, done
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
