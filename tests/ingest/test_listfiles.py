"""Lists of every form and of any columns give the same plan; bad ones get one sentence."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from core.errors import InputError
from core.storage import Folder
from ingest.config import IngestConfig
from ingest.urllist import has_captions, plan_rows, write_plan
from tests.ingest.lists import ROWS, packed, plan, write, write_csv


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


def test_empty_files_among_others_and_one_huge_row_group(tmp_path: Path) -> None:
    table = pa.table({"url": [f"http://a.test/{i % 150_000}" for i in range(200_000)], "caption": ["x"] * 200_000})
    pq.write_table(table.slice(0, 0), tmp_path / "0.parquet")
    pq.write_table(table, tmp_path / "1.parquet", row_group_size=200_000)
    pq.write_table(table.slice(0, 0), tmp_path / "2.parquet")
    folder = Folder(tmp_path / "work")
    write_plan(IngestConfig(urls=str(tmp_path / "*.parquet"), unit_urls=50_000), folder)
    assert sum(plan_rows(folder)) == 200_000 and len(plan_rows(folder)) in (3, 4)


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
