"""Balancing against the formula of the paper, and the data's own words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from core.errors import ConfigError
from dedup import balance
from tests.dedup.parts import decide, decisions, kept, pair, write_parts


def test_the_share_kept_is_the_papers() -> None:
    """12,000 captions say "dog", 3,000 of them also "ball"; at t = 1,500 those are kept with 1/8, or 1 - 7/8 * 1/2."""
    captions = ["Dog: ball"] * 3000 + ["dog dog"] * 9000 + ["nothing of it"] * 2 + ["", None]
    found = balance.entries(pa.array(captions), 1500)
    draw = np.random.default_rng(1).random(len(captions))
    keeps = found.keeps(np.ones(len(captions), bool), 1500, draw)
    assert keeps[:3000].mean() == pytest.approx(1 - 7 / 8 * 1 / 2, abs=0.03)
    assert keeps[3000:12000].mean() == pytest.approx(1 / 8, abs=0.015)
    assert not keeps[12000:].any()
    more = found.keeps(np.ones(len(captions), bool), 3000, draw)
    assert (more | ~keeps).all() and more[:3000].all()  # whoever stays at one t stays at a larger one
    few = found.keeps(np.arange(len(captions)) % 10 == 0, 1500, draw)
    assert few[:12000:10].all() and few.sum() == 1200  # counted among those that are asked for


def test_the_datas_own_words_leave_what_is_rare(tmp_path: Path) -> None:
    rows = [pair(f"c{i:04d}", f"photo of stuff x{i}", f"http://x/{i}") for i in range(1000)]
    rows += [pair(f"r{i}", f"zebra in a field y{i}", f"http://y/{i}") for i in range(6)]
    rows += [pair("lone", "singular", "http://z/0")]
    write_parts(tmp_path, rows, sizes=[300])
    summary = decide(tmp_path, balance=20)
    left = kept(tmp_path)
    assert {f"r{i}" for i in range(6)} <= left  # "zebra" is said by few
    assert 20 <= sum(u.startswith("c") for u in left) <= 100  # 1 - (1 - 20/1000) ** 3 of 1,000 is 59
    assert "lone" not in left and decisions(tmp_path)["lone"]["reason"] == "balance"
    (rule,) = summary["rules"]
    assert rule == {"rule": "balance", "alone": 1007 - len(left), "in_sequence": 1007 - len(left)}
    write_parts(tmp_path / "turned", rows[::-1], sizes=[100])
    decide(tmp_path / "turned", balance=20)
    assert kept(tmp_path / "turned") == left


def test_conditions_before_it_change_the_counts(tmp_path: Path) -> None:
    rows = [pair(f"p{i:03d}", "a dog", f"http://x/{i}", side=100 + i) for i in range(400)]
    write_parts(tmp_path, rows)
    assert len(kept_of(tmp_path, balance=50)) < 100
    assert len(kept_of(tmp_path, balance=50, where="width < 150")) == 50


def kept_of(work: Path, **settings: object) -> set[str]:
    decide(work, policy="image", max_captions_per_image=0, **settings)
    return kept(work)


def test_a_count_below_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--balance"):
        decide(tmp_path, balance=-1)
