"""Verdicts on evidence, which is all that a verdict depends on."""

from __future__ import annotations

import dataclasses

import pytest

from train.judge import Evidence, Straggler, judge

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


def test_the_heaviest_cause_is_the_verdict() -> None:
    waiting = dataclasses.replace(CASES["decode_bound"], comm_share=0.3, double_rate=2500.0)
    assert judge(waiting)["verdict"] == "decode_bound"  # and a small batch costs nothing while the loop waits
    assert "overhead_bound" not in judge(waiting)["losses"]
    assert judge(dataclasses.replace(waiting, wait_share=0.06))["verdict"] == "communication_bound"


def test_loader_and_model_share_the_cores() -> None:
    """1.5 + 2 ms of a pair on two cores allow 571 pairs/s, though each stage alone does 1,000 and more."""
    slow = Evidence(wait_share=0.5, steps=100, rate=100, read_rate=100, decode_rate=1333, model_rate=1000, loader_rate=100,
                    model_cpu=2e-3, loader_cpu=1.5e-3, cores=2, threads=2)  # fmt: skip
    assert judge(slow)["fixes"][0]["predicted_gain"] == pytest.approx(2 / 3.5e-3 / 100 - 1)


def test_smaller_pictures_gain_what_the_probe_says() -> None:
    large = dataclasses.replace(
        CASES["decode_bound"], oversize=20.0, small_rate=900.0, small_bytes=0.1, read_rate=80.0, rate=60.0, decode_rate=60.0,
        loader_rate=60.0, threads=16,
    )  # fmt: skip
    (fix,) = (f for f in judge(large)["fixes"] if f["cause"] == "large_pictures")
    assert fix["predicted_gain"] == pytest.approx(800 / 60 - 1)  # a tenth of the bytes: reading does 800
    assert fix["apply"] == "smaller" and judge(large)["cause"] == "large_pictures"


@pytest.mark.parametrize(("remote", "cause"), [(True, "slow_network"), (False, "slow_disk")])
def test_where_the_bytes_come_from(remote: bool, cause: str) -> None:
    assert judge(dataclasses.replace(CASES["read_bound"], remote=remote))["cause"] == cause
