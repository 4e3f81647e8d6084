from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from core.errors import HardwareError
from train import doctor
from train.config import DoctorConfig
from train.doctor import Check


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict:
    work = tmp_path_factory.mktemp("doctor") / "not" / "there" / "yet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "SECONDS", 0.02)
        patch.setattr(doctor, "DISK_MB", 2)
        return doctor.run(DoctorConfig(work=str(work)))


def test_every_part_has_its_line(summary: dict) -> None:
    names = [check["name"] for check in summary["checks"]]
    assert names == [
        "python", "torch", "matrix products", "cuda", "nccl", "nvml", "dali", "pillow", "jpeg decode", "tokenizer", "disk",
        "open files", "loss on ranks", "gpu decode", "100 steps",
    ]  # fmt: skip
    assert {check["state"] for check in summary["checks"]} <= {"ok", "slow", "skipped"}
    assert all(check["found"] for check in summary["checks"])
    assert summary["exit_code"] == 0
    json.dumps(summary)


def test_the_loss_agrees_on_real_ranks(summary: dict) -> None:
    found = next(check for check in summary["checks"] if check["name"] == "loss on ranks")
    assert found["state"] == "ok"
    assert float(found["found"].rsplit(" ", 1)[1]) < 1e-12


def test_a_loss_that_is_off_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (1e-3, float("nan")):
        monkeypatch.setattr(doctor, "_spawned_loss_error", lambda *_, error=error: error)
        assert doctor.loss_on_ranks().state == "wrong"


def test_some_real_steps_are_told_with_their_waits() -> None:
    found = doctor.first_steps("test-32", 16, 6, "cpu")
    assert found.state in ("ok", "slow") and "pairs/s" in found.found
    shares = re.search(
        r"of a step ([\d.]+)% waiting for a batch, ([\d.]+)% copying to the device, ([\d.]+)% computing", found.found
    )
    assert shares and sum(map(float, shares.groups())) == pytest.approx(100, abs=0.2)


def test_what_needs_a_gpu_is_skipped_by_name(summary: dict) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    skipped = {check["name"] for check in summary["checks"] if check["state"] == "skipped"}
    assert {"cuda", "nccl", "nvml", "gpu decode", "100 steps"} <= skipped


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Check:
        raise ImportError("first line\nlibthing.so is missing")

    def refused() -> Check:
        raise HardwareError("no vocabulary is installed")

    found = doctor._guarded("thing", broken)
    assert (found.state, found.found) == ("wrong", "ImportError: libthing.so is missing")
    assert doctor._guarded("thing", refused).found == "no vocabulary is installed"


def test_something_wrong_gives_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_spawned_loss_error", lambda *_: 1.0)
    monkeypatch.setattr(doctor, "dali", lambda: Check("dali", "skipped", "not looked at"))
    monkeypatch.setattr(doctor, "SECONDS", 0.001)
    found = doctor.run(DoctorConfig(work=str(tmp_path)))
    assert found["exit_code"] == HardwareError.exit_code


def test_the_disk_is_timed_where_the_work_folder_will_be(tmp_path: Path) -> None:
    found = doctor.disk(str(tmp_path / "later"))
    assert str(tmp_path) in found.found and found.state in ("ok", "slow")
    assert not list(tmp_path.iterdir())
    assert doctor.disk("s3://bucket/work").state == "skipped"


@pytest.mark.parametrize(
    ("name", "flops", "state", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 700e12, "ok", "H100"),
        ("NVIDIA H100 PCIe", 400e12, "ok", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", 100e12, "slow", "A100-40GB"),
        ("NVIDIA L40S", 200e12, "ok", "L40S"),
        ("NVIDIA GeForce RTX 4090", 150e12, "ok", "RTX-4090"),
        ("NVIDIA RTX A6000", 100e12, "ok", "A6000"),
        ("Unheard Of 9000", 1e12, "ok", "not in the table"),
    ],
)
def test_gpus_are_compared_with_their_peak(name: str, flops: float, state: str, kind: str) -> None:
    found = doctor._against_peak(name, flops, "bf16")
    assert found.state == state and kind in found.found


def test_the_lines_are_readable(summary: dict) -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(doctor.render(summary))
    assert "images/s and core" in capture.get() and "skipped" in capture.get()
