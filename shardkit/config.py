"""Settings of `shard` and `verify`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from core.config import PoolConfig, UnitsConfig, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardConfig(UnitsConfig):
    """Write the kept pairs as shuffled tar shards that webdataset, DALI and `pairmill train` read.

    Pictures that dedup holds out for evaluation go to WORK/holdout in the same format.
    """

    size: tuple[int, ...] = setting((256,))
    """Longest allowed shorter side, in pixels. A staged picture that fits is copied byte for byte; a larger one is resized.
    A little above the training size leaves room for random crops. Given several times, one pass writes several sets of the
    same samples: the first size into WORK/shards, any other size N into WORK/shards-N (and WORK/holdout-N)."""
    samples_per_shard: int = setting(5000)
    """Most samples a shard holds; they are shared out evenly. Aim at 50 to 500 MB a shard, and at several shards a core."""
    mb_per_shard: int = setting(0)
    """Most megabytes (millions of bytes) a shard holds, by the size of the staged pictures, instead of a number of samples;
    0 goes by --samples-per-shard. Samples are shared out evenly here too."""
    ranks: int = setting(0)
    """Also write one list of shards a rank for this many ranks: disjoint, equally many shards each. Only other loaders
    need it; `pairmill train` shares samples out itself, for any number of ranks."""
    captions: Literal["all", "first"] = setting("all")
    """Keep `all` captions of a picture in its sample (the trainer draws one each epoch), or only the `first`."""
    seed: int = setting(0)
    """Seed of the global shuffle that spreads the pictures over the shards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(PoolConfig):
    """Read shards again and compare them with their hashes; names every bad sample, and exits with 5 if there is one."""

    shards: str = setting("")
    """Folder of shards to verify; empty takes every set of the work folder: WORK/shards, WORK/holdout, WORK/shards-N."""
    deep: bool = setting(False)
    """Decode every picture too, strictly: also finds damage that was there before the shards were written."""
    repair: bool = setting(False)
    """Write damaged shards of the work folder again, to the very bytes that were listed: from their own whole samples and
    the staged pictures, and where those are gone by fetching the damaged samples' URLs anew."""
    allow_private: bool = setting(False)
    """Let a repair fetch from private, loopback and link-local addresses too, as in `ingest`."""
