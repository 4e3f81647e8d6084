"""Shards that another tool wrote: their members are scanned once, and they read like our own.

A sample is the members that share a key (webdataset's rule: up to the first dot of the file name). Its picture is the
member with an image's extension, its captions come from `.txt`, else from `.json` (`captions`, `caption`, `text` or `TEXT`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import xxhash

from core import webdataset
from core.errors import DataError, InputError
from core.schema import sound
from core.storage import Folder, expand
from shardkit.index import Shard, split_name
from shardkit.rows import Rows
from shardkit.tar import Member, scan_file

log = logging.getLogger("pairmill.shardkit")
IMAGES = ("jpg", "jpeg", "png", "webp")
CAPTION_KEYS = ("captions", "caption", "text", "TEXT")
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string()), pa.field("uid", pa.string()), pa.field("captions", pa.list_(pa.string())),
        pa.field("jpg_offset", pa.int64()), pa.field("jpg_size", pa.int64()), pa.field("width", pa.int64()),
        pa.field("height", pa.int64()), pa.field("crc32", pa.uint32()), pa.field("image_group", pa.string()),
    ]
)  # fmt: skip
_BRACES = re.compile(r"\{([^{}]*)\}")


def open_foreign(
    url: str, *, skip: bool = False
) -> tuple[Folder, list[Shard], list[Rows], str, list[int], list[Shard]]:
    """What `opening.Opened` holds, of webdataset tars; samples carry no checksum. `skip` leaves damaged tars out.

    Raises:
        InputError: there are no tars, or no pictures with captions in them.
        DataError: a tar is cut short or damaged.
    """
    paths = tar_paths(url)
    folder = Folder(paths[0].rpartition("/")[0] or ".")
    shards, tables, bad = list[Shard](), list[Rows](), list[Shard]()
    digest = xxhash.xxh3_128()
    skipped = 0
    for path in paths:
        name = path.removeprefix(f"{folder.url}/")
        try:
            with folder.open(path) as file:
                found, without = _scan_samples(file, path)
                size = file.seek(0, 2)
        except DataError as error:
            if not skip:
                raise
            log.warning("%s", error)
            bad.append(Shard(name, 0, 0))  # how many samples it held nobody knows
            continue
        skipped += without
        digest.update(f"{name.rpartition('/')[2]} {size} {[(r['key'], r['jpg_offset']) for r in found]}".encode())
        shards.append(Shard(name, len(found), size))
        tables.append(pa.Table.from_pylist(found, _SCHEMA).select)
    samples = sum(shard.samples for shard in shards)
    if not samples:
        raise InputError(f"expected pictures with captions in {url}, found none in {len(paths)} tars")
    log.info("%s: %d samples in %d tars without our index, %d left out", url, samples, len(paths), skipped)
    return folder, shards, tables, digest.hexdigest(), [len(shards)], bad


def tar_paths(url: str) -> list[str]:
    """The tars that a folder, a glob or a brace pattern (`{00000..00007}.tar`, `{a,b}.tar`) names.

    Raises:
        InputError: one of them is not there.
    """
    if "{" in url:
        paths = [path for one in expand_braces(url) for path in expand(one)]
        if not paths:
            raise InputError(f"expected braces that count upwards, found {url}")
        return paths
    if url.endswith(".tar"):
        return expand(url)
    try:
        return expand(f"{url.rstrip('/')}/*.tar")
    except InputError:
        raise InputError(
            f"expected shards in {url} (shards.json, or .tar files), found none; run `pairmill shard` first"
        ) from None


def expand_braces(pattern: str) -> list[str]:
    """`a{0..2}` is a0, a1, a2 (numbers keep their leading zeros); `a{x,y}` is ax, ay."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    body = match[1]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", body)
    if span:
        choices = [f"{n:0{len(span[1])}d}" for n in range(int(span[1]), int(span[2]) + 1)]
    else:
        choices = body.split(",")
    return [
        one for choice in choices for one in expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def _scan_samples(file: IO[bytes], path: str) -> tuple[list[dict[str, Any]], int]:
    """Rows of one tar's samples, and how many keys had no picture or no caption."""
    rows, skipped = [], 0
    for key, members in _grouped(list(scan_file(file, path))):
        image = next((members[e] for e in IMAGES if e in members), None)
        notes = _notes(file, members, f"{path}: {sound(key)}.json")
        captions = _captions(file, members, notes)
        if image is None or not captions:
            skipped += 1
            continue
        name = f"{path.rpartition('/')[2]}/{sound(key)}"
        group = str(notes.get("image_group") or notes.get("sha256") or name)
        rows.append(
            {
                "key": sound(key), "uid": str(notes.get("uid") or name), "captions": captions, "jpg_offset": image.offset,
                "jpg_size": image.size, "width": webdataset.pixels(notes, "width"),
                "height": webdataset.pixels(notes, "height"), "image_group": group,
            }
        )  # fmt: skip
    return rows, skipped


def _grouped(members: list[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """Key and members by lower-case extension, for each run of members with the same key."""
    current, group = "", dict[str, Member]()
    for member in members:
        key, extension = split_name(member.name)
        if group and key != current:
            yield current, group
            group = {}
        current = key
        group[extension.lower()] = member
    if group:
        yield current, group


def _notes(file: IO[bytes], members: dict[str, Member], label: str) -> dict[str, Any]:
    return webdataset.parsed_notes(_data(file, members["json"]), label) if "json" in members else {}


def _captions(file: IO[bytes], members: dict[str, Member], notes: dict[str, Any]) -> list[str]:
    for key in CAPTION_KEYS:
        if isinstance(notes.get(key), list) and notes[key] and all(isinstance(c, str) for c in notes[key]):
            return notes[key]
    if "txt" in members:
        return [_data(file, members["txt"]).decode(errors="replace")]
    return next(([notes[key]] for key in CAPTION_KEYS if isinstance(notes.get(key), str)), [])


def _data(file: IO[bytes], member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)
