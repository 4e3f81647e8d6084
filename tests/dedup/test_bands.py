"""Buckets and the pairs inside them, against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from dedup import bands

MIX = np.uint32(0x9E3779B1)


def _pairs(found: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(*(row.tolist() for row in bands.unpair(found)), strict=True))


@pytest.mark.parametrize(("rows", "values"), [(0, 1), (1, 1), (2, 1), (5000, 20), (5000, 4000), (3, 10**6)])
def test_buckets_hold_all_rows_that_share_a_key(rows: int, values: int) -> None:
    keys = np.random.default_rng(rows).integers(0, values, rows).astype(np.uint32) * MIX
    found, upper = bands.buckets(keys)
    count = {int(k): n for k, n in zip(*np.unique(keys, return_counts=True), strict=True)}
    expected = sorted((int(k), i) for i, k in enumerate(keys) if count[int(k)] > 1)
    assert list(zip(upper.tolist(), found.tolist(), strict=True)) == expected


def test_small_buckets_are_compared_completely_and_large_ones_by_nearness() -> None:
    keys = np.repeat(np.array([7, 8, 9, 10], np.uint32), [2, 4, 1, 40]) * MIX
    near = np.random.default_rng(1).permutation(len(keys)).astype(np.uint64)
    rows, upper = bands.buckets(keys)
    found = _pairs(bands.candidates(rows, upper, near.__getitem__))
    small = set(combinations(range(2), 2)) | set(combinations(range(2, 6), 2))
    chain = sorted(range(7, 47), key=near.__getitem__)
    large = {(chain[0], row) for row in chain[1:]}
    large |= {(a, b) for step in (1, 2, 3) for a, b in zip(chain, chain[step:], strict=False)}
    assert found == small | {(min(p), max(p)) for p in large}


def test_names_stand_for_rows() -> None:
    rows, upper = bands.buckets(np.array([1, 1, 2, 2], np.uint32) * MIX)
    names = np.array([5, 5, 5, 9])
    assert _pairs(bands.candidates(rows, upper, lambda which: which.astype(np.uint64), names)) == {(5, 9)}


def test_meeting_gives_every_equal_pair() -> None:
    ours, theirs = np.array([3, 1, 3, 8], np.uint64), np.array([3, 7, 3, 1], np.uint64)
    a, b = bands.meeting(ours, theirs)
    assert set(zip(a.tolist(), b.tolist(), strict=True)) == {(0, 0), (0, 2), (2, 0), (2, 2), (1, 3)}
