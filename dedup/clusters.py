"""Groups of rows: connected components of edges, and their refinement to groups around a leader."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
MOST_LEADERS = 256  # greedy compares every row of a component with each leader; beyond this many it would be quadratic

# (row numbers, row numbers) -> whether each pair is similar enough
Similar = Callable[[I64, I64], npt.NDArray[np.bool_]]


def components(n: int, a: I64, b: I64) -> I64:
    """The smallest row number connected with each of `n` rows by edges (a, b)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(a), np.int8), (a, b)), shape=(n, n))
    _, label = connected_components(graph, directed=False)
    return smallest_of(label.astype(np.int64))


def smallest_of(label: I64) -> I64:
    """The smallest row number with the same label, for each row."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int64)


def joined(*labels: I64) -> I64:
    """Groups of rows that agree in all labels, named by their smallest row."""
    result = labels[0]
    for label in labels[1:]:
        _, left = np.unique(result, return_inverse=True)
        _, right = np.unique(label, return_inverse=True)
        result = left.astype(np.int64) * (int(right.max(initial=0)) + 1) + right
    return smallest_of(result)


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
