"""Settings: one definition becomes options, recipe keys and a saved copy; whatever is unknown is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from core.config import UnitsConfig, VerbConfig, build, command, field_docs, load_recipe, setting
from core.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class BakeConfig(UnitsConfig):
    """Bake bread."""

    flour: str = setting(argument=True)
    """Kind of flour."""
    hours: float = 1.5
    """Hours in the oven."""
    seeds: tuple[str, ...] = ()
    """Seeds to add."""
    note: str | None = None
    """A note."""


def recipe(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return str(path)


def test_docstrings_under_fields_are_the_help() -> None:
    docs = field_docs(BakeConfig)
    assert docs["hours"] == "Hours in the oven."
    assert docs["work"].startswith("Work folder")


def test_command_line_reaches_the_config() -> None:
    app, seen = typer.Typer(), []
    app.command()(command(BakeConfig, lambda config: seen.append(config) or {}, lambda summary, json: None))
    result = CliRunner().invoke(app, ["rye", "--hours", "2", "--seeds", "poppy", "--seeds", "flax", "--fresh"])
    assert result.exit_code == 0, result.output
    assert seen == [BakeConfig(flour="rye", hours=2.0, seeds=("poppy", "flax"), fresh=True)]
    assert "Hours in the oven." in CliRunner().invoke(app, ["--help"]).output


def test_recipe_reads_stages_in_their_order_not_the_files(tmp_path: Path) -> None:
    path = recipe(tmp_path, 'work = "w"\n[b]\nflour = "rye"\n[a]\nflour = "oat"\nseeds = ["flax"]\nhours = 2\n')
    configs = load_recipe(path, {"a": BakeConfig, "b": BakeConfig}, overrides={"b": {"hours": 3.0}})
    assert list(configs) == ["a", "b"]
    assert configs["a"] == BakeConfig(flour="oat", seeds=("flax",), hours=2.0, work="w")
    assert configs["b"] == BakeConfig(flour="rye", hours=3.0, work="w")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[a]\nflour = "rye"\nhuors = 2\n', "did you mean 'hours'"),
        ('[aa]\nflour = "rye"\n', "did you mean 'a'"),
        ('wrok = "w"\n[a]\nflour = "rye"\n', "did you mean 'work'"),
        ('[a]\nflour = 3\n', "expected str, found 3"),
        ('[a]\nflour = "rye"\nhours = "long"\n', "expected float, found 'long'"),
        ('[a]\nflour = "rye"\nseeds = "flax"\n', "expected a list"),
        ("[a]\nhours = 2\n", "needs the setting 'flour'"),
        ('[a]\nflour = "rye"\nengine = "rya"\n', "expected one of local, ray, found 'rya'"),
        ('[a]\nflour = "rye"\nworkers = -1\n', "expected workers of at least 0"),
        ("a = 3\n", "as a value: expected a table, [a]"),
        ("a = [1, 2]\n", "as a value: expected a table, [a]"),
        ('[[a]]\nflour = "rye"\n[[a]]\nflour = 3\n', "expected str, found 3"),
        ("", "expected a table for each stage"),
        ('work = "w"\n', "expected a table for each stage"),
        ('work = ""\n[a]\nflour = "rye"\n', "expected a folder as work"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_one_clear_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        load_recipe(recipe(tmp_path, text), {"a": BakeConfig, "b": BakeConfig})


def test_a_recipe_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found none"):
        load_recipe(str(tmp_path / "no.toml"), {"a": BakeConfig})
    with pytest.raises(InputError, match="is not TOML"):
        load_recipe(recipe(tmp_path, "a = = 1"), {"a": BakeConfig})


def test_environment_in_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(tmp_path, '[a]\nflour = "$BAKERY/rye"\n')
    monkeypatch.setenv("BAKERY", "/mill")
    assert load_recipe(path, {"a": BakeConfig})["a"] == BakeConfig(flour="/mill/rye")
    monkeypatch.delenv("BAKERY")
    with pytest.raises(ConfigError, match=r"\$BAKERY, which is not set"):
        load_recipe(path, {"a": BakeConfig})


def test_an_unset_option_differs_from_a_set_one_in_the_fingerprint_only_where_results_do() -> None:
    one = build(BakeConfig, {"flour": "rye", "workers": 1}, where="x").fingerprint()
    two = build(BakeConfig, {"flour": "rye", "workers": 2}, where="x").fingerprint()
    other = build(BakeConfig, {"flour": "oat"}, where="x").fingerprint()
    assert one == two != other


def test_a_list_of_tables_runs_a_stage_several_times_in_its_order(tmp_path: Path) -> None:
    text = 'work = "w"\n[[a]]\nflour = "rye"\n[b]\nflour = "oats"\n[[a]]\nflour = "spelt"\n'
    configs = load_recipe(recipe(tmp_path, text), {"a": BakeConfig, "b": BakeConfig}, overrides={"a": {"hours": 4.0}})
    assert {name: config.flour for name, config in configs.items()} == {"a": "rye", "a 2": "spelt", "b": "oats"}  # type: ignore[attr-defined]
    assert {config.hours for name, config in configs.items() if name != "b"} == {4.0}  # type: ignore[attr-defined]
    assert all(config.work == "w" for config in configs.values())


def test_what_a_recipe_says_once_reaches_the_stages_that_have_it(tmp_path: Path) -> None:
    """Not every verb has workers: one that has none is no mistake of the recipe's top, but of its own table."""

    @dataclass(frozen=True, kw_only=True)
    class PageConfig(VerbConfig):
        """Print a page."""

    stages: dict[str, type[VerbConfig]] = {"bake": BakeConfig, "page": PageConfig}
    text = 'work = "here"\nworkers = 3\n[bake]\nflour = "rye"\n[page]\n'
    found = load_recipe(recipe(tmp_path, text), stages, common={"fresh": True})
    assert found["bake"] == BakeConfig(work="here", workers=3, flour="rye", fresh=True)
    assert found["page"] == PageConfig(work="here")
    with pytest.raises(ConfigError, match=r"\[page\] knows no setting 'workers'"):
        load_recipe(recipe(tmp_path, text + "workers = 1\n"), stages)
