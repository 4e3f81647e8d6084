"""Filters as SQL over `pairs`: the user's condition, presets of published rules, and the mark of evaluation rows.

A preset is a file of predicates, each with a name, a sentence, and optionally the column without which it does not apply:

    -- rule min_side: the shorter side has at least 200 pixels
    least(width, height) >= 200;
    -- rule clip_score (if clip_score): the similarity of picture and caption is at least 0.30
    clip_score >= 0.30;
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from core import catalog
from core.errors import InputError, UsageError, nearest
from core.schema import pair_fields

if TYPE_CHECKING:
    import duckdb

    from dedup.config import DedupConfig

Mask = npt.NDArray[np.bool_]
HOLDOUT = "holdout"
_RULE = re.compile(r"^--\s*rule\s+(?P<name>[\w-]+)\s*(?:\(if\s+(?P<column>\w+)\))?\s*:", re.MULTILINE)
_POINTED = re.compile(r"(?P<head>LINE (?P<line>\d+): )(?P<text>.*)\n(?P<caret> *)\^")
_MISSING = re.compile(r'[Cc]olumn "(?P<name>[^"]+)" not found')


@dataclass(frozen=True)
class Rule:
    """A named predicate. `reason` is what a pair carries that it drops."""

    reason: str
    predicate: str
    needs: str | None = None


@dataclass(frozen=True)
class Verdicts:
    """What the conditions say of each fetched pair, in order of (uid, unit, row). `passes` follows the order of `reasons`."""

    reasons: list[str]
    passes: list[Mask]
    holdout: Mask | None

    @classmethod
    def of(cls, judged: pa.Table) -> Verdicts | None:
        """Those that `judge` gave; None where no condition applied."""
        masks = [column.to_numpy() for column in judged.columns]
        if not masks:
            return None
        rules = len(masks) - (judged.column_names[-1] == HOLDOUT)
        return cls(judged.column_names[:rules], masks[:rules], masks[rules] if rules < len(masks) else None)

    def take(self, rows: npt.NDArray[np.int64]) -> Verdicts:
        return Verdicts(
            self.reasons, [p[rows] for p in self.passes], None if self.holdout is None else self.holdout[rows]
        )


def conditions(config: DedupConfig) -> list[Rule]:
    """Every condition of `config` in order, that of --holdout last.

    Raises:
        InputError: an unknown preset.
    """
    rules = [Rule("where", config.where)] if config.where else []
    for name in config.preset:
        rules += load_preset(name)
    return [*rules, Rule(HOLDOUT, config.holdout)] if config.holdout else rules


def judge(connection: duckdb.DuckDBPyConnection, rules: list[Rule]) -> pa.Table:
    """Evaluate the conditions that apply over the fetched pairs: a column each, for `Verdicts.of`.

    Args:
        connection: with the view `pairs`.

    Raises:
        UsageError: a condition that DuckDB does not accept, in DuckDB's words.
        InputError: a preset needs a column which is missing or empty everywhere.
    """
    known = catalog.columns(connection, "pairs")
    rules = [rule for rule in rules if rule.needs is None or rule.needs in known]
    if not rules:
        return pa.table({})
    for rule in rules:
        _check(connection, rule, known)
    answers = _answers(connection, rules)
    for rule, answer in zip(rules, answers, strict=True):
        if ":" in rule.reason and len(answer) and answer.mask.all():
            raise InputError(_empty_column(rule, known))
    return pa.table(
        [pa.array(np.asarray(answer.filled(False), bool)) for answer in answers], [rule.reason for rule in rules]
    )


def _answers(connection: duckdb.DuckDBPyConnection, conditions: list[Rule]) -> list[Any]:
    """A masked array a condition, in their order; masked where SQL says NULL.

    Raises:
        UsageError: a condition cannot be evaluated on a pair, or makes several rows of one.
    """
    import duckdb

    chosen = ", ".join(f"CAST(({c.predicate}\n) AS BOOLEAN) AS c{i}" for i, c in enumerate(conditions))
    sql = f"""SELECT {", ".join(f"c{i}" for i in range(len(conditions)))} FROM (
        SELECT uid, unit, "row", {chosen} FROM pairs WHERE outcome = 'ok') ORDER BY uid, unit, "row" """
    try:
        found = connection.execute(sql).fetchnumpy()
    except (duckdb.OutOfMemoryException, duckdb.IOException):
        raise  # of this machine and the files
    except duckdb.Error as error:
        for condition in conditions:
            _check(connection, condition, [], "")
        raise UsageError(f"the conditions cannot be evaluated; DuckDB says: {catalog.says(error)}") from error
    count = connection.execute("SELECT count(*) FROM pairs WHERE outcome = 'ok'").fetchall()[0][0]
    if any(len(answer) != count for answer in found.values()):
        raise UsageError(
            "expected conditions that say one thing of each pair, found one with several rows for one (unnest)"
        )
    return [np.ma.asarray(found[f"c{i}"]) for i in range(len(conditions))]


def _check(connection: duckdb.DuckDBPyConnection, condition: Rule, known: list[str], how: str = "EXPLAIN") -> None:
    """Let DuckDB bind one condition alone (or evaluate it, where `how` is empty), to put its complaint down to it."""
    import duckdb

    where = f"the preset's rule {condition.reason}" if ":" in condition.reason else f"--{condition.reason}"
    try:
        connection.execute(
            f"{how} SELECT count(c) FROM (SELECT uid, CAST((\n{condition.predicate}\n) AS BOOLEAN) AS c FROM pairs "
            "WHERE outcome = 'ok')"
        ).fetchall()
    except duckdb.Error as error:
        missing = _MISSING.search(str(error))
        if missing and ":" in condition.reason:
            raise InputError(_missing_column(where, missing["name"], known)) from error
        raise UsageError(
            f"{where} is not a condition over pairs; DuckDB says: {catalog.says(error)}{_place(str(error))}"
        ) from error


def _place(message: str) -> str:
    """Where in the condition, which stands alone from the second line of what DuckDB was given, it stumbled."""
    found = _POINTED.search(message)
    if found is None:
        return ""
    line, text = int(found["line"]) - 1, found["text"][max(0, len(found["caret"]) - len(found["head"])) :]
    return f"; in line {line} of it, at: {text.strip() or 'its end'}"


def _missing_column(where: str, column: str, known: list[str]) -> str:
    if column == "clip_score":
        return f"{where} needs the column clip_score, which pairs lack; `pairmill score --checkpoint C` makes it"
    if column in {field.name for field in pair_fields()}:
        return f"{where} needs the column {column}, which these pairs lack; make them again with `pairmill ingest`"
    return (
        f"{where} needs the column {column}, which pairs lack ({nearest(column, known)}); `pairmill ingest` keeps every "
        f"column of its list, so put {column} into the list and ingest that"
    )


def _empty_column(rule: Rule, known: list[str]) -> str:
    used = [name for name in known if re.search(rf"\b{re.escape(name)}\b", rule.predicate)]
    made_by = {"lang": "`pairmill ingest --lang` fills it", "clip_score": "`pairmill score --checkpoint C` fills it"}
    hint = "; " + next((made_by[name] for name in used if name in made_by), "fill it or leave the preset out")
    return f"the preset's rule {rule.reason} reads {' and '.join(used)}, which is empty in every pair{hint}"


def load_preset(name: str) -> list[Rule]:
    """The rules of a preset by name, or of a .sql file by path.

    Raises:
        InputError: there is no such preset, or the file holds no rule.
    """
    if name.endswith(".sql"):
        try:
            text, title = Path(name).read_text(encoding="utf-8"), Path(name).stem
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--preset: expected a readable .sql file at {name}, found none ({error})") from error
    else:
        known = preset_names()
        if name not in known:
            raise InputError(f"--preset: there is no preset {name!r}: {nearest(name, known)}")
        text = resources.files("dedup.presets").joinpath(f"{name}.sql").read_text(encoding="utf-8")
        title = name
    rules = _parse(text, title)
    if not rules:
        raise InputError(f"--preset: {name} holds no rule; a rule starts with a line `-- rule NAME: what it asks`")
    return rules


def preset_names() -> list[str]:
    """Presets that come with pairmill."""
    files = resources.files("dedup.presets").iterdir()
    return sorted(f.name.removesuffix(".sql") for f in files if f.name.endswith(".sql"))


def _parse(text: str, title: str) -> list[Rule]:
    heads = list(_RULE.finditer(text))
    rules = []
    for i, head in enumerate(heads):
        end = heads[i + 1].start() if i + 1 < len(heads) else len(text)
        body = [line for line in text[head.start() : end].splitlines() if not line.lstrip().startswith("--")]
        rules.append(Rule(f"{title}:{head['name']}", "\n".join(body).strip().removesuffix(";"), head["column"]))
    return rules
