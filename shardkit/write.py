"""Writes one shard, in one or several sizes, from its rows of the plan: what a worker of `pairmill shard` does.

Way in: a row group of the plan and the staged images. Way out: for each size a tar, DALI's index of it, and a Parquet part
with the shard's rows of `samples.parquet`, published in that order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from isal import isal_zlib

from core import images
from core.errors import DataError, ImageError
from core.plan import Unit
from core.runner import tick
from core.schema import Outcome, sample_schema
from core.storage import Folder, begin_writing
from shardkit.index import Shard, dali_index
from shardkit.plan import planned_rows
from shardkit.ranges import RangeReader
from shardkit.tar import TarWriter

if TYPE_CHECKING:
    from core.images import Pixels

log = logging.getLogger("pairmill.shardkit")
NOTE = b"pairmill"  # key of a part's own figures in its Parquet metadata
_PLAIN_KEY = re.compile(r"[0-9A-Za-z_-]{1,90}")  # no dots or spaces; KEY.json stays within a tar name of 100 bytes
QUALITY = 90  # of the pictures that are resized: below 85 artefacts begin to show, 95 is half as large again
_BEGIN = 4 << 20  # bytes after which the disk is told to begin
_AT_ONCE = 64  # pictures asked of an object store together, and told to the progress line together
# null for a NaN, which DuckDB and Python write and few other readers of JSON take
_SOURCE = json.JSONDecoder(parse_constant=lambda _: None)


def part_name(home: str, unit: Unit) -> str:
    return f"{home}/parts/{unit.id}.parquet"


class Row(NamedTuple):
    """One sample of the plan, as `plan` writes it."""

    uid: str
    uids: list[str]
    captions: list[str]
    url: str | None
    tar: str
    tar_offset: int
    tar_size: int
    stored_sha256: str | None
    stored_crc32: int | None
    image_group: str
    source: str


@dataclass(frozen=True)
class PackShard:
    """Writes one shard of every set. Runs in a worker process.

    Attributes:
        plan: file with one row group a shard.
        homes: folder of each set, with its longest shorter side in pixels at the same place of `sizes`.
    """

    folder: Folder
    plan: str
    homes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __call__(self, unit: Unit) -> None:
        rows = read_plan(self.folder, self.plan, unit)
        with contextlib.ExitStack() as publishing:
            tars = [publishing.enter_context(self.folder.staged(f"{home}/{unit.id}.tar")) for home in self.homes]
            with contextlib.ExitStack() as writing:
                outputs = [writing.enter_context(Output(tar, f"{unit.id}.tar")) for tar in tars]
                left_out = fill(outputs, rows, staged_images(self.folder, rows), self.sizes)
            tables = [output.table(left_out) for output in outputs]  # while the disk writes the tars' ends
        for home, output, table in zip(self.homes, outputs, tables, strict=True):
            self.folder.write(f"{home}/{unit.id}.idx", output.index)
            with self.folder.staged(part_name(home, unit)) as path:
                # read once, by `describe`: not worth the time to make it small
                pq.write_table(table, path, compression="none", use_dictionary=False)


def join_parts(tables: Iterable[pa.Table], path: Path) -> None:
    """Write the rows of all shards, in order, as `samples.parquet`: one row group a shard."""
    with pq.ParquetWriter(path, sample_schema()) as writer:
        for table in tables:
            writer.write_table(table.replace_schema_metadata(None), row_group_size=max(1, table.num_rows))


def read_plan(folder: Folder, plan: str, unit: Unit) -> list[Row]:
    """The rows of one shard."""
    table = planned_rows(folder, plan, unit)
    return list(map(Row._make, zip(*(table[name].to_pylist() for name in Row._fields), strict=True)))


def staged_images(folder: Folder, rows: list[Row]) -> Iterator[bytes]:
    """The staged image of each row, in order; those of an object store are asked for many at a time.

    Raises:
        DataError: a tar is gone or shorter than its index says.
    """
    files = RangeReader(folder)
    remote = {tar for tar in {row.tar for row in rows} if "://" in folder.path(tar)}
    batches = [rows[first : first + _AT_ONCE] for first in range(0, len(rows), _AT_ONCE)]
    for some, coming in itertools.pairwise([[], *batches, []]):
        _begin_reading(folder, [row for row in coming if row.tar not in remote])
        fetched = iter(folder.read_ranges([(r.tar, r.tar_offset, r.tar_size) for r in some if r.tar in remote]))
        for row in some:
            body: bytes | OSError
            try:
                body = next(fetched) if row.tar in remote else files.read(row.tar, row.tar_offset, row.tar_size)
            except OSError as error:
                body = error
            if isinstance(body, OSError) or len(body) != row.tar_size:
                raise _lost(row, body)
            yield body


def _begin_reading(folder: Folder, rows: list[Row]) -> None:
    """Ask the disk for what will be read next, all at once, unless the first is in memory: read one by one, each would be
    waited for, which takes twice as long as packing itself.

    A hint, and nothing where the system has no such calls (Linux: RWF_NOWAIT, posix_fadvise).
    """
    if not rows or _is_in_memory(folder.path(rows[0].tar), rows[0].tar_offset + rows[0].tar_size // 2):
        return
    for row in rows:
        with (
            contextlib.suppress(OSError),
            open(folder.path(row.tar), "rb", buffering=0) as file,
        ):  # reading will say why
            os.posix_fadvise(file.fileno(), row.tar_offset, row.tar_size, os.POSIX_FADV_WILLNEED)


def _is_in_memory(path: str, position: int) -> bool:
    """Whether this byte of a file can be had without the disk; so it is said of a file that is not there, too."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True
    try:
        with open(path, "rb", buffering=0) as file:
            os.preadv(file.fileno(), [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP  # a file system that cannot say
    return True


def _lost(row: Row, found: bytes | OSError) -> DataError:
    advice = "restore that file, or run ingest again"
    if isinstance(found, OSError):
        return DataError(f"expected staged images in {row.tar}, found {found.strerror or found}; {advice}")
    return DataError(
        f"{row.tar} is cut short: expected {row.tar_size} bytes of {row.uid} at byte {row.tar_offset}, "
        f"found {len(found)}; {advice}"
    )


def fill(
    outputs: Sequence[Output], rows: list[Row], bodies: Iterable[bytes], sizes: Sequence[int]
) -> list[dict[str, str]]:
    """Put every row's image into every output, in its size; returns what could not be decoded (uid, reason).

    A picture that is no use in one size is left out of all: the sets hold the same samples.
    """
    left_out = []
    for done, (row, body) in enumerate(zip(rows, bodies, strict=True), 1):
        crc32 = isal_zlib.crc32(body)
        try:
            if row.stored_crc32 not in (crc32, None):
                raise ImageError(Outcome.CORRUPT, f"its bytes in {row.tar} are not those that were staged")
            fitted = fit(body, sizes)
        except ImageError as error:
            log.warning("shard: %s is left out (%s)", row.uid, error)
            left_out.append({"uid": row.uid, "reason": str(error)})
        else:
            source = _SOURCE.decode(row.source) if row.source != "{}" else {}
            for output, picture in zip(outputs, fitted, strict=True):
                if picture.data is body:
                    # ingest has hashed these very bytes, as the crc32 tells: a third of the cost of copying them
                    sha256 = (row.stored_crc32 is not None and row.stored_sha256) or hashlib.sha256(body).hexdigest()
                    output.add(row, source, picture, sha256, crc32)
                    output.copied += 1
                else:
                    sha256 = hashlib.sha256(picture.data).hexdigest()
                    output.add(row, source, picture, sha256, isal_zlib.crc32(picture.data))
        if done % _AT_ONCE == 0:
            tick(_AT_ONCE)
    tick(len(rows) % _AT_ONCE)
    return left_out


class Fitted(NamedTuple):
    """A JPEG that fits, with its size in pixels."""

    data: bytes
    width: int
    height: int


def fit(body: bytes, sizes: Sequence[int]) -> list[Fitted]:
    """The picture as JPEG with a shorter side of at most each of `sizes` pixels; the very same bytes where they fit already.

    Raises:
        ImageError: it cannot be decoded.
    """
    header = images.read_header(body)
    fitted = [Fitted(body, header.width, header.height)] * len(sizes)
    pixels: dict[int, Pixels] = {}
    for i, size in enumerate(sizes):
        if not images.fits_as_is(body, header, size):
            # decoded once for all sizes, but for those that decoding itself scales: a set is the same with and without
            # its companions
            key = size if images.scales_while_decoding(header, size) else 0
            if key not in pixels:
                pixels[key] = images.decode(body, header, min_side=size)
            small = images.resize(pixels[key], size)
            fitted[i] = Fitted(images.encode_jpeg(small, QUALITY), small.shape[1], small.shape[0])
    return fitted


def sample_key(uid: str) -> str:
    """The tar key of a sample: its uid where that has no dots, spaces or slashes and is short, else a hash of it."""
    return uid if _PLAIN_KEY.fullmatch(uid) else xxhash.xxh3_128_hexdigest(uid.encode())


class Output:
    """A shard being written: `add` samples, leave the context to finish the tar, then take index, part and digest."""

    def __init__(self, path: Path, shard: str) -> None:
        self.shard, self.rows, self._lines = shard, list[tuple[Any, ...]](), list[str]()
        self.copied = 0
        self._file = path.open("wb")
        self._tar = TarWriter(self._file)
        self._begun = 0

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._tar.finish()
                begin_writing(self._file)

    def add(self, row: Row, source: dict[str, Any], image: Fitted, sha256: str, crc32: int) -> None:
        """Append one sample: the picture, its first caption, and what is known of it (`source`: the list's own columns)."""
        key, text, notes = sample_key(row.uid), row.captions[0].encode(), _notes(row, source, image, sha256)
        jpg, txt, json_ = f"{key}.jpg", f"{key}.txt", f"{key}.json"
        at = self._tar.add(jpg, image.data)
        self._lines.append(
            f"jpg {at} {len(image.data)} {jpg} txt {self._tar.add(txt, text)} {len(text)} {txt} "
            f"json {self._tar.add(json_, notes)} {len(notes)} {json_}"
        )
        self.rows.append(
            (self.shard, key, row.uid, row.uids, row.captions[0], row.captions, row.url, at, len(image.data), image.width,
             image.height, crc32, sha256, row.image_group)
        )  # fmt: skip
        if self._tar.position - self._begun > _BEGIN:
            self._begun = self._tar.position
            begin_writing(self._file)

    @functools.cached_property
    def index(self) -> bytes:
        """DALI's index of the tar."""
        return dali_index(self._lines)

    @property
    def entry(self) -> Shard:
        """The shard as `shards.json` lists it."""
        index = hashlib.sha256(self.index).hexdigest()
        return Shard(self.shard, len(self.rows), self._tar.position, self._tar.digest.hexdigest(), index)

    def table(self, left_out: list[dict[str, str]]) -> pa.Table:
        """The shard's rows of `samples.parquet`, with its own figures in the metadata."""
        figures = {"left_out": left_out, "copied": self.copied, "resized": len(self.rows) - self.copied}
        note = json.dumps({"shard": dataclasses.asdict(self.entry), **figures})
        schema = sample_schema().with_metadata({NOTE: note.encode()})
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(schema)
        return pa.table([pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema)


def _notes(row: Row, source: dict[str, Any], image: Fitted, sha256: str) -> bytes:
    """KEY.json. Put together by hand, because the encoder takes three times as long, a twentieth of copying a picture."""
    ours = (
        f'"uid":{_text(row.uid)},"uids":[{",".join(map(_text, row.uids))}],'
        f'"url":{"null" if row.url is None else _text(row.url)},"captions":[{",".join(map(_text, row.captions))}],'
        f'"width":{image.width},"height":{image.height},"sha256":"{sha256}","image_group":{_text(row.image_group)}'
    )
    others = {name: value for name, value in source.items() if name not in _OURS}
    return f"{{{ours},{_JSON.encode(others)[1:]}".encode() if others else f"{{{ours}}}".encode()


_OURS = frozenset(("uid", "uids", "url", "captions", "width", "height", "sha256", "image_group"))
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_text = json.encoder.encode_basestring
