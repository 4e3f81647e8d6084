"""Decisions as files: one row a pair, one row a group, and what evaluation sets matched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from core.schema import decision_schema
from dedup import policy
from dedup.against import TABLE
from dedup.evidence import KINDS

if TYPE_CHECKING:
    from core.storage import Folder
    from dedup.against import Matches
    from dedup.evidence import Likeness, Pairs

DECISIONS, CLUSTERS = "dedup/decisions.parquet", "dedup/clusters.parquet"


def publish(
    folder: Folder,
    pairs: Pairs,
    groups: policy.Groups,
    decisions: policy.Decisions,
    holdout: npt.NDArray[np.bool_],
    likeness: Likeness,
    matches: list[Matches],
) -> None:
    """Write decisions, clusters, and what evaluation sets matched; the mark of the earlier decisions goes first.

    A pair that stays and is like no other has no row: the catalogue's view adds those, so that deciding again writes little.
    """
    folder.remove("dedup/done.json")  # it speaks of the decisions that are about to be replaced
    uid = pairs.table["uid"].combine_chunks()
    rows = np.flatnonzero(
        ~decisions.kept | holdout | (decisions.cluster >= 0) | (groups.image != np.arange(len(pairs)))
    )
    similarity, kind = likeness.of_removals(decisions)
    for found in matches:
        gone = decisions.has(found.reason)
        similarity[gone], kind[gone] = found.similarity[gone], found.kind[gone]
    code, kind, kept = decisions.code[rows], kind[rows], decisions.kept[rows]
    columns = [
        uid.take(pa.array(rows)),
        pa.array(kept),
        pa.array(holdout[rows]),
        pa.DictionaryArray.from_arrays(pa.array(code, mask=kept), pa.array(decisions.reasons)).cast(pa.string()),
        _named(uid, decisions.cluster[rows]),
        uid.take(pa.array(groups.image[rows])),
        _named(uid, decisions.final_survivors()[rows]),
        pa.DictionaryArray.from_arrays(pa.array(kind, mask=kind < 0), pa.array(KINDS)).cast(pa.string()),
        pa.array(similarity[rows], mask=kind < 0),
    ]
    folder.remove(TABLE)
    if matches:
        with folder.staged(TABLE) as path:
            pq.write_table(pa.concat_tables([found.table(uid) for found in matches]), path, compression="zstd")
    with folder.staged(CLUSTERS) as path:
        pq.write_table(_cluster_table(uid, groups, decisions), path)
    with folder.staged(DECISIONS) as path:
        table = pa.Table.from_arrays(columns, schema=decision_schema())
        # uids repeat too seldom for dictionaries, and zstd would take longer than deciding
        pq.write_table(table, path, compression="snappy", use_dictionary=["reason", "evidence"])


def _named(uid: pa.Array, rows: npt.NDArray[np.int64]) -> pa.Array:
    """Uids of these rows, null for -1."""
    return uid.take(pa.array(rows, mask=rows < 0))


def _cluster_table(uid: pa.Array, groups: policy.Groups, decisions: policy.Decisions) -> pa.Table:
    """Every group of two URLs or more: kind (`image`, `caption`, or `pair` for the policy's own), pairs, URLs, kept."""
    tables = []
    for kind, label in (("image", groups.image), ("caption", groups.caption), ("pair", decisions.cluster)):
        at = np.flatnonzero((label >= 0) if kind == "pair" else policy.in_company(label))
        heads = at[label[at] == at]
        of = np.searchsorted(heads, label[at])
        pairs, kept = np.bincount(of, minlength=len(heads)), np.bincount(of[decisions.kept[at]], minlength=len(heads))
        urls = policy.urls_of(of, groups.url[at], len(heads))
        named = np.flatnonzero((urls > 1) | (kind == "pair"))
        columns = {"pairs": pairs[named], "urls": urls[named], "kept": kept[named]}
        names = {"kind": pa.array([kind] * len(named), pa.string()), "cluster": uid.take(pa.array(heads[named]))}
        tables.append(pa.table(names | columns))
    return pa.concat_tables(tables)
