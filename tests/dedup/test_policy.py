"""Policies on tables small enough to decide by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core import catalog
from core.schema import decision_schema
from core.storage import Folder
from tests.dedup.parts import decide, decisions, kept, pair, write_parts

DOG = "a brown dog runs over the green grass in the park"
DOG_ALSO = "a brown dog runs over the green grass in a park"
CAT = "a small cat sleeps on an old red sofa at home"

# a1, a2: two captions of one URL. b: the bytes of a under another URL, nearly the caption of a1, and smaller.
# c: the bytes of a, another caption. d: another picture with the caption of a1. e: another picture, another caption.
ROWS = [
    pair("a1", DOG, "http://x/a", "A"),
    pair("a2", "a small cat with a toy", "http://x/a", "A"),
    pair("b1", DOG_ALSO, "http://x/b", "A", side=200),
    pair("c1", "the neighbour took this picture of a lawn in spring", "http://x/c", "A", side=100),
    pair("d1", DOG, "http://x/d", "D", side=250),
    pair("e1", CAT, "http://x/e", "E"),
]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("both", {"b1": ("pair_duplicate", "a1", "minhash")}),
        ("image", {"b1": ("image_duplicate", "a1", "sha256"), "c1": ("image_duplicate", "a1", "sha256")}),
        ("text", {"d1": ("caption_duplicate", "a1", "caption")}),
        (
            "either",
            {
                "b1": ("image_duplicate", "a1", "sha256"),
                "c1": ("image_duplicate", "a1", "sha256"),
                "d1": ("caption_duplicate", "a1", "caption"),
            },
        ),
    ],
)
def test_each_policy_drops_what_its_table_says(
    tmp_path: Path, policy: str, expected: dict[str, tuple[str, str, str]]
) -> None:
    write_parts(tmp_path, ROWS)
    summary = decide(tmp_path, policy=policy, max_images_per_caption=1)
    found = decisions(tmp_path)
    gone = {u: (r["reason"], r["survivor"], r["evidence"]) for u, r in found.items() if not r["kept"]}
    assert gone == expected
    assert summary["pairs"] == 6 and summary["kept"] == 6 - len(expected)
    assert sum(summary["dropped"].values()) == len(expected)
    assert all(found[u]["similarity"] > 0.8 for u in gone)
    assert {u: r["image_group"] for u, r in found.items()} == dict.fromkeys(("a1", "a2", "b1", "c1"), "a1") | {
        "d1": "d1",
        "e1": "e1",
    }


def test_decisions_are_in_the_form_of_the_contract(tmp_path: Path) -> None:
    write_parts(tmp_path, [*ROWS, {**pair("f1", "failed", "http://x/f"), "outcome": "timeout"}])
    decide(tmp_path)
    noted = pq.read_table(tmp_path / "dedup" / "decisions.parquet")
    assert noted.schema.equals(decision_schema())
    assert noted["uid"].to_pylist() == ["a1", "a2", "b1", "c1"]  # the others stay, and are like no other
    with catalog.connect(Folder(tmp_path)) as connection:
        whole = connection.sql("SELECT * FROM decisions ORDER BY uid").to_arrow_table()
    assert whole.schema.names == noted.schema.names and whole.schema.types == noted.schema.types
    assert whole["uid"].to_pylist() == sorted(row["uid"] for row in ROWS)  # and none for what was not fetched
    assert whole.filter(pa.compute.is_in(whole["uid"], noted["uid"])).cast(noted.schema).equals(noted)


def test_captions_of_one_url_stay_unless_they_are_equal(tmp_path: Path) -> None:
    rows = [
        pair("a1", "a dog jumps over a white fence", "http://x/a"),
        pair("a2", "a dog jumps over a tall white fence", "http://x/a"),  # near, but of the same picture
        pair("a3", "A dog jumps over a white fence!", "http://x/a"),  # equal once case and punctuation are gone
    ]
    write_parts(tmp_path, rows)
    for policy in ("both", "image", "text", "either"):
        decide(tmp_path, policy=policy)
        assert kept(tmp_path) == {"a1", "a2"}, policy
        gone = decisions(tmp_path)["a3"]
        assert (gone["reason"], gone["survivor"], gone["evidence"]) == ("pair_duplicate", "a1", "caption")
        assert gone["similarity"] == 1.0


def test_caps_keep_the_best_captions_of_the_best_url(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [pair(f"a{i}", " ".join(words[:i]), "http://x/a", "A") for i in range(1, 5)]
    rows += [pair(f"b{i}", " ".join(words[i : i + 3]), "http://x/b", "A", side=500) for i in range(1, 3)]
    write_parts(tmp_path, rows)
    summary = decide(tmp_path, max_captions_per_image=4)
    assert kept(tmp_path) == {"b1", "b2", "a4", "a3"}
    assert summary["dropped"] == {"caption_cap": 2}
    assert decisions(tmp_path)["a1"]["survivor"] == "b1"
    decide(tmp_path, max_captions_per_image=0)
    assert len(kept(tmp_path)) == 6


def test_one_caption_on_many_pictures_is_capped(tmp_path: Path) -> None:
    rows = [pair(f"p{i:02d}", DOG, f"http://x/{i}", side=100 + i) for i in range(20)]
    write_parts(tmp_path, rows)
    decide(tmp_path, policy="text")
    assert kept(tmp_path) == {f"p{i:02d}" for i in range(10, 20)}  # the ten largest
    decide(tmp_path, policy="both")
    assert len(kept(tmp_path)) == 20


def test_short_and_empty_captions(tmp_path: Path) -> None:
    captions = ["red dress", "dress red", "red shirt", "the old red dress", "the old red dress shop", "", None, "!!"]
    rows = [pair(f"p{i}", c, f"http://x/{i}") for i, c in enumerate(captions)]
    write_parts(tmp_path, rows)
    decide(tmp_path, policy="text", max_images_per_caption=1)
    # of four words and fewer only equal sets match, and captions without words match nothing
    assert kept(tmp_path) == {"p0", "p2", "p3", "p4", "p5", "p6", "p7"}
    assert decisions(tmp_path)["p1"]["evidence"] == "minhash"


def test_greedy_removes_only_what_is_similar_to_what_stays(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(20)]
    chain = [" ".join(words[i : i + 10]) for i in range(4)]  # neighbours share 9 of 11 words, the ends 7 of 13
    rows = [pair(f"p{i}", c, f"http://x/{i}") for i, c in enumerate(chain)]
    write_parts(tmp_path, rows)
    decide(tmp_path, policy="text", max_images_per_caption=1, method="components")
    assert kept(tmp_path) == {"p0"}
    decide(tmp_path, policy="text", max_images_per_caption=1)
    assert kept(tmp_path) == {"p0", "p2"}
    found = decisions(tmp_path)
    assert all(found[u]["similarity"] == pytest.approx(9 / 11) for u in ("p1", "p3"))


def test_evaluation_pictures_are_kept_and_never_trained_on(tmp_path: Path) -> None:
    split = pa.field("split", pa.string())
    rows: list[dict[str, Any]] = [{**row, "split": "test" if row["uid"] == "c1" else "train"} for row in ROWS]
    rows.append({**pair("c2", rows[3]["caption"], "http://x/c", "A"), "split": "test"})
    write_parts(tmp_path, rows, source=[split])
    summary = decide(tmp_path, holdout="split = 'test'", policy="either", where="width > 150")
    found = decisions(tmp_path)
    assert {u for u, r in found.items() if r["holdout"]} == {"c1", "c2"}
    assert found["c1"]["kept"] and found["c2"]["kept"]  # equal captions, and c1 is small: kept all the same
    for uid in ("a1", "a2", "b1"):
        row = found[uid]
        assert (row["reason"], row["survivor"], row["evidence"], row["similarity"]) == ("holdout", "c1", "sha256", 1.0)
    assert summary["holdout"] == 2 and kept(tmp_path) == {"c1", "c2", "d1", "e1"}


def test_a_row_of_the_list_given_twice_is_one_pair(tmp_path: Path) -> None:
    write_parts(tmp_path, [*ROWS, ROWS[0], ROWS[5]], sizes=[3])
    summary = decide(tmp_path)
    assert summary["pairs"] == 8 and summary["dropped"]["repeated_row"] == 2
    assert len(decisions(tmp_path)) == 6
    assert summary["kept"] + sum(summary["dropped"].values()) == 8


@pytest.mark.parametrize("policy", ["image", "either"])
def test_the_best_url_stays_with_all_its_captions(tmp_path: Path, policy: str) -> None:
    rows = [
        pair("u1", "a dog", "http://x/b", "A"),  # equal to u2 and before it in order, but of a URL that goes
        pair("u2", "a dog", "http://x/a", "A"),
        pair("u3", "a dog that runs over green grass", "http://x/a", "A"),
    ]
    write_parts(tmp_path, rows)
    decide(tmp_path, policy=policy)
    assert kept(tmp_path) == {"u2", "u3"}


@pytest.mark.parametrize("method", ["greedy", "components"])
@pytest.mark.parametrize("policy", ["image", "text", "both", "either"])
def test_every_survivor_is_kept(tmp_path: Path, policy: str, method: str) -> None:
    rng = np.random.default_rng(5)
    rows = [
        pair(f"p{i:03d}", " ".join(f"w{w}" for w in rng.integers(0, 9, 6)), f"http://x/{i % 70}", i % 30,
             side=100 + i % 3)
        for i in range(300)
    ]  # fmt: skip
    write_parts(tmp_path, rows)
    decide(tmp_path, policy=policy, method=method, threshold=0.5, max_captions_per_image=2, max_images_per_caption=2)
    found = decisions(tmp_path)
    gone = [row for row in found.values() if not row["kept"]]
    assert len({row["reason"] for row in gone}) > 1
    assert all(found[row["survivor"]]["kept"] for row in gone)
