"""Settings of dedup. Cheap to import: no numpy, no duckdb."""

from __future__ import annotations

import dataclasses
from typing import Literal

from core.config import UnitsConfig, setting
from core.errors import ConfigError
from core.redact import redacted


@dataclasses.dataclass(frozen=True, kw_only=True)
class DedupConfig(UnitsConfig):
    """Find near-duplicate pairs and decide which to keep, with survivor, evidence and similarity of every removal.

    \b
    --policy  duplicates are pairs of              of them stays
    image     the same picture                     the best URL, all its captions
    text      nearly the same caption              --max-images-per-caption
    both      the same picture, nearly the same    the best URL
              caption
    either    the one or the other                 as image, then as text

    Under every policy the captions of one URL are different captions of one picture, so only equal ones fall; and a
    picture keeps at most --max-captions-per-image. Run it again with other settings to decide anew: signatures and
    comparisons are used again.
    """

    captions: str = setting("")
    """A bare table of captions to deduplicate instead of the work folder's pairs: parquet, csv, tsv, jsonl, .gz, a
    glob. Its column `uid`, if any, names the rows; each caption is kept once."""
    caption_col: str = setting("caption")
    """Column of that table which holds the captions."""
    policy: Literal["image", "text", "both", "either"] = setting("both", stable=False)
    """What counts as a duplicate pair; the table above says what is kept."""
    threshold: float = setting(0.8, stable=False)
    """Jaccard similarity of word sets from which captions are near-duplicates, 0.3 to 1. 0.8 lets one word in ten
    change; 1 wants the same words, as captions of fewer than five words always do."""
    method: Literal["greedy", "components"] = setting("greedy", stable=False)
    """`greedy` removes only what is itself similar to the pair that stays; `components` lets similarity chain from pair
    to pair, which removes up to a tenth more where captions follow patterns."""
    max_captions_per_image: int = setting(5, stable=False)
    """Most captions kept of one picture; 0 for no limit."""
    max_images_per_caption: int = setting(10, stable=False)
    """Most pictures kept of one caption under `text` and `either` (ALIGN: 10); 1 keeps each caption once."""
    where: str = setting("", stable=False)
    """SQL condition over `pairs` that a pair must meet, such as "width >= 200 AND lang = 'en'"."""
    preset: tuple[str, ...] = setting((), stable=False)
    """Published filter rules to apply: align, cc12m, coyo, datacomp-basic, datacomp-clip, laion, obelics, or a .sql
    file of yours. May be given more than once."""
    holdout: str = setting("", stable=False)
    """SQL condition over `pairs` that marks the evaluation rows: always kept, never trained on, and training pairs with
    one of their pictures are dropped."""
    against: tuple[str, ...] = setting((), stable=False)
    """An evaluation set that must not be trained on: a folder of pictures or of .tar shards, a work folder, or a table
    with captions, URLs or pictures. Pairs that show one of its pictures or say one of its captions are dropped. May be
    given more than once."""
    balance: int = setting(0, stable=False)
    """Balance captions as MetaCLIP did, by the data's own words: one that more than this many captions hold is sampled down
    to about it (MetaCLIP: 20000 for 400 M pairs); 0 leaves them alone."""
    dry_run: bool = setting(False, flags="--dry-run/--decide", stable=False)
    """Report what would be dropped, rule by rule, and decide nothing."""

    def decides(self) -> dict[str, object]:
        """The settings that another decision over the same signatures may change."""
        ignored = {"work", "workers", "engine", "fresh", "part", "dry_run", "captions", "caption_col"}
        values = {f.name: redacted(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in ignored}
        return {**values, "preset": list(self.preset), "against": list(redacted(self.against))}

    def check(self) -> None:
        """Raise ConfigError for a value outside its range or settings that contradict each other."""
        if not 0.3 <= self.threshold <= 1:
            raise ConfigError(f"--threshold: expected a similarity from 0.3 to 1, found {self.threshold:g}")
        if self.max_captions_per_image < 0 or self.max_images_per_caption < 1:
            raise ConfigError(
                "--max-captions-per-image starts at 0 (no limit) and --max-images-per-caption at 1, found "
                f"{self.max_captions_per_image} and {self.max_images_per_caption}"
            )
        if self.balance < 0:
            raise ConfigError(f"--balance: expected 1 or more (0 is off), found {self.balance}")
        if self.workers < 0:
            raise ConfigError(f"--workers: expected 0 or more, found {self.workers}")
        if self.dry_run and self.fresh:
            raise ConfigError("expected --dry-run or --fresh, found both; a dry run throws no decisions away")
        if self.captions and (self.where or self.preset or self.holdout):
            raise ConfigError("--where, --preset and --holdout read the pairs of a work folder; leave out --captions")
        if self.captions and self.policy in ("image", "either"):
            raise ConfigError(
                f"--policy {self.policy} compares pictures, and --captions has none; leave out one of them"
            )
