"""The two files a unit leaves behind: a tar of its pictures, then the Parquet part that says what became of every row.

The part is published last and names its tar, so whoever sees a part sees all of its pictures.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import DataError, WorkFolderError
from core.schema import RETRYABLE, Outcome, pair_schema
from core.storage import Folder
from core.work import Stage
from ingest.journal import Journal

if TYPE_CHECKING:
    import pyarrow as pa

PARTS = "ingest/parts"


def part_name(unit: str) -> str:
    """The Parquet part of a unit, which is there when the unit is done."""
    return f"{PARTS}/{unit}.parquet"


def tar_name(unit: str, round_: int) -> str:
    """The tar of a unit; every round of `--retry-failed` writes a new one, so that part and tar always fit together."""
    return f"{PARTS}/{unit}.r{round_}.tar" if round_ else f"{PARTS}/{unit}.tar"


def round_of(tar: str | None) -> int:
    """The retry round that wrote `tar`; -1 for none."""
    if tar is None:
        return -1
    found = re.search(r"\.r(\d+)\.tar$", tar)
    return int(found[1]) if found else 0


def is_whole(stage: Stage, count: str) -> bool:
    """Whether the stage has finished and still has as many parts as its summary says under `count`."""
    return stage.finished is not None and len(stage.folder.list(f"{PARTS}/*.parquet")) == stage.finished[count]


VERB = "ingest/verb"


def refuse_other(folder: Folder, verb: str) -> None:
    """Raise WorkFolderError where the parts of `folder` come from another verb than `verb`."""
    holder = folder.read(VERB).decode() if folder.exists(VERB) else verb
    if holder != verb:
        raise WorkFolderError(
            f"{folder} holds pairs that `pairmill {holder}` made; choose another folder with --work, or throw them away "
            "with --fresh"
        )


def claim(folder: Folder, verb: str) -> None:
    """Note that the parts come from `verb`."""
    if not folder.exists(VERB):
        folder.write(VERB, verb.encode())


@dataclass(frozen=True)
class Member:
    """A picture for the tar: where its bytes lie in the journal, and its file name."""

    name: str
    start: int
    size: int


def write_tar(path: Path, members: Iterable[Member], journal: Journal) -> list[int]:
    """Write a USTAR archive without dates or owners; returns the byte position of each member's data."""
    offsets = []
    with path.open("wb") as file:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size = member.size
            file.write(info.tobuf(tarfile.USTAR_FORMAT))
            offsets.append(file.tell())
            file.write(journal.read(member.start, member.size))
            file.write(bytes(-member.size % tarfile.BLOCKSIZE))
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    return offsets


def write_part(folder: Folder, unit: str, rows: list[dict[str, Any]], source: pa.Table | None = None) -> None:
    """Publish the part of `unit`: `rows` by the names of `core.schema.pair_fields`, and the source's own columns.

    Args:
        source: table of the source's own columns, row by row beside `rows`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    own_fields = list(source.schema) if source is not None else []
    ours = pa.Table.from_pylist(rows, schema=pair_schema())
    columns = [*ours.columns, *(source.columns if source is not None else [])]
    table = pa.table(columns, schema=pair_schema(own_fields))
    with folder.staged(part_name(unit)) as path:
        pq.write_table(table, path, compression="zstd")


def read_part(folder: Folder, unit: str) -> pa.Table:
    """The part of a finished unit."""
    import pyarrow.parquet as pq

    with folder.open(part_name(unit)) as file:
        return pq.read_table(file, use_threads=False)


def read_member(folder: Folder, tar: str, offset: int, size: int) -> tuple[str, bytes]:
    """Name and bytes of the member whose `size` bytes begin at `offset`.

    Raises:
        DataError: there is no such member, because the tar is damaged.
    """
    block = folder.read_range(tar, offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE + size)
    try:
        info = tarfile.TarInfo.frombuf(block[: tarfile.BLOCKSIZE], "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError):
        info = tarfile.TarInfo()
    if info.size != size or len(block) != tarfile.BLOCKSIZE + size:
        raise DataError(
            f"{folder.path(tar)} is damaged: no picture of {size:,} bytes at byte {offset:,}; restore it, or delete it and run "
            "the same command again, which fetches its rows anew"
        )
    return info.name, block[tarfile.BLOCKSIZE :]


def retryable_units(folder: Folder) -> frozenset[str]:
    """Finished units with rows that another attempt may cure."""
    if not folder.list(f"{PARTS}/*.parquet"):
        return frozenset()
    words = ", ".join(f"'{outcome}'" for outcome in sorted(RETRYABLE))
    with catalog.connect(folder) as connection:
        found = connection.execute(f"SELECT DISTINCT unit FROM pairs WHERE outcome IN ({words})").fetchall()
    return frozenset(row[0] for row in found)


def sweep_tars(folder: Folder) -> None:
    """Remove tars that no part names any more: a killed `--retry-failed` may leave the old one behind."""
    tars = set(folder.list(f"{PARTS}/*.tar"))
    if not any(round_of(tar) > 0 for tar in tars):
        return
    with catalog.connect(folder) as connection:
        named = {row[0] for row in connection.execute("SELECT DISTINCT tar FROM pairs").fetchall()}
    finished = {name.removesuffix(".parquet") for name in folder.list(f"{PARTS}/*.parquet")}
    for tar in sorted(tars - named):
        if re.sub(r"(\.r\d+)?\.tar$", "", tar) in finished:
            folder.remove(tar)


def summary(folder: Folder) -> dict[str, Any]:
    """Over all parts: rows, ok, outcomes by name (most common first), bytes received (once a URL)."""
    with catalog.connect(folder) as connection:
        counts = connection.execute("SELECT outcome, count(*) n FROM pairs GROUP BY outcome ORDER BY n DESC, outcome")
        outcomes = dict(counts.fetchall())
        received = (
            "SELECT coalesce(sum(b), 0)::BIGINT FROM (SELECT max(bytes) b FROM pairs GROUP BY unit, coalesce(url, uid))"
        )
        (bytes_,) = connection.execute(received).fetchall()[0]
    return {"rows": sum(outcomes.values()), "ok": outcomes.get(Outcome.OK, 0), "outcomes": outcomes, "bytes": bytes_}
