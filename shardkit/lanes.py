"""The order of an epoch: which samples make up each global batch, and which of them each rank reads.

The epoch is one sequence fixed by (seed, epoch): shards are permuted, and samples are shuffled inside windows of whole
shards. It is cut into L equal lanes; sample g of the epoch is position g div L of lane g mod L, so a batch draws from L
distant windows at once while each lane reads its shards one after another. Global batch t holds g in [tB, (t+1)B) and
never depends on the number of ranks. Rank r of N reads the g with g mod N = r: the lanes with lane mod N = r where N
divides L, every N-th sample of the batch otherwise. The state of a run is therefore (epoch, step) and nothing else.

Sample indices count through the shards in their listed order; S is their sum, B the global batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError, InputError

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# Where nobody says otherwise, sets of up to WHOLE samples are shuffled whole, and larger ones so that POOL samples are
# being mixed at any time. A larger pool would make no batch better that anyone could see, and the shards that are read at
# one time have to fit into the local cache of a remote set.
WHOLE = 1 << 20
POOL = 1 << 18

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Order(ABC):
    """The batches of one epoch: `steps` global batches of `batch_size` out of `samples`."""

    samples: int
    batch_size: int
    steps: int

    @abstractmethod
    def rank_indices(self, step: int, rank: int, ranks: int) -> Int64:
        """The part of global batch `step`, in [0, steps), that `rank` of `ranks` reads: int64 of shape (B / ranks,).

        Raises:
            ConfigError: `ranks` does not divide the batch, or rank or step are out of range.
        """

    def batch_indices(self, step: int) -> Int64:
        """Sample indices of the whole global batch: int64 of shape (B,)."""
        return self.rank_indices(step, 0, 1)


class EpochOrder(Order):
    """The sequence of one epoch, computed window by window, so that 100 million samples cost no more than they must.

    Memory is O(shards) plus one int64 array a window that a lane is in.

    Args:
        shard_sizes: samples in each shard.
        seed, epoch: choose the order; nothing else does.
        lanes: L. Keep it over the whole run; a multiple of every rank count you mean to use keeps reads local.
        batch_size: B, the global batch in samples.
        window: samples that are shuffled together, at least one shard; 0 takes the whole epoch up to `WHOLE` samples, and
            above that as many as make the windows of all lanes hold `POOL`.

    Raises:
        ConfigError: a negative or zero setting.
        InputError: there are fewer samples than one batch.
    """

    def __init__(
        self, shard_sizes: Sequence[int] | Int64, seed: int, epoch: int, lanes: int, batch_size: int, window: int = 0
    ) -> None:
        if lanes < 1 or batch_size < 1 or window < 0 or epoch < 0:
            raise ConfigError(
                f"expected lanes and batch size of at least 1, epoch and window of at least 0, found lanes {lanes}, "
                f"batch size {batch_size}, epoch {epoch}, window {window}"
            )
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.seed, self.epoch, self.lanes, self.batch_size = seed, epoch, lanes, batch_size
        self.samples = int(sizes.sum())
        self.steps = self.samples // batch_size
        if self.steps == 0:
            raise InputError(
                f"expected at least one batch of {batch_size} samples, found {self.samples} in {len(sizes)} shards; use a "
                "smaller batch or more data"
            )
        self.remainder = left_over(self.samples, self.samples % batch_size, seed, epoch)
        self._length = self.steps * batch_size
        self._shard_starts = np.concatenate([[0], np.cumsum(sizes)])
        self._plan_windows(sizes, window or (self.samples if self.samples <= WHOLE else -(-POOL // lanes)))
        self._cache: OrderedDict[int, Int64] = OrderedDict()
        self._lock = Lock()

    def _plan_windows(self, sizes: Int64, window: int) -> None:
        """Permute the shards and group them into windows: `_window_shards[i]` and the position each window starts at."""
        shards = _shuffled(np.arange(len(sizes), dtype=np.int64), _key(self.seed, self.epoch, 1))
        shards = shards[sizes[shards] > 0]
        before = np.cumsum(sizes[shards]) - sizes[shards]
        cuts = np.flatnonzero(np.diff(before // window)) + 1
        self._window_shards = np.split(shards, cuts)
        owner = np.empty(len(sizes), dtype=np.int64)
        owner[shards] = np.repeat(np.arange(len(cuts) + 1), [len(w) for w in self._window_shards])
        full = np.bincount(owner[shards], weights=sizes[shards], minlength=len(cuts) + 1).astype(np.int64)
        missing_shard = np.searchsorted(self._shard_starts, self.remainder, side="right") - 1
        missing = np.bincount(owner[missing_shard], minlength=len(cuts) + 1).astype(np.int64)
        self._window_starts = np.concatenate([[0], np.cumsum(full - missing)])

    def _window(self, number: int) -> Int64:
        """Sample indices of one window in epoch order, without the epoch's remainder."""
        with self._lock:  # held while computing, because the readers' threads come to a new window at the same time
            if number not in self._cache:
                ids = np.concatenate([self._shard_ids(int(shard)) for shard in self._window_shards[number]])
                self._cache[number] = _shuffled(ids, _key(self.seed, self.epoch, 2))
                if len(self._cache) > 2 * self.lanes + 2:  # a lane that crosses into its next window needs both
                    self._cache.popitem(last=False)
            self._cache.move_to_end(number)
            return self._cache[number]

    def _shard_ids(self, shard: int) -> Int64:
        start, stop = self._shard_starts[shard : shard + 2]
        first, last = np.searchsorted(self.remainder, [start, stop])
        return np.delete(np.arange(start, stop, dtype=np.int64), self.remainder[first:last] - start)

    def at(self, positions: Int64) -> Int64:
        """Sample indices at `positions` of the epoch's plain (not yet interleaved) sequence."""
        windows = np.searchsorted(self._window_starts, positions, side="right") - 1
        out = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(windows):
            here = windows == number
            out[here] = self._window(int(number))[positions[here] - self._window_starts[number]]
        return out

    def _interleaved(self, g: Int64) -> Int64:
        lane, position = g % self.lanes, g // self.lanes
        lane_length, longer = divmod(self._length, self.lanes)  # the first lanes are one longer where L does not divide
        return self.at(lane * lane_length + np.minimum(lane, longer) + position)

    def rank_indices(self, step: int, rank: int, ranks: int) -> Int64:
        check_rank(step, self.steps, rank, ranks, self.batch_size)
        first = step * self.batch_size
        return self._interleaved(np.arange(first + rank, first + self.batch_size, ranks, dtype=np.int64))

    def mixing(self, step: int = 0) -> tuple[int, float]:
        """Shards that batch `step` draws from, and how many a draw from the whole epoch would be expected to."""
        sizes = np.diff(self._shard_starts)
        seen = len(np.unique(np.searchsorted(self._shard_starts, self.batch_indices(step), side="right")))
        return seen, float((1 - (1 - sizes / self.samples) ** self.batch_size).sum())


def check_rank(step: int, steps: int, rank: int, ranks: int, batch_size: int) -> None:
    """Refuse, by ConfigError, a rank, rank count or step that cannot be."""
    if ranks < 1 or batch_size % ranks:
        raise ConfigError(
            f"expected a batch size that {ranks} ranks can share equally, found {batch_size}; use a multiple of {ranks}"
        )
    if not (0 <= rank < ranks and 0 <= step < steps):
        raise ConfigError(f"expected a rank below {ranks} and a step below {steps}, found rank {rank}, step {step}")


def left_over(samples: int, count: int, seed: int, epoch: int) -> Int64:
    """Sorted indices of the `count` samples that epoch `epoch` leaves out.

    They walk through a fixed cycle over all samples, so that no sample is left out again before every other one was.
    """
    if count == 0:
        return np.empty(0, dtype=np.int64)
    stride = int(_key(seed, 0, 3)) % samples | 1
    while math.gcd(stride, samples) != 1:
        stride += 2 if samples % 2 == 0 else 1
    first = epoch * count
    steps = [(first + i) * stride % samples for i in range(count)]  # Python integers, because the product may pass 2^63
    return np.sort(np.array(steps, dtype=np.int64))


def _shuffled(ids: Int64, key: np.uint64) -> Int64:
    """`ids` in the order of their keyed hashes: the same with every NumPy, which its own generators do not promise."""
    return ids[np.argsort(mix(ids.astype(np.uint64) * _GOLDEN + key), kind="stable")]


def mix(x: UInt64) -> UInt64:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), which spreads every input bit over all output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(*parts: int) -> np.uint64:
    """One 64-bit key from integers."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = mix(state * _GOLDEN + np.array([part % (1 << 64)], dtype=np.uint64) + _GOLDEN)
    return state[0]
