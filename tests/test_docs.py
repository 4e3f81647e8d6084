"""The documentation: what is drawn from the code is whole, and a dead link is noticed. `make docs` builds it strictly."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import cli
from core.config import COMMON, flag_name

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs", reason="needs the extra `docs`")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(text: str, title: str) -> str:
    """From the heading `title` to the next one of its level."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("verb", [*cli.STAGES, *cli.TOOLS])
def test_every_setting_of_every_verb_is_in_the_reference(pages: ModuleType, verb: str) -> None:
    config = (cli.STAGES | cli.TOOLS)[verb][0]
    text = section(pages.commands(), verb)
    for field in dataclasses.fields(config):
        assert f"`{field.name.upper() if field.metadata.get('argument') else flag_name(field)}" in text
    assert "`--json`" in text


@pytest.mark.parametrize("stage", cli.STAGES)
def test_every_table_of_a_recipe_is_in_the_reference(pages: ModuleType, stage: str) -> None:
    text = section(pages.recipes(), f"[{stage}]")
    own = {f.name for f in dataclasses.fields(cli.STAGES[stage][0])} - set(COMMON)
    assert all(f"| `{name}` |" in text for name in own)


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("index.md", "docs/LOG.md", "LOG.md"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("index.md", "docs/nowhere.md", "nowhere.md"),
        ("results/flickr8k.md", "../../bench/flickr8k.py", "REPO/blob/main/bench/flickr8k.py"),
        ("results/flickr8k.md", "../../bench/nowhere.py", "../../bench/nowhere.py"),
        ("results/flickr8k.md", "../../README.md", "../index.md"),
        ("results/flickr8k.md", "train.md", "train.md"),
        ("guide/train.md", "https://example.org/README.md", "https://example.org/README.md"),
        ("guide/train.md", "#recipes", "#recipes"),
    ],
)
def test_links_for_the_repository_work_on_the_site_and_dead_ones_stay_dead(
    pages: ModuleType, page: str, link: str, wanted: str
) -> None:
    here = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    found = pages.on_page_markdown(
        f"see [it]({link}) there", page=here, config=SimpleNamespace(repo_url="REPO"), files=None
    )
    assert found == f"see [it]({wanted}) there"
