"""What NVML tells of the GPU that a rank trains on: how busy it is, its power and memory, and what passes over PCIe.

Needs a GPU and the extra `nvml` (nvidia-ml-py). Without a GPU nothing is imported, and the rows' `gpu` is null.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

log = logging.getLogger("pairmill.train")

EVERY_S = 1.0  # in a thread, because the driver watches each direction of PCIe for 20 ms
INSTALL = "pip install nvidia-ml-py"

Reading = dict[str, float]
"""busy (share of time in which a kernel ran), power_w, power_limit_w, memory_bytes (of all processes),
memory_total_bytes, pcie_in_bytes_s and pcie_out_bytes_s (to and from the card); what a card does not tell is left out."""


class Readings:
    """Those of a thread that reads once a second, since the last `take`."""

    def __init__(self) -> None:
        self._found: list[Reading] = []

    def add(self, reading: Reading) -> None:
        self._found.append(reading)

    def take(self) -> Reading:
        """Their mean, and start over; empty where there are none."""
        found, self._found = self._found, []
        names = {name for reading in found for name in reading}
        values = {name: [reading[name] for reading in found if name in reading] for name in sorted(names)}
        return {name: sum(those) / len(those) for name, those in values.items()}


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Readings]:
    """Readings of this device while the context lasts; none of a CPU, nor where NVML cannot be asked, which is said."""
    readings = Readings()
    try:
        read = reader(device) if device.type == "cuda" else None
    except (ImportError, RuntimeError) as error:
        log.info("no utilisation and power of the GPU: %s", error)
        read = None
    if read is None:
        yield readings
        return
    with reading_every(EVERY_S, read, readings):
        yield readings


@contextlib.contextmanager
def reading_every(seconds: float, read: Callable[[], Reading], readings: Readings) -> Iterator[None]:
    """Call `read` again and again in a thread that ends with the context."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(seconds):
            readings.add(read())

    thread = threading.Thread(target=work, name="nvml", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def reader(device: torch.device) -> Callable[[], Reading]:
    """A function that reads the card of a CUDA device.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        RuntimeError: NVML is not there, or does not know the card.
    """
    nvml, handle = _opened(device)
    asked: dict[str, Callable[[], float]] = {
        "busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "pcie_in_bytes_s": lambda: 1e3 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
        "pcie_out_bytes_s": lambda: 1e3 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
    }

    def read() -> Reading:
        found = {}
        for name, ask in asked.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = float(ask())
        return found

    return read


def _opened(device: torch.device) -> tuple[Any, Any]:
    """NVML, and its handle of the card: by UUID, because CUDA_VISIBLE_DEVICES renumbers them."""
    try:
        import pynvml
    except ImportError as error:
        raise ImportError(f"nvidia-ml-py is not installed ({INSTALL})") from error
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error


def over_ranks(readings: list[Reading]) -> dict[str, dict[str, float]] | None:
    """Mean, least and most over the ranks by name; None where no rank has any."""
    found = {}
    for name in sorted({name for reading in readings for name in reading}):
        values = [reading[name] for reading in readings if name in reading]
        found[name] = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    return found or None


def words(gpu: dict[str, dict[str, float]]) -> str:
    """A row's `gpu` in a line."""
    mean = {name: over["mean"] for name, over in gpu.items()}
    said = []
    if "busy" in mean:
        least = f" (the idlest {gpu['busy']['min']:.0%})" if gpu["busy"]["max"] - gpu["busy"]["min"] > 0.05 else ""
        said.append(f"busy {mean['busy']:.0%} of the time{least}")
    for name, limit, unit, scale in (
        ("power_w", "power_limit_w", "W", 1.0),
        ("memory_bytes", "memory_total_bytes", "GB", 1e9),
    ):
        if name in mean:
            most = f" of {mean[limit] / scale:,.0f}" if limit in mean else ""
            said.append(f"{mean[name] / scale:,.0f}{most} {unit}")
    if "pcie_in_bytes_s" in mean:
        out = f", {mean['pcie_out_bytes_s'] / 1e9:.1f} GB/s out" if "pcie_out_bytes_s" in mean else ""
        said.append(f"PCIe {mean['pcie_in_bytes_s'] / 1e9:.1f} GB/s in{out}")
    return f"GPU {'; '.join(said)}"
