"""The whole way through the command line, against the fault server; and every kind of bad input at its door.

Kill -9 inside a stage is tested beside each stage (tests/ingest, tests/shardkit, tests/train).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
import webdataset

from demo.faults import KINDS
from demo.server import DemoServer
from demo.world import World, make_world, write_urls

ROOT = Path(__file__).parent.parent
PICTURES = 120


@dataclass(frozen=True)
class Mill:
    """A served world, the recipe that mills it, and what its first run printed."""

    world: World
    urls: Path
    recipe: Path
    work: Path
    summaries: dict[str, Any]


def pairmill(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a verb in a process of its own, as a user would; check how it ended."""
    command = [sys.executable, "-m", "cli", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    """One world, milled once, looked at by many tests."""
    home = tmp_path_factory.mktemp("mill")
    world = make_world(home / "world", pictures=PICTURES)
    (world.eval_dir / "templates.txt").write_text("\n".join(world.templates))
    with DemoServer(world.folder) as server:
        urls = write_urls(world, server.base_url)
        recipe = home / "recipe.toml"
        recipe.write_text(f"""
            work = "{home / "work"}"
            [ingest]
            urls = "{urls}"
            size = 64
            allow_private = true
            unit_urls = 50
            [dedup]
            where = "caption NOT LIKE '%ring%'"
            [shard]
            size = 48
            samples_per_shard = 30
            [train]
            model = "test-32"
            precision = "fp32"
            batch_size = 30
            epochs = 2
            [eval]
            zero_shot = "{world.eval_dir}"
            [report]
            """)
        yield Mill(world, urls, recipe, home / "work", last_json(pairmill("run", recipe, "--json")))


def sql(mill: Mill, query: str) -> list[dict[str, Any]]:
    found = last_json(pairmill("sql", query, "--work", mill.work, "--json"))
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def test_every_row_of_the_list_has_an_outcome_that_fits_what_was_planted(mill: Mill) -> None:
    rows = sql(mill, "SELECT planted, outcome, count(*) AS n FROM pairs GROUP BY ALL")
    assert sum(row["n"] for row in rows) == mill.summaries["ingest"]["rows"] == sum(mill.world.counts.values())
    for row in rows:
        allowed = KINDS[row["planted"]].outcomes if row["planted"] in KINDS else ("ok",)
        assert row["outcome"] in allowed, row
    assert Counter({row["planted"]: 0 for row in rows}).keys() == {kind for kind, n in mill.world.counts.items() if n}


def test_the_funnel_adds_up(mill: Mill) -> None:
    ingest, dedup, shard, train = (mill.summaries[name] for name in ("ingest", "dedup", "shard", "train"))
    assert ingest["ok"] == dedup["pairs"] > dedup["kept"] > 0
    assert dedup["kept"] + sum(dedup["dropped"].values()) == dedup["pairs"]
    assert (
        dedup["dropped"]["where"]
        == sql(mill, "SELECT count(*) AS n FROM pairs WHERE outcome = 'ok' AND caption LIKE '%ring%'")[0]["n"]
    )
    assert shard["samples"] <= dedup["kept"]
    assert train["samples_seen"] == train["steps"] * 30 == 2 * (shard["samples"] // 30) * 30
    funnel = list(mill.summaries["report"]["funnel"].values())
    assert funnel[0] == ingest["rows"] and funnel == sorted(funnel[:-1], reverse=True) + funnel[-1:]


def test_every_dropped_pair_has_a_reason_and_every_duplicate_its_survivor(mill: Mill) -> None:
    with duckdb.connect(str(mill.work / "catalog.duckdb"), read_only=True) as connection:
        bad = connection.execute(
            """SELECT count(*) FROM decisions d LEFT JOIN decisions s ON s.uid = d.survivor
            WHERE (d.kept AND d.reason IS NOT NULL) OR (NOT d.kept AND d.reason IS NULL)
               OR (d.reason LIKE '%duplicate' AND (s.uid IS NULL OR NOT s.kept OR d.evidence IS NULL))"""
        ).fetchone()
    assert bad == (0,)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # its files
def test_webdataset_reads_the_shards_unchanged(mill: Mill) -> None:
    samples = pq.read_table(mill.work / "shards" / "samples.parquet").to_pylist()
    tars = [str(mill.work / "shards" / name) for name in sorted({row["shard"] for row in samples})]
    read = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))
    assert [sample["__key__"] for sample in read] == [row["key"] for row in samples]
    for sample, row in zip(read, samples, strict=True):
        assert len(sample["jpg"]) == row["jpg_size"]
        assert sample["txt"].decode() == row["captions"][0]
        assert min(row["width"], row["height"]) <= 48


def test_the_model_was_measured_and_the_report_written(mill: Mill) -> None:
    zero_shot = mill.summaries["eval"]["zero_shot"]
    assert zero_shot["classes"] == len(mill.world.class_names)
    assert 0 <= zero_shot["accuracy"] <= 1
    page = (mill.work / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)</script>" not in page, "a hostile caption stays text"
    assert not re.search(r"""(src|href|action)\s*=\s*["']?\s*(https?:)?//""", page), "the page loads nothing"


def test_a_second_run_does_nothing_again_and_says_the_same(mill: Mill) -> None:
    before = {path: path.stat().st_mtime_ns for path in mill.work.rglob("*.tar")}
    again = last_json(pairmill("run", mill.recipe, "--json"))
    assert again["train"] == mill.summaries["train"]
    assert again["dedup"]["kept"] == mill.summaries["dedup"]["kept"]
    assert {path: path.stat().st_mtime_ns for path in mill.work.rglob("*.tar")} == before


def test_other_verbs_read_the_same_folder(mill: Mill) -> None:
    verified = last_json(pairmill("verify", "--deep", "--work", mill.work, "--json"))
    assert (verified["samples"], verified["bad"]) == (mill.summaries["shard"]["samples"], [])
    assert last_json(pairmill("audit", "--work", mill.work, "--json"))
    assert "Funnel" in pairmill("audit", "--work", mill.work).stdout
    exported = mill.work / "exported"
    pairmill("export", "--work", mill.work, "--out", exported)
    assert (exported / "open_clip_config.json").exists()


def complaint(*args: object, code: int) -> str:
    """The one sentence with which a command refuses."""
    done = pairmill(*args, code=code)
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("pairmill: ")]
    assert len(said) == 1, done.stderr
    return said[0]


def test_bad_input_is_refused_in_one_sentence(mill: Mill, tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("url,caption\n")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("link,caption\nhttp://127.0.0.1/a.jpg,a\n")
    file = tmp_path / "file"
    file.write_text("not a folder")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[ingest]\nurls = 'x.csv'\nszie = 3\n")

    said = complaint("ingest", wrong, "--work", tmp_path / "w", code=2)
    assert "'url'" in said and "link" in said
    assert "empty" in complaint("ingest", empty, "--work", tmp_path / "w", code=2)
    assert "found none" in complaint("ingest", tmp_path / "no.csv", "--work", tmp_path / "w", code=2)
    assert "cannot write" in complaint("ingest", mill.urls, "--work", file / "work", code=3)
    assert "did you mean 'size'" in complaint("run", recipe, code=2)
    assert "pairmill ingest" in complaint("dedup", "--work", tmp_path / "new", code=2)
    assert "pairmill ingest" in complaint("shard", "--work", tmp_path / "new", code=2)
    said = complaint("ingest", mill.urls, "--work", mill.work, "--size", 99, "--allow-private", code=4)
    assert "99" in said and "--fresh" in said
    assert "parser error" in complaint("sql", "SELEC 1", "--work", mill.work, code=2).lower()
    assert "did you mean" in complaint("train", "--work", mill.work, "--model", "ViT-B-31", code=2)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="the machine has a GPU")
def test_a_gpu_that_is_not_there(mill: Mill) -> None:
    said = complaint("train", "--work", mill.work, "--name", "gpu", "--device", "cuda", code=6)
    assert "GPU" in said or "cuda" in said.lower()


def test_shards_that_changed_are_noticed(mill: Mill, tmp_path: Path) -> None:
    work = tmp_path / "work"
    pairmill("run", mill.recipe, "--work", work)
    shard = sorted((work / "shards").glob("*.tar"))[0]
    shard.write_bytes(shard.read_bytes() + b"\0" * 512)
    train = ("train", "--work", work, "--name", "other", "--model", "test-32", "--batch-size", 30)
    assert shard.name in complaint(*train, code=5)
    bad = pairmill("verify", "--work", work, "--json", code=5)
    assert shard.name in json.dumps(last_json(bad)["bad"])
    shard.unlink()
    assert shard.name in complaint(*train, code=5)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 900 kB, which only root can mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_stops_cleanly_and_goes_on_when_there_is_room(mill: Mill, small_disk: Path) -> None:
    ingest = ("ingest", mill.urls, "--work", small_disk / "work", "--size", 128, "--allow-private", "--unit-urls", 30)
    assert "disk is full" in complaint(*ingest, code=3)
    finished = {p: p.stat().st_mtime_ns for p in (small_disk / "work/ingest/parts").glob("*.parquet")}
    assert finished, "units that were finished before stay"
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert last_json(pairmill(*ingest, "--json"))["rows"] == mill.summaries["ingest"]["rows"]
    assert {p: p.stat().st_mtime_ns for p in finished} == finished
