"""What every test may rely on: Ctrl-C reaches the processes that tests start (a shell starts its background jobs deaf to it,
and they hand that on), a small list is served, and one run of the data stages over it is there to compare with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bench.small import SmallList

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallList]:
    from bench.small import SmallList

    with SmallList(tmp_path_factory.mktemp("list"), 24) as served:
        yield served


@pytest.fixture(scope="session")
def whole(small: SmallList) -> Path:
    """A work folder in which one run of the local engine did each data stage."""
    from dedup.config import DedupConfig
    from dedup.keep import run as dedup
    from ingest.config import IngestConfig
    from ingest.fetch import run as ingest
    from shardkit.config import ShardConfig
    from shardkit.pack import run as shard

    work = small.home / "whole"
    ingest(IngestConfig(**small.settings("ingest", str(work)), workers=1))
    dedup(DedupConfig(work=str(work), workers=1))
    shard(ShardConfig(**small.settings("shard", str(work)), workers=1))
    return work
