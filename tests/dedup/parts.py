"""Builds ingest parts as Parquet files to core's schema, and reads decisions back."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from datasketch import MinHash

from core import catalog
from core.imagehash import image_hash
from core.schema import decision_schema, pair_schema
from core.storage import Folder
from dedup.config import DedupConfig
from dedup.keep import run
from dedup.minhash import PERMUTATIONS, SEED
from dedup.tokens import Sets


@functools.cache
def picture(seed: int, *, width: int = 200, height: int = 150) -> npt.NDArray[np.uint8]:
    """A random picture [H, W, 3] whose amplitudes fall with frequency as they do in photographs."""
    rng = np.random.default_rng(seed)
    falling = 1 / (0.005 + np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)))
    noise = rng.standard_normal((3, height, width // 2 + 1)) + 1j * rng.standard_normal((3, height, width // 2 + 1))
    noise[1:] = 0.6 * noise[0] + 0.4 * noise[1:]  # channels of a photograph go together
    image = np.fft.irfft2(noise * falling, (height, width)).transpose(1, 2, 0)
    image -= image.min()
    return (255 * image / image.max()).astype(np.uint8)


def pair(uid: str, caption: str | None, url: str, shows: object = None, side: int = 300, **more: Any) -> dict[str, Any]:
    """A fetched row. `shows` decides the bytes (any value; defaults to the URL); hashes only where they are given."""
    shows = url if shows is None else shows
    return {
        "uid": uid,
        "url": url,
        "caption": caption,
        "caption_raw": caption,
        "outcome": "ok",
        "sha256": hashlib.sha256(repr(shows).encode()).hexdigest(),
        "bytes": 9000,
        "width": side,
        "height": side,
        **more,
    }


def hashes_of(pixels: np.ndarray) -> dict[str, bytes]:
    direct, mirrored = image_hash(pixels)
    return {"image_hash": direct, "image_hash_mirrored": mirrored}


def write_parts(
    work: Path, rows: Sequence[dict[str, Any]], sizes: Iterable[int] = (), source: Sequence[pa.Field[Any]] = ()
) -> None:
    """Write `rows` as `ingest/parts`, cut after `sizes` rows (the rest in the last part)."""
    schema = pair_schema(list(source))
    folder = work / "ingest" / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    left, unit = list(rows), 0
    for size in [*sizes, len(left)]:
        taken, left = left[:size], left[size:]
        if not taken:
            continue
        name = f"u{unit:06d}"
        full = [{"unit": name, "row": i, **row} for i, row in enumerate(taken)]
        pq.write_table(pa.Table.from_pylist(full, schema=schema), folder / f"{name}.parquet")
        unit += 1


def decide(work: Path, **settings: Any) -> dict[str, Any]:
    return run(DedupConfig(work=str(work), workers=1, **settings))


def decisions(work: Path) -> dict[str, dict[str, Any]]:
    """uid -> its decision."""
    with catalog.connect(Folder(work), views=("decisions",)) as connection:
        table = connection.sql("SELECT * FROM decisions ORDER BY uid").to_arrow_table()
    return {row["uid"]: row for row in table.cast(decision_schema()).to_pylist()}


def kept(work: Path) -> set[str]:
    return {uid for uid, row in decisions(work).items() if row["kept"]}


def datasketchs_values(sets: Sets, which: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """`minhash.values` by all permutations of datasketch's MinHash, the reference."""
    documents = [sets.flat[s : s + n].tolist() for s, n in zip(sets.starts[which], sets.sizes[which], strict=True)]
    made = MinHash.bulk(documents, num_perm=PERMUTATIONS, seed=SEED, hashfunc=int)
    values = np.array([m.hashvalues for m in made], np.uint64).astype(np.uint32).reshape(-1, PERMUTATIONS)
    return np.ascontiguousarray(values.T)
