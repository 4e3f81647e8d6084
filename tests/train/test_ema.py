"""Averaged weights: the formula, and runs that evaluate, export and continue with them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from core.metrics import Jsonl
from tests.train.shards import make_work
from train import checkpoint
from train.config import TrainConfig
from train.ema import Average
from train.export import load_weights
from train.models import ModelConfig
from train.optim import make_optimizer
from train.run import run
from train.towers import CLIP

RESNET = ModelConfig(32, 64, 32, 8, (1, 1, 1, 1), 4, 32, 2, 2, context=12, vocab=64)


def test_the_formula_on_parameters_and_running_statistics() -> None:
    torch.manual_seed(0)
    model = CLIP(RESNET)
    average = Average(model, 0.5)
    truth = {name: value.double() for name, value in model.state_dict().items()}
    for step in range(12):
        model.train().encode_image(torch.randn(4, 3, 64, 64))  # moves the running statistics
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        truth = {name: decay * truth[name] + (1 - decay) * now.double() for name, now in model.state_dict().items()}
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with average.used():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                assert torch.allclose(value.double(), truth[name], rtol=1e-5, atol=1e-6), name
                assert not torch.equal(value, own[name])
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def settings(work: Path, name: str, **other: Any) -> TrainConfig:
    return TrainConfig(
        work=str(work), name=name, model="test-32", batch_size=24, steps=8, lr=2e-3, precision="fp32", log_every=1,
        checkpoint_every=4, keep=20, workers=1, device="cpu", **other,
    )  # fmt: skip


def test_a_run_trains_as_without_and_is_judged_by_the_average(tmp_path: Path) -> None:
    work = make_work(tmp_path, 80, holdout_every=11)
    plain, averaged = run(settings(work, "plain")), run(settings(work, "averaged", ema=0.9))
    losses = [[row["loss"] for row in Jsonl(Path(done["run"]) / "metrics.jsonl").rows()] for done in (plain, averaged)]
    assert losses[0] == losses[1]
    saved = checkpoint.load(averaged["checkpoint"])
    used = load_weights(averaged["run"]).state
    assert saved.average.keys() == saved.model.keys()
    assert all(torch.equal(used[name], value) for name, value in saved.average.items())
    assert not torch.equal(used["visual.proj"], saved.model["visual.proj"])
    assert averaged["retrieval"] != plain["retrieval"]

    shutil.rmtree(averaged["checkpoint"])  # killed after the checkpoint before it
    (Path(averaged["run"]) / "done.json").unlink(missing_ok=True)
    again = run(settings(work, "averaged", ema=0.9))
    assert again["retrieval"] == averaged["retrieval"]
    continued = checkpoint.load(again["checkpoint"])
    assert all(torch.equal(continued.average[name], value) for name, value in saved.average.items())


def test_a_shape_with_a_list_in_it_continues(tmp_path: Path) -> None:
    model = CLIP(RESNET)
    fixed = {key: "same" for key in checkpoint.FIXED} | {"model": dataclasses.asdict(RESNET)}
    path = checkpoint.save(tmp_path, 3, model, make_optimizer(model, 1e-3), fixed)
    saved = checkpoint.load(path)
    checkpoint.check_same(saved, fixed)
    assert saved.shape == RESNET
