"""What counts as a duplicate pair, which one stays, and why: arrays in, arrays out.

N pairs, in order of uid; a group is named by its smallest row. The policies are a table in DedupConfig's docstring and in
docs/design/dedup-policy.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dedup.clusters import best_of, components, joined, leaders, place_of, smallest_of

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Compare = Callable[[I64, I64], F32]


@dataclass(frozen=True)
class Groups:
    """Labels [N]: pairs of one URL, of one picture, of the same normalised caption, of nearly the same caption."""

    url: I64
    image: I64
    text: I64
    caption: I64


@dataclass(frozen=True)
class Rules:
    """The settings of the policy; `image_at_least` and `caption_at_least` are similarities in [0, 1]."""

    policy: str
    method: str
    max_captions_per_image: int
    max_images_per_caption: int
    image_at_least: float
    caption_at_least: float


@dataclass
class Decisions:
    """`code` [N] indexes `reasons`, 0 for a kept pair; `survivor` is a row number, -1 where there is none."""

    code: npt.NDArray[np.int16]
    survivor: I64
    reasons: list[str] = field(default_factory=lambda: [""])
    cluster: I64 = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def all_kept(cls, n: int) -> Decisions:
        return cls(np.zeros(n, np.int16), np.full(n, -1, np.int64))

    @property
    def kept(self) -> Mask:
        return self.code == 0

    def has(self, *reasons: str) -> Mask:
        """Which pairs were dropped for one of `reasons`."""
        return np.isin(self.code, [self.reasons.index(r) for r in reasons if r in self.reasons])

    def drop(self, rows: I64, reason: str, survivors: I64) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.code[rows] = self.reasons.index(reason)
        self.survivor[rows] = survivors

    def final_survivors(self) -> I64:
        """`survivor`, but where that pair was dropped by a later rule, the kept pair that stands for it in the end."""
        final = self.survivor.copy()
        while len(rows := np.flatnonzero((final >= 0) & ~self.kept[final])):
            final[rows] = final[final[rows]]
        return final

    def counts(self) -> dict[str, int]:
        """Dropped pairs by reason, the most frequent first."""
        counts = np.bincount(self.code, minlength=len(self.reasons)).tolist()
        found = [(name, n) for name, n in zip(self.reasons, counts, strict=True) if name and n]
        return dict(sorted(found, key=lambda item: (-item[1], item[0])))


def protect_holdout(decisions: Decisions, holdout: Mask, image: I64) -> dict[str, int]:
    """Drop every pair that shows a picture of the evaluation rows, whatever its caption; counts as the conditions'."""
    first = np.full(len(image), -1)
    first[image[holdout][::-1]] = np.flatnonzero(holdout)[::-1]
    fails = ~holdout & (first[image] >= 0)
    rows = np.flatnonzero(decisions.kept & fails)
    decisions.drop(rows, "holdout", first[image[rows]])
    return {"alone": int(fails.sum()), "in_sequence": len(rows)}


def resolve(
    decisions: Decisions,
    free: Mask,
    groups: Groups,
    rank: I64,
    rules: Rules,
    image_like: Compare,
    caption_like: Compare,
) -> None:
    """Apply the policy to the pairs that are still kept and `free` to be dropped, and name the clusters of all."""
    policy = _Policy(decisions, free, groups, rank, rules, image_like, caption_like)
    if rules.policy in ("image", "either"):
        # before equal captions: of two equal ones, the one that stays may be of a URL that goes
        policy.one_url_of("image_duplicate", groups.image)
    policy.equal_captions()
    if rules.policy == "both":
        policy.one_url_of("pair_duplicate", joined(groups.image, groups.caption))
    if rules.policy in ("text", "either"):
        policy.few_pictures_of_captions()
    policy.few_captions_of_pictures()
    decisions.cluster = clusters(decisions, groups, rules.policy)


def clusters(decisions: Decisions, groups: Groups, policy: str) -> I64:
    """The cluster of duplicates each pair is in, by its smallest row; -1 where it is in none.

    A cluster has at least two URLs, or a pair that was dropped for another: several captions of one URL are none.
    """
    result = np.full(len(groups.url), -1)
    rows = np.flatnonzero(in_company(groups.image, groups.caption))
    image, caption = (smallest_of(label[rows]) for label in (groups.image, groups.caption))
    if policy == "either":
        here = np.arange(len(rows))
        label = components(len(rows), np.concatenate((here, here)), np.concatenate((image, caption)))
    else:
        label = {"image": image, "text": caption}.get(policy, joined(image, caption))
    many = urls_of(label, groups.url[rows], len(rows)) > 1
    many[label[decisions.has("pair_duplicate", "image_duplicate", "caption_duplicate")[rows]]] = True
    shown = many[label]
    result[rows[shown]] = rows[label[shown]]
    return result


def urls_of(label: I64, url: I64, groups: int) -> I64:
    """How many URLs each of the groups that `label` numbers has."""
    first = joined(label, url) == np.arange(len(label))
    return np.bincount(label[first], minlength=groups)


def in_company(*labels: I64) -> Mask:
    """Which rows share a group of any of these labels with another row."""
    found = np.zeros(len(labels[0]), bool)
    for label in labels:
        found |= np.bincount(label, minlength=1)[label] > 1
    return found


class _Policy:
    def __init__(
        self, decisions: Decisions, free: Mask, groups: Groups, rank: I64, rules: Rules, image: Compare, caption: Compare
    ) -> None:  # fmt: skip
        self.decisions, self.groups, self.rank, self.rules = decisions, groups, rank, rules
        self.free = free & in_company(groups.image, groups.caption)  # no rule drops a pair that is like no other
        self.image_like, self.caption_like = image, caption

    def _rows(self) -> I64:
        return np.flatnonzero(self.decisions.kept & self.free)

    def equal_captions(self) -> None:
        """The same caption on the same picture is kept once."""
        rows = self._rows()
        cell = joined(self.groups.image[rows], self.groups.text[rows])
        best = best_of(cell, self.rank[rows])
        gone = best != np.arange(len(rows))
        self.decisions.drop(rows[gone], "pair_duplicate", rows[best[gone]])

    def one_url_of(self, reason: str, label: I64) -> None:
        """Of each group, the URL of its best pair stays with all its captions."""
        rows = self._rows()
        best = best_of(self._cells(rows, label), self.rank[rows])
        gone = self.groups.url[rows] != self.groups.url[rows[best]]
        self.decisions.drop(rows[gone], reason, rows[best[gone]])

    def few_pictures_of_captions(self) -> None:
        """Of each group of captions, the best pictures stay, up to the limit."""
        rows = self._rows()
        rank = self.rank[rows]
        cell = self._cells(rows, self.groups.caption)
        shown = best_of(joined(cell, self.groups.image[rows]), rank)  # the best pair of each picture stands for it
        pictures = np.flatnonzero(shown == np.arange(len(rows)))
        place = np.zeros(len(rows), np.int64)
        place[pictures] = place_of(cell[pictures], rank[pictures])
        gone = place[shown] >= self.rules.max_images_per_caption
        self.decisions.drop(rows[gone], "caption_duplicate", rows[best_of(cell, rank)[gone]])

    def few_captions_of_pictures(self) -> None:
        """Of each picture, the captions of the best URL first, up to the limit."""
        if not self.rules.max_captions_per_image:
            return
        rows = self._rows()
        crowd = np.bincount(self.groups.image[rows], minlength=1)[self.groups.image[rows]]
        rows = rows[crowd > self.rules.max_captions_per_image]
        rank, image = self.rank[rows], self.groups.image[rows]
        of_url = rank[best_of(self.groups.url[rows], rank)]
        place = place_of(image, _order((rank, of_url)))
        gone = place >= self.rules.max_captions_per_image
        best = best_of(image, rank)
        self.decisions.drop(rows[gone], "caption_cap", rows[best[gone]])

    def _cells(self, rows: I64, label: I64) -> I64:
        """Groups among `rows`; under `greedy` only what is similar to the best pair of its group stays with it."""
        cell = smallest_of(label[rows])
        if self.rules.method != "greedy":
            return cell
        wants_image = label is not self.groups.caption
        wants_caption = label is not self.groups.image

        def similar(a: I64, b: I64) -> Mask:
            close = np.ones(len(a), bool)
            if wants_image:
                close &= self.image_like(rows[a], rows[b]) >= np.float32(self.rules.image_at_least)
            if wants_caption:
                close &= self.caption_like(rows[a], rows[b]) >= np.float32(self.rules.caption_at_least)
            return close

        return leaders(cell, self.rank[rows], similar)


def _order(keys: tuple[I64, ...]) -> I64:
    """Rank by several keys, the last one first."""
    rank = np.empty(len(keys[0]), np.int64)
    rank[np.lexsort(keys)] = np.arange(len(keys[0]))
    return rank
