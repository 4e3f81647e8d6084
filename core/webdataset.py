"""Samples of anybody's tars, by webdataset's rule: neighbouring files that share a name up to its first dot.

For `adopt`, dedup's evaluation sets and the audit of a bare folder; shards that are trained on are read by `shardkit`,
which checks more. Text comes out as UTF-8 can hold it, whatever bytes the tar's names and its JSON are made of.
"""

from __future__ import annotations

import json
import logging
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from core.errors import DataError
from core.schema import sound
from core.storage import Folder

log = logging.getLogger("pairmill.webdataset")
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
TEXTS = ("txt", "text", "caption")
CAPTION_KEYS = ("captions", "caption", "text", "TEXT", "alt")
MOST_PIXELS = 2**31 - 1  # a side, as tables hold it
_SURROGATE = re.compile(
    rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]"
)  # escaped, or as if it were UTF-8, which json lets through


@dataclass
class Sample:
    """Files of one key: extension in lower case -> (position of its data, bytes)."""

    key: str
    tar: Tar = field(repr=False)
    members: dict[str, tuple[int, int]] = field(default_factory=dict)

    def first(self, endings: tuple[str, ...]) -> str | None:
        """The extension that is one of `endings`; `jpg` also finds `image.jpg`, but `jpg` itself goes before `mask.jpg`."""
        fitting = [name for name in self.members if name.rpartition(".")[2] in endings]
        return min(fitting, key=lambda name: name.count(".")) if fitting else None

    def read(self, ending: str, most: int | None = None) -> bytes:
        """The bytes of a member, or the first `most` of them."""
        position, size = self.members[ending]
        self.tar.file.seek(position)
        return self.tar.file.read(size if most is None else min(size, most))

    def notes(self) -> dict[str, Any]:
        """The JSON object beside the picture; empty where there is none that can be read."""
        ending = self.first(("json",))
        return {} if ending is None else parsed_notes(self.read(ending), f"{self.tar.name}: {self.key}.{ending}")

    def text(self) -> str | None:
        """What the text file beside the picture says; None where there is none."""
        ending = self.first(TEXTS)
        return None if ending is None else self.read(ending).decode("utf-8", errors="replace")

    def captions(self, notes: dict[str, Any]) -> list[str]:
        """All captions the JSON object lists, else the text beside the picture, else the JSON object's one."""
        for key in CAPTION_KEYS:
            if isinstance(notes.get(key), list):
                return [c for c in notes[key] if isinstance(c, str)]
        if (text := self.text()) is not None:
            return [text]
        return next(([notes[key]] for key in CAPTION_KEYS if isinstance(notes.get(key), str)), [])


class Tar:
    """A tar read front to back; `damage` says where and why it could not be read further."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name, self.file, self.damage = name, file, ""

    def samples(self) -> Iterator[Sample]:
        """Samples in the order of the tar; their members are read on demand."""
        sample, current = Sample("", self), ""
        for path, position, size in self._members():
            folder, slash, leaf = path.rpartition("/")
            stem, _, ending = leaf.partition(".")
            key = f"{folder}{slash}{stem}"
            if key != current and sample.members:
                yield sample
            if key != current or not sample.members:
                sample, current = Sample(sound(key), self), key
            sample.members[sound(ending).lower()] = (position, size)
        if sample.members:
            yield sample

    def _members(self) -> Iterator[tuple[str, int, int]]:
        end = self.file.seek(0, 2)
        self.file.seek(0)
        try:
            with tarfile.open(fileobj=self.file, mode="r:") as archive:
                while (info := archive.next()) is not None:
                    # tarfile remembers every member, and a shard has tens of thousands
                    archive.members.clear()  # type: ignore[attr-defined]
                    if info.isfile() and info.offset_data + info.size > end:
                        self.damage = f"{info.name} is cut short at byte {end}"
                        return
                    if info.isfile():
                        yield info.name, info.offset_data, info.size
                # tarfile takes a damaged header for the end; the real end is a block of zeros
                self.file.seek(archive.offset)
                if self.file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    self.damage = f"no member and no end at byte {archive.offset}"
        except tarfile.TarError as error:
            self.damage = str(error)


def samples(name: str) -> Iterator[Sample]:
    """Every sample of the tar at this path or URL, in its order.

    Raises:
        DataError: it is no tar, is cut short or damaged.
    """
    with Folder("/").open(name) as file:
        tar = Tar(name, file)
        yield from tar.samples()
    if tar.damage:
        raise DataError(f"expected a whole tar at {name}, found it damaged ({sound(tar.damage)}); restore or remove it")


def parsed_notes(data: bytes, label: str) -> dict[str, Any]:
    """A sample's JSON object; empty, with a warning that names `label`, where it is none."""
    try:
        value = json.loads(data)
        if _SURROGATE.search(data):
            value = json.loads(sound(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        log.warning("%s cannot be read: %s", label, error)
        return {}
    return value if isinstance(value, dict) else {}


def pixels(notes: dict[str, Any], name: str) -> int:
    """The side of the picture that its notes give by this name; 0 where they give none that can be."""
    found = notes.get(name)
    return found if type(found) is int and 0 < found <= MOST_PIXELS else 0
