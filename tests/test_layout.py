"""The import rule: cli -> {stages} -> core, stages never import each other, and help is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = {"ingest", "dedup", "shardkit", "train", "report", "demo"}
HEAVY = {"torch", "duckdb", "nvidia", "pyarrow", "numpy", "aiohttp", "PIL", "scipy", "simplejpeg"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full dotted names of every module that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", sources("core"), ids=str)
def test_core_imports_no_stage(path: Path) -> None:
    assert not roots(path) & (STAGES | {"cli", "bench", "tests"})


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_stages_do_not_import_each_other(stage: str) -> None:
    assert sources(stage), stage
    for path in sources(stage):
        others = {
            name for name in imports(path) if name.split(".")[0] in (STAGES | {"cli", "bench", "tests"}) - {stage}
        }
        if stage == "train":
            others = {n for n in others if not n.startswith("shardkit.reader") and n != "shardkit"}
        assert not others, f"{path} imports {others}"


def test_only_storage_uses_fsspec() -> None:
    users = {path.name for folder in ["core", *STAGES] for path in sources(folder) if "fsspec" in roots(path)}
    assert users <= {"storage.py"}


def test_every_folder_says_what_it_offers() -> None:
    for folder in ["core", *STAGES]:
        tree = ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1, f"{folder}/__init__.py holds only its docstring"


def test_help_loads_nothing_heavy() -> None:
    code = f"import sys, cli; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
