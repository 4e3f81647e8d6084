"""csv and tsv: fields hold what they like, and a line that is no row costs itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import InputError
from tests.ingest.lists import plan, write_csv


def test_unquoted_tabs_keep_their_quotes(tmp_path: Path) -> None:
    path = tmp_path / "list.tsv"
    path.write_text('caption\turl\n"so he said\thttp://a.test/1\n5" disc\thttp://a.test/2\n"quoted"\thttp://a.test/3\n')
    table = plan(tmp_path, path)
    assert table["caption_raw"].to_pylist() == ['"so he said', '5" disc', '"quoted"']


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


def test_fields_hold_what_they_like(tmp_path: Path) -> None:
    captions = ["nul \0 byte", "x" * 1_000_000, "tab\tand\r\nnew line", '"', "", " ", "\ufeff", "é" * 70_000, "\u202e"]
    rows = [{"url": f"http://a.test/\0{i}\t", "caption": caption} for i, caption in enumerate(captions)]
    table = plan(tmp_path, write_csv(tmp_path / "list.csv", rows))
    assert table["caption_raw"].to_pylist() == captions
    assert table["url"].to_pylist() == [row["url"] for row in rows]
