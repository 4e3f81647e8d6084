"""Verdicts on evidence, which is all that a verdict depends on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from train.judge import Evidence, Straggler, judge

RECORDED = json.loads((Path(__file__).parent / "evidence.json").read_text())
GPU = {"gpu": True, "steps": 100, "workers": 4, "cores": 16, "reading_share": 0.1}

CASES = {
    "decode_bound": Evidence(
        wait_share=0.4, rate=600, model_rate=1000, loader_rate=600, read_rate=9000, decode_rate=600,
        rehearsed={"workers": 980}, **GPU
    ),
    "read_bound": Evidence(wait_share=0.5, rate=500, model_rate=1000, loader_rate=500, read_rate=500, decode_rate=4000, **GPU),
    "not_input_bound": Evidence(
        wait_share=0.01, rate=990, model_rate=1000, loader_rate=4000, read_rate=9000, decode_rate=4000, **GPU
    ),
    "copy_bound": Evidence(
        wait_share=0.01, rate=700, h2d_share=0.3, model_rate=1000, loader_rate=4000, read_rate=9000, decode_rate=4000, **GPU
    ),
    "cores_shared": Evidence(
        wait_share=0.01, rate=500, steps=100, model_rate=1000, loader_rate=1000, read_rate=9000, decode_rate=1000, cores=2
    ),
    "straggler": Evidence(
        wait_share=0.08, rate=800, steps=100, straggler=Straggler(3, 0.4, "decode"), run_wait_share=0.08, comm_share=0.02
    ),
    "communication_bound": Evidence(
        wait_share=0.01, rate=700, comm_share=0.5, model_rate=800, loader_rate=4000, read_rate=9000, decode_rate=4000, **GPU
    ),
    "overhead_bound": Evidence(
        wait_share=0.01, rate=990, model_rate=1000, double_rate=1900, loader_rate=4000, read_rate=9000, decode_rate=4000, **GPU
    ),
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
    assert not [fix for fix in found["fixes"] if "workers" in fix["fix"]]


def test_a_wait_beside_a_loader_of_ample_rate_is_a_short_step() -> None:
    short = dataclasses.replace(CASES["overhead_bound"], wait_share=0.06, rate=800, loader_rate=9000)
    assert judge(short)["verdict"] == "overhead_bound"
    assert judge(dataclasses.replace(short, loader_rate=1500))["verdict"] == "decode_bound"


def test_gains_are_what_the_rehearsal_did_as_long_as_the_bytes_come() -> None:
    (workers,) = (f for f in judge(CASES["decode_bound"])["fixes"] if "--workers 16" in f["fix"])
    assert workers["predicted_gain"] == pytest.approx(980 / 600 - 1)
    slow = dataclasses.replace(CASES["decode_bound"], read_rate=700.0)
    (workers,) = (f for f in judge(slow)["fixes"] if "--workers 16" in f["fix"])
    assert workers["predicted_gain"] == pytest.approx(700 / 600 - 1)
    (local,) = judge(dataclasses.replace(CASES["read_bound"], rehearsed={"local": 950}))["fixes"]
    assert local["predicted_gain"] == pytest.approx(950 / 500 - 1)  # from a local disk they do come
    assert judge(CASES["read_bound"])["fixes"][0]["predicted_gain"] is None


def test_what_can_be_tried_and_gains_comes_first() -> None:
    shared = dataclasses.replace(CASES["cores_shared"], oversize=10.0, rehearsed={"smaller": 700})
    first, second = judge(shared)["fixes"]
    assert (first["apply"], second["apply"]) == ("smaller", None)  # though more cores would gain more
    assert second["predicted_gain"] > first["predicted_gain"] == pytest.approx(700 / 500 - 1)
    assert judge(dataclasses.replace(shared, rehearsed={"smaller": 501}))["cause"] == "shared_cores"


def test_a_type_that_the_device_multiplies_slowly() -> None:
    slow = dataclasses.replace(CASES["not_input_bound"], precision="bf16", native="fp32", rehearsed={"precision": 9000})
    found = judge(slow)
    assert (found["verdict"], found["cause"]) == ("not_input_bound", "slow_precision")
    assert found["fixes"][0]["apply"] == "precision" and found["fixes"][0]["predicted_gain"] > 8
    shared = dataclasses.replace(CASES["cores_shared"], native="fp32", rehearsed={"precision": 5000})
    assert (judge(shared)["verdict"], judge(shared)["cause"]) == ("cores_shared", "slow_precision")
    both_16_bits = judge(dataclasses.replace(slow, precision="fp16", native="bf16"))
    assert both_16_bits["cause"] == "compute"


def test_a_gpu_that_idles_while_nobody_waits() -> None:
    """Of a run alone, whose rows say how busy the GPUs were."""
    idle = Evidence(wait_share=0.01, rate=900, gpu=True, steps=100, busy=0.4)
    found = judge(idle)
    assert found["verdict"] == "overhead_bound" and "idle for 60%" in found["says"]
    assert judge(dataclasses.replace(idle, busy=0.95))["verdict"] == "not_input_bound"
    assert judge(dataclasses.replace(idle, wait_share=0.5))["verdict"] == "decode_bound"


def test_few_steps_or_sources_that_disagree_lower_the_confidence() -> None:
    clear = CASES["decode_bound"]
    assert judge(dataclasses.replace(clear, steps=3))["confidence"] == "low"
    assert judge(dataclasses.replace(clear, wait_share=0.07))["confidence"] == "medium"
    assert judge(dataclasses.replace(clear, run_wait_share=0.0))["confidence"] == "medium"


def test_the_heaviest_cause_is_the_verdict() -> None:
    waiting = dataclasses.replace(CASES["decode_bound"], comm_share=0.3, double_rate=2500.0)
    assert judge(waiting)["verdict"] == "decode_bound"  # and a small batch costs nothing while the loop waits
    assert "overhead_bound" not in judge(waiting)["losses"]
    assert judge(dataclasses.replace(waiting, wait_share=0.06))["verdict"] == "communication_bound"


def test_a_rank_that_waits_alone_does_not_make_the_run_input_bound() -> None:
    """With two ranks half of all waiting is the mean of one that always waits and one that never does."""
    alone = Evidence(
        wait_share=0.45, common_wait=0.01, rate=800, steps=100, straggler=Straggler(1, 0.89, "decode"), run_wait_share=0.45,
        comm_share=0.02, reading_share=0.9,
    )  # fmt: skip
    assert judge(alone)["verdict"] == "straggler"
    assert judge(dataclasses.replace(alone, common_wait=0.8))["verdict"] == "read_bound"
    assert judge(dataclasses.replace(alone, straggler=None))["verdict"] == "read_bound"


def test_smaller_pictures_gain_what_the_rehearsal_says() -> None:
    large = dataclasses.replace(
        CASES["decode_bound"], oversize=20.0, rehearsed={"smaller": 900}, small_bytes=0.1, read_rate=80.0, rate=60.0,
        decode_rate=60.0, loader_rate=60.0, workers=16,
    )  # fmt: skip
    (fix,) = (f for f in judge(large)["fixes"] if f["cause"] == "large_pictures")
    assert fix["predicted_gain"] == pytest.approx(800 / 60 - 1)  # a tenth of the bytes: reading does 800
    assert fix["apply"] == "smaller" and judge(large)["cause"] == "large_pictures"


@pytest.mark.parametrize(("remote", "cause"), [(True, "slow_network"), (False, "slow_disk")])
def test_where_the_bytes_come_from(remote: bool, cause: str) -> None:
    assert judge(dataclasses.replace(CASES["read_bound"], remote=remote))["cause"] == cause


@pytest.mark.parametrize("made", RECORDED)
def test_what_was_measured_of_a_cause_made_on_purpose_is_judged_rightly(made: str) -> None:
    """Recorded by `python -m bench.diagnose --record`: the verdict follows, and a fix of the loader gained what was promised."""
    known = dict(RECORDED[made]["measured"])
    if known.get("straggler"):
        known["straggler"] = Straggler(**known["straggler"])
    found, applied = judge(Evidence(**known)), RECORDED[made]["applied"]
    assert (found["verdict"], found["cause"]) == (RECORDED[made]["expected"], made)
    if applied and made != "small_batch":
        promised = found["fixes"][0]["predicted_gain"]
        assert promised == pytest.approx(applied["predicted_gain"])
        assert abs(promised - applied["measured_gain"]) <= 0.25 * applied["measured_gain"]


def test_all_eight_causes_were_recorded() -> None:
    assert len(RECORDED) == 8
