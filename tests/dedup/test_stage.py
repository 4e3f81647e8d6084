"""The stage as a whole: the same result in any order, work used again, and damaged input named."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import ConfigError, DataError, HardwareError, InputError, UsageError, WorkFolderError
from core.storage import TEMPORARY
from core.work import locked
from dedup import minhash
from dedup.config import DedupConfig
from dedup.keep import run
from dedup.tokens import Sets
from tests.dedup.parts import datasketchs_values, decide, decisions, hashes_of, pair, picture, write_parts
from tests.dedup.test_captions import planted


def _rows(n: int = 600) -> list[dict[str, object]]:
    captions = planted(n, seed=3)
    shown = [hashes_of(picture(seed)) for seed in range(40)]
    return [
        pair(
            f"{(i * 7919) % 10007:05d}", captions[i], f"http://x/{i % 450}", i % 400, side=100 + i % 7, **shown[i % 40]
        )
        for i in range(n)
    ]


def test_results_do_not_depend_on_parts_order_or_workers(tmp_path: Path) -> None:
    rows = _rows()
    settings = {"policy": "either", "where": "width > 101"}
    results = []
    for name, order, sizes, workers in (
        ("one", rows, [], 1),
        ("many", rows[::-1], [17, 200, 83], 1),
        ("spread", rows[300:] + rows[:300], [150, 150], 2),
    ):
        write_parts(tmp_path / name, order, sizes)
        summary = run(DedupConfig(work=str(tmp_path / name), **{**settings, "workers": workers}))
        results.append((pq.read_table(tmp_path / name / "dedup" / "decisions.parquet"), summary["dropped"]))
    assert results[0][1] == results[1][1] == results[2][1]
    assert {"where", "image_duplicate"} <= results[0][1].keys()
    for table, _ in results[1:]:
        assert table.equals(results[0][0])


def test_deciding_again_reads_signatures_and_edges(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows(300), sizes=[150])
    first = decide(tmp_path, policy="text", max_images_per_caption=1)
    made = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "dedup").rglob("*")}
    again = decide(tmp_path, policy="text", max_images_per_caption=1, threshold=0.9)
    for path, stamp in made.items():
        if path.parent.name in ("signatures", "sets", "edges") or path.name == "pairs.parquet":
            assert (path.stat().st_mtime_ns, path.stat().st_ino) == stamp, path
    assert again["kept"] > first["kept"]
    expected = decisions(tmp_path)
    fresh = decide(tmp_path, policy="text", max_images_per_caption=1, threshold=0.9, fresh=True)
    assert fresh["dropped"] == again["dropped"] and decisions(tmp_path) == expected


def test_a_finished_stage_returns_its_summary(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows(50))
    first = decide(tmp_path)
    stamp = os.stat(tmp_path / "dedup" / "decisions.parquet").st_mtime_ns
    assert decide(tmp_path) == first
    assert os.stat(tmp_path / "dedup" / "decisions.parquet").st_mtime_ns == stamp
    write_parts(tmp_path, _rows(60))  # another input: it runs again
    assert decide(tmp_path)["pairs"] == 60


def test_a_run_killed_between_files_is_not_taken_for_finished(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows(50))
    decide(tmp_path)
    expected = decisions(tmp_path)
    decide(tmp_path, policy="text", max_images_per_caption=1)
    (tmp_path / "dedup" / "done.json").unlink()  # what a kill before the marker leaves behind
    (tmp_path / "dedup" / "signatures" / ".tmp-1-u000000.parquet").write_bytes(b"half")
    decide(tmp_path)
    assert decisions(tmp_path) == expected
    assert not list((tmp_path / "dedup" / "signatures").glob(".tmp-*"))


def test_clusters_and_the_catalogue(tmp_path: Path) -> None:
    words = "the quick brown fox jumps over a lazy dog"
    write_parts(tmp_path, [pair(f"p{i}", words, f"http://x/{i}", "same" if i < 2 else i) for i in range(3)])
    summary = decide(tmp_path)
    clusters = {
        (r["kind"], r["cluster"]): r for r in pq.read_table(tmp_path / "dedup" / "clusters.parquet").to_pylist()
    }
    assert clusters[("caption", "p0")] == {"kind": "caption", "cluster": "p0", "pairs": 3, "urls": 3, "kept": 2}
    assert clusters[("image", "p0")]["pairs"] == 2 and clusters[("pair", "p0")]["kept"] == 1
    assert summary["clusters"] == 1 and summary["largest"] == [{"pairs": 3, "caption": words, "uid": "p0"}]
    assert {u: r["cluster"] for u, r in decisions(tmp_path).items()} == {"p0": "p0", "p1": "p0", "p2": None}
    assert (tmp_path / "catalog.duckdb").exists()


def test_boilerplate_raises_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_parts(tmp_path, [pair(f"p{i:03d}", "image may contain: person", f"http://x/{i}") for i in range(120)])
    decide(tmp_path)
    assert "120 pairs say nearly the same as 'image may contain: person'" in caplog.text
    assert "120 captions are a machine's description" in caplog.text


def test_file_names_as_captions_raise_an_alarm_though_no_two_are_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["IMG_{}.JPG", "dsc0{}", "holiday-{}.jpeg", "Image {}"]
    rows = [pair(f"p{i:03d}", names[i % 4].format(100 + i), f"http://x/{i}") for i in range(104)]
    rows += [
        pair(f"q{i}", c, f"http://x/q{i}") for i, c in enumerate(("image of 3 dogs", "a file named x.jpg", "", "1"))
    ]
    write_parts(tmp_path, rows)
    assert decide(tmp_path)["boilerplate"] == {"file names": 104}
    assert "104 captions are file names" in caplog.text


def test_pairs_without_hashes_urls_or_captions(tmp_path: Path) -> None:
    rows = [{**pair("a", None, "x"), "url": None}, {**pair("b", "words", "y"), "url": None, "sha256": None}]
    rows += [{**pair("c", "words", "z", "x"), "url": None, "width": None}]  # the bytes of a
    write_parts(tmp_path, rows)
    summary = decide(tmp_path)
    assert summary["kept"] == 3
    assert decisions(tmp_path)["c"]["image_group"] == "a"


def test_nothing_fetched(tmp_path: Path) -> None:
    write_parts(tmp_path, [{**pair("a", "words", "x"), "outcome": "timeout"}])
    assert decide(tmp_path)["pairs"] == 0
    assert pq.read_table(tmp_path / "dedup" / "decisions.parquet").num_rows == 0


def test_bad_input_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no pairs yet; run `pairmill ingest`"):
        decide(tmp_path)
    write_parts(tmp_path, _rows(20), sizes=[10])
    part = tmp_path / "ingest" / "parts" / "u000001.parquet"
    part.write_bytes(part.read_bytes()[:-200])
    with pytest.raises(
        DataError, match=r"u000001.parquet is not a whole Parquet file.*delete it and run `pairmill ingest`"
    ):
        decide(tmp_path)
    (tmp_path / "ingest" / "verb").write_text("adopt")
    with pytest.raises(DataError, match="run `pairmill adopt` again"):
        decide(tmp_path)
    table = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"caption": pa.array([], pa.string())}), table)
    with pytest.raises(InputError, match="found no rows"):
        decide(tmp_path / "w", captions=str(table))
    other = tmp_path / "captions.docx"
    other.write_text("words")
    with pytest.raises(InputError, match=r"expected a file of parquet, csv"):
        decide(tmp_path / "w", captions=str(other))
    with pytest.raises(InputError, match="expected a file"):
        decide(tmp_path / "w", captions=str(part.parent))


def test_datasketchs_signatures_lead_to_the_same_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path, _rows(120))
    decide(tmp_path, policy="text", max_images_per_caption=1, threshold=0.85)
    expected = decisions(tmp_path)
    asked: list[range] = []

    def band_keys(sets: Sets, which: npt.NDArray[np.int64], rows: int, numbers: range) -> npt.NDArray[np.uint32]:
        asked.append(numbers)
        values = datasketchs_values(sets, which).reshape(-1, rows, len(which))[numbers.start : numbers.stop]
        keys = [np.unique(band, axis=1, return_inverse=True)[1].ravel() for band in values]
        return np.array(keys, np.uint32) * np.uint32(0x9E3779B1)  # well mixed, as buckets wants them

    monkeypatch.setattr(minhash, "band_keys", band_keys)
    decide(tmp_path, policy="text", max_images_per_caption=1, threshold=0.85, fresh=True)
    assert asked
    assert decisions(tmp_path) == expected


@pytest.mark.parametrize(
    "lost",
    [
        "decisions.parquet",
        "clusters.parquet",
        "sets/u000000.arrow",
        "signatures/u000000.parquet",
        "edges",
        "pairs.parquet",
    ],
)
def test_files_that_are_gone_are_made_again(tmp_path: Path, lost: str) -> None:
    write_parts(tmp_path, _rows(200), sizes=[100])
    decide(tmp_path, policy="text")
    expected = decisions(tmp_path)
    path = tmp_path / "dedup" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if lost.endswith("s.parquet"):
        decide(tmp_path, policy="text")
    else:
        decide(tmp_path, policy="text", threshold=0.6)
        decide(tmp_path, policy="text")
    assert decisions(tmp_path) == expected
    assert (tmp_path / "dedup" / "clusters.parquet").exists()


@pytest.mark.parametrize("where", ["", "width > 2"])
def test_too_little_memory_is_said_so(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path, _rows(50)[::-1])  # not in order of uid, so that DuckDB sorts
    with monkeypatch.context() as small, pytest.raises(HardwareError, match="DuckDB needs more than the 1e-06 GB"):
        small.setattr("dedup.keep.DUCKDB_GB", 1e-6)
        decide(tmp_path, where=where)
    assert decide(tmp_path, where=where)["pairs"] == 50


@pytest.mark.parametrize("policy", ["image", "either"])
def test_captions_alone_have_no_pictures_to_compare(tmp_path: Path, policy: str) -> None:
    with pytest.raises(ConfigError, match=policy):
        decide(tmp_path, captions="captions.csv", policy=policy)


@pytest.mark.parametrize("name", ["signatures/u000000.parquet", "sets/u000000.arrow", "edges/captions-5.arrow"])
def test_own_files_cut_short_are_named(tmp_path: Path, name: str) -> None:
    write_parts(tmp_path, _rows(100))
    decide(tmp_path, policy="text")
    path = tmp_path / "dedup" / name
    path.write_bytes(path.read_bytes()[:-100])
    if name.startswith("sets"):
        (tmp_path / "dedup" / "edges" / "captions-5.arrow").unlink()
    with pytest.raises(DataError, match=path.name):
        decide(tmp_path, policy="text", threshold=0.9)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("workers", -1), ("threshold", math.nan),
     ("threshold", 0.2), ("max_images_per_caption", 0)],
)  # fmt: skip
def test_settings_out_of_range_are_refused(tmp_path: Path, flag: str, value: float) -> None:
    write_parts(tmp_path, _rows(5))
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}"):
        run(DedupConfig(**{"work": str(tmp_path), flag: value}))


def _stamps(work: Path) -> dict[str, tuple[int, int]]:
    paths = [p for home in ("signatures", "sets") for p in (work / "dedup" / home).glob("u*")]
    return {f"{p.parent.name}/{p.name}": (p.stat().st_mtime_ns, p.stat().st_ino) for p in paths}


def test_parts_that_come_later_are_added_and_the_old_ones_not_signed_again(tmp_path: Path) -> None:
    rows, settings = _rows(300), {"policy": "either", "max_images_per_caption": 2}
    write_parts(tmp_path / "grown", rows[:200], sizes=[100])
    decide(tmp_path / "grown", **settings)
    before = _stamps(tmp_path / "grown")
    write_parts(tmp_path / "whole", rows, sizes=[100, 100])
    decide(tmp_path / "whole", **settings)
    parts = [path / "ingest" / "parts" for path in (tmp_path / "grown", tmp_path / "whole")]
    shutil.copy(parts[1] / "u000002.parquet", parts[0])
    assert decide(tmp_path / "grown", **settings)["pairs"] == 300
    after = _stamps(tmp_path / "grown")
    assert {name: after[name] for name in before} == before and len(after) == 6
    assert decisions(tmp_path / "grown") == decisions(tmp_path / "whole")
    # a part that changed is signed again, and one that went away is forgotten
    write_parts(tmp_path / "other", [*rows[:50], *rows[200:250]])
    shutil.copy(tmp_path / "other" / "ingest" / "parts" / "u000000.parquet", parts[0])
    (parts[0] / "u000002.parquet").unlink()
    assert decide(tmp_path / "grown", **settings)["pairs"] == 200
    final = _stamps(tmp_path / "grown")
    assert final["signatures/u000001.parquet"] == before["signatures/u000001.parquet"] and len(final) == 4
    write_parts(tmp_path / "again", [*rows[:50], *rows[200:250], *rows[100:200]], sizes=[100])
    decide(tmp_path / "again", **settings)
    assert decisions(tmp_path / "grown") == decisions(tmp_path / "again")


def test_decisions_of_another_input_do_not_outlive_it(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows(60))
    decide(tmp_path)
    write_parts(tmp_path, _rows(80))
    with pytest.raises(UsageError):
        decide(tmp_path, where="no such thing")
    assert not (tmp_path / "dedup" / "decisions.parquet").exists()
    assert not (tmp_path / "dedup" / "done.json").exists()


def test_a_folder_in_use_is_said_so(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows(20))
    with (
        locked(tmp_path / ".lock", str(tmp_path), "--work"),
        pytest.raises(WorkFolderError, match="in use by another run"),
    ):
        decide(tmp_path)
    assert decide(tmp_path)["pairs"] == 20


def test_ray_decides_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra")
    for engine in ("local", "ray"):
        write_parts(tmp_path / engine, _rows(120), sizes=[50, 50])
        run(DedupConfig(work=str(tmp_path / engine), engine=engine, workers=2, policy="either"))
    assert decisions(tmp_path / "local") == decisions(tmp_path / "ray")


def test_what_others_are_still_writing_is_not_read(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows(40), [20])
    for home in ("dedup/signatures", "ingest/parts"):
        (tmp_path / home).mkdir(parents=True, exist_ok=True)
        (tmp_path / home / f"{TEMPORARY}elsewhere-1-u000000.parquet").write_bytes(b"half a file")
    assert decide(tmp_path)["pairs"] == 40


def test_a_dry_run_takes_nothing_away(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows(40), [20])
    decide(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "dedup").glob("*.*")}
    assert decide(tmp_path, dry_run=True, where="false")["kept"] == 0
    with pytest.raises(ConfigError, match="--dry-run or --fresh"):
        decide(tmp_path, dry_run=True, fresh=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "dedup").glob("*.*")} == before
