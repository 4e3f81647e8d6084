"""Verdicts on made-up evidence, and on real trials whose cause is made on purpose."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console

from core.errors import ConfigError, InputError
from core.images import encode_jpeg
from core.storage import Folder
from shardkit.config import ShardConfig
from shardkit.pack import run as pack
from tests.shardkit.parts import World
from tests.train.shards import make_work, photograph
from train import diagnose
from train.config import DiagnoseConfig
from train.diagnose import Evidence, judge
from train.models import model_config
from train.trials import Bench

GPU = {"gpu": True, "steps": 100, "threads": 4, "cores": 16, "reading_share": 0.1}

CASES = {
    "decode_bound": Evidence(wait_share=0.4, rate=600, model_rate=1000, loader_rate=600, read_rate=9000, decode_rate=600, **GPU),
    "read_bound": Evidence(wait_share=0.5, rate=500, model_rate=1000, loader_rate=500, read_rate=500, decode_rate=4000, **GPU),
    "not_input_bound": Evidence(
        wait_share=0.01, rate=990, model_rate=1000, loader_rate=4000, read_rate=9000, decode_rate=4000, **GPU
    ),
    "copy_bound": Evidence(
        wait_share=0.01, rate=700, h2d_share=0.3, model_rate=1000, loader_rate=4000, read_rate=9000, decode_rate=4000, **GPU
    ),
    "cores_shared": Evidence(
        wait_share=0.01, rate=700, steps=100, model_rate=1000, loader_rate=2000, read_rate=9000, decode_rate=2000, cores=2
    ),
    "straggler": Evidence(wait_share=0.2, rate=800, steps=100, straggler=(3, 2.5), run_wait_share=0.2),
}  # fmt: skip


@pytest.mark.parametrize("verdict", CASES)
def test_each_cause_has_its_verdict(verdict: str) -> None:
    found = judge(CASES[verdict])
    assert found["verdict"] == verdict
    assert found["fixes"] and found["says"].endswith(".")
    assert found["confidence"] == "high"


def test_a_loader_that_keeps_up_is_left_alone() -> None:
    found = judge(CASES["not_input_bound"])
    assert "Stop tuning the loader" in found["says"]
    assert found["ceiling_gain"] == pytest.approx(1000 / 990 - 1)
    assert not [fix for fix in found["fixes"] if "threads" in fix["fix"]]


def test_gains_are_predicted_up_to_the_next_limit() -> None:
    """600 to 2,400 pairs/s from decoding with 16 cores for 4, but the model takes no more than 1,000."""
    (threads,) = (f for f in judge(CASES["decode_bound"])["fixes"] if "--threads 16" in f["fix"])
    assert threads["predicted_gain"] == pytest.approx(1000 / 600 - 1)
    (local,) = judge(CASES["read_bound"])["fixes"]
    assert local["predicted_gain"] == pytest.approx(1.0)


def test_few_steps_or_sources_that_disagree_lower_the_confidence() -> None:
    clear = CASES["decode_bound"]
    assert judge(dataclasses.replace(clear, steps=3))["confidence"] == "low"
    assert judge(dataclasses.replace(clear, wait_share=0.07))["confidence"] == "medium"
    assert judge(dataclasses.replace(clear, run_wait_share=0.0))["confidence"] == "medium"


# ---------------------------------------------------------------- metrics of a run


def metrics(work: Path, rows: list[dict[str, Any]], name: str = "main") -> None:
    home = work / "runs" / name
    home.mkdir(parents=True)
    (home / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "wai')


def row(step: int, *, decode: float, compute: float = 0.1, ranks: int = 1, worst: float = 0.0) -> dict[str, Any]:
    def place(mean: float, most: float = 0.0) -> dict[str, float]:
        return {
            "p50": mean,
            "p99": 2 * mean,
            "mean": mean,
            "min": mean / 2,
            "max": most or mean,
            "slowest_rank": ranks - 1,
        }

    waits = {"decode": place(decode, worst), "h2d": place(0.0), "compute": place(compute), "reader": place(0.001),
             "decode_busy": place(0.05)}  # fmt: skip
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
    metrics(tmp_path, [row(10 * i, decode=0.03, worst=0.09, ranks=4) for i in range(1, 6)])
    found = diagnose.run(DiagnoseConfig(work=str(tmp_path)))
    assert found["verdict"] == "straggler" and "Rank 3" in found["says"]


def test_nothing_to_diagnose(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pairmill shard"):
        diagnose.run(DiagnoseConfig(work=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"0\.1 for 10 %"):
        diagnose.run(DiagnoseConfig(work=str(tmp_path), budget=10.0))


# ---------------------------------------------------------------- real trials


def tried(work: Path | str, **values: Any) -> dict[str, Any]:
    wanted = {"model": "test-32", "batch_size": 16, "precision": "fp32", "seconds": 0.8, "device": "cpu", **values}
    return diagnose.run(DiagnoseConfig(work=str(work), **wanted))


def test_the_trials_train_the_runs_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_work(tmp_path, 32)
    (tmp_path / "runs/main").mkdir(parents=True)
    recorded = {"model": "test-32", "patch_dropout": 0.5, "compile": True, "checkpointing": True, "batch_size": 16}
    (tmp_path / "runs/main/config.json").write_text(json.dumps({"as_run": recorded}))
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *_, **__: compiled.append(type(self).__name__))
    config = DiagnoseConfig(work=str(tmp_path), device="cpu")
    settings = diagnose._settings(config, diagnose._recorded(Folder(str(tmp_path)), "main"))
    bench = Bench(settings, settings.batch_size, 1, torch.device("cpu"))
    bench._stepper()
    assert bench.shape == dataclasses.replace(model_config("test-32"), patch_dropout=0.5)
    assert settings.checkpointing and compiled == ["VisionTower"]


def test_pictures_far_too_large_for_the_model(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number in range(32):
        pixels = np.ascontiguousarray(photograph(number, 64, 48).repeat(24, 0).repeat(24, 1))
        world.add(number, [f"picture {number}"], body=encode_jpeg(pixels, 90))
    world.write()
    pack(ShardConfig(work=str(tmp_path), workers=1, size=(2000,)))
    found = tried(tmp_path)
    assert found["verdict"] == "decode_bound"
    assert found["wait_share"] > 0.2
    assert found["data"]["oversize"] == pytest.approx(1536 * 1152 / 32**2)
    assert "smaller pictures" in found["fixes"][0]["fix"] and found["fixes"][0]["predicted_gain"] > 0.2
    assert [s["stage"] for s in found["stages"] if s["slowest"]] == ["decode and tokenise"]


def test_a_model_that_has_enough_to_do(tmp_path: Path) -> None:
    make_work(tmp_path, 80)
    found = tried(tmp_path, model="small-112", batch_size=32, seconds=1.5)
    assert found["verdict"] in ("not_input_bound", "cores_shared")  # a busy machine may show the second
    assert found["wait_share"] < 0.05
    assert [s["stage"] for s in found["stages"] if s["slowest"]] == ["model"]
    console = Console(width=110)
    with console.capture() as capture:
        console.print(diagnose.render(found))
    assert "Not input-bound" in capture.get() and "computing" in capture.get()


class SlowStore(LocalFileSystem):
    """Local files under slow://, each read of a range taking as long as a far-away object store."""

    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("slow://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"slow://{name}"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if start is not None:
            time.sleep(0.02)
        return super().cat_file(path, start=start, end=end, **kwargs)


def test_shards_that_are_far_away(tmp_path: Path) -> None:
    make_work(tmp_path, 80)
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    found = tried(tmp_path, shards=f"slow://{tmp_path}/shards")
    assert found["verdict"] == "read_bound"
    assert found["fixes"][0]["fix"] == "copy the shards to a local SSD"
    assert found["fixes"][0]["predicted_gain"] > 0.3
