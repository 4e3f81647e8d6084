"""Settings: one frozen dataclass a stage becomes its Typer options, its table in a recipe, and its saved copy.

A setting is a dataclass field with a docstring under it; the docstring is the help text. Unknown names are errors
everywhere, because a misspelt key that is silently ignored trains the wrong model.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from core.errors import ConfigError, InputError, nearest
from core.redact import redacted

Config = TypeVar("Config", bound="VerbConfig")


def setting(
    default: Any = dataclasses.MISSING,
    *,
    argument: bool = False,
    flags: str = "",
    stable: bool = True,
    choices: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> Any:
    """A config field with more to say than its type and default.

    Args:
        argument: a positional argument on the command line instead of an option.
        flags: the option's spelling where it is not the field's name with dashes.
        stable: whether another value makes other results; `work`, `workers` and the like do not, so a finished stage
            may be continued with another value.
        also: further spellings on the command line, such as another program's.
        choices: the only values, where a subclass has others (the type of a field that none overrides is a Literal).
    """
    metadata = {"argument": argument, "flags": flags, "stable": stable, "choices": choices, "also": also}
    return dataclasses.field(default=default, kw_only=True, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerbConfig:
    """What every verb can be told."""

    work: str = setting("work", stable=False)
    """Work folder: a path or any fsspec URL."""

    def fingerprint(self) -> dict[str, Any]:
        """The settings that decide the results, by name, without passwords: they are kept in the work folder."""
        return {f.name: redacted(getattr(self, f.name)) for f in dataclasses.fields(self) if is_stable(f)}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """What `fingerprint` would have of the settings that have a default, as TOML holds them: results that are older than
        a setting were made with that."""
        fields = [f for f in dataclasses.fields(cls) if is_stable(f) and f.default is not dataclasses.MISSING]
        return plain({f.name: f.default for f in fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig(VerbConfig):
    """What a verb can be told that leaves results in the work folder, and skips those that are there."""

    fresh: bool = setting(False, flags="--fresh/--resume", stable=False)
    """Throw this stage's earlier results away instead of continuing them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolConfig(VerbConfig):
    """What a verb can be told that spreads its work over processes."""

    workers: int = setting(0, stable=False)
    """Worker processes; 0 takes one a core."""
    engine: str = setting("local", stable=False, choices=("local", "ray"))
    """Where units run: `local` processes, or `ray` (needs the extra of that name)."""
    ray_address: str = setting("", stable=False)
    """The cluster of `--engine ray`, `HOST:PORT`; left out it is RAY_ADDRESS, and without that this machine alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitsConfig(StageConfig, PoolConfig):
    """What a stage can be told whose work is cut into units."""

    part: str = setting("", stable=False)
    """Do a share of the units only, `i/n`: those whose number leaves `i` when divided by `n`. For as many runs beside
    each other on one work folder (a Slurm job array); the last one to finish closes the stage."""


COMMON = ("work", "workers", "engine", "ray_address", "fresh")
"""Settings that mean the same in every verb that has them; a recipe may say them once for all its stages."""


def is_stable(field: dataclasses.Field[Any]) -> bool:
    """Whether another value of this field makes other results."""
    return bool(field.metadata.get("stable", True))


def flag_name(field: dataclasses.Field[Any]) -> str:
    """The option's spelling on the command line, `--url-col`."""
    return str(field.metadata.get("flags") or "--" + field.name.replace("_", "-"))


@functools.cache
def field_docs(cls: Any) -> dict[str, str]:
    """The docstring under each field of `cls` and its bases, by field name."""
    docs: dict[str, str] = {}
    for klass in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(klass):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(typing.cast(type, klass)))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Resolved type of each field of `cls`."""
    return typing.get_type_hints(cls)


def as_parameters(cls: Any) -> list[inspect.Parameter]:
    """The fields of `cls` as parameters that Typer reads: arguments first, then the stage's options, then the common."""
    import typer

    docs, hints = field_docs(cls), field_types(cls)
    fields = sorted(dataclasses.fields(cls), key=lambda f: (not f.metadata.get("argument"), f.name in COMMON))
    parameters = []
    for field in fields:
        required = field.default is dataclasses.MISSING
        hint = hints[field.name]
        info: Any
        if field.metadata.get("argument"):
            info = typer.Argument(help=docs[field.name], show_default=not required)
        else:
            info = typer.Option(
                flag_name(field),
                *field.metadata.get("also", ()),
                help=docs[field.name],
                rich_help_panel=_panel(field.name),
            )
        if typing.get_origin(hint) is tuple:
            hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
        default = inspect.Parameter.empty if required else field.default
        if isinstance(default, tuple):
            default = list(default)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=Annotated[hint, info]))
    return parameters


def _panel(name: str) -> str | None:
    """Under which heading of the help a setting stands."""
    if name == "work":
        return "Common to all verbs"
    return "Common to the stages" if name in COMMON else None


def build(cls: type[Config], values: Mapping[str, Any], *, where: str) -> Config:
    """A config from plain values, checked by name and type.

    Raises:
        ConfigError: an unknown name (the nearest is offered), a missing one, or a value of another type.
    """
    hints = field_types(typing.cast(Any, cls))
    for name in values:
        if name not in hints:
            raise ConfigError(f"{where} knows no setting {name!r}: {nearest(name, hints)}")
    clean = {name: _checked(value, hints[name], f"{where}: {name}") for name, value in values.items()}
    for field in dataclasses.fields(cls):
        choices = field.metadata.get("choices")
        if choices and clean.get(field.name, field.default) not in choices:
            raise ConfigError(
                f"{where}: {field.name}: expected one of {', '.join(choices)}, found {clean[field.name]!r}"
            )
    if clean.get("work") == "":  # of an unset variable; as a path it would be the root folder
        raise ConfigError(f"{where}: expected a folder as work, found an empty name")
    if clean.get("workers", 0) < 0:
        raise ConfigError(f"{where}: expected workers of at least 0, found {clean['workers']}")
    missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in clean]
    if missing:
        raise ConfigError(f"{where} needs the setting {missing[0]!r}: {field_docs(typing.cast(Any, cls))[missing[0]]}")
    return cls(**clean)


def _checked(value: Any, hint: Any, name: str) -> Any:
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if type(value) in (int, float):  # `size = 224` in a recipe is a list of one
            value = [value]
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ConfigError(f"{name}: expected a list, found {value!r}")
        return tuple(_checked(v, inner, name) for v in value)
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{name}: expected one of {', '.join(typing.get_args(hint))}, found {value!r}")
        return value
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        wanted = " or ".join("nothing" if k is types.NoneType else k.__name__ for k in kinds)
        raise ConfigError(f"{name}: expected {wanted}, found {value!r}")
    return value


def load_recipe(
    path: str,
    stages: Mapping[str, type[VerbConfig]],
    *,
    common: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, VerbConfig]:
    """Read a TOML recipe: common settings at the top, then one table a stage, in any order.

    A stage that runs several times has a list of tables (`[[train]]`), run in their order; they come back as `train`,
    `train 2` and so on.

    `common` and `overrides` (by stage) win over what the recipe says; stages come back in the order of `stages`.

    Relative paths in a recipe are relative to the current folder, as on the command line. Strings that begin with `~` or
    `$NAME` are expanded, so that one recipe serves on machines whose data lies elsewhere; others may hold a dollar.

    Raises:
        InputError: the file is missing or is not TOML.
        ConfigError: an unknown table or setting, or a value of another type.
    """
    try:
        recipe = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"expected a recipe at {path}, found none ({error.strerror}); see examples/") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    shared = {k: _expanded(v) for k, v in recipe.items() if not _tables(v)}
    for name in shared:
        if name in stages:
            raise ConfigError(f"{path} holds {name} as a value: expected a table, [{name}]")
        if name not in COMMON:
            raise ConfigError(f"{path} knows no setting {name!r} at its top: {nearest(name, [*COMMON, *stages])}")
    tables = {name: found for name, value in recipe.items() if (found := _tables(value))}
    for name in tables:
        if name not in stages:
            raise ConfigError(f"{path} knows no stage [{name}]: {nearest(name, stages)}")
    if not tables:
        raise ConfigError(f"expected a table for each stage to run in {path}, as [ingest], found none; see examples/")
    configs: dict[str, VerbConfig] = {}
    for name in (stage for stage in stages if stage in tables):
        known = field_types(typing.cast(Any, stages[name]))
        for_all, given = ({k: v for k, v in some.items() if k in known} for some in (shared, common or {}))
        for turn, table in enumerate(tables[name], 1):
            own = {key: _expanded(value) for key, value in table.items()}
            values = {**for_all, **own, **given, **(overrides or {}).get(name, {})}
            key = name if turn == 1 else f"{name} {turn}"
            configs[key] = build(stages[name], values, where=f"{path} [{key}]")
    return configs


def _tables(value: Any) -> list[dict[str, Any]]:
    """A table, or a list of them, as a list; empty for a plain value."""
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) and value and all(isinstance(v, dict) for v in value) else []


def _expanded(value: Any) -> Any:
    import os.path

    if isinstance(value, list):
        return [_expanded(v) for v in value]
    if not isinstance(value, str):
        return value
    expanded = os.path.expandvars(os.path.expanduser(value)) if value.startswith(("~", "$")) else value
    if expanded.startswith("$"):
        raise ConfigError(f"the recipe uses {value.split('/')[0]}, which is not set; set it in the environment")
    return expanded


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as TOML can hold them: tuples as lists, nothing as no key."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}


def command(
    cls: type[Config], verb: Callable[[Config], dict[str, Any]], show: Callable[..., None]
) -> Callable[..., None]:
    """A function Typer can register: its parameters are the fields of `cls` and `--json`; it runs `verb`, then `show`s.

    `show(summary, json)` prints the summary object for people or as the last line for machines.
    """
    import typer

    def invoke(*, json: bool, **values: Any) -> None:
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        show(verb(build(cls, given, where="the command")), json)

    as_json = inspect.Parameter(
        "json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool,
            typer.Option(
                "--json", help="Print one summary object as the last line.", rich_help_panel="Common to all verbs"
            ),
        ],
    )
    invoke.__signature__ = inspect.Signature([*as_parameters(cls), as_json])  # type: ignore[attr-defined]
    invoke.__doc__ = inspect.getdoc(cls)
    return invoke
