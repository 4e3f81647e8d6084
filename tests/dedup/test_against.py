"""Decontamination: every form of an evaluation set, what it removes, and what is said of it."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from core.errors import DataError, InputError
from tests.dedup.parts import decide, decisions, hashes_of, kept, pair, picture, write_parts

LEAK = "a brown dog runs over the green grass in the park"
NEAR = "a brown dog runs over the green grass in the garden"


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(seed)).save(buffer, "PNG")
    return buffer.getvalue()


def _rows() -> list[dict[str, object]]:
    """Pictures 0 to 4, each with a caption of its own; 3 is shown mirrored; 4 says nearly what the set says."""
    shown = {i: picture(i) for i in (0, 1, 2, 4)}
    shown[3] = np.asarray(ImageOps.mirror(Image.fromarray(picture(3))))
    captions = [
        "first words of all the pairs here",
        "second words of all these pairs",
        "a dog",
        "fourth words of the lot",
        NEAR,
    ]
    return [pair(f"p{i}", captions[i], f"http://x/{i}", **hashes_of(shown[i])) for i in range(5)]


def _folder(root: Path) -> Path:
    (root / "set" / "class_a").mkdir(parents=True)
    (root / "set" / "class_a" / "one.png").write_bytes(png(1))
    (root / "set" / "three.png").write_bytes(png(3))
    (root / "set" / "three.txt").write_text(LEAK)
    (root / "set" / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    return root / "set"


def _tars(root: Path) -> Path:
    files = {
        "00.png": png(1), "00.txt": b"a dog", "01.png": png(3), "01.json": json.dumps({"captions": ["a dog", LEAK]}).encode(),
        "02.jpg": b"\xff\xd8 no picture", "02.txt": b"x",
    }  # fmt: skip
    (root / "set").mkdir()
    with tarfile.open(root / "set" / "00000.tar", "w") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return root / "set"


def _pictures_in_parquet(root: Path) -> Path:
    rows = {
        "image": [
            {"bytes": png(1), "path": "1.png"},
            {"bytes": png(3), "path": None},
            {"bytes": b"no picture", "path": ""},
        ],
        "sentences": [["a dog"], ["a dog", LEAK], None],
    }
    pq.write_table(pa.table(rows), root / "set.parquet")
    return root / "set.parquet"


def _work(root: Path) -> Path:
    rows = [pair(f"e{i}", c, f"http://eval/{i}", **hashes_of(picture(i))) for i, c in ((1, "a dog"), (3, LEAK))]
    write_parts(root / "set", [*rows, {**pair("e5", LEAK, "http://x/0"), "outcome": "timeout"}])
    return root / "set"


@pytest.mark.parametrize("make", [_folder, _tars, _pictures_in_parquet, _work])
def test_every_form_of_a_set_removes_the_same(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    write_parts(tmp_path / "work", _rows(), sizes=[2])
    summary = decide(tmp_path / "work", against=(str(make(tmp_path)),))
    found = decisions(tmp_path / "work")
    assert kept(tmp_path / "work") == {"p0", "p2"}  # "a dog" alone is no leak
    assert {u: (found[u]["reason"], found[u]["evidence"]) for u in ("p1", "p3", "p4")} == {
        "p1": ("against:set", "image_hash"), "p3": ("against:set", "image_hash"), "p4": ("against:set", "minhash"),
    }  # fmt: skip
    assert found["p4"]["similarity"] == pytest.approx(9 / 11) and found["p4"]["survivor"] is None
    assert found["p1"]["similarity"] > 0.98 and found["p3"]["similarity"] > 0.98
    assert summary["dropped"] == {"against:set": 3}
    (report,) = summary["against"]
    assert (report["matched"], report["removed"], report["items_matched"]) == (3, 3, 2)
    assert report["evidence"] == {"image_hash": 2, "minhash": 1}
    table = pq.read_table(tmp_path / "work" / "dedup" / "against.parquet").to_pylist()
    assert [(r["uid"], r["evidence"]) for r in table] == [("p1", "image_hash"), ("p3", "image_hash"), ("p4", "minhash")]
    assert table[1]["item"] == table[2]["item"] != table[0]["item"] and table[2]["caption"] == LEAK


def test_urls_bytes_and_equal_captions_are_known_as_such(tmp_path: Path) -> None:
    rows = [pair("a", "the words of a", "http://x/a"), pair("b", "the words of b", "http://x/b", "body"),
            pair("c", f"{LEAK}!", "http://x/c"), pair("d", "the words of d", "http://x/d")]  # fmt: skip
    write_parts(tmp_path / "work", rows)
    known = pa.table({"url": ["http://x/a", None], "sha256": [None, rows[1]["sha256"]], "TEXT": [None, LEAK.upper()]})
    pq.write_table(known, tmp_path / "eval.parquet")
    decide(tmp_path / "work", against=(str(tmp_path / "eval.parquet"),))
    found = {u: (r["evidence"], r["similarity"]) for u, r in decisions(tmp_path / "work").items() if not r["kept"]}
    assert found == {"a": ("url", 1.0), "b": ("sha256", 1.0), "c": ("caption", 1.0)}


def test_bare_captions_against_captions(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(f"caption\n{NEAR}\nsomething else in so many words\na dog\n")
    (tmp_path / "eval.tsv").write_text(f"caption\tn\n{LEAK}\t1\na dog\t2\n")
    summary = decide(
        tmp_path / "work", captions=str(tmp_path / "data.csv"), against=(str(tmp_path / "eval.tsv"),), threshold=0.75
    )
    assert summary["kept"] == 2 and summary["against"][0]["captions_too_short"] == 1
    assert summary["dropped"] == {"against:eval": 1}


def test_sets_are_counted_each_and_held_out_rows_stay(tmp_path: Path) -> None:
    write_parts(tmp_path / "work", _rows())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(1))
    (tmp_path / "two" / "y.png").write_bytes(png(2))
    (tmp_path / "two" / "z.png").write_bytes(png(1))  # the same picture is found twice
    sets = (str(tmp_path / "one"), str(tmp_path / "two"))
    dry = decide(tmp_path / "work", against=sets, holdout="uid = 'p2'", dry_run=True)
    assert [(r["rule"], r["alone"], r["in_sequence"]) for r in dry["rules"]] == [
        ("holdout", 0, 0), ("against:one", 1, 1), ("against:two", 1, 0),
    ]  # fmt: skip
    summary = decide(tmp_path / "work", against=sets, holdout="uid = 'p2'")
    assert [(r["set"], r["matched"], r["removed"]) for r in summary["against"]] == [("one", 1, 1), ("two", 2, 0)]
    assert [r["items_matched"] for r in summary["against"]] == [1, 3]
    assert decisions(tmp_path / "work")["p2"]["kept"]


def test_a_set_that_changed_decides_anew_and_one_that_did_not_is_not_read_again(tmp_path: Path) -> None:
    write_parts(tmp_path / "work", _rows())
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "x.png").write_bytes(png(1))
    settings = {"against": (str(tmp_path / "set"),)}
    decide(tmp_path / "work", **settings)
    (read,) = (tmp_path / "work" / "dedup" / "against").glob("*/*.parquet")
    stamp = read.stat().st_mtime_ns
    decide(tmp_path / "work", **settings, threshold=0.9)
    assert read.stat().st_mtime_ns == stamp
    (tmp_path / "set" / "y.png").write_bytes(png(2))
    assert decide(tmp_path / "work", **settings, threshold=0.9)["kept"] == 3
    decide(tmp_path / "work")
    assert len(kept(tmp_path / "work")) == 5 and not (tmp_path / "work" / "dedup" / "against.parquet").exists()


def test_a_set_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    write_parts(tmp_path / "work", _rows())
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.parquet").write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"label": [1]}), tmp_path / "labels.parquet")
    (tmp_path / "none.csv").write_text("caption\n")
    pq.write_table(pa.table({"image": ["a path"], "caption": [None]}), tmp_path / "nothing.parquet")
    pq.write_table(pa.table({"image_hash": [b"ab"]}), tmp_path / "short.parquet")
    pq.write_table(pa.table({"sha256": [3]}), tmp_path / "number.parquet")
    (tmp_path / "cut.tar").write_bytes(_tars(tmp_path).joinpath("00000.tar").read_bytes()[:9000])
    for name, error, words in (
        ("nowhere", InputError, "found none of them"), ("empty", InputError, "found none of them"),
        ("words.parquet", InputError, "cannot be read; DuckDB says"),
        ("labels.parquet", InputError, "expected a column caption, url, image or image_hash, found label"),
        ("none.csv", InputError, "found none"), ("nothing.parquet", InputError, "found none"),
        ("short.parquet", InputError, "expected 32 bytes in the column image_hash, found b'ab'"),
        ("number.parquet", InputError, "expected 32 bytes in the column sha256, found 3"),
        ("cut.tar", DataError, "cut.tar"), ("nothing*.csv", InputError, "expected a file at"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            decide(tmp_path / "work", against=(str(tmp_path / name),))


@pytest.mark.parametrize("column", ["sha256", "image_hash"])
def test_hashes_as_bytes_and_in_hexadecimal_are_the_same(tmp_path: Path, column: str) -> None:
    rows = [{**row, **hashes_of(picture(i))} for i, row in enumerate(_rows())]
    write_parts(tmp_path / "work", rows)
    values = [row[column] for row in rows[:2]]
    as_bytes = [bytes.fromhex(v) if isinstance(v, str) else v for v in values]
    pq.write_table(pa.table({column: as_bytes}), tmp_path / "bytes.parquet")
    pq.write_table(pa.table({column: [v.hex() for v in as_bytes]}), tmp_path / "hex.parquet")
    found = []
    for name in ("bytes", "hex"):
        summary = decide(tmp_path / "work", against=(str(tmp_path / f"{name}.parquet"),))
        found.append((kept(tmp_path / "work"), summary["against"][0]["matched"]))
    assert found[0] == found[1] and found[0][1] >= 2


def test_recall_of_near_captions_and_pictures_of_a_larger_set(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    words = [[f"w{w}" for w in rng.choice(5000, 12, replace=False)] for _ in range(400)]
    near = [[*w[:-1], "other"] for w in words]  # 11 of 13 words
    rows = [pair(f"p{i:03d}", " ".join(w), f"http://x/{i}", **hashes_of(picture(i % 40))) for i, w in enumerate(near)]
    rows += [pair(f"q{i:03d}", f"nothing like it number {i} q{i} r{i} s{i}", f"http://y/{i}") for i in range(400)]
    write_parts(tmp_path / "work", rows, sizes=[300])
    pq.write_table(pa.table({"caption": [" ".join(w) for w in words]}), tmp_path / "eval.parquet")
    summary = decide(tmp_path / "work", against=(str(tmp_path / "eval.parquet"),))
    assert summary["against"][0]["matched"] >= 396
    assert all(row["uid"].startswith("p") for row in pq.read_table(tmp_path / "work/dedup/against.parquet").to_pylist())
