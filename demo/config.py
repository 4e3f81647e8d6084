"""Settings of `pairmill demo`."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import PoolConfig, StageConfig, setting


@dataclass(frozen=True, kw_only=True)
class DemoConfig(StageConfig, PoolConfig):
    """Make a small world of pictures and captions, serve it on loopback with faults, and run everything on it.

    Opens no network. Ends with a funnel, zero-shot accuracy on combinations never seen in training, and a report.
    """

    work: str = setting("demo-work", stable=False)
    """Work folder; the world itself lies beside the stages' results."""
    pictures: int = 6000
    """Pictures in the world. Fewer make a faster demo and a worse model."""
