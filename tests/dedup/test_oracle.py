"""The oracle on a sample: complete against brute force, and honest about what the bands miss or make up."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dedup import oracle
from dedup.match import Edges
from dedup.tokens import as_sets
from tests.dedup.parts import decide, pair, write_parts
from tests.dedup.test_captions import planted


def _edges(pairs: set[tuple[int, int]]) -> Edges:
    both = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return Edges(both[:, 0], both[:, 1], np.ones(len(both), np.float32))


@pytest.mark.parametrize("at_least", [0.5, 0.75, 0.9])
def test_all_sets_near_a_sampled_one_are_found(monkeypatch: pytest.MonkeyPatch, at_least: float) -> None:
    monkeypatch.setattr(oracle, "_AT_ONCE", 500)  # many pieces
    captions = planted(700)
    words = [frozenset(c.split()) for c in captions]
    near = {
        (i, j)
        for i, j in combinations(range(700), 2)
        if i < 60 and len(words[i] & words[j]) >= at_least * len(words[i] | words[j]) - 1e-9
    }
    found = oracle.near(as_sets(pa.array(captions))[0], np.arange(60), at_least)
    assert set(zip(found.a.tolist(), found.b.tolist(), strict=True)) == near | {(i, i) for i in range(60)}
    assert len(near) > 3


def test_recall_and_precision_of_a_sample() -> None:
    truth = _edges({(0, 0), (1, 1), (2, 2), (0, 3), (0, 4), (1, 5), (2, 6)})
    chained = _edges(
        {(0, 3), (3, 4), (1, 5), (2, 7)}
    )  # 0 and 4 meet over 3; 2 has a false friend, and not its true one
    group = np.array([0, 1, 2, 0, 0, 1, 6, 2])
    assert oracle.measured(truth, chained, group) == {"sampled": 3, "pairs": 4, "recall": 0.75, "precision": 0.66667}
    nobody = oracle.measured(_edges({(0, 0)}), _edges(set()), np.arange(2))
    assert nobody == {"sampled": 1, "pairs": 0, "recall": None, "precision": None}


def test_dedup_measures_itself(tmp_path: Path) -> None:
    write_parts(tmp_path, [pair(f"p{i:05d}", c, f"http://x/{i}") for i, c in enumerate(planted(3000))], sizes=[1000])
    first = decide(tmp_path, policy="text")["measured"]
    assert first["sampled"] == 1000 and first["pairs"] > 300
    assert first["recall"] >= 0.99 and first["precision"] == 1
    again = decide(tmp_path, policy="text", threshold=0.95)["measured"]
    assert again["sampled"] == 1000 and again["pairs"] < first["pairs"] and again["precision"] == 1
