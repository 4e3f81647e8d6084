"""Weighted mixtures: the promised shares, no repetition within a round, the same batches for every rank count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from core.errors import ConfigError, InputError
from shardkit.mixture import Mixture, shares

SMALL, LARGE = np.array([40, 25, 7]), np.array([300, 1, 0, 199])  # 72 and 500 samples


def mixture(epoch: int = 0, *, weights: tuple[float, ...] = (1, 2), batch: int = 24, seed: int = 3) -> Mixture:
    return Mixture([SMALL, LARGE], weights, seed, epoch, 8, batch)


def stream(epochs: int) -> list[list[int]]:
    return [mixture(e).batch_indices(t).tolist() for e in range(epochs) for t in range(mixture(e).steps)]


def test_each_batch_holds_the_share_of_each_set() -> None:
    order = mixture()
    assert order.shares == [8, 16] and order.samples == 572
    for batch in stream(4):
        assert len(set(batch)) == 24
        assert sum(i < 72 for i in batch) == 8
    assert order.steps == 9  # 72 samples at 8 a batch: the epoch ends when the first set has been seen


def test_sets_are_drawn_without_replacement_round_by_round() -> None:
    batches = stream(8)  # 72 steps: the small set 8 times; the large one, of 31 steps, twice and a part
    small = [[i for i in batch if i < 72] for batch in batches]
    for start in range(0, 72, 9):
        assert sorted(i for part in small[start : start + 9] for i in part) == list(range(72))
    assert [small[t] for t in range(9)] != [small[t] for t in range(9, 18)]
    large = [[i for i in batch if i >= 72] for batch in batches]
    for start in (0, 31):
        counts = Counter(i for part in large[start : start + 31] for i in part)
        assert max(counts.values()) == 1 and len(counts) == 31 * 16  # all but the remainder, which rotates
    left = [set(range(72, 572)) - {i for part in large[start : start + 31] for i in part} for start in (0, 31)]
    assert not left[0] & left[1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_ranks_share_the_same_batches_and_resume_anywhere(ranks: int) -> None:
    for epoch in (0, 1, 5):
        alone = [set(mixture(epoch).batch_indices(t).tolist()) for t in range(9)]
        for start in (0, 4, 8):
            order = mixture(epoch)  # new: the state is (epoch, step)
            for t in range(start, 9):
                parts = [order.rank_indices(t, r, ranks).tolist() for r in range(ranks)]
                assert {len(p) for p in parts} == {24 // ranks}
                assert {i for p in parts for i in p} == alone[t]


def test_seeds_and_epochs_differ() -> None:
    first = mixture().batch_indices(0).tolist()
    assert first == mixture().batch_indices(0).tolist()
    assert first != mixture(seed=4).batch_indices(0).tolist()
    assert first != mixture(1).batch_indices(0).tolist()


def test_shares_add_up_and_come_as_near_as_whole_numbers_can() -> None:
    assert shares([1, 1, 1], 3, 256) == [86, 85, 85]
    assert shares([0.7, 0.3], 2, 10) == [7, 3]
    assert shares([1e-9, 1e-9], 2, 8) == [4, 4]


def test_weights_that_cannot_be_are_refused() -> None:
    for wrong in ([1.0], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(ConfigError, match="a weight above 0 for each of 2 shard sets"):
            shares(wrong, 2, 24)
    with pytest.raises(ConfigError, match=r"a batch of 24 holds no sample of shard set 1 at weights \[1, 1000\]"):
        mixture(weights=(1, 1000))
    with pytest.raises(InputError, match="at least the 192 samples that a batch takes of shard set 1, found 72"):
        mixture(weights=(3, 1), batch=256)
    with pytest.raises(ConfigError, match="that 5 ranks can share equally, found 24"):
        mixture().rank_indices(0, 0, 5)
