"""An exact oracle on a sample: how many near-duplicates of the user's own captions were found, and whether all were ones.

All sets that are near a sampled one are found without MinHash, through rare words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dedup import bands
from dedup.match import Edges, jaccard, of_like_size
from dedup.tokens import Sets, segments

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

SAMPLE, SEED = 1000, 60  # sets
_BINS = 1 << 20  # of words by their lowest bits: enough to tell rare from frequent
_LOW = np.uint32(_BINS - 1)
_AT_ONCE = 1 << 20  # words of the data


def sample(sizes: I64) -> I64:
    """Numbers of at most `SAMPLE` sets that are not empty, ascending: chosen at random, and the same ones every time."""
    full = np.flatnonzero(sizes)
    return full if len(full) <= SAMPLE else np.sort(np.random.default_rng(SEED).choice(full, SAMPLE, replace=False))


def near(sets: Sets, asked: I64, at_least: float) -> Edges:
    """Edges between one of the sets `asked` and any other whose Jaccard similarity is at least `at_least`, and behind them an
    edge from each of those asked to itself.

    Complete: two such sets share at least `at_least` of the words of either, so one of any len - at_least * len + 1 of them,
    for which the rarest are taken.
    """
    words, owners = _probes(sets, asked, at_least)
    counts = np.bincount(words & _LOW, minlength=_BINS)
    begins, probed = np.cumsum(counts) - counts, counts > 0
    present = np.flatnonzero(sets.sizes)
    present = present[np.argsort(sets.starts[present])]
    starts = sets.starts[present]
    found = []
    for first in range(0, len(sets.flat), _AT_ONCE):
        some = sets.flat[first : first + _AT_ONCE]
        hits = np.flatnonzero(probed[some & _LOW])
        hits_bin = some[hits] & _LOW
        there, which = bands.spread(begins[hits_bin], counts[hits_bin])
        same = some[hits[there]] == words[which]
        at, which = hits[there[same]] + first, which[same]
        holder = present[np.searchsorted(starts, at, "right") - 1]
        inside = at < sets.starts[holder] + sets.sizes[holder]
        pairs = of_like_size(bands.pair_keys(holder[inside], owners[which[inside]]), sets.sizes, at_least)
        # compared piece by piece: what shares a word is much more than what is near, and grows with the data
        similar = jaccard(sets, *bands.unpair(pairs)) >= np.float32(at_least)
        found.append(pairs[similar])
    a, b = bands.unpair(bands.ascending(np.concatenate(found)))
    edges = Edges(a, b, jaccard(sets, a, b))
    ones = np.ones(len(asked), np.float32)
    a, b = np.concatenate((edges.a, asked)), np.concatenate((edges.b, asked))
    return Edges(a, b, np.concatenate((edges.similarity, ones)))


def _probes(sets: Sets, asked: I64, at_least: float) -> tuple[U32, I64]:
    """The rarest words of each set asked, as many as its near sets cannot all lack, and the set of each, by lowest bits.

    Any choice of that many is right; how rare a word is, is judged by some of the data.
    """
    counts = np.bincount(sets.flat[:_AT_ONCE] & _LOW, minlength=_BINS)
    sizes = sets.sizes[asked]
    words, offsets = segments(sets.flat, sets.starts[asked], sizes)
    owners = np.repeat(asked, sizes)
    order = np.lexsort((words, counts[words & _LOW], owners))
    place = np.arange(len(words)) - np.repeat(offsets[:-1], sizes)
    enough = sizes - np.ceil(at_least * sizes - 1e-9).astype(np.int64) + 1
    chosen = order[place < np.repeat(enough, sizes)]
    chosen = chosen[np.argsort(words[chosen] & _LOW, kind="stable")]
    return words[chosen], owners[chosen]


def measured(truth: Edges, found: Edges, group: I64) -> dict[str, Any]:
    """What the sample shows: sampled sets, their near-duplicate pairs, `recall` and `precision` (None without pairs).

    Args:
        truth, found: of `near` and of the bands, at least as similar as asked for.
        group: the group of each set; a pair counts as found where both are in one group.
    """
    asked = np.zeros(len(group), bool)
    asked[truth.a[truth.a == truth.b]] = True
    theirs = bands.pair_keys(truth.a, truth.b)
    of_them = asked[found.a] | asked[found.b]
    ours = bands.pair_keys(found.a[of_them], found.b[of_them])
    together = np.count_nonzero(np.equal(*(group[row] for row in bands.unpair(theirs))))
    return {
        "sampled": int(asked.sum()),
        "pairs": len(theirs),
        "recall": round(together / len(theirs), 5) if len(theirs) else None,
        "precision": round(float(np.isin(ours, theirs).mean()), 5) if len(ours) else None,
    }
