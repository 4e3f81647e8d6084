"""The guides to ingest name every option of ours, and none that is not there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from core.config import flag_name
from core.schema import Outcome
from dedup.config import DedupConfig
from ingest.config import IngestConfig
from shardkit.config import ShardConfig

PAGES = ("from-img2dataset.md", "ingest.md")
GUIDE = "".join((Path(__file__).parents[2] / "docs/guide" / page).read_text(encoding="utf-8") for page in PAGES)


def flags(config: type) -> set[str]:
    """Every spelling of every option."""
    found: set[str] = set()
    for field in dataclasses.fields(config):
        found |= {*flag_name(field).split("/"), *field.metadata.get("also", ())}
    return found - {"--urls"}


def test_every_option_of_ours_is_named_and_no_other() -> None:
    body = GUIDE.partition("becomes")[2]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", body))
    assert named <= flags(IngestConfig) | flags(DedupConfig) | flags(ShardConfig) | {"--json", "--help"}
    common = {"--resume", "--lang", "--no-robots"}  # the defaults of switches
    assert flags(IngestConfig) - named <= common


def test_every_outcome_is_explained() -> None:
    table = GUIDE.partition("| outcome |")[2].partition("\n\n")[0]
    first = " ".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE))
    assert set(re.findall(r"`([a-z0-9_]+)`", first)) == set(Outcome)
