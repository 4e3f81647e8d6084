"""Comparing in units: however the work is cut, and whoever does it, the same groups."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.storage import Folder
from dedup import bands, edges
from dedup.clusters import components, strongest_forest
from dedup.config import DedupConfig
from dedup.keep import run
from dedup.match import Edges
from tests.dedup.parts import decisions, hashes_of, pair, picture, write_parts

COUNT = 120


def _rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(4)
    rows = []
    for i in range(COUNT):
        words = [f"w{int(w)}" for w in np.random.default_rng(i - i % 3).integers(0, 500, 12)]
        words[0] = f"v{i % 3}" if i % 2 else words[0]
        shown = hashes_of(picture(i // 4))
        rows.append(pair(f"{int(rng.integers(1 << 40)):011x}-{i:03d}", " ".join(words), f"http://x/{i}", i, **shown))
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    work = tmp_path_factory.mktemp("whole")
    write_parts(work, _rows(), sizes=[50])
    run(DedupConfig(work=str(work), workers=1, policy="either", method="components"))
    found = decisions(work)
    assert sum(not row["kept"] for row in found.values()) > COUNT / 2
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_however_the_work_is_cut_the_decisions_are_the_same(
    whole: dict[str, Any], tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("KEYS", 3 * COUNT), ("ROWS", 25)):
        monkeypatch.setattr(edges, name, size)
    if workers == 1:
        monkeypatch.setattr(edges, "GROUPED", 50)  # and of each band one range of keys after the other
    write_parts(tmp_path, _rows(), sizes=[50])
    run(DedupConfig(work=str(tmp_path), workers=workers, policy="either", method="components"))
    assert decisions(tmp_path) == whole
    assert not list((tmp_path / "dedup/edges").glob("*.units")), "files of units go when the edges are kept"


def test_units_that_are_there_are_used_and_those_of_other_data_are_not(
    whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "KEYS", 3 * COUNT)
    write_parts(tmp_path, _rows(), sizes=[50])
    compare = edges._compare
    monkeypatch.setattr(edges, "_compare", _broken)
    with pytest.raises(ZeroDivisionError):
        run(DedupConfig(work=str(tmp_path), workers=1, policy="either", method="components"))
    units = sorted((tmp_path / "dedup/edges").glob("*.units/pairs/*"))
    stamps = [path.stat().st_mtime_ns for path in units]
    assert len(units) > 3
    with pytest.raises(ZeroDivisionError):
        run(DedupConfig(work=str(tmp_path), workers=1, policy="either", method="components"))
    assert [path.stat().st_mtime_ns for path in units] == stamps, "nothing is brought together twice"
    write_parts(tmp_path, _rows()[: COUNT // 2], sizes=[50])
    with pytest.raises(ZeroDivisionError):
        run(DedupConfig(work=str(tmp_path), workers=1, policy="either", method="components"))
    assert all(path.stat().st_mtime_ns not in stamps for path in units if path.exists()), "the data are others"
    monkeypatch.setattr(edges, "_compare", compare)
    write_parts(tmp_path, _rows(), sizes=[50])
    run(DedupConfig(work=str(tmp_path), workers=1, policy="either", method="components"))
    assert decisions(tmp_path) == whole


def test_on_a_store_a_run_whose_units_another_one_cleared_away_takes_the_edges_that_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores have no locks; two parts that finish together both close the stage."""
    write_parts(tmp_path, _rows(), sizes=[50])
    work = Folder(f"memory://{tmp_path.name}")
    for name in Folder(tmp_path).list("ingest/parts/*"):
        work.write(name, Folder(tmp_path).read(name))
    config = DedupConfig(work=work.url, workers=1, policy="either", method="components")
    compare = edges._compare

    def late(*given: Any, **more: Any) -> None:
        monkeypatch.setattr(edges, "_compare", compare)
        run(config)
        compare(*given, **more)

    monkeypatch.setattr(edges, "_compare", late)
    kept = run(config)["kept"]
    run(dataclasses.replace(config, work=str(tmp_path)))
    assert kept == run(dataclasses.replace(config, work=str(tmp_path)))["kept"] < COUNT
    for name in ("dedup/decisions.parquet", "dedup/clusters.parquet"):
        assert work.read(name) == Folder(tmp_path).read(name)
    assert not work.list("dedup/edges/*.units")


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def test_a_strongest_forest_joins_what_its_edges_join_at_every_similarity() -> None:
    rng = np.random.default_rng(2)
    pairs = bands.pair_keys(rng.integers(0, 60, 400), rng.integers(0, 60, 400))
    found = Edges(*bands.unpair(pairs), rng.integers(0, 8, len(pairs)).astype(np.float32) / 8)
    forest = strongest_forest(found)
    assert len(forest.a) == 59
    for similarity in (0.0, 0.25, 0.5, 0.75, 0.875, 1.0):
        all_of, few = found.at_least(similarity), forest.at_least(similarity)
        assert (components(60, all_of.a, all_of.b) == components(60, few.a, few.b)).all()


def test_nothing_to_compare_makes_no_files(tmp_path: Path) -> None:
    write_parts(tmp_path, _rows()[:1])
    run(DedupConfig(work=str(tmp_path), workers=1))
    assert not list((tmp_path / "dedup/edges").glob("*.units"))
