"""Several sets in one run, each batch holding a fixed share of each.

Every set keeps an order of its own (`EpochOrder`) and starts over, in another order, when all of it has been seen: sets
are mixed without replacement, and a set whose share is large for its size simply comes round more often. Step t takes
step t of every set, so (epoch, step) is still all the state there is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np

from core.errors import ConfigError, InputError
from shardkit.lanes import EpochOrder, Int64, Order, check_rank


class Mixture(Order):
    """The batches of one epoch over weighted sets.

    An epoch ends when the first set has been seen once. Sample indices count through the sets as they are listed.

    Args:
        set_sizes: for each set the samples in each of its shards.
        weights: of each set; only their ratios matter.
        seed, epoch, lanes, batch_size, window: as for `EpochOrder`.

    Raises:
        ConfigError: not one positive weight a set, or a batch too small to hold a sample of each.
        InputError: a set holds fewer samples than its share of a batch.
    """

    def __init__(
        self, set_sizes: Sequence[Int64], weights: Sequence[float], seed: int, epoch: int, lanes: int, batch_size: int,
        window: int = 0,
    ) -> None:  # fmt: skip
        totals = [int(sizes.sum()) for sizes in set_sizes]
        self.shares = shares(weights, len(totals), batch_size)
        for number, (total, share) in enumerate(zip(totals, self.shares, strict=True)):
            if total < share:
                raise InputError(
                    f"expected at least the {share} samples that a batch takes of shard set {number + 1}, found {total}; "
                    "use a smaller batch or another weight"
                )
        self._sizes, self.seed, self.epoch, self.lanes, self.window = set_sizes, seed, epoch, lanes, window
        self.batch_size, self.samples = batch_size, sum(totals)
        self._starts = np.cumsum([0, *totals])
        self._steps = [total // share for total, share in zip(totals, self.shares, strict=True)]
        self.steps = min(self._steps)
        self._orders: OrderedDict[tuple[int, int], EpochOrder] = OrderedDict()
        self._lock = Lock()

    def _order(self, number: int, round_: int) -> EpochOrder:
        """The order of a set when it is seen for the `round_`-th time."""
        with self._lock:
            if (number, round_) not in self._orders:
                share = self.shares[number]
                self._orders[number, round_] = EpochOrder(
                    self._sizes[number], self.seed, round_, self.lanes, share, self.window
                )
                if len(self._orders) > 2 * len(self._sizes):  # a set that starts over is read ahead of its end
                    self._orders.popitem(last=False)
            self._orders.move_to_end((number, round_))
            return self._orders[number, round_]

    def rank_indices(self, step: int, rank: int, ranks: int) -> Int64:
        check_rank(step, self.steps, rank, ranks, self.batch_size)
        at = self.epoch * self.steps + step
        parts = [
            self._starts[number] + self._order(number, at // steps).batch_indices(at % steps)
            for number, steps in enumerate(self._steps)
        ]
        return np.concatenate(parts)[rank::ranks]


def shares(weights: Sequence[float], sets: int, batch_size: int) -> list[int]:
    """Samples of each set in a batch: in proportion to the weights, the largest remainders rounded up.

    Raises:
        ConfigError: see `Mixture`.
    """
    if len(weights) != sets or not all(0 < w < float("inf") for w in weights):
        raise ConfigError(f"expected a weight above 0 for each of {sets} shard sets, found {list(weights)}")
    exact = np.asarray(weights) / np.sum(weights) * batch_size
    whole = np.floor(exact).astype(int)
    for number in np.argsort(whole - exact, kind="stable")[: batch_size - int(whole.sum())]:
        whole[number] += 1
    if whole.min() == 0:
        raise ConfigError(
            f"a batch of {batch_size} holds no sample of shard set {int(whole.argmin()) + 1} at weights {list(weights)}; use "
            "a larger batch or a larger weight"
        )
    return [int(n) for n in whole]
