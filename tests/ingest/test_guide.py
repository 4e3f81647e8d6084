"""The guide names every option of img2dataset and every option of ours, and none that is not there."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from bench.peers import ready
from core.config import flag_name
from core.schema import Outcome
from ingest.config import IngestConfig
from shardkit.config import ShardConfig

GUIDE = (Path(__file__).parents[2] / "docs/guide/ingest.md").read_text(encoding="utf-8")


def flags(config: type) -> set[str]:
    """Every spelling of every option."""
    found: set[str] = set()
    for field in dataclasses.fields(config):
        found |= {*flag_name(field).split("/"), *field.metadata.get("also", ())}
    return found - {"--urls"}


def test_every_option_of_ours_is_named_and_no_other() -> None:
    body = GUIDE.partition("becomes")[2]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", body))
    assert named <= flags(IngestConfig) | flags(ShardConfig) | {"--json"}
    common = {"--resume", "--lang", "--no-robots"}  # the defaults of switches
    assert flags(IngestConfig) - named <= common


def test_every_outcome_is_explained() -> None:
    table = GUIDE.partition("| outcome |")[2].partition("\n\n")[0]
    first = " ".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE))
    assert set(re.findall(r"`([a-z0-9_]+)`", first)) == set(Outcome)


def test_every_option_of_img2dataset_is_named() -> None:
    python = ready("img2dataset")
    if python is None:
        pytest.skip("img2dataset is not there; make it with: python -m bench.peers img2dataset")
    (source,) = python.parents[1].glob("lib/*/site-packages/img2dataset/main.py")
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    arguments = next(f for f in functions if f.name == "download").args
    table = GUIDE.partition("| img2dataset | here |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {a.arg for a in arguments.args}
