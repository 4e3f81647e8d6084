"""What the figures were measured on, and the one shape in which every bench reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> str:
    """Processor, cores this process may use, and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB"


def claim(
    text: str, ours: float, *, goal: float, at_least: bool, peer: float | None = None, floor: float | None = None
) -> dict[str, Any]:
    """One claim: `ours` is held against `goal`; `peer` and `floor` were measured in the same run where they are given."""
    return {
        "claim": text,
        "ours": ours,
        "peer": peer,
        "floor": floor,
        "ratio": None if not peer else ours / peer,
        "goal": goal,
        "holds": ours >= goal if at_least else ours <= goal,
        "machine": machine(),
    }
