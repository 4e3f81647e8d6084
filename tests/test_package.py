"""What is distributed: a source distribution that is enough to build, and a wheel with every file that the code opens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def needs_setuptools() -> None:
    wanted = next(r for r in map(Requirement, PROJECT["build-system"]["requires"]) if r.name == "setuptools")
    try:
        found = Version(version("setuptools"))
    except PackageNotFoundError:
        pytest.skip("no setuptools here, and tests fetch nothing")
    if found not in wanted.specifier:
        pytest.skip(f"setuptools {found} is here, building needs {wanted}")


def own_files() -> list[str]:
    """What git tracks and what is new and not ignored, so that a change is tested before it is committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the working tree, unpacked."""
    needs_setuptools()
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in own_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", BUILD_SDIST, str(out)], cwd=copy, check=True, capture_output=True)
    with tarfile.open(next(out.glob("pairmill-*.tar.gz"))) as tar:
        tar.extractall(out, filter="data")
    return next(path for path in out.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds of the source distribution, unpacked."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(unpacked)], check=True, capture_output=True)
    with zipfile.ZipFile(next(out.glob("pairmill-*.whl"))) as archive:
        archive.extractall(out / "site")
    return out / "site"


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_holds_all_but_the_workshop(unpacked: Path) -> None:
    missing = {name for name in own_files() if not name.startswith((".ci/", ".git"))} - files(unpacked)
    assert not missing


def test_the_wheel_holds_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    folders = {package.split(".")[0] for package in PACKAGES}
    wanted = {name for name in own_files() if name.split("/")[0] in folders} | {"cli.py"}
    found = {name for name in files(wheel) if ".dist-info/" not in name}
    assert found == wanted
    assert {"dedup/presets/laion.sql", "report/page.css", "demo/recipe.toml"} <= found


@pytest.mark.parametrize("package", sorted({package.split(".")[0] for package in PACKAGES}))
def test_each_package_is_typed(wheel: Path, package: str) -> None:
    assert (wheel / package / "py.typed").is_file()


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    folder = next(wheel.glob("*.dist-info"))
    metadata, _ = parse_email((folder / "METADATA").read_bytes())
    needed = {r for r in map(Requirement, metadata["requires_dist"]) if "extra" not in str(r.marker)}
    assert needed == {Requirement(r) for r in PROJECT["project"]["dependencies"]}
    assert set(metadata["provides_extra"]) == set(PROJECT["project"]["optional-dependencies"])
    assert "pairmill = cli:main" in (folder / "entry_points.txt").read_text(encoding="utf-8")


def test_it_runs_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    code = "import cli; print(cli.__file__); cli.main()"
    environment = {**os.environ, "PYTHONPATH": str(wheel), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(wheel))
    assert "demo" in done.stdout and "diagnose" in done.stdout
