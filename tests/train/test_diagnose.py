"""What runs and real trials say, where the cause is made on purpose."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from core.errors import ConfigError, InputError
from core.images import encode_jpeg, read_header
from core.storage import Folder
from shardkit.config import ShardConfig
from shardkit.pack import run as pack
from shardkit.reader import ShardSet
from tests.shardkit.parts import World
from tests.train.shards import make_work, photograph
from train import diagnose, remedies
from train.card import over_ranks
from train.config import DiagnoseConfig, TrainConfig
from train.judge import THRESHOLDS, Evidence
from train.models import model_config
from train.trials import Bench, shrunk

# ---------------------------------------------------------------- metrics of a run


def metrics(work: Path, rows: list[dict[str, Any]], name: str = "main") -> None:
    home = work / "runs" / name
    home.mkdir(parents=True)
    (home / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "wai')


def shown(found: dict[str, Any]) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(diagnose.render(found))
    return capture.get()


def row(
    step: int, *, decode: float, compute: float = 0.1, ranks: int = 1, worst: float = 0.0, comm: float = 0.0
) -> dict[str, Any]:
    """A row of a run; `worst` is the wait of the last rank, whose batches the others then wait for in collectives."""

    def place(mean: float, most: float = 0.0) -> dict[str, float]:
        return {
            "p50": mean,
            "p99": 2 * mean,
            "mean": mean,
            "min": mean / 2,
            "max": most or mean,
            "slowest_rank": ranks - 1,
        }

    own = decode + compute - comm
    waits = {"decode": place(decode, worst), "h2d": place(0.0), "compute": place(compute), "reader": place(0.001),
             "decode_busy": place(0.05), "comm": place(2 * comm), "own": place(own, own - decode + worst)}  # fmt: skip
    return {
        "step": step,
        "pairs_per_s": 100.0,
        "wait_share": decode / (decode + compute),
        "waits": waits,
        "ranks": ranks,
    }


def test_a_run_that_waits_for_decoding(tmp_path: Path) -> None:
    metrics(tmp_path, [row(10 * i, decode=0.1) for i in range(1, 6)])
    found = diagnose.run(DiagnoseConfig(work=str(tmp_path)))
    assert found["verdict"] == "decode_bound"
    assert found["wait_share"] == pytest.approx(0.5)
    assert found["ceiling_gain"] == pytest.approx(1.0)
    assert found["split"]["decode"]["p99"] == pytest.approx(0.2)
    assert found["exit_code"] == 0
    json.dumps(found)


def test_a_wait_over_the_budget_has_an_exit_code(tmp_path: Path) -> None:
    metrics(tmp_path, [row(10 * i, decode=0.1) for i in range(1, 6)])
    assert diagnose.run(DiagnoseConfig(work=str(tmp_path), budget=0.2))["exit_code"] == 3
    assert diagnose.run(DiagnoseConfig(work=str(tmp_path), budget=0.6))["exit_code"] == 0


def test_one_slow_rank_is_named(tmp_path: Path) -> None:
    metrics(tmp_path, [row(10 * i, decode=0.03, worst=0.12, ranks=4) for i in range(1, 6)])
    found = diagnose.run(DiagnoseConfig(work=str(tmp_path)))
    assert (found["verdict"], found["cause"]) == ("straggler", "slow_rank")
    assert "Rank 3" in found["says"] and "waits for its data" in found["says"]
    assert found["fixes"][0]["predicted_gain"] > 0.5


def test_ranks_that_are_slow_in_turn_are_no_straggler(tmp_path: Path) -> None:
    rows = [row(10 * i, decode=0.0, worst=0.1, ranks=4) for i in range(1, 7)]
    for i, one in enumerate(rows):
        one["waits"]["own"]["slowest_rank"] = i % 3
    metrics(tmp_path, rows)
    assert diagnose.run(DiagnoseConfig(work=str(tmp_path)))["verdict"] != "straggler"


def test_collectives_that_take_long_on_every_rank(tmp_path: Path) -> None:
    metrics(tmp_path, [row(10 * i, decode=0.0, compute=0.2, comm=0.1, ranks=4) for i in range(1, 6)])
    found = diagnose.run(DiagnoseConfig(work=str(tmp_path)))
    assert (found["verdict"], found["cause"]) == ("communication_bound", "slow_collectives")
    assert found["measured"]["comm_share"] == pytest.approx(0.5)
    assert found["split"]["comm"]["share"] == pytest.approx(1.0)
    assert found["fixes"][0]["predicted_gain"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("number", "words"), [(1, "Fix 1 (spend the effort"), (2, "There is no fix 2.")])
def test_the_diagnosis_stays_where_no_fix_can_be_tried(tmp_path: Path, number: int, words: str) -> None:
    metrics(tmp_path, [row(10 * i, decode=0.0) for i in range(1, 6)])
    found = diagnose.run(DiagnoseConfig(work=str(tmp_path), apply=number))
    assert found["verdict"] == "not_input_bound" and found["exit_code"] == 0
    assert found["applied"]["fix"] is found["applied"]["measured_gain"] is None
    page = shown(found)
    assert "What to do" in page and words in page and "Nothing was tried." in page


def test_what_gpus_did_is_a_line_of_the_page(tmp_path: Path) -> None:
    rows = [
        {**row(10 * i, decode=0.0, ranks=2), "gpu": over_ranks([{"busy": 0.5}, {"busy": 0.3}])} for i in range(1, 6)
    ]
    metrics(tmp_path, rows)
    found = diagnose.run(DiagnoseConfig(work=str(tmp_path)))
    assert found["verdict"] == "overhead_bound" and found["measured"]["busy"] == pytest.approx(0.4)
    page = shown(found)
    assert "GPU busy 40% of the time (the idlest 30%)" in page and "rank 1 longest, as in 100% of the intervals" in page


def test_nothing_to_diagnose(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pairmill shard"):
        diagnose.run(DiagnoseConfig(work=str(tmp_path)))
    for wrong in ({"budget": 10.0}, {"budget": math.nan}, {"seconds": math.nan}, {"seconds": math.inf}):
        with pytest.raises(ConfigError, match=r"0\.1 for 10 %"):
            diagnose.run(DiagnoseConfig(work=str(tmp_path), **wrong))
    with pytest.raises(ConfigError, match="--seconds above 0"):
        diagnose.run(DiagnoseConfig(work=str(tmp_path), seconds=0, apply=1))


# ---------------------------------------------------------------- real trials
# What they measure is this machine's; whether a verdict is right is tested on recorded evidence (test_judge.py) and by
# bench/diagnose.py, which makes each cause.


def make_large(work: Path, pictures: int = 32) -> Path:
    """Shards of pictures of 384 x 288 for a model that takes 32 x 32."""
    world = World(work)
    for number in range(pictures):
        pixels = np.ascontiguousarray(photograph(number, 64, 48).repeat(6, 0).repeat(6, 1))
        world.add(number, [f"picture {number}"], body=encode_jpeg(pixels, 90))
    world.write()
    pack(ShardConfig(work=str(work), workers=1, size=(2000,)))
    return work


def bench_of(work: Path, **values: Any) -> Bench:
    settings = TrainConfig(work=str(work), model="test-32", precision="fp32", device="cpu", batch_size=8, **values)
    return Bench(settings, 8, 1, torch.device("cpu"))


def test_the_trials_train_the_runs_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_work(tmp_path, 32)
    (tmp_path / "runs/main").mkdir(parents=True)
    recorded = {"model": "test-32", "patch_dropout": 0.5, "compile": True, "checkpointing": True, "batch_size": 16}
    (tmp_path / "runs/main/config.json").write_text(json.dumps({"as_run": recorded}))
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *_, **__: compiled.append(type(self).__name__))
    config = DiagnoseConfig(work=str(tmp_path))
    settings = diagnose._settings(config, diagnose._recorded(Folder(str(tmp_path)), "main"))
    bench = Bench(settings, settings.batch_size, 1, torch.device("cpu"))
    bench._stepper()
    assert bench.shape == dataclasses.replace(model_config("test-32"), patch_dropout=0.5)
    assert settings.checkpointing and compiled == ["VisionTower"]


def test_a_diagnosis_from_trials_alone(tmp_path: Path) -> None:
    make_large(tmp_path)
    found = diagnose.run(DiagnoseConfig(work=str(tmp_path), model="test-32", batch_size=8, seconds=0.2))
    assert found["data"] == {"progressive": 0.0, "oversize": pytest.approx(384 * 288 / 32**2), "quarantined": 0}
    known = found["measured"]
    rates = ("rate", "read_rate", "decode_rate", "loader_rate", "model_rate", "double_rate")
    assert all(known[name] > 0 for name in rates)
    tried = {fix["apply"] for fix in found["fixes"] if fix["apply"]}
    assert set(known["rehearsed"]) == tried and all(rate > 0 for rate in known["rehearsed"].values())
    assert 0 < known["small_bytes"] < 0.5
    assert sum(found["split"][place]["share"] for place in diagnose.PLACES) == pytest.approx(1, abs=0.2)
    assert [stage["slowest"] for stage in found["stages"]].count(True) == 1
    assert found["verdict"] in (*THRESHOLDS, "not_input_bound") and found["fixes"][0]["cause"] == found["cause"]
    json.dumps(found)
    page = shown(found)
    for words in ("A step", "Stages", "← bottleneck", "What to do", "times the area of the model's input"):
        assert words in page


def test_a_fix_that_cannot_be_tried_is_skipped_and_named(tmp_path: Path) -> None:
    bench = bench_of(make_large(tmp_path))
    fixes = [
        {"fix": "more cores", "predicted_gain": 0.9, "apply": None},
        {"fix": "smaller pictures", "predicted_gain": 0.5, "apply": "smaller"},
    ]
    before = Evidence(wait_share=0.0, steps=9, rate=1.0)
    config = DiagnoseConfig(work=str(tmp_path), apply=1, seconds=0.05)
    applied = diagnose._apply(config, fixes, bench, before)
    assert (applied["number"], applied["fix"]) == (2, "smaller pictures") and applied["measured_gain"] > -1
    assert applied["note"] == "Fix 1 (more cores) cannot be tried from here."
    assert diagnose._apply(dataclasses.replace(config, apply=2), fixes, bench, before)["note"] is None


def test_too_few_samples_to_try_a_fix_on_leave_the_diagnosis(tmp_path: Path) -> None:
    bench = bench_of(make_large(tmp_path, 8))
    bench.batch_size = 100  # more than there are
    fixes = [{"fix": "smaller pictures", "predicted_gain": 0.5, "apply": "smaller"}]
    before = Evidence(wait_share=0.0, steps=9, rate=1.0)
    applied = diagnose._apply(DiagnoseConfig(work=str(tmp_path), apply=1, seconds=0.05), fixes, bench, before)
    assert applied["fix"] is None and "at least one batch of 100 samples" in applied["note"]


@pytest.mark.parametrize("kind", ["workers", "batch", "local", "smaller", "precision"])
def test_every_remedy_can_be_tried(tmp_path: Path, kind: str) -> None:
    trial = remedies.measure(kind, bench_of(make_large(tmp_path), workers=1), 0.05)
    assert trial.rate > 0 and trial.places["decode"]["n"] == trial.steps


def test_a_copy_holds_the_same_pairs_in_smaller_pictures(tmp_path: Path) -> None:
    bench = bench_of(make_large(tmp_path))
    with remedies._copied("smaller", bench, remedies._in_time(bench)) as folder:
        copied = ShardSet.open(folder)
        assert len(copied) == len(bench.shard_set)
        assert [copied.captions(i) for i in range(len(copied))] == [
            bench.shard_set.captions(i) for i in range(len(copied))
        ]
        for sample in copied.read(np.arange(4)):
            header = read_header(sample.data)
            assert (header.width, header.height) == (49, 37)
    assert not Path(folder).exists()


def test_a_picture_that_fits_or_is_broken_stays_as_it_is(tmp_path: Path) -> None:
    sample = bench_of(make_large(tmp_path, 8)).shard_set.read(np.arange(1))[0]
    assert shrunk(sample, 1000) is sample
    broken = dataclasses.replace(sample, data=sample.data[:300])
    assert shrunk(broken, 32) is broken
