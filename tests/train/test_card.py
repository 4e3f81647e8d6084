"""All of it but the driver: this machine may have no GPU."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from train import card


def test_readings_are_averaged_and_begin_anew() -> None:
    readings = card.Readings()
    readings.add({"busy": 0.2, "power_w": 100.0})
    readings.add({"busy": 0.6})  # a reading that failed is left out
    assert readings.take() == {"busy": pytest.approx(0.4), "power_w": 100.0}
    assert readings.take() == {}


def test_a_thread_reads_until_the_end() -> None:
    readings, numbers, thrice = card.Readings(), itertools.count(1), threading.Event()

    def read() -> card.Reading:
        number = next(numbers)
        if number == 3:
            thrice.set()
        return {"number": float(number)}

    with card.reading_every(0.001, read, readings):
        assert thrice.wait(60)
    assert readings.take()["number"] >= 2  # the mean of 1, 2, 3 and perhaps more
    time.sleep(0.02)
    assert readings.take() == {}


def test_a_cpu_has_none_and_imports_nothing() -> None:
    with card.watched(torch.device("cpu")) as readings:
        assert readings.take() == {}
    assert card.over_ranks([{}, {}]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_nvml_cannot_be_asked_that_is_said_and_nothing_else_happens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), card.watched(torch.device("cuda", 0)) as readings:
        assert readings.take() == {}
    assert "no utilisation and power of the GPU: " in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_real_card_tells_what_it_does() -> None:
    pytest.importorskip("pynvml")
    found = card.reader(torch.device("cuda", 0))()
    assert 0 <= found["busy"] <= 1 and 0 < found["memory_bytes"] <= found["memory_total_bytes"]
    assert found["power_w"] > 0


def test_over_ranks_and_in_words() -> None:
    ranks = [
        {"busy": 0.9, "power_w": 300.0, "power_limit_w": 700.0, "memory_bytes": 20e9, "memory_total_bytes": 80e9},
        {"busy": 0.5, "power_w": 200.0, "power_limit_w": 700.0, "pcie_in_bytes_s": 2e9, "pcie_out_bytes_s": 1e8},
    ]
    over = card.over_ranks(ranks)
    assert over is not None and over["busy"] == {"mean": pytest.approx(0.7), "min": 0.5, "max": 0.9}
    assert card.words(over) == (
        "GPU busy 70% of the time (the idlest 50%); 250 of 700 W; 20 of 80 GB; PCIe 2.0 GB/s in, 0.1 GB/s out"
    )
