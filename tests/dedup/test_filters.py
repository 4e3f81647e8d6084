"""Conditions in SQL: what they drop, how they are counted, and what a wrong one is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from core.errors import ConfigError, InputError, UsageError
from dedup.filters import load_preset, preset_names
from dedup.keep import render
from tests.dedup.parts import decide, decisions, kept, pair, write_parts

LONG = "a photograph of the old town hall on a sunny day in spring"


def _row(uid: str, caption: str = LONG, **more: Any) -> dict[str, Any]:
    row = pair(uid, f"{caption}", f"http://x/{uid}", lang="en")
    return {**row, "bytes": 60_000, "width": 500, "height": 450, **more}


def test_where_drops_what_does_not_meet_it(tmp_path: Path) -> None:
    score = pa.field("score", pa.float64())
    rows = [{**_row("a"), "score": 0.5}, {**_row("b"), "score": 0.1}, {**_row("c"), "score": None}]
    write_parts(tmp_path, rows, source=[score])
    summary = decide(tmp_path, where="score > 0.3 -- comments are fine")
    assert kept(tmp_path) == {"a"}
    assert decisions(tmp_path)["b"]["reason"] == "where" and summary["dropped"] == {"where": 2}


def test_what_a_filter_drops_stands_for_nothing(tmp_path: Path) -> None:
    write_parts(tmp_path, [_row("a", width=900), {**_row("b"), "url": "http://x/b"}])
    decide(tmp_path, policy="text", max_images_per_caption=1)
    assert kept(tmp_path) == {"a"}
    decide(tmp_path, policy="text", max_images_per_caption=1, where="width < 800")
    assert kept(tmp_path) == {"b"}


@pytest.mark.parametrize("name", ["align", "cc12m", "coyo", "datacomp-basic", "laion", "obelics"])
def test_every_preset_keeps_a_good_pair_and_drops_a_bad_one(tmp_path: Path, name: str) -> None:
    bad = _row("bad", "x x x", lang="de", width=2000, height=100, bytes=900)
    write_parts(tmp_path, [_row("good"), bad])
    summary = decide(tmp_path, preset=(name,))
    assert name in preset_names()
    assert kept(tmp_path) == {"good"}
    assert str(decisions(tmp_path)["bad"]["reason"]).startswith(f"{name}:")
    assert {r["rule"] for r in summary["rules"]} <= {r.reason for r in load_preset(name)}


def test_published_thresholds_of_datacomp_basic(tmp_path: Path) -> None:
    rows = [
        _row("side", width=199),
        _row("side_ok", width=200, height=200),
        _row("aspect", width=601, height=200),
        _row("aspect_ok", width=600, height=200),
        _row("words", "two words"),
        _row("words_ok", "now three words"),
        _row("characters", "a b c"),
        _row("characters_ok", "a b cd"),
        _row("english", lang="fr"),
    ]
    write_parts(tmp_path, rows)
    summary = decide(tmp_path, preset=("datacomp-basic",), policy="image")
    found = {u: r["reason"] for u, r in decisions(tmp_path).items()}
    for uid in ("aspect", "words", "characters", "english"):
        assert found[uid] == f"datacomp-basic:{uid}"
    assert found["side"] == "datacomp-basic:min_side"
    assert kept(tmp_path) == {"side_ok", "aspect_ok", "words_ok", "characters_ok"}
    assert {r["rule"].split(":")[1]: r["alone"] for r in summary["rules"]} == {
        "english": 1,
        "words": 1,
        "characters": 1,
        "min_side": 1,
        "aspect": 1,
    }


def test_rules_are_counted_alone_and_in_sequence(tmp_path: Path) -> None:
    rows = [_row("a"), _row("b", "no", bytes=10), _row("c", bytes=10), _row("d", "no")]
    write_parts(tmp_path, rows)
    dry = decide(tmp_path, preset=("laion",), policy="image", dry_run=True)
    assert not (tmp_path / "dedup" / "decisions.parquet").exists()
    assert dry["rules"] == [
        {"rule": "laion:bytes", "alone": 2, "in_sequence": 2},
        {"rule": "laion:characters", "alone": 2, "in_sequence": 1},
    ]
    wet = decide(tmp_path, preset=("laion",), policy="image")
    assert wet["rules"] == dry["rules"] and wet["dropped"] == {"laion:bytes": 2, "laion:characters": 1}


def test_a_rule_with_a_condition_applies_where_its_column_is(tmp_path: Path) -> None:
    rows = [{**_row("a"), "clip_score": 0.31}, {**_row("b"), "clip_score": 0.29}]
    write_parts(tmp_path, rows, source=[pa.field("clip_score", pa.float32())])
    decide(tmp_path, preset=("laion",), policy="image")
    assert decisions(tmp_path)["b"]["reason"] == "laion:clip_score"


def test_align_counts_over_the_whole_list(tmp_path: Path) -> None:
    write_parts(tmp_path, [_row(f"p{i:02d}", "the same three words") for i in range(11)] + [_row("q")])
    decide(tmp_path, preset=("align",), policy="image")
    assert kept(tmp_path) == {"q"}
    assert decisions(tmp_path)["p00"]["reason"] == "align:images_of_text"


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.sql"
    path.write_text("-- my rules\n-- rule wide: wider than high\nwidth > height\n;\n")
    write_parts(tmp_path, [_row("a"), _row("b", width=300)])
    decide(tmp_path, preset=(str(path),), policy="image")
    assert decisions(tmp_path)["b"]["reason"] == "mine:wide"
    path.write_text("width > height")
    with pytest.raises(InputError, match="holds no rule"):
        load_preset(str(path))


def test_wrong_conditions_get_duckdbs_words(tmp_path: Path) -> None:
    write_parts(tmp_path, [_row("a")])
    with pytest.raises(UsageError, match=r'(?s)--where is not a condition.*"heigth" not found.*height'):
        decide(tmp_path, where="heigth > 3")
    with pytest.raises(UsageError, match=r"(?s)--holdout is not a condition.*syntax error"):
        decide(tmp_path, holdout="split == ")
    with pytest.raises(UsageError, match="DuckDB"):
        decide(tmp_path, where="CAST(caption AS INTEGER) > 3")
    with pytest.raises(InputError, match="no preset 'datacomp': did you mean 'datacomp-"):
        decide(tmp_path, preset=("datacomp",))
    assert not (tmp_path / "dedup" / "decisions.parquet").exists()


def test_a_preset_without_its_column_says_who_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "scored.sql"
    path.write_text("-- rule score: good\naesthetic > 5;\n")
    write_parts(tmp_path, [_row("a", lang=None)])
    with pytest.raises(
        InputError, match=r"rule scored:score needs the column aesthetic.*`pairmill ingest` keeps every column"
    ):
        decide(tmp_path, preset=(str(path),))
    with pytest.raises(InputError, match=r"datacomp-basic:english reads lang, which is empty.*ingest --lang"):
        decide(tmp_path, preset=("datacomp-basic",))


@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": 0.1},
        {"max_images_per_caption": 0},
        {"captions": "x.csv", "where": "true"},
        {"balance": -1},
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(settings)).replace("_", "-")):
        decide(tmp_path, **settings)


def test_rules_of_the_same_name_all_count(tmp_path: Path) -> None:
    write_parts(tmp_path, [_row("small", width=300), _row("good"), _row("large", width=900)])
    rules = tmp_path / "mine.sql"
    rules.write_text("-- rule size: large enough\nwidth > 400;\n-- rule size: small enough\nwidth < 800;\n")
    summary = decide(tmp_path, preset=(str(rules),))
    assert kept(tmp_path) == {"good"} and summary["dropped"] == {"mine:size": 2}


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("width > 3 AND heigth > 3", "in line 1 of it, at: heigth > 3"),
        ("width > 3\n  AND (height >> ", "at: "),
        ("width > 3\n AND nothing(height)", "in line 2 of it, at: nothing(height)"),
    ],
)
def test_the_place_of_an_error_in_a_condition_is_named(tmp_path: Path, where: str, words: str) -> None:
    write_parts(tmp_path, [_row("a")])
    with pytest.raises(UsageError, match="DuckDB says") as caught:
        decide(tmp_path, where=where)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_best_scores_of_a_column_that_score_makes(tmp_path: Path) -> None:
    rows = [_row(f"p{i}") for i in range(10)]
    write_parts(tmp_path, rows)
    with pytest.raises(InputError, match=r"needs the column clip_score.*`pairmill score --checkpoint C`"):
        decide(tmp_path, preset=("datacomp-clip",))
    scores = {"unit": ["u000000"] * 10, "row": list(range(10)), "uid": [f"p{i}" for i in range(10)]}
    (tmp_path / "scores").mkdir()
    table = pa.table({**scores, "clip_score": pa.array([None, *(i / 10 for i in range(1, 10))], pa.float32())})
    pq.write_table(table, tmp_path / "scores" / "u000000.parquet")
    decide(tmp_path, preset=("datacomp-clip",), policy="image")
    assert kept(tmp_path) == {"p7", "p8", "p9"}
    decide(tmp_path, preset=("laion",), policy="image")
    assert kept(tmp_path) == {"p3", "p4", "p5", "p6", "p7", "p8", "p9"}
    pq.write_table(
        table.set_column(3, "clip_score", pa.nulls(10, pa.float32())), tmp_path / "scores" / "u000000.parquet"
    )
    with pytest.raises(InputError, match="clip_score, which is empty in every pair; `pairmill score"):
        decide(tmp_path, preset=("laion",), policy="image")


def test_the_summary_is_a_table_with_every_rule(tmp_path: Path) -> None:
    write_parts(tmp_path, [_row("a"), _row("b", "no", bytes=10), _row("c", "[red]odd[/red] words", bytes=10)])
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render(decide(tmp_path, preset=("laion",), dry_run=True)))
    text = capture.get()
    assert "1 of 3 pairs would stay" in text and "laion:characters" in text and "Expected recall" in text


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("CAST(caption AS INTEGER) > 3", "Could not convert string"),
        ("caption", "Could not convert string"),
        ("length(caption)::TINYINT > 3", "out of range"),
        ("count(*) > 1", "GROUP BY"),
        ("error('no')", "no"),
        ("regexp_matches(caption, '(')", "missing"),
        ("unnest([true, false])", "several rows for one"),
    ],
)
@pytest.mark.parametrize("setting", ["where", "holdout", "preset"])
def test_a_condition_that_cannot_be_evaluated_is_one_sentence(
    tmp_path: Path, setting: str, condition: str, words: str
) -> None:
    write_parts(tmp_path, [_row("a", "long words " * 30), _row("b")])
    rules = tmp_path / "mine.sql"
    rules.write_text(f"-- rule fine: wide\nwidth > 3;\n-- rule odd: odd\n{condition};")
    given = (str(rules),) if setting == "preset" else condition
    with pytest.raises(UsageError, match=re.escape(words)) as failed:
        decide(tmp_path, **{setting: given})
    assert "\n" not in str(failed.value) and "FROM pairs" not in str(failed.value)
    assert "unnest" in condition or {"preset": "mine:odd"}.get(setting, f"--{setting}") in str(failed.value)


def test_a_preset_of_which_nothing_applies_drops_nothing(tmp_path: Path) -> None:
    write_parts(tmp_path, [_row("a")])
    rules = tmp_path / "mine.sql"
    rules.write_text("-- rule score (if score): a good one\nscore > 3;")
    assert decide(tmp_path, preset=(str(rules),))["kept"] == 1


def test_conditions_are_evaluated_once_and_again_when_they_or_the_pairs_change(tmp_path: Path) -> None:
    work, preset, rows = tmp_path / "work", tmp_path / "mine.sql", [_row(f"{n}", width=500 + n) for n in range(6)]
    answers = work / "dedup/edges/verdicts.arrow"
    write_parts(work, rows)

    def dropped(side: int, **more: Any) -> int:
        preset.write_text(f"-- rule side: of some width\nwidth >= {side};")
        return int(decide(work, preset=(str(preset),), policy="image", **more)["dropped"].get("mine:side", 0))

    assert dropped(502) == 2
    stamp = answers.stat().st_mtime_ns
    assert dropped(502, threshold=0.9) == 2 and answers.stat().st_mtime_ns == stamp
    assert dropped(503, threshold=0.8) == 3, "the same name and another predicate"
    assert dropped(503, holdout="width = 500") == 2
    assert dropped(503) == 3
    write_parts(work, [{**row, "width": row["width"] + 1} for row in rows])
    assert dropped(503) == 2


def test_a_preset_that_was_edited_decides_anew(tmp_path: Path) -> None:
    work, preset = tmp_path / "work", tmp_path / "mine.sql"
    write_parts(work, [_row(f"{n}", width=500 + n) for n in range(6)])
    for side in (501, 504):  # under one name, and with the same settings
        preset.write_text(f"-- rule side: of some width\nwidth >= {side};")
        assert decide(work, preset=(str(preset),), policy="image")["dropped"]["mine:side"] == side - 500
