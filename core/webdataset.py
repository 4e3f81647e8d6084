"""Samples of anybody's tars, by webdataset's rule: neighbouring files that share a name up to its first dot.

For those who only look (dedup's evaluation sets, the audit of a bare folder); shards that are trained on are read by
`shardkit`, which checks more.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from core.errors import DataError
from core.storage import Folder

PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
TEXTS = ("txt", "text", "caption")
CAPTION_KEYS = ("captions", "caption", "text", "TEXT", "alt")


@dataclass
class Sample:
    """Files of one key: extension in lower case -> (position of its data, bytes)."""

    key: str
    file: IO[bytes] = field(repr=False)
    members: dict[str, tuple[int, int]] = field(default_factory=dict)

    def first(self, endings: tuple[str, ...]) -> str | None:
        """The extension of the first of `endings` that there is; `jpg` also finds `image.jpg`."""
        fitting = [name for name in self.members if name.rpartition(".")[2] in endings]
        return min(fitting, key=lambda name: name.count(".")) if fitting else None

    def read(self, ending: str) -> bytes:
        position, size = self.members[ending]
        self.file.seek(position)
        return self.file.read(size)

    def notes(self) -> dict[str, Any]:
        """The JSON object beside the picture; empty where there is none that can be read."""
        ending = self.first(("json",))
        if ending is None:
            return {}
        try:
            value = json.loads(self.read(ending))
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def captions(self, notes: dict[str, Any]) -> list[str]:
        """All captions the JSON object lists, else the text beside the picture, else the JSON object's one."""
        for key in CAPTION_KEYS:
            if isinstance(notes.get(key), list):
                return [c for c in notes[key] if isinstance(c, str)]
        if ending := self.first(TEXTS):
            return [self.read(ending).decode("utf-8", errors="replace")]
        return next(([notes[key]] for key in CAPTION_KEYS if isinstance(notes.get(key), str)), [])


def samples(tar: str) -> Iterator[Sample]:
    """Every sample of the tar at this path or URL, in its order; members are read on demand, while it is open.

    Raises:
        DataError: it is no tar, or is cut short.
    """
    with Folder("/").open(tar) as file:
        sample: Sample | None = None
        for name, position, size in _members(file, tar):
            folder, slash, leaf = name.rpartition("/")
            stem, _, ending = leaf.partition(".")
            key = f"{folder}{slash}{stem}"
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = Sample(key, file)
            sample.members[ending.lower()] = (position, size)
        if sample is not None:
            yield sample


def _members(file: IO[bytes], tar: str) -> Iterator[tuple[str, int, int]]:
    end = file.seek(0, 2)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # a shard has tens of thousands
                if info.isfile() and info.offset_data + info.size > end:
                    raise DataError(
                        f"{tar} is cut short: {info.name} needs {info.offset_data + info.size} bytes of {end}"
                    )
                if info.isfile():
                    yield info.name, info.offset_data, info.size
    except tarfile.TarError as error:
        raise DataError(f"expected a tar at {tar}, found something else ({error}); restore or remove it") from error
