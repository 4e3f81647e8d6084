"""The stage: pairs in, one decision a pair out.

Signatures and verified edges are kept in the work folder, so deciding again under other settings only reads them.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from core import catalog
from core.errors import ConfigError, InputError
from core.runner import cores
from core.schema import decision_schema
from core.storage import Folder
from core.work import fingerprint, open_stage
from dedup import bands, captions, filters, policy, store
from dedup.clusters import components, first_of
from dedup.config import DedupConfig
from dedup.evidence import Likeness, Pairs, image_groups
from dedup.match import Edges
from dedup.sign import sign, units_of

if TYPE_CHECKING:
    import duckdb

    from dedup.filters import Verdicts

log = logging.getLogger("pairmill.dedup")
I64 = npt.NDArray[np.int64]
PARTS = "ingest/parts"
DECISIONS, CLUSTERS = "dedup/decisions.parquet", "dedup/clusters.parquet"
LARGEST = 5
ALARM_SHARE, ALARM_PAIRS = 0.01, 100  # a cluster of captions this large is boilerplate more often than repetition


def run(config: DedupConfig) -> dict[str, Any]:
    """Decide every fetched pair of the work folder, or every row of `config.captions`.

    Returns: pairs, kept, dropped {reason: n}, clusters, seconds; also holdout, image_groups, rules (drops of each
        condition, alone and in sequence), expected_recall {similarity: share}, largest (caption clusters) and settings.

    Raises:
        InputError: nothing was ingested yet, a preset is unknown, or a column is missing.
        ConfigError: a setting out of range, or too little memory for DuckDB.
        UsageError: a condition that DuckDB does not accept.
        DataError: a part cannot be read.
    """
    start = time.monotonic()
    config.check()
    folder = Folder(config.work)
    if config.captions:
        inputs = captions.fingerprint(config.captions)
    else:
        if not folder.list(f"{PARTS}/*.parquet"):
            raise InputError(f"{folder} holds no pairs yet; run `pairmill ingest` or `pairmill adopt` first")
        inputs = fingerprint(folder, f"{PARTS}/*.parquet")
    with open_stage(config, "dedup", home="dedup", inputs=inputs) as stage:
        settings = config.decides()
        whole = stage.finished is not None and folder.exists(DECISIONS) and folder.exists(CLUSTERS)
        if stage.finished and whole and not config.dry_run and stage.finished.get("settings") == settings:
            log.info("dedup: already decided with these settings")
            return stage.finished
        summary = _judged(folder, config)
        summary |= {"seconds": round(time.monotonic() - start, 3), "settings": settings}
        if config.dry_run:
            return summary
        finished = stage.finish(json.loads(json.dumps(summary)))
    catalog.write(folder)
    return finished


def _judged(folder: Folder, config: DedupConfig) -> dict[str, Any]:
    """Sign what is not signed yet, and decide."""
    import duckdb

    parts = captions.stage(folder, config) if config.captions else PARTS
    units = units_of(folder, parts)
    views = () if config.captions else ("pairs",)
    try:
        with (
            catalog.reading(folder),
            catalog.connect(folder, memory_gb=config.memory_gb, views=views) as connection,
        ):
            connection.execute(f"SET threads = {config.workers or cores()}")
            verdicts = None if config.captions else filters.judge(connection, config)
            sign(folder, parts, units, by=config.minhash, workers=config.workers, engine=config.engine)
            return _decide(connection, folder, parts, verdicts, config)
    except duckdb.OutOfMemoryException as error:
        raise ConfigError(
            f"--memory-gb {config.memory_gb:g} is too little for DuckDB; raise it or lower --workers"
        ) from error


def _decide(
    connection: duckdb.DuckDBPyConnection, folder: Folder, parts: str, verdicts: Verdicts | None, config: DedupConfig
) -> dict[str, Any]:
    pairs, rows, read = store.load_pairs(connection, folder)
    verdicts = None if verdicts is None else verdicts.take(rows)
    groups = _groups(connection, folder, pairs, config)
    likeness = Likeness(pairs, lambda keys: store.load_sets(folder, keys))
    decisions, holdout, rules = _decisions(pairs, groups, likeness, verdicts, config)
    dropped = decisions.counts()
    if read > len(pairs):
        dropped["repeated_row"] = read - len(pairs)
    largest = _largest(connection, folder, parts, pairs, groups.caption)
    summary = {
        "pairs": read,
        "kept": int(decisions.kept.sum()),
        "dropped": dropped,
        "clusters": _count(decisions.cluster),
        "holdout": int(holdout.sum()),
        "image_groups": _count(groups.image),
        "rules": rules,
        "expected_recall": _expected_recall(config.threshold),
        "largest": largest,
    }
    _alarm(largest, len(pairs))
    if not config.dry_run:
        _publish(folder, pairs, groups, decisions, holdout, likeness)
    return summary


def _groups(connection: duckdb.DuckDBPyConnection, folder: Folder, pairs: Pairs, config: DedupConfig) -> policy.Groups:
    """Who is the same as whom, for all fetched pairs."""
    image_a, image_b = image_groups(pairs, _image_edges(connection, folder, pairs, config))
    image = components(len(pairs), image_a, image_b)
    rows = np.arange(len(pairs))
    text = np.where(pairs.text == 0, rows, first_of(pairs.text))
    keys, first, inverse = np.unique(pairs.set_key, return_index=True, return_inverse=True)
    edges = store.caption_edges(connection, folder, keys, config.threshold, config.minhash).at_least(config.threshold)
    of_set = components(len(keys), edges.a, edges.b)
    caption = np.where(pairs.set_key == 0, rows, components(len(pairs), rows, first[of_set[inverse]]))
    return policy.Groups(pairs.url, image, text, caption)


def _image_edges(connection: duckdb.DuckDBPyConnection, folder: Folder, pairs: Pairs, config: DedupConfig) -> Edges:
    hashes, mirrored = pairs.hashes
    return store.image_edges(connection, folder, hashes, mirrored).at_least(1 - config.image_bits / 256)


def _decisions(
    pairs: Pairs, groups: policy.Groups, likeness: Likeness, verdicts: Verdicts | None, config: DedupConfig
) -> tuple[policy.Decisions, npt.NDArray[np.bool_], list[dict[str, Any]]]:
    """Conditions first, then the evaluation set, then the policy among what is left."""
    decisions = policy.Decisions.all_kept(len(pairs))
    holdout = np.zeros(len(pairs), bool)
    rules = []
    if verdicts is not None:
        if verdicts.holdout is not None:
            holdout = verdicts.holdout
        for rule, passes in zip(verdicts.rules, verdicts.passes, strict=True):
            failed = ~passes & ~holdout
            hit = np.flatnonzero(failed & decisions.kept)
            rules.append({"rule": rule.reason, "alone": int(failed.sum()), "in_sequence": len(hit)})
            decisions.drop(hit, rule.reason, np.full(len(hit), -1))
    policy.protect_holdout(decisions, holdout, groups.image)
    rank = policy.ranked(*(pairs.numbers(name).astype(np.int64) for name in ("pixels", "words")))
    policy.resolve(decisions, ~holdout, groups, rank, _rules(config), likeness.image, likeness.caption)
    return decisions, holdout, rules


def _rules(config: DedupConfig) -> policy.Rules:
    return policy.Rules(
        policy="text" if config.captions else config.policy,
        method=config.method,
        max_captions_per_image=config.max_captions_per_image,
        max_images_per_caption=1 if config.captions else config.max_images_per_caption,
        image_at_least=1 - config.image_bits / 256,
        caption_at_least=config.threshold,
    )


def _publish(
    folder: Folder,
    pairs: Pairs,
    groups: policy.Groups,
    decisions: policy.Decisions,
    holdout: npt.NDArray[np.bool_],
    likeness: Likeness,
) -> None:
    folder.remove("dedup/done.json")  # it speaks of the decisions that are about to be replaced
    uid = pairs.table["uid"].combine_chunks()
    evidence, similarity = likeness.of_removals(decisions)
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
    with folder.staged(CLUSTERS) as path:
        pq.write_table(_cluster_table(uid, groups, decisions), path)
    with folder.staged(DECISIONS) as path:
        pq.write_table(pa.Table.from_arrays(columns, schema=decision_schema()), path, compression="zstd")


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


def _count(label: I64) -> int:
    """How many groups there are; -1 is none."""
    return int(np.count_nonzero(np.bincount(label[label >= 0])))


def _expected_recall(threshold: float) -> dict[str, float]:
    """Share of near-duplicate captions, by their similarity, that the bands are expected to bring together."""
    _, rows = bands.rows_for(threshold)
    at = sorted({round(threshold, 3), *(s for s in (0.6, 0.7, 0.8, 0.9, 1.0) if s >= threshold)})
    return {f"{s:g}": round(bands.expected_recall(s, rows), 4) for s in at}


def _largest(
    connection: duckdb.DuckDBPyConnection, folder: Folder, parts: str, pairs: Pairs, caption: I64
) -> list[dict[str, Any]]:
    """The largest groups of near-equal captions, each with its first caption."""
    count = np.bincount(caption)
    top = np.argsort(-count, kind="stable")[:LARGEST]
    top = top[count[top] > 1]
    uids = pairs.table["uid"].take(pa.array(top)).to_pylist()
    source = catalog.literal(folder, f"{parts}/*.parquet")
    texts = f"SELECT uid, min(caption) FROM read_parquet({source}, union_by_name=true)"
    text = dict(connection.execute(f"{texts} WHERE uid IN (SELECT unnest(?)) GROUP BY uid", [uids]).fetchall())
    return [{"pairs": int(count[t]), "caption": text.get(u), "uid": u} for t, u in zip(top, uids, strict=True)]


def _alarm(largest: list[dict[str, Any]], pairs: int) -> None:
    for group in largest:
        if group["pairs"] >= max(ALARM_PAIRS, ALARM_SHARE * pairs):
            log.warning(
                "dedup: %s pairs say nearly the same as %r; boilerplate like this teaches nothing, drop it with --where",
                f"{group['pairs']:,}",
                (group["caption"] or "")[:80],
            )
