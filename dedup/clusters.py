"""Groups of rows: connected components of edges, and their refinement to groups around a leader."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dedup.bands import ascending, buckets
from dedup.match import Edges

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, so that a product tells apart what its factor does
MOST_LEADERS = 256  # greedy compares every row of a component with each leader; beyond this many it would be quadratic

# (row numbers, row numbers) -> whether each pair is similar enough
Similar = Callable[[I64, I64], npt.NDArray[np.bool_]]


def components(n: int, a: I64, b: I64) -> I64:
    """The smallest row number connected with each of `n` rows by edges (a, b)."""
    result = np.arange(n)
    touched = np.zeros(n, bool)
    touched[a] = touched[b] = True
    rows = np.flatnonzero(touched)
    number = np.empty(n, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    left, right = number[a], number[b]
    root = np.arange(len(rows), dtype=np.int32)
    # as fast as scipy's, whose import takes longer than all of a decision over 200,000 pairs
    while len(left):
        low, high = np.minimum(left, right), np.maximum(left, right)
        np.minimum.at(root, high, low)
        while not np.array_equal(above := root[root], root):
            root = above
        left, right = root[low], root[high]
        apart = left != right
        left, right = left[apart], right[apart]
    result[rows] = rows[root]
    return result


def strongest_forest(edges: Edges) -> Edges:
    """At most an edge a row, which join at every similarity what `edges` join there; in the order of `edges`.

    The maximum spanning forest; of equally similar edges the earlier ones.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import minimum_spanning_tree

    if not len(edges.a):
        return edges
    rows = ascending(np.concatenate((edges.a, edges.b)).astype(np.uint64))
    ends = tuple(np.searchsorted(rows, end.astype(np.uint64)) for end in (edges.a, edges.b))
    order = np.argsort(-edges.similarity, kind="stable")
    place = np.empty(len(order))
    place[order] = np.arange(1, len(order) + 1)  # all different, so that the forest is one and the same everywhere
    forest = minimum_spanning_tree(coo_array((place, ends), shape=(len(rows), len(rows))).tocsr())
    kept = np.sort(order[forest.data.astype(np.int64) - 1])
    return Edges(edges.a[kept], edges.b[kept], edges.similarity[kept])


def smallest_of(label: I64) -> I64:
    """The smallest row number with the same label, for each row; labels are small numbers (at most a few times n)."""
    first = np.zeros(int(label.max(initial=-1)) + 1, np.int64)
    first[label[::-1]] = np.arange(len(label))[::-1]  # of repeated indices the last assignment stands
    return first[label]


def first_of(keys: U64) -> I64:
    """The smallest row number with the same key, for each row; keys are well mixed (of any others it takes two sorts)."""
    result = np.arange(len(keys))
    rows, _ = buckets((keys >> np.uint64(32)).astype(np.uint32))
    if not len(rows):
        return result
    order = np.argsort(keys[rows])
    rows, ordered = rows[order], keys[rows[order]]
    new = np.ones(len(rows), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    result[rows] = np.minimum.reduceat(rows, np.flatnonzero(new))[np.cumsum(new) - 1]
    return result


def joined(a: I64, b: I64) -> I64:
    """Groups of rows that agree in both labels (numbers below 2^31), named by their smallest row."""
    return first_of(((a << 32) | b).view(np.uint64) * _SPREAD)


def best_of(label: I64, rank: I64) -> I64:
    """The row number of the best ranked row with the same label, for each row; labels are small numbers."""
    worst_first = np.argsort(-rank)
    best = np.zeros(int(label.max(initial=-1)) + 1, np.int64)
    best[label[worst_first]] = worst_first
    return best[label]


def place_of(label: I64, rank: I64) -> I64:
    """How many rows of its group rank before each row."""
    order = np.lexsort((rank, label))
    new = np.ones(len(order), bool)
    new[1:] = label[order[1:]] != label[order[:-1]]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.flatnonzero(new)[np.cumsum(new) - 1] if len(order) else order
    return place


def leaders(label: I64, rank: I64, similar: Similar) -> I64:
    """Refine groups: the best row leads, rows similar to it join, and the rest of the group goes on without them.

    Args:
        label: group of each row.
        rank: 0 is the best; all different.

    Returns: the leader's row number for each row. A row that no leader takes leads itself, so nothing is grouped without
        having been compared.
    """
    result = np.arange(len(label))
    order = np.lexsort((rank, label))
    left = order[_in_company(label[order])]
    for _ in range(MOST_LEADERS):
        if not len(left):
            break
        new = np.ones(len(left), bool)
        new[1:] = label[left[1:]] != label[left[:-1]]
        leader = left[np.flatnonzero(new)[np.cumsum(new) - 1]]
        taken = new.copy()
        taken[~new] = similar(leader[~new], left[~new])
        result[left[taken]] = leader[taken]
        left = left[~taken]
    return result


def _in_company(sorted_label: I64) -> npt.NDArray[np.bool_]:
    same = sorted_label[1:] == sorted_label[:-1]
    return np.concatenate((same, [False])) | np.concatenate(([False], same)) if len(sorted_label) else same
