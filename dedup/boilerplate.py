"""Captions that say nothing of the picture, told by their form: no two need be alike, so no cluster shows them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# kind -> RE2, case ignored; a caption is of the first kind that it matches
PATTERNS = {
    "file names": r"^\s*(?:\S+\.(?:jpe?g|png|gif|webp|avif|bmp|tiff?|svg)"
    r"|(?:img|dsc[nf]?|dscf|image|photo|pict?|screenshot|untitled)[ _-]*\d+)\s*$",
    "a machine's description": r"^\s*(?:(?:image|photo|picture) may contain|may be an? (?:image|photo|picture) of"
    r"|no (?:photo|image) description available)",
}
_ANY = "|".join(f"(?:{pattern})" for pattern in PATTERNS.values())


def kinds(captions: pa.Array) -> npt.NDArray[np.int8]:
    """For each caption 0, or the place from 1 of its kind in `PATTERNS`."""
    found = np.zeros(len(captions), np.int8)
    # one pass over all of them; which pattern it was is asked of few
    rows = np.flatnonzero(pc.fill_null(_matches(captions, _ANY), False).to_numpy(zero_copy_only=False))
    few = captions.take(pa.array(rows))
    for kind, pattern in reversed(list(enumerate(PATTERNS.values(), 1))):
        found[rows[_matches(few, pattern).to_numpy(zero_copy_only=False)]] = kind
    return found


def _matches(captions: pa.Array, pattern: str) -> pa.Array:
    return pc.match_substring_regex(captions, pattern, ignore_case=True)


def counts(kinds_N: npt.NDArray[np.int8]) -> dict[str, int]:
    """How many captions are of each kind, of those that there are."""
    found = np.bincount(kinds_N, minlength=len(PATTERNS) + 1)[1:].tolist()
    return {name: n for name, n in zip(PATTERNS, found, strict=True) if n}
