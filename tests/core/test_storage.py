"""Storage: whole files or none, on a disk and on an object store's stand-in that fsspec ships (memory://)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.errors import InputError, StorageError
from core.storage import TEMPORARY, Folder, expand

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "f" if request.param == "local" else f"memory://{tmp_path.name}")


def test_what_is_written_is_read_listed_hashed_and_removed(folder: Folder) -> None:
    folder.make()
    folder.write("a/one.txt", b"hello")
    folder.write("a/two.bin", b"")
    assert folder.list("a/*.txt") == ["a/one.txt"]
    assert folder.list("a/*") == ["a/one.txt", "a/two.bin"]
    assert folder.list("none/*") == []
    assert (folder.read("a/one.txt"), folder.size("a/one.txt")) == (b"hello", 5)
    assert folder.read_range("a/one.txt", 1, 3) == b"ell"
    assert folder.sha256("a/one.txt") == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    folder.remove("a")
    assert not folder.exists("a/one.txt")
    folder.remove("a")


def test_an_error_while_writing_leaves_the_old_file_and_no_litter(folder: Folder) -> None:
    folder.write("x", b"old")
    with pytest.raises(RuntimeError), folder.staged("x") as path:
        path.write_bytes(b"half of the n")
        raise RuntimeError
    assert folder.read("x") == b"old"
    assert folder.list("*") == ["x"]


def test_kill_9_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("x", b"old")
    code = (
        "import time; from core.storage import Folder\n"
        f"with Folder({str(tmp_path)!r}).staged('x') as path:\n"
        "    path.write_bytes(b'new' * 100000); print('writing', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert folder.read("x") == b"old"
    assert folder.list("*") == ["x"], "an unfinished file is not listed"
    folder.sweep(".")
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


def test_a_full_disk_is_one_clear_sentence(tmp_path: Path) -> None:
    """/dev/full stands for the disk: every write to it fails with ENOSPC."""
    with pytest.raises(StorageError, match="disk is full"), Folder(tmp_path).staged("x"):
        descriptor = os.open("/dev/full", os.O_WRONLY)
        try:
            os.write(descriptor, b"x" * 10)
        finally:
            os.close(descriptor)


def test_an_unwritable_place_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for place in ("file/work", "file", "n" * 300, "/proc/nothing", "/dev/null/work"):
        with pytest.raises(StorageError, match="cannot write"):
            Folder(tmp_path / place).make()
    with pytest.raises(StorageError, match="cannot be opened: Protocol not known"):
        Folder("nothing://work").make()
    with pytest.raises(InputError, match="empty name"):
        Folder("")


def test_expand(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "c.tsv"):
        (tmp_path / name).write_text("x")
    assert expand(f"{tmp_path}/*.csv") == [f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]
    assert expand(f"{tmp_path}/c.tsv") == [f"{tmp_path}/c.tsv"]
    with pytest.raises(InputError, match="found none"):
        expand(f"{tmp_path}/*.json")
    (tmp_path / "d[1].csv").write_text("x")
    assert expand(f"{tmp_path}/d[1].csv") == [f"{tmp_path}/d[1].csv"]
    (tmp_path / "e.csv").mkdir()
    assert len(expand(f"{tmp_path}/*.csv")) == 3
    with pytest.raises(InputError, match=r"found a folder; name the files in it, as in .*/e.csv/\*"):
        expand(f"{tmp_path}/e.csv")
    with pytest.raises(InputError, match="empty name"):
        expand("")
    with pytest.raises(InputError, match="cannot be reached: Protocol not known"):
        expand("nothing://list.csv")


def test_an_object_store_is_asked_each_time() -> None:
    """A listing that this process remembers would hide the parts that its workers write."""
    pytest.importorskip("s3fs")
    fs, _ = Folder("s3://bucket/mill")._remote("ingest/parts")
    fs.dircache["bucket/mill/ingest/parts"] = []
    assert "bucket/mill/ingest/parts" not in fs.dircache


def test_publishing_is_visible_only_whole(tmp_path: Path) -> None:
    """A reader that polls while a large file is published sees nothing or all of it."""
    folder = Folder(tmp_path)
    code = (
        f"from core.storage import Folder\nfor _ in range(20): Folder({str(tmp_path)!r}).write('x', b'y' * 3_000_000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    sizes = set()
    while child.poll() is None:
        if folder.exists("x"):
            sizes.add(folder.size("x"))
        time.sleep(0.001)
    assert child.returncode == 0
    assert sizes <= {3_000_000}
