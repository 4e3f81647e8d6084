"""Decisions as files: one row a pair, one row a group, and what evaluation sets matched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
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
    """Write decisions, clusters, and what evaluation sets matched; the mark of the earlier decisions goes first."""
    folder.remove("dedup/done.json")  # it speaks of the decisions that are about to be replaced
    uid = pairs.table["uid"].combine_chunks()
    evidence, similarity = _with_matches(*likeness.of_removals(decisions), decisions, matches)
    survivor = decisions.final_survivors()
    reasons = pa.DictionaryArray.from_arrays(pa.array(decisions.code, mask=decisions.kept), pa.array(decisions.reasons))
    columns = [
        uid,
        pa.array(decisions.kept),
        pa.array(holdout),
        reasons.cast(pa.string()),
        uid.take(pa.array(decisions.cluster, mask=decisions.cluster < 0)),
        uid.take(pa.array(groups.image)),
        uid.take(pa.array(survivor, mask=survivor < 0)),
        evidence,
        similarity,
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


def _with_matches(
    evidence: pa.Array, similarity: pa.Array, decisions: policy.Decisions, matches: list[Matches]
) -> tuple[pa.Array, pa.Array]:
    """Evidence and similarity, of pairs that an evaluation set removed those of its item."""
    for found in matches:
        gone = decisions.has(found.reason)
        names = pa.DictionaryArray.from_arrays(pa.array(found.kind[gone]), pa.array(KINDS)).cast(pa.string())
        evidence = pc.replace_with_mask(evidence, pa.array(gone), names)
        similarity = pc.replace_with_mask(similarity, pa.array(gone), pa.array(found.similarity[gone]))
    return evidence, similarity


def _cluster_table(uid: pa.Array, groups: policy.Groups, decisions: policy.Decisions) -> pa.Table:
    """Every group of two URLs or more: kind (`image`, `caption`, or `pair` for the policy's own), pairs, URLs, kept."""
    tables = []
    for kind, label in (("image", groups.image), ("caption", groups.caption), ("pair", decisions.cluster)):
        at = np.flatnonzero(label >= 0)
        pairs = np.bincount(label[at], minlength=len(uid))
        urls = policy.urls_of(np.where(label < 0, np.arange(len(uid)), label), groups.url)
        kept = np.bincount(label[at], decisions.kept[at], minlength=len(uid)).astype(np.int64)
        named = np.flatnonzero((pairs > 0) & ((urls > 1) | (kind == "pair")))
        columns = {"pairs": pairs[named], "urls": urls[named], "kept": kept[named]}
        names = {"kind": pa.array([kind] * len(named), pa.string()), "cluster": uid.take(pa.array(named))}
        tables.append(pa.table(names | columns))
    return pa.concat_tables(tables)
