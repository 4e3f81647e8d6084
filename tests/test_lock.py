"""The lock file is in step: whatever the project and its tested extras need is pinned, at a version that will do."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.vulnerable import LOCK, asked, described

ROOT = Path(__file__).parent.parent
EXTRAS = ("dev", "docs", "dali", "s3")


def pinned() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def needed() -> list[Requirement]:
    """Every requirement reachable from pyproject.toml, as this machine's markers select them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    todo = [Requirement(r) for r in project["dependencies"] + [r for e in EXTRAS for r in extras[e]]]
    seen: set[str] = set()
    found = []
    while todo:
        requirement = todo.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
            continue
        found.append(requirement)
        name = canonicalize_name(requirement.name)
        if f"{name}{sorted(requirement.extras)}" in seen:
            continue
        seen.add(f"{name}{sorted(requirement.extras)}")
        try:
            children = [Requirement(r) for r in requires(name) or []]
        except PackageNotFoundError:
            continue  # reported by the caller when it is not pinned either
        for child in children:
            marker = child.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                child.marker = None
                todo.append(child)
    return found


def test_every_requirement_is_pinned_at_a_version_that_will_do() -> None:
    pins = pinned()
    wrong = []
    for requirement in needed():
        name = canonicalize_name(requirement.name)
        if name not in pins:
            wrong.append(f"{requirement} is not pinned")
        elif not requirement.specifier.contains(pins[name], prereleases=True):
            wrong.append(f"{requirement} is pinned at {pins[name]}")
    assert not wrong, "; ".join(wrong) + " (run: make lock)"


def test_an_audit_that_cannot_be_made_is_no_finding_and_a_hole_is_named() -> None:
    with pytest.raises(ValueError, match="No module named pip_audit"):
        asked(Path(sys.executable), LOCK)
    hole = {"id": "PYSEC-1", "fix_versions": ["2.1", "3.0"]}
    assert described({"name": "x", "version": "2.0", "vulns": [hole]}) == ["x 2.0: PYSEC-1, mended in 2.1, 3.0"]
    assert described({"name": "x", "version": "2.1", "vulns": []}) == []
