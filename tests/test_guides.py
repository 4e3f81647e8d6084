"""The guides for people who come from another tool name every option of that tool (made by `make peers`, skipped without)."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import click
import pytest
import typer.main

import cli
from bench.peers import ready

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "docs" / "guide"
VERBS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def named(page: str, pattern: str) -> set[str]:
    """What stands in the first column of a page's tables and matches `pattern`."""
    first = " ".join(re.findall(r"^\|(.*?)\|", (GUIDES / page).read_text(encoding="utf-8"), re.MULTILINE))
    return set(re.findall(f"`({pattern})`", first))


def source(peer: str, file: str) -> ast.Module:
    """Syntax tree of a file of a peer's package; skips the test where the peer is not there."""
    python = ready(peer)
    if python is None:
        pytest.skip(f"{peer} is not there; make it with: python -m bench.peers {peer}")
    (path,) = python.parents[1].glob(f"lib/*/site-packages/{file}")
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_option_of_img2dataset_is_named() -> None:
    functions = [n for n in source("img2dataset", "img2dataset/main.py").body if isinstance(n, ast.FunctionDef)]
    arguments = next(f for f in functions if f.name == "download").args
    assert named("from-img2dataset.md", r"\w+") == {a.arg for a in arguments.args}


def test_every_option_of_open_clip_train_is_named() -> None:
    calls = [n for n in ast.walk(source("open_clip", "open_clip_train/params.py")) if isinstance(n, ast.Call)]
    added = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument"]
    assert named("from-open-clip.md", r"--[\w-]+") == {ast.literal_eval(call.args[0]) for call in added}


def test_every_argument_and_method_of_webdataset_is_named() -> None:
    source("webdataset1", "webdataset/__init__.py")
    code = (
        "import inspect, webdataset as w\n"
        "for c in (w.WebDataset, w.ShardWriter, w.TarWriter):\n"
        "    print(*(p for p in inspect.signature(c.__init__).parameters if p not in ('self', 'kw', 'fileobj')))\n"
        "print(*(n for n in vars(w.FluidInterface) if n[0] != '_'), 'with_epoch', 'with_length')"
    )
    python = ready("webdataset1")
    assert python is not None
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    assert set(said.split()) <= named("from-webdataset.md", r"\w+")


def options(verb: click.Command) -> set[str]:
    """Every spelling of a verb's options."""
    return {spelling for p in verb.params for spelling in (*p.opts, *p.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", ["from-img2dataset.md", "from-open-clip.md", "from-webdataset.md"])
def test_no_option_of_ours_is_named_that_is_not_there(page: str) -> None:
    columns = re.findall(r"^\|.*?\|(.*)\|$", (GUIDES / page).read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", " ".join(columns)))
    assert named <= set().union(*(options(verb) for verb in VERBS.values()))


PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*/*.md"),
    ROOT / "docs" / "scale.md",
]  # not the log, which speaks of the past


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_is_shown_with_options_that_it_has(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for verb, words in re.findall(rf"(?:pairmill\)? |-m cli |`)({'|'.join(VERBS)})\b([^`|\n]*)", text):
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", words.split(" #")[0]))
        assert shown <= options(VERBS[verb]), f"{verb} {shown - options(VERBS[verb])}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_shell_script_is_one(page: Path) -> None:
    for script in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert not done.returncode and not done.stderr, done.stderr
