"""The stage: pairs in, one decision a pair out.

Signatures and verified edges are kept in the work folder, so deciding again under other settings only reads them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from core import catalog
from core.allocator import keep_freed_memory
from core.errors import ConfigError, HardwareError, InputError
from core.runner import cores
from core.storage import Folder
from core.work import Stage, fingerprint, open_stage
from dedup import against, balance, bands, boilerplate, captions, evalsets, filters, oracle, phash, policy
from dedup.clusters import components, smallest_of
from dedup.config import DedupConfig
from dedup.evidence import Likeness, Pairs, image_groups, in_company
from dedup.publish import CLUSTERS, DECISIONS, publish
from dedup.sign import digests_of, sign, units_of, unsigned
from dedup.store import Store, forget

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import duckdb
    from rich.console import RenderableType

    from dedup.filters import Verdicts
    from dedup.match import Edges

log = logging.getLogger("pairmill.dedup")
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
PARTS = "ingest/parts"
KEPT = ("signatures", "sets", "edges", "against", "pairs.parquet")  # each of these files says what it was made from
LARGEST = 5
DUCKDB_GB = 4.0  # of memory, or a quarter of the machine's: sorting beyond that spills to the temporary folder
ALARM_SHARE, ALARM_PAIRS = 0.01, 100  # a cluster of captions this large is boilerplate more often than repetition


def run(config: DedupConfig) -> dict[str, Any]:
    """Decide every fetched pair of the work folder, or every row of `config.captions`.

    Returns: pairs, kept, dropped {reason: n}, clusters, seconds; also holdout, image_groups, rules (drops of each
        condition, alone and in sequence), against (a report of each evaluation set), expected_recall {similarity: share},
        measured (recall and precision on a sample), largest (caption clusters), boilerplate {kind: captions} and settings.

    Raises:
        InputError: nothing was ingested yet, a preset is unknown, or a column is missing.
        ConfigError: a setting out of range.
        HardwareError: too little memory for DuckDB.
        UsageError: a condition that DuckDB does not accept.
        DataError: a part cannot be read.
    """
    start = time.monotonic()
    config.check()
    keep_freed_memory()
    if config.part and (config.captions or config.dry_run):
        raise ConfigError("expected --part without --captions and --dry-run, which one run does alone")
    folder = Folder(config.work)
    sources = evalsets.find(config.against)
    inputs = captions.fingerprint(config.captions) if config.captions else _fingerprint(folder)
    with open_stage(config, "dedup", home="dedup", inputs=inputs, keep=KEPT) as stage:
        settings = config.decides() | _presets(config)
        if not config.dry_run and _is_decided(folder, stage.finished, settings, sources):
            log.info("dedup: already decided with these settings")
            return stage.finished or {}
        if not stage.part.whole:
            stage.reopen()  # the last part is the one that marks it as done again
        stage.share()
        summary = _signed_in_part(stage, config) or _judged(folder, config, sources, inputs)
        if "left" in summary:
            return summary
        summary |= {"seconds": round(time.monotonic() - start, 3), "settings": settings}
        if config.dry_run:
            return {**summary, "dry_run": True}
        known = stage.finished
        finished = stage.finish(json.loads(json.dumps(summary)))
    if not (known and bool(known.get("against")) == bool(sources) and folder.exists("catalog.duckdb")):
        catalog.write(folder)  # where decisions were only replaced, its views are those that it has
    return finished


def render(summary: dict[str, Any]) -> RenderableType:
    """The summary as tables for a terminal."""
    from dedup import show

    return show.summary(summary)


def _presets(config: DedupConfig) -> dict[str, object]:
    """What the presets say today: their files are the user's to change."""
    rules = {name: [rule.predicate for rule in filters.load_preset(name)] for name in config.preset}
    return {"preset_rules": xxhash.xxh3_128_hexdigest(json.dumps(rules, sort_keys=True).encode())} if rules else {}


def _fingerprint(folder: Folder) -> str:
    """Of all that the decisions depend on, but for settings and evaluation sets."""
    if not folder.list(f"{PARTS}/*.parquet"):
        raise InputError(f"{folder} holds no pairs yet; run `pairmill ingest` or `pairmill adopt` first")
    return fingerprint(folder, f"{PARTS}/*.parquet", catalog.SCORES)


def _is_decided(
    folder: Folder, finished: dict[str, Any] | None, settings: dict[str, object], sources: list[evalsets.Source]
) -> bool:
    if finished is None or not all(folder.exists(name) for name in (DECISIONS, CLUSTERS, catalog.PAIRS)):
        return False
    known = [report["fingerprint"] for report in finished.get("against", [])]
    return bool(finished.get("settings") == settings and known == [source.digest for source in sources])


def _signed_in_part(stage: Stage, config: DedupConfig) -> dict[str, Any] | None:
    """With `--part`: sign this part's units. A summary where others are left, None for who is to decide over all."""
    if stage.part.whole:
        return None
    folder, at = stage.folder, dict[str, Any](workers=config.workers, engine=config.engine)
    units, digests = units_of(folder, PARTS), digests_of(folder, PARTS)
    sign(folder, PARTS, stage.part.of(units), digests=digests, **at)
    return stage.left_to_others(lambda: unsigned(folder, units, digests=digests))


def _judged(folder: Folder, config: DedupConfig, sources: list[evalsets.Source], inputs: str) -> dict[str, Any]:
    """Make what is not there yet, and decide; whatever takes all pairs at once is a task of the engine."""
    parts = captions.stage(folder, config) if config.captions else PARTS
    units, digests = units_of(folder, parts), digests_of(folder, parts)
    at: dict[str, Any] = {"workers": config.workers, "engine": config.engine}
    connect = functools.partial(_connected, folder=folder, workers=config.workers)
    store = Store(folder, _digest(digests), sum(unit.rows for unit in units), connect, **at)
    rules = filters.conditions(config)
    for home in ("dedup", "dedup/edges"):
        folder.sweep(home)
    try:
        judged = store.judge(rules, inputs) if rules else ""
        sign(folder, parts, units, digests=digests, **at)
        for source in sources:
            evalsets.read(folder, source, **at)
        store.match(config.threshold, *store.number())
        summary = store.alone("keep", _Decider(store, parts, config, judged, sources).run)
    finally:
        forget()
    _alarm(summary)
    return summary


@contextlib.contextmanager
def _connected(views: Collection[str], *, folder: Folder, workers: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB with these views of the work folder.

    Raises:
        HardwareError: it needs more memory than it may have.
        DataError: a file is damaged.
    """
    try:
        with catalog.reading(folder), catalog.connect(folder, memory_gb=_duckdb_gb(), views=views) as connection:
            connection.execute(f"SET threads = {min(workers or cores(), cores())}")
            yield connection
    except catalog.errors("OutOfMemoryException") as error:
        raise HardwareError(
            f"DuckDB needs more than the {_duckdb_gb():.3g} GB of memory that it may have here; lower --workers, or take a "
            "machine with more"
        ) from error


def _duckdb_gb() -> float:
    return min(DUCKDB_GB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4e9)


def _digest(digests: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(digests, sort_keys=True).encode())


@dataclass(frozen=True)
class _Decider:
    """Everything a decision reads; picklable.

    Args:
        judged: what the conditions say, by Store.judge; empty for no conditions.
    """

    store: Store
    parts: str
    config: DedupConfig
    judged: str
    sources: list[evalsets.Source]

    def run(self) -> dict[str, Any]:
        """Decide, publish unless it is a dry run, and sum up."""
        every = self.store.pairs(keys=bool(self.sources))
        sets = int(every.numbers("set_number").max(initial=-1)) + 1
        copies = every.numbers("copies")
        read = int(copies.sum(dtype=np.int64))
        verdicts = self.store.verdicts(self.judged) if self.judged else None
        verdicts = verdicts and verdicts.take(np.cumsum(copies, dtype=np.int64) - copies)
        evaluated = [evalsets.items(self.store.folder, source) for source in self.sources]
        matches = [against.match(every, self.store.sets(sets), items, self.config) for items in evaluated]
        pictures = self.store.image_edges()
        found = self.store.caption_edges(self.config.threshold)
        similar, sample = (edges.at_least(self.config.threshold) for edges in found)
        # the others stay, like no other, which is said by saying nothing of them
        rows = np.flatnonzero(in_company(every, similar, pictures) | self._in_question(len(every), verdicts, matches))
        pairs = every.at(rows)
        verdicts, matches = verdicts and verdicts.take(rows), [found.take(rows) for found in matches]
        of_set = components(sets, similar.a, similar.b)
        groups = _groups(pairs, pictures, of_set)
        crowd = np.bincount(groups.caption, minlength=1)[groups.caption] > 2  # of two alike the edge says all
        likeness = Likeness(pairs, similar, functools.cache(lambda: self.store.sets(sets, pairs.set_number[crowd])))
        holdout = np.zeros(len(pairs), bool) if verdicts is None or verdicts.holdout is None else verdicts.holdout
        decisions = policy.Decisions.all_kept(len(pairs))
        rules = self._conditions(decisions, ~holdout, pairs, verdicts, matches, groups)
        policy.resolve(decisions, ~holdout, groups, pairs.rank, _rules(self.config), likeness.image, likeness.caption)
        if not self.config.dry_run:
            publish(self.store.folder, pairs, groups, decisions, holdout, likeness, matches)
        largest = self._largest(pairs, groups.caption)
        empty = boilerplate.counts(every.numbers("boilerplate"))
        dropped = decisions.counts()
        kept = len(every) - sum(dropped.values())
        if read > len(every):
            dropped["repeated_row"] = read - len(every)
        return {
            "pairs": read,
            "kept": kept,
            "dropped": dropped,
            "clusters": _count(decisions.cluster),
            "holdout": int(holdout.sum()),
            "image_groups": _count(groups.image) + len(every) - len(pairs),
            "rules": rules,
            "against": [found.report(decisions.has(found.reason)) for found in matches],
            "expected_recall": _expected_recall(self.config.threshold),
            "measured": oracle.measured(sample, similar, of_set),
            "largest": largest,
            "boilerplate": empty,
        }

    def _in_question(self, count: int, verdicts: Verdicts | None, matches: list[against.Matches]) -> Mask:
        """Which pairs a condition may have something to say of."""
        found = np.full(count, bool(self.config.balance))
        if verdicts is not None:
            for passes in verdicts.passes:
                found |= ~passes
            if verdicts.holdout is not None:
                found |= verdicts.holdout
        for match in matches:
            found |= match.row >= 0
        return found

    def _largest(self, pairs: Pairs, caption: I64) -> list[dict[str, Any]]:
        """The largest groups of near-equal captions, each with its first caption."""
        count = np.bincount(caption)
        top = np.flatnonzero(count > 1)
        top = top[np.lexsort((top, -count[top]))][:LARGEST]
        uids = pairs.table["uid"].take(pa.array(top)).to_pylist()
        texts = self._captions(pairs, top).to_pylist()
        return [{"pairs": int(count[t]), "caption": c, "uid": u} for t, c, u in zip(top, texts, uids, strict=True)]

    def _captions(self, pairs: Pairs, rows: I64) -> pa.ChunkedArray:
        return captions.at(self.store.folder, self.parts, pairs.numbers("signed_row")[rows])

    def _conditions(
        self, decisions: policy.Decisions, free: Mask, pairs: Pairs, verdicts: Verdicts | None,
        matches: list[against.Matches], groups: policy.Groups,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Drop what fails a condition, in order: --where, presets, --holdout, --against, --balance; counts of each."""
        counts = []
        for reason, passes in zip(*((verdicts.reasons, verdicts.passes) if verdicts else ((), ())), strict=True):
            counts.append(_apply(decisions, reason, free & ~passes))
        if not free.all():
            counts.append({"rule": "holdout", **policy.protect_holdout(decisions, ~free, groups.image)})
        for found in matches:
            counts.append(_apply(decisions, found.reason, free & (found.row >= 0)))
        if self.config.balance:
            entries = balance.entries(self._captions(pairs, np.arange(len(pairs))), self.config.balance)
            draws = balance.draws(pairs.table["uid"])
            alone, left = (entries.keeps(m, self.config.balance, draws) for m in (free, free & decisions.kept))
            counts.append(_apply(decisions, "balance", free & ~left) | {"alone": int((free & ~alone).sum())})
        return counts


def _groups(pairs: Pairs, pictures: Edges, of_set: I64) -> policy.Groups:
    """Who is the same as whom.

    Args:
        pictures: edges between the same pictures.
        of_set: the group of each word set.
    """
    image = components(len(pairs), *image_groups(pairs, pictures))
    caption, worded = np.arange(len(pairs)), np.flatnonzero(pairs.set_number >= 0)
    caption[worded] = worded[smallest_of(of_set[pairs.set_number[worded]])]
    return policy.Groups(pairs.url, image, pairs.same_text, caption)


def _apply(decisions: policy.Decisions, reason: str, fails: Mask) -> dict[str, Any]:
    """Drop the pairs that fail and are still kept; how many fail, and how many of them no earlier condition dropped."""
    hit = np.flatnonzero(fails & decisions.kept)
    decisions.drop(hit, reason, np.full(len(hit), -1))
    return {"rule": reason, "alone": int(fails.sum()), "in_sequence": len(hit)}


def _rules(config: DedupConfig) -> policy.Rules:
    return policy.Rules(
        policy="text" if config.captions else config.policy,
        method=config.method,
        max_captions_per_image=config.max_captions_per_image,
        max_images_per_caption=1 if config.captions else config.max_images_per_caption,
        image_at_least=phash.AT_LEAST,
        caption_at_least=config.threshold,
    )


def _count(label: I64) -> int:
    """How many groups there are; -1 is none."""
    return int(np.count_nonzero(np.bincount(label[label >= 0])))


def _expected_recall(threshold: float) -> dict[str, float]:
    """Share of near-duplicate captions, by their similarity, that the bands are expected to bring together."""
    _, rows = bands.rows_for(threshold)
    at = sorted({round(threshold, 3), *(s for s in (0.6, 0.7, 0.8, 0.9, 1.0) if s >= threshold)})
    return {f"{s:g}": round(bands.expected_recall(s, rows), 4) for s in at}


def _alarm(summary: dict[str, Any]) -> None:
    pairs = summary["pairs"] - summary["dropped"].get("repeated_row", 0)
    for name, count in summary["boilerplate"].items():
        if count >= max(ALARM_PAIRS, ALARM_SHARE * pairs):
            log.warning(
                "dedup: %s captions are %s; they say nothing of the picture, drop them with --where", f"{count:,}", name
            )
    for group in summary["largest"]:
        if group["pairs"] >= max(ALARM_PAIRS, ALARM_SHARE * pairs):
            log.warning(
                "dedup: %s pairs say nearly the same as %r; boilerplate like this teaches nothing, drop it with --where",
                f"{group['pairs']:,}",
                (group["caption"] or "")[:80],
            )
