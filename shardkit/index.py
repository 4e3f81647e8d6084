"""What lies beside the tars: DALI's index of each one, `shards.json` and `samples.parquet`.

DALI's index, version 1.2: the line `v1.2 SAMPLES`, then one line a sample of `EXTENSION OFFSET SIZE NAME` groups, where
the offset is that of the data and the extension is everything after the name's first dot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from core.errors import ConfigError, DataError, InputError
from core.storage import Folder

SHARDS = "shards.json"
SAMPLES = "samples.parquet"
SIZES = "sizes.json"  # samples by shard name, where open_clip's loader looks for them
FORMAT = 1
Bad = dict[str, str]  # one thing that `verify` found: shard, key, uid, reason


def index_name(tar: str) -> str:
    """Name of the index beside a tar."""
    return f"{tar.removesuffix('.tar')}.idx"


def dali_index(lines: Sequence[str]) -> bytes:
    """The index of one tar from the line of each sample, in tar order."""
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""]).encode()


def split_name(name: str) -> tuple[str, str]:
    """A member's key and extension, as webdataset splits them: at the first dot of the last path segment."""
    folder, slash, leaf = name.rpartition("/")
    key, _, extension = leaf.partition(".")
    return folder + slash + key, extension


@dataclass(frozen=True)
class Shard:
    """One tar of a set, as `shards.json` lists it; sizes in bytes, `sha256` of the whole file ("" where not known).

    `index_sha256` is that of the index beside it.
    """

    name: str
    samples: int
    bytes: int
    sha256: str = ""
    index_sha256: str = ""


@dataclass(frozen=True)
class ShardList:
    """`shards.json`: the shards in order, how they were made, and the sha256 of their `samples.parquet`."""

    shards: list[Shard]
    made_with: dict[str, Any] = field(default_factory=dict)
    lanes: list[dict[str, Any]] = field(default_factory=list)
    samples_sha256: str = ""

    @property
    def samples(self) -> int:
        return sum(s.samples for s in self.shards)

    @property
    def total_bytes(self) -> int:
        return sum(s.bytes for s in self.shards)

    def derived_files(self) -> dict[str, bytes]:
        """Contents of the files beside the list that follow from it, by name: `sizes.json`, and a list of shards a rank."""
        sizes = json.dumps({shard.name: shard.samples for shard in self.shards}, indent=1).encode()
        ranks = len(self.lanes)
        return {SIZES: sizes} | {
            rank_list_name(rank, ranks): "".join(f"{shard.name}\n" for shard in mine).encode()
            for rank, mine in enumerate(rank_lists(self.shards, ranks))
        }

    def dump(self) -> bytes:
        head = {"format": FORMAT, "samples": self.samples, "bytes": self.total_bytes, "made_with": self.made_with}
        body = {"samples_sha256": self.samples_sha256, "lanes": self.lanes, "shards": [asdict(s) for s in self.shards]}
        return (json.dumps({**head, **body}, indent=1) + "\n").encode()


def rank_list_name(rank: int, ranks: int) -> str:
    return f"ranks/{rank:05d}-of-{ranks:05d}.txt"


def rank_lists(shards: list[Shard], ranks: int) -> list[list[Shard]]:
    """Shards of each rank, dealt in turn: disjoint, all of them, equally many a rank, samples within one of each other.

    No list for 0 ranks.

    Raises:
        ConfigError: `ranks` does not divide the number of shards.
    """
    if ranks and len(shards) % ranks:
        raise ConfigError(f"expected a number of shards that {ranks} ranks can share equally, found {len(shards)}")
    return [shards[rank::ranks] for rank in range(ranks)]


def read_shard_list(folder: Folder) -> ShardList:
    """`shards.json` of a folder.

    Raises:
        InputError: there is none.
        DataError: it is not ours.
    """
    if not folder.exists(SHARDS):
        raise InputError(
            f"expected {SHARDS} in {folder}, found none; run `pairmill shard` first, or name another folder"
        )
    try:
        found = json.loads(folder.read(SHARDS))
        shards = [_listed(shard) for shard in found["shards"]]
        return ShardList(shards, found.get("made_with", {}), found.get("lanes", []), found.get("samples_sha256", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"expected the list of shards in {folder.path(SHARDS)}, found {error}") from error


def _listed(entry: dict[str, Any]) -> Shard:
    shard = Shard(**entry)
    for one in fields(Shard):
        value = getattr(shard, one.name)
        if type(value).__name__ != one.type or (isinstance(value, int) and value < 0):
            raise ValueError(f"a shard whose {one.name} is {value!r}")
    return shard
