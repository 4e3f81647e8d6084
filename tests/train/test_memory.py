"""The estimate against what real steps of a real model took."""

from __future__ import annotations

import logging

import pytest
import torch

from train import memory
from train.memory import Load, Watch, estimate
from train.models import MODELS

# What a fresh process grew by over twenty steps without a loader, with captions of 4 to 40 positions, in MB (measured on
# 2 Zen 4 cores, torch 2.13).
MEASURED = {
    ("tiny-48", 64, 64, "bf16", False): 417,
    ("tiny-48", 256, 256, "bf16", False): 748,
    ("tiny-48", 512, 512, "bf16", False): 1261,
    ("small-112", 64, 64, "bf16", False): 829,
    ("small-112", 256, 256, "bf16", False): 2010,
    ("small-112", 256, 64, "bf16", False): 1005,
    ("small-112", 128, 128, "bf16", True): 807,
    ("small-112", 64, 64, "fp32", False): 887,
    ("small-rn-112", 128, 128, "bf16", False): 1329,
}


@pytest.mark.parametrize(("model", "batch", "at_once", "precision", "checkpointing"), MEASURED)
def test_the_estimate_is_near_what_was_measured(
    model: str, batch: int, at_once: int, precision: str, checkpointing: bool
) -> None:
    cfg = MODELS[model]
    ready = 3 * cfg.image_size**2 * (memory.QUEUE_DEPTH + 2) * batch  # of the loader, which was not there
    found = estimate(cfg, Load(batch, at_once, 1, 16, checkpointing, precision), gpu=False) - ready
    assert found / 1e6 == pytest.approx(MEASURED[model, batch, at_once, precision, checkpointing], rel=0.15)


def test_it_grows_with_what_is_held_at_once_only() -> None:
    cfg = MODELS["small-112"]
    whole, micro = (estimate(cfg, Load(256, n, 1, 16, False, "bf16"), gpu=False) for n in (256, 32))
    assert micro < whole - 200 * 2e6
    lean = estimate(cfg, Load(256, 256, 1, 16, True, "bf16"), gpu=False)
    assert lean < whole and estimate(cfg, Load(256, 256, 1, 16, False, "fp32"), gpu=False) > whole


def test_too_much_is_said_before_the_run(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free", lambda _: 1e9)
    Watch(MODELS["small-112"], Load(4096, 4096, 1, 16, False, "bf16"), torch.device("cpu"))
    assert "use --micro-batch 2048" in caplog.text


def test_the_estimate_is_compared_once_after_twenty_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pairmill.train")
    watch = Watch(MODELS["test-32"], Load(8, 8, 1, 16, False, "fp32"), torch.device("cpu"))
    for step in range(1, 30):
        watch.after(step)
    assert caplog.text.count("estimated") == 1 and watch.measured is not None
