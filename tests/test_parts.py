"""`--part i/n`: runs beside each other on one work folder do each unit once, and the last one closes the stage."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.small import STAGES, SmallList, results, run, start
from core.errors import ConfigError, WorkFolderError
from core.plan import Part, cut
from core.storage import Folder
from core.work import locked
from dedup.config import DedupConfig
from dedup.keep import run as dedup
from ingest.config import IngestConfig
from ingest.fetch import run as ingest
from shardkit.config import ShardConfig
from shardkit.pack import run as shard


def test_parts_share_all_units_without_overlap() -> None:
    for rows in (0, 1, 7, 50):
        units = cut(rows, 3)
        for count in (1, 2, 5, 30):
            dealt = [unit for i in range(count) for unit in Part(i, count).of(units)]
            assert sorted(dealt, key=lambda unit: unit.id) == units
    for text in ("3", "4/4", "-1/4", "1/0", "1/2/3", "a/b", " 1/2"):
        with pytest.raises(ConfigError, match="as in 3/16"):
            Part.parse(text)
    assert Part.parse("").whole and not Part.parse("0/2").whole


def test_three_runs_at_once_make_what_one_run_makes(small: SmallList, whole: Path, tmp_path: Path) -> None:
    """Workers differ from run to run, as on machines of different sizes."""
    for stage in STAGES:
        options = [("--part", f"{i}/3", "--workers", str(1 + i % 2)) for i in range(3)]
        running = [start(small.command(stage, str(tmp_path), *more)) for more in options]
        said = [process.communicate(timeout=240) for process in running]
        assert [process.returncode for process in running] == [0, 0, 0], said
        assert sum('"left"' not in out.splitlines()[-1] for out, _ in said) >= 1, said
        assert Folder(tmp_path).exists({"shard": "shards"}.get(stage, stage) + "/done.json"), stage
    assert results(str(tmp_path)) == results(str(whole))


def test_parts_one_after_the_other_and_the_last_one_closes(small: SmallList, whole: Path, tmp_path: Path) -> None:
    work = str(tmp_path)
    first = ingest(IngestConfig(**small.settings("ingest", work), workers=1, part="1/2"))
    units = results(str(whole)).keys() & {f"ingest/parts/u{n:06d}.parquet" for n in range(99)}
    assert first == {"part": "1/2", "left": (len(units) + 1) // 2}
    assert ingest(IngestConfig(**small.settings("ingest", work), workers=1, part="1/2")) == first
    last = ingest(IngestConfig(**small.settings("ingest", work), workers=1, part="0/2"))
    assert last["ok"] == small.pictures
    assert ingest(IngestConfig(**small.settings("ingest", work), workers=1, part="1/2")) == last
    assert dedup(DedupConfig(work=work, workers=1, part="0/2"))["left"] == len(units) // 2
    assert shardless(tmp_path)
    assert dedup(DedupConfig(work=work, workers=1))["pairs"] == small.pictures, "a run without --part does what is left"
    config = ShardConfig(**small.settings("shard", work), workers=1, part="2/3")
    assert shard(config)["left"] > shard(replace(config, part="0/3"))["left"] > 0
    assert shard(replace(config, part="1/3"))["samples"] == shard(replace(config, part=""))["samples"]
    assert results(work) == results(str(whole))


def shardless(work: Path) -> bool:
    return not (work / "dedup/decisions.parquet").exists()


def test_a_killed_part_is_done_by_the_same_part_again(
    small: SmallList, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "latency", 0.1)
    command = small.command("ingest", str(tmp_path), "--workers", "1", "--part")
    killed, other = start([*command, "0/2"]), start([*command, "1/2"])
    while not (tmp_path / "ingest/parts/u000000.parquet").exists() and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    said = other.communicate(timeout=120)
    assert other.returncode == 0, said
    assert not (tmp_path / "ingest/done.json").exists()
    assert run([*command, "0/2"])["ok"] == small.pictures
    assert results(str(tmp_path)) == {k: v for k, v in results(str(whole)).items() if k.startswith("ingest/")}


def test_what_parts_cannot_be_told(small: SmallList, whole: Path, tmp_path: Path) -> None:
    config = IngestConfig(**small.settings("ingest", str(whole)), part="0/2")
    with pytest.raises(ConfigError, match="--fresh without --part"):
        ingest(replace(config, fresh=True))
    with pytest.raises(ConfigError, match="--part without --retry-failed"):
        ingest(replace(config, retry_failed=True))
    with pytest.raises(ConfigError, match="--part without --captions"):
        dedup(DedupConfig(work=str(whole), part="0/2", captions="x.csv"))
    with pytest.raises(ConfigError, match="as in 3/16"):
        shard(ShardConfig(work=str(whole), part="2/2"))
    with locked(whole / ".lock", str(whole), "--work"), pytest.raises(WorkFolderError, match="in use by another run"):
        ingest(config)
    with (
        locked(whole / ".lock", str(whole), "--work", shared=True),
        pytest.raises(WorkFolderError, match="in use by another run"),
    ):
        ingest(replace(config, part=""))


def test_results_are_not_thrown_away_under_other_parts(small: SmallList, tmp_path: Path) -> None:
    work = str(tmp_path)
    ingest(IngestConfig(**small.settings("ingest", work), workers=1))
    config = DedupConfig(work=work, workers=1, part="0/2")
    dedup(config)
    max((tmp_path / "ingest/parts").glob("*.parquet")).unlink()  # another input
    with (
        locked(tmp_path / ".lock", work, "--work", shared=True),
        pytest.raises(WorkFolderError, match="while other parts are at work"),
    ):
        dedup(config)
    assert dedup(config)["left"] > 0


def test_a_part_waits_for_its_turn_and_decides_again_under_other_settings(small: SmallList, whole: Path) -> None:
    with locked(whole / ".turn", "turn", "--work"):
        waiting = start(small.command("dedup", str(whole), "--part", "0/2", "--policy", "image"))
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        assert "waiting for another part" in said, said
    out, said = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, said
    assert json.loads(out.splitlines()[-1])["settings"]["policy"] == "image"
    assert dedup(DedupConfig(work=str(whole), workers=1, part="1/2"))["settings"]["policy"] != "image"
