"""Builds what ingest and dedup leave behind: real Parquet parts and tars of real JPEG files, to the schemas of core."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.images import encode_jpeg
from core.schema import decision_schema, pair_schema

SOURCE = [pa.field("similarity", pa.float64()), pa.field("license", pa.string())]


def jpeg(number: int, width: int = 40, height: int = 32) -> bytes:
    """A small baseline JPEG that differs from number to number."""
    rng = np.random.Generator(np.random.PCG64(number))
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return encode_jpeg(np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1)), 90)


def uid_of(*words: object) -> str:
    return hashlib.md5(repr(words).encode()).hexdigest()


@dataclass
class World:
    """A work folder after ingest and dedup, picture by picture.

    `pictures[url]` are the staged bytes, `pairs` the rows, `decisions` what dedup said of them.
    """

    work: Path
    units: int = 2
    pictures: dict[str, bytes] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        number: int,
        captions: Iterable[str],
        *,
        body: bytes = b"",
        kept: bool = True,
        holdout: bool = False,
        group: str = "",
    ) -> list[str]:
        """One picture with its captions; returns the uids of its pairs."""
        url = f"http://example.test/{number}.jpg"
        self.pictures[url] = body or jpeg(number)
        uids = [uid_of(url, caption) for caption in captions]
        for uid, caption in zip(uids, captions, strict=True):
            self.pairs.append({"uid": uid, "url": url, "caption": caption, "similarity": number / 7, "license": None})
            self.decisions.append(
                {
                    "uid": uid,
                    "kept": kept,
                    "holdout": holdout,
                    "reason": None if kept else "where",
                    "image_group": group or min(uids),
                }
            )
        return uids

    def write(self) -> Path:
        """Write `ingest/parts` (pictures dealt over the units) and `dedup/decisions.parquet`."""
        (self.work / "ingest/parts").mkdir(parents=True, exist_ok=True)
        (self.work / "dedup").mkdir(exist_ok=True)
        urls = list(self.pictures)
        for unit in range(self.units):
            self._write_unit(f"u{unit:06d}", urls[unit :: self.units])
        table = pa.Table.from_pylist(self.decisions, schema=decision_schema())
        pq.write_table(table, self.work / "dedup/decisions.parquet")
        return self.work

    def _write_unit(self, unit: str, urls: list[str]) -> None:
        rows = []
        name = f"ingest/parts/{unit}.tar"
        places = self._write_tar(self.work / name, urls)
        for row, pair in enumerate(p for p in self.pairs if p["url"] in places):
            body = self.pictures[pair["url"]]
            rows.append(
                pair | {
                    "unit": unit, "row": row, "caption_raw": pair["caption"], "outcome": "ok", "bytes": len(body),
                    "sha256": hashlib.sha256(body).hexdigest(), "format": "jpeg", "tar": name,
                    "tar_offset": places[pair["url"]], "tar_size": len(body), "stored_crc32": zlib.crc32(body),
                    "stored_sha256": hashlib.sha256(body).hexdigest(),
                }
            )  # fmt: skip
        failed = {
            "uid": uid_of(unit),
            "unit": unit,
            "row": len(rows),
            "url": "http://gone.test/",
            "outcome": "http_4xx",
        }
        pq.write_table(
            pa.Table.from_pylist([*rows, failed], schema=pair_schema(SOURCE)),
            self.work / f"ingest/parts/{unit}.parquet",
        )

    def _write_tar(self, path: Path, urls: list[str]) -> dict[str, int]:
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i, url in enumerate(urls):
                info = tarfile.TarInfo(f"{i:09d}.jpg")
                info.size = len(self.pictures[url])
                tar.addfile(info, io.BytesIO(self.pictures[url]))
        with tarfile.open(path) as tar:
            return {url: member.offset_data for url, member in zip(urls, tar.getmembers(), strict=True)}


def small_world(work: Path, pictures: int = 60) -> World:
    """`pictures` pictures with 1 to 3 captions each; every tenth is held out, every seventh was dropped."""
    world = World(work)
    for number in range(pictures):
        captions = [f"picture {number}, caption {i} — “ünï”" for i in range(1 + number % 3)]
        world.add(number, captions, holdout=number % 10 == 0, kept=number % 10 == 0 or number % 7 != 0)
    return world


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder`, by name, but for the stage's summary, which holds seconds."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "done.json"
    }
