"""Tars: the same bytes for the same members, readable by anyone, and every cut or damage is noticed."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from core.errors import DataError
from shardkit.tar import Member, TarWriter, headers, scan, scan_file

MEMBERS = [("a.jpg", b"x" * 700), ("a.txt", b""), ("b.jpg", bytes(range(256)) * 2), ("b.json", b"{}")]


def write(path: Path) -> list[Member]:
    with path.open("wb") as file:
        writer = TarWriter(file)
        members = [Member(name, writer.add(name, data), len(data)) for name, data in MEMBERS]
        assert writer.finish() == file.tell()
    assert writer.digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    return members


def test_python_and_tar_read_what_we_write(tmp_path: Path) -> None:
    members = write(tmp_path / "ours.tar")
    with tarfile.open(tmp_path / "ours.tar") as tar:
        found = tar.getmembers()
        assert [(m.name, tar.extractfile(m).read()) for m in found] == MEMBERS  # type: ignore[union-attr]
    assert [(m.name, m.offset_data, m.size) for m in found] == [(m.name, m.offset, m.size) for m in members]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in found} == {(0, 0, 0, "", 0o644)}
    listing = subprocess.run(["tar", "tf", tmp_path / "ours.tar"], check=True, capture_output=True, text=True)
    assert (listing.stdout.splitlines(), listing.stderr) == ([name for name, _ in MEMBERS], "")


def test_members_of_any_size_are_read_by_the_standard_library(tmp_path: Path) -> None:
    sizes = [0, 3_000_001, *range(0, 1_200_000, 99_999), 511, 512, 513]
    with (tmp_path / "ours.tar").open("wb") as file:
        writer = TarWriter(file)
        members = [Member(f"{i}", writer.add(f"{i}", bytes([i]) * size), size) for i, size in enumerate(sizes)]
        assert writer.finish() == file.tell()
    assert writer.digest.hexdigest() == hashlib.sha256((tmp_path / "ours.tar").read_bytes()).hexdigest()
    assert scan(str(tmp_path / "ours.tar")) == members
    with tarfile.open(tmp_path / "ours.tar") as tar:
        for i, member in enumerate(tar):
            assert tar.extractfile(member).read() == bytes([i]) * sizes[i]  # type: ignore[union-attr]


def test_scan_finds_the_data_of_every_member(tmp_path: Path) -> None:
    assert write(tmp_path / "ours.tar") == scan(str(tmp_path / "ours.tar"))


@pytest.mark.parametrize(
    "form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "gnu", "pax"]
)
def test_scan_reads_the_tars_of_others(tmp_path: Path, form: int) -> None:
    """Long and non-ASCII names, folders, links, and the float times that cost webdataset a PAX header a member."""
    names = ["plain.jpg", "folder/" * 20 + "deep.jpg", *([] if form == tarfile.USTAR_FORMAT else ["é" * 120 + ".txt"])]
    with tarfile.open(tmp_path / "theirs.tar", "w", format=form) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for i, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 100 + i, 1.5 if form == tarfile.PAX_FORMAT else 1
            tar.addfile(info, io.BytesIO(bytes(100 + i)))
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "plain.jpg"
        tar.addfile(link)
    with tarfile.open(tmp_path / "theirs.tar") as tar:
        wanted = [Member(m.name, m.offset_data, m.size) for m in tar if m.isreg()]
    assert scan(str(tmp_path / "theirs.tar")) == wanted
    assert [m.name for m in wanted] == names


def test_a_tar_cut_at_any_byte_is_named(tmp_path: Path) -> None:
    members = write(tmp_path / "ours.tar")
    whole = (tmp_path / "ours.tar").read_bytes()
    end_mark = members[-1].offset + 512
    for size in range(0, end_mark + 1, 37):
        with pytest.raises(DataError, match=r"some\.tar is cut short"):
            list(scan_file(io.BytesIO(whole[:size]), "some.tar"))


def test_a_damaged_header_is_named_with_its_place(tmp_path: Path) -> None:
    members = write(tmp_path / "ours.tar")
    data = bytearray((tmp_path / "ours.tar").read_bytes())
    start = members[1].offset - 512
    data[start + 3] ^= 1
    with pytest.raises(DataError, match=rf"some\.tar is damaged: expected a tar header at byte {start}"):
        list(scan_file(io.BytesIO(bytes(data)), "some.tar"))


def test_names_and_sizes_that_do_not_fit_are_refused() -> None:
    for name, size in (("x" * 101, 1), ("", 1), ("é" * 51, 1), ("a", 8**11)):
        with pytest.raises(
            DataError, match=f"1 to 100 bytes and less than 8 GiB each, found '{name}' with {size} bytes"
        ):
            headers(["the longest that fits" * 4, name, "fits"], np.array([8**11 - 1, size, 1]))


def test_headers_are_those_of_the_standard_library() -> None:
    names, sizes = ["a", "é.txt", "x" * 100, "0123.jpg"], [0, 511, 8**11 - 1, 25_000]
    for name, size, ours in zip(names, sizes, headers(names, np.array(sizes)), strict=True):
        info = tarfile.TarInfo(name)
        info.size = size
        theirs = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
        theirs[329:345] = bytes(16)  # the numbers of a device, which we leave empty
        theirs[148:156] = b"%06o\0 " % (sum(theirs) - sum(theirs[148:156]) + 8 * 0x20)
        assert ours.tobytes() == bytes(theirs)
