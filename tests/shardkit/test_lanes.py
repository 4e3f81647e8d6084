"""The order of an epoch: exactly once, the same batches for every rank count, other seeds and epochs other orders."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from core.errors import ConfigError, InputError
from shardkit import lanes
from shardkit.lanes import EpochOrder, left_over

RANKS = (1, 2, 3, 4, 6, 8)
UNEVEN = [7, 1, 30, 13, 200, 1, 0, 64, 9]


def order(
    sizes: list[int], *, seed: int = 5, epoch: int = 0, lanes: int = 8, batch: int = 24, window: int = 40
) -> EpochOrder:
    return EpochOrder(sizes, seed, epoch, lanes, batch, window)


def read_by(epoch: EpochOrder, ranks: int) -> list[int]:
    return [int(i) for t in range(epoch.steps) for r in range(ranks) for i in epoch.rank_indices(t, r, ranks)]


def batches(epoch: EpochOrder, ranks: int = 1, start: int = 0) -> list[set[int]]:
    return [{int(i) for r in range(ranks) for i in epoch.rank_indices(t, r, ranks)} for t in range(start, epoch.steps)]


@pytest.mark.parametrize(
    "sizes",
    [UNEVEN, [100, 3, 50], [1] * 173, [48], [500]],
    ids=["uneven", "3 shards", "1-sample shards", "whole batches", "1 shard"],
)
@pytest.mark.parametrize("lanes", [1, 5, 8, 64])
@pytest.mark.parametrize("window", [0, 40])
def test_each_sample_is_read_exactly_once_by_1_to_8_ranks(sizes: list[int], lanes: int, window: int) -> None:
    for ranks in range(1, 9):
        epoch = order(sizes, lanes=lanes, batch=24 if 24 % ranks == 0 else 5 * 7, window=window)
        assert len(epoch.remainder) < epoch.batch_size
        assert sorted([*read_by(epoch, ranks), *epoch.remainder.tolist()]) == list(range(sum(sizes)))


@pytest.mark.parametrize("lanes", [1, 24, 64])
def test_batches_do_not_depend_on_the_number_of_ranks(lanes: int) -> None:
    epoch = order(UNEVEN, lanes=lanes)
    alone = batches(epoch)
    for ranks in RANKS:
        assert batches(epoch, ranks) == alone
        parts = [epoch.rank_indices(0, r, ranks) for r in range(ranks)]
        assert {len(part) for part in parts} == {24 // ranks}


def test_a_run_resumes_at_any_step_on_another_number_of_ranks() -> None:
    alone = batches(order(UNEVEN))
    for start in range(len(alone)):
        for ranks in RANKS:
            assert (
                batches(order(UNEVEN), ranks, start) == alone[start:]
            )  # a new object: the state is (epoch, step) only


def test_seed_and_epoch_choose_the_order_and_nothing_else_does() -> None:
    first = read_by(order(UNEVEN), 1)
    assert read_by(order(UNEVEN), 1) == first
    assert read_by(order(UNEVEN, seed=6), 1) != first
    assert read_by(order(UNEVEN, epoch=1), 1) != first
    assert sorted(first) != first


def test_the_order_is_pinned_because_old_checkpoints_resume_by_it() -> None:
    epoch = EpochOrder([4, 3, 5], seed=1, epoch=2, lanes=2, batch_size=4, window=5)
    assert [epoch.batch_indices(t).tolist() for t in range(3)] == [[5, 3, 1, 10], [4, 9, 6, 11], [0, 8, 2, 7]]


def test_what_an_epoch_leaves_out_rotates_through_all_samples() -> None:
    samples, batch = 101, 24
    left = [left_over(samples, samples % batch, 3, e) for e in range(20)]
    counts = np.bincount(np.concatenate(left), minlength=samples)
    assert counts.sum() == 20 * 5
    assert counts.max() - counts.min() == 1  # nobody twice before everybody once
    assert order([50, 51], epoch=1).remainder.tolist() == left_over(101, 5, 5, 1).tolist()


def test_shuffling_mixes_shards_within_a_batch() -> None:
    """40 shards of 100 in windows of 400, 16 lanes: a batch of 160 should see most of the shards of its 16 windows."""
    epoch = order([100] * 40, lanes=16, batch=160, window=400)
    seen = [len(np.unique(epoch.batch_indices(t) // 100)) for t in range(epoch.steps)]
    assert min(seen) >= 30


def test_lanes_read_few_windows_at_a_time() -> None:
    """With one lane a batch stays inside one window of shards: the locality that slow disks need."""
    epoch = order([50] * 20, lanes=1, batch=50, window=100)
    assert max(len(np.unique(epoch.batch_indices(t) // 50)) for t in range(epoch.steps)) <= 4


def test_a_hundred_million_samples_start_in_bounded_memory() -> None:
    """What the trainer opens: 10 MB and a tenth of a second, where a shuffle of all at once took 2.9 GB and 43 s."""
    tracemalloc.start()
    epoch = EpochOrder(np.full(20_000, 5_000), 1, 0, 64, 32_768)
    for step in (0, 1, 1_500):  # the last in other windows, so that both are held
        taken = epoch.rank_indices(step, 0, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(taken)) == 32_768
    assert peak < 20e6


def test_a_small_set_is_shuffled_whole_and_a_large_one_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [50] * 20
    assert (order(sizes, window=0).batch_indices(3) == order(sizes, window=10_000).batch_indices(3)).all()
    monkeypatch.setattr(lanes, "WHOLE", 999)
    monkeypatch.setattr(lanes, "POOL", 400)
    assert (order(sizes, window=0).batch_indices(3) == order(sizes, window=50).batch_indices(3)).all()
    assert sorted(read_by(order(sizes, window=0), 1)) != sorted(read_by(order(sizes, window=0, epoch=1), 1))


def test_mixing_says_what_a_batch_draws_from() -> None:
    """Of 40 equal shards a batch of 24 drawn at random is expected to meet 40 (1 - (39/40)^24) = 18.2."""
    seen, expected = order([100] * 40, window=0).mixing(2)
    assert abs(expected - 18.2) < 0.05
    assert abs(np.mean([order([100] * 40, window=0, seed=s).mixing()[0] for s in range(50)]) - expected) < 1
    assert seen == len({i // 100 for i in order([100] * 40, window=0).batch_indices(2).tolist()})
    clumped, _ = order([100] * 40, lanes=1, window=100).mixing()
    assert clumped <= 2


def test_settings_that_cannot_be_are_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match="at least one batch of 24 samples, found 10 in 1 shards"):
        order([10])
    with pytest.raises(ConfigError, match="that 5 ranks can share equally, found 24"):
        order(UNEVEN).rank_indices(0, 0, 5)
    with pytest.raises(ConfigError, match="found rank 2, step 0"):
        order(UNEVEN).rank_indices(0, 2, 2)
    with pytest.raises(ConfigError, match="lanes 0"):
        order(UNEVEN, lanes=0)
