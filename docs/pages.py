"""Pages of the site that are written elsewhere: the README, and the reference, drawn from the code at every build.

A hook of MkDocs (mkdocs.yml). The commands come from the Typer app, settings of recipes from the config dataclasses,
columns and outcomes from `core.schema`, so none of them is written twice. Links may be written for the repository, as a
reader of the file there expects; what lies outside docs/ becomes a link to the repository, if it exists.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import os
import posixpath
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}
SECTIONS = {"Guides": ["guide"], "Concepts": ["concepts"], "Results": ["results", "."], "Design": ["design"]}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Put pages that mkdocs.yml does not name at the end of their folder's section. Called by MkDocs once a build."""
    named = str(config.nav)
    for section in config.nav:
        for title in section.keys() & SECTIONS:
            paths = (path for folder in SECTIONS[title] for path in (DOCS / folder).glob("*.md"))
            found = sorted(path.relative_to(DOCS).as_posix() for path in paths)
            section[title] += [page for page in found if f"'{page}'" not in named]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages. Called by MkDocs once a build."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in COPIED.items()}
    pages |= {f"reference/{name}.md": write() for name, write in REFERENCE.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links that lead out of docs/ into links that work on the site. Called by MkDocs for every page."""
    here = page.file.src_uri
    source = ROOT / COPIED[here] if here in COPIED else DOCS / here

    def relinked(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[1]))
        if target.is_relative_to(DOCS):
            return posixpath.relpath(target.relative_to(DOCS).as_posix(), posixpath.dirname(here) or ".")
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        copies = [page for page, original in COPIED.items() if original == name]
        if copies:
            return posixpath.relpath(copies[0], posixpath.dirname(here) or ".")
        # A dead link stays as it is: MkDocs complains about it, and the strict build fails.
        return f"{config.repo_url}/blob/main/{name}" if name and target.exists() else match[1]

    return LINK.sub(relinked, markdown)


def commands() -> str:
    """Every verb of the command line with its settings."""
    import cli

    lines = ["# Commands", "", "Written from the command line itself; `pairmill VERB --help` says the same.", ""]
    lines += [
        f"{knobs()} settings in all: those common to stages once, the others for each verb that declares them.",
        "",
    ]
    for command in cli.app.registered_commands:
        assert command.callback is not None
        parameters = inspect.signature(command.callback, eval_str=True).parameters.values()
        arguments = [_spelling(p) for p in parameters if _is_argument(p)]
        verb = command.name or command.callback.__name__
        lines += [f"## {verb}", "", "    " + " ".join(["pairmill", verb, *arguments, "[OPTIONS]"]), ""]
        lines += [*_prose(inspect.getdoc(command.callback) or ""), "", *_table(parameters), ""]
    return "\n".join(lines)


def knobs() -> int:
    """How many settings there are: fields of config dataclasses, each counted in the class that declares it."""
    import cli
    from demo.config import DemoConfig

    configs: list[type] = [DemoConfig, *(config for config, _ in (cli.STAGES | cli.TOOLS).values())]
    classes: set[type] = {klass for config in configs for klass in config.__mro__ if klass is not object}
    return sum(_declares(klass, name) for klass in classes for name in inspect.get_annotations(klass))


def recipes() -> str:
    """What the tables of a recipe may hold."""
    import cli
    from core.config import COMMON, is_stable

    lines = [
        *["# Recipes", "", "A recipe is a TOML file with one table a stage, run in this order by `pairmill run`."],
        *[
            f"{', '.join(f'`{name}`' for name in COMMON)} may stand at its top, for all stages. A stage that runs several"
        ],
        "times has a list of tables, `[[train]]`. An unknown name is an error. [Commands](commands.md) explains each",
        "setting; those marked *binds* decide the results, so a work folder keeps to them (`--fresh` starts over).",
    ]
    for stage, (cls, _) in cli.STAGES.items():
        hints = typing.get_type_hints(cls)
        lines += ["", f"## [{stage}]", "", "| setting | type | default | |", "|---|---|---|---|"]
        for field in dataclasses.fields(cls):
            if field.name not in COMMON:
                required = field.default is dataclasses.MISSING
                default = "required" if required else _code(field.default)
                binds = "binds" if is_stable(field) else ""
                lines.append(f"| `{field.name}` | {_type(hints[field.name])} | {default} | {binds} |")
    return "\n".join(lines) + "\n"


def columns() -> str:
    """The Parquet files that stages share, and the words for what became of a row."""
    from core import schema

    lines = ["# Files and columns", "", "What crosses from one stage to the next, as `core/schema.py` fixes it.", ""]
    lines += ["## Outcomes", "", inspect.getdoc(schema.Outcome) or "", "", "| outcome | tried again |", "|---|---|"]
    lines += [f"| `{word}` | {'yes' if word in schema.RETRYABLE else ''} |" for word in schema.Outcome]
    tables = {
        "Pairs": (schema.pair_fields, schema.pair_schema()),
        "Decisions": (schema.decision_schema, schema.decision_schema()),
        "Samples": (schema.sample_schema, schema.sample_schema()),
    }
    for title, (described, columns) in tables.items():
        lines += ["", f"## {title}", "", inspect.getdoc(described) or "", "", "| column | type |", "|---|---|"]
        lines += [f"| `{field.name}` | `{field.type}`{'' if field.nullable else ', never null'} |" for field in columns]
    return "\n".join(lines) + "\n"


def presets() -> str:
    """The rule sets of `dedup --preset`."""
    lines = ["# Filter presets", "", "`pairmill dedup --preset NAME`: each file is one set of named rules.", ""]
    for path in sorted((ROOT / "dedup" / "presets").glob("*.sql")):
        lines += [f"## {path.stem}", "", "```sql", path.read_text(encoding="utf-8").strip(), "```", ""]
    return "\n".join(lines)


def errors() -> str:
    """The error tree with exit codes."""
    tree = inspect.getdoc(importlib.import_module("core.errors"))
    return f"# Errors and exit codes\n\n```text\n{tree}\n```\n"


REFERENCE: dict[str, Callable[[], str]] = {
    "commands": commands,
    "recipes": recipes,
    "files": columns,
    "presets": presets,
    "errors": errors,
}


def _declares(klass: type, name: str) -> bool:
    """Whether the setting is new in `klass`, rather than one of its base with another default."""
    return not any(name in inspect.get_annotations(base) for base in klass.__mro__[1:])


def _prose(docstring: str) -> Iterator[str]:
    """A config's docstring as Markdown; what Typer keeps as it is (after a backspace) is a block here too."""
    for paragraph in docstring.split("\n\n"):
        kept = paragraph.startswith("\b")
        yield f"```text\n{paragraph.lstrip(chr(8)).strip(chr(10))}\n```" if kept else paragraph
        yield ""


def _table(parameters: Any) -> Iterator[str]:
    yield "| | type | default | |"
    yield "|---|---|---|---|"
    for p in parameters:
        hint, info = typing.get_args(p.annotation)
        required = p.default is inspect.Parameter.empty
        default = "required" if required else _code(p.default)
        yield f"| `{_spelling(p)}` | {_type(hint)} | {default} | {_cell(info.help or '')} |"


def _is_argument(parameter: inspect.Parameter) -> bool:
    return type(typing.get_args(parameter.annotation)[1]).__name__ == "ArgumentInfo"


def _spelling(parameter: inspect.Parameter) -> str:
    if _is_argument(parameter):
        return parameter.name.upper()
    info = typing.get_args(parameter.annotation)[1]
    # Inside Annotated the first spelling stands where the default would, and Typer moves it later.
    names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    return ", ".join(names or ["--" + parameter.name.replace("_", "-")])


def _type(hint: Any) -> str:
    """A type in words: choices by name, a list by what it holds."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(i) for i in inner if i is not types.NoneType)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    return {"str": "text", "int": "number", "float": "number", "bool": "yes or no"}.get(hint.__name__, hint.__name__)


def _code(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value in ("", None, (), []) else f"`{list(value) if isinstance(value, tuple) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
