"""`ingest --engine img2dataset`: that package downloads, and its shards are adopted."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from core.errors import HardwareError

if TYPE_CHECKING:
    from ingest.config import IngestConfig


def run(config: IngestConfig) -> dict[str, Any]:
    """Download with img2dataset and adopt what it wrote.

    Raises:
        HardwareError: the package is not installed.
    """
    if importlib.util.find_spec("img2dataset") is None:
        raise HardwareError(
            "--engine img2dataset needs that package, which is not installed; run: pip install 'pairmill[img2dataset]'"
        )
    raise NotImplementedError
