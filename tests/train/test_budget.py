"""The plan's arithmetic against published budgets."""

from __future__ import annotations

import math

import pytest

from core.errors import ConfigError
from train import budget
from train.config import PlanConfig
from train.models import MODELS, flops_per_pair

PAIRS, EPOCHS = 400e6, 32
VIT_L = MODELS["ViT-L-14"]


def plan(**values: object) -> dict:
    return budget.run(PlanConfig(**{"model": "ViT-L-14", "pairs": PAIRS, "epochs": float(EPOCHS), **values}))  # type: ignore[arg-type]


def test_clip_vit_l_on_v100s_ran_at_20_percent() -> None:
    """Radford et al. 2021: ViT-L/14 took 12 days on 256 V100s."""
    assert plan(gpus=256, gpu="V100", days=12.0)["mfu"] == pytest.approx(0.203, abs=0.0005)


def test_the_same_run_on_a100s() -> None:
    """2.5 times the peak, twice the cards, twice the utilisation: 12 days become 1.2."""
    assert plan(gpus=512, gpu="A100-80GB", mfu=0.4)["days"] == pytest.approx(1.2, abs=0.05)


def test_days_and_mfu_are_inverse() -> None:
    there = plan(gpus=64, gpu="H100", mfu=0.37)
    back = plan(gpus=64, gpu="H100", days=there["days"])
    assert back["mfu"] == pytest.approx(0.37)
    assert back["pairs_per_s"] * there["days"] * 86400 == pytest.approx(PAIRS * EPOCHS)


def test_one_epoch_at_336_pixels() -> None:
    ratio = flops_per_pair(MODELS["ViT-L-14-336"]) / flops_per_pair(MODELS["ViT-L-14"])
    assert ratio == pytest.approx(2.25, abs=0.01)
    assert ratio / EPOCHS == pytest.approx(0.07, abs=0.005)


def test_logits_of_a_batch_of_32768() -> None:
    full, local, tile = (budget.logit_bytes(32768, 256, form) for form in ("full", "local", "tile"))
    assert full == pytest.approx(4.3e9, rel=0.01)
    assert local == 2 * full / 256
    assert tile == 4 * 128 * 4096


def test_gathered_embeddings_take_64_mib() -> None:
    """32,768 embeddings of the widest CLIP in fp16."""
    assert budget.gathered_bytes(32768, 1024, element=2) == 64 * 2**20
    both = budget.gathered_bytes(32768, 768, towers=2, element=2)
    assert both == pytest.approx(100e6, rel=0.01)


def test_known_parameter_counts() -> None:
    """As open_clip lists them, in millions."""
    for name, millions in (("ViT-B-32", 151.28), ("ViT-B-16", 149.62), ("ViT-L-14", 427.62), ("ViT-H-14", 986.11)):
        assert plan(model=name)["params"] / 1e6 == pytest.approx(millions, abs=0.01)


def test_activations_scale_with_what_is_held_at_once() -> None:
    whole, part, lean = (
        budget.memory(VIT_L, batch=4096, gpus=8, micro=micro, checkpointing=lean)["activations"]
        for micro, lean in ((512, False), (64, False), (512, True))
    )
    assert part == pytest.approx(whole / 8) and lean < whole / 8


def test_a_plan_holds_as_many_pairs_as_fit() -> None:
    roomy, tight = plan(gpus=8, gpu="B200", batch_size=8 * 256), plan(gpus=8, gpu="A100-40GB", batch_size=8 * 1024)
    assert roomy["batch"]["micro"] == 256 and roomy["hfu"] == roomy["mfu"] and not roomy["checkpointing"]
    micro = tight["batch"]["micro"]
    assert 0 < micro < 1024 and tight["fits"] and tight["hfu"] == pytest.approx(tight["mfu"] * 4 / 3)
    room = budget.USABLE * 40e9
    sizes = [budget.memory(VIT_L, batch=8 * 1024, gpus=8, micro=m)["total"] for m in (micro, 2 * micro)]
    assert sizes[0] <= room < sizes[1]


def test_activations_are_recomputed_where_few_pairs_fit_otherwise() -> None:
    small = plan(model="ViT-H-14", gpus=8, gpu="V100-32GB", batch_size=8 * 1024)
    assert small["checkpointing"] and small["batch"]["micro"] > budget.FEW
    assert small["hfu"] == pytest.approx(small["mfu"] * 5 / 3)
    assert not plan(model="ViT-H-14", gpus=8, gpu="T4", batch_size=8)["fits"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpu": "A100-90GB"}, "A100-80GB"),
        ({"model": "ViT-L14"}, "ViT-L-14"),
        ({"gpus": 0}, "--gpus"),
        ({"mfu": 40.0}, "0.4 is 40 %"),
        ({"gpus": 8, "days": 1.0}, "of their peak"),
        *(({name: value}, f"--{name}") for name in ("pairs", "epochs", "days") for value in (math.nan, math.inf)),
    ],
)
def test_a_plan_that_cannot_be(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**values)


def test_the_page_says_whether_it_fits() -> None:
    from rich.console import Console

    def page(**values: object) -> str:
        console = Console(width=160)
        with console.capture() as capture:
            console.print(budget.render(plan(gpus=8, **values)))
        return capture.get()

    text = page(gpu="V100", batch_size=8192)
    assert "It fits with `train --micro-batch" in text and "MFU" in text and "full matrix" in text
    assert "It fits.\n" in page(gpu="B200", batch_size=256)
    assert "It does not fit, even with one pair" in page(gpu="T4", model="ViT-H-14", batch_size=8)
