"""A journal gives back what was added, and of a damaged one what lies before the damage."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from core.storage import Folder
from ingest.journal import HOME, Journal

MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
RECORDS: list[tuple[list[Any], bytes]] = [
    (["http://a.test/1", "jpg", {"image_hash": b"\0\xff", "fetched_at": MOMENT, "n": 1.5, "detail": None}], b"picture"),
    (["http://a.test/\ud83d", "", {}], b""),
    (["http://a.test/3", "png", {"outcome": "ok"}], bytes(100_000)),
]


def filled(folder: Path) -> Path:
    journal = Journal(Folder(folder), "u000000.0")
    for words, data in RECORDS:
        start, size = journal.add(words, data)
        assert journal.read(start, size) == data
    journal.close(done=False)
    return folder / HOME / "u000000.0"


def recovered(folder: Path) -> list[tuple[list[Any], bytes]]:
    journal = Journal(Folder(folder), "u000000.0")
    found = [(words, journal.read(start, size)) for words, start, size in journal.records()]
    journal.close(done=False)
    return found


def test_what_was_added_comes_back_and_goes_with_the_unit(tmp_path: Path) -> None:
    path = filled(tmp_path)
    assert recovered(tmp_path) == RECORDS
    Journal(Folder(tmp_path), "u000000.0").close(done=True)
    assert not path.exists()


@pytest.mark.parametrize("damage", ["cut in the head", "cut in the body", "zeros", "one bit", "empty", "foreign"])
def test_what_lies_before_the_damage_comes_back_and_more_can_be_added(tmp_path: Path, damage: str) -> None:
    path = filled(tmp_path)
    body = path.read_bytes()
    last = len(body) - 100_000
    damaged, whole = {
        "cut in the head": (body[: last - 60], 2), "cut in the body": (body[:-1], 2),
        "zeros": (body[: last - 100] + bytes(100_100), 1), "one bit": (body[:-5] + b"\1" + body[-4:], 2),
        "empty": (b"", 0), "foreign": (b"PAR1" + body[4:], 0),
    }[damage]  # fmt: skip
    path.write_bytes(damaged)
    found = recovered(tmp_path)
    assert found == RECORDS[: len(found)] and len(found) == whole
    journal = Journal(Folder(tmp_path), "u000000.0")
    list(journal.records())
    journal.add(["http://a.test/4", "jpg", {}], b"more")
    journal.close(done=False)
    assert recovered(tmp_path) == [*RECORDS[:whole], (["http://a.test/4", "jpg", {}], b"more")]
