"""What SECURITY.md says is defended against, over the whole program."""

from __future__ import annotations

import ast
import io
import logging
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.small import SmallList, run, start
from core.catalog import connect
from core.config import UnitsConfig
from core.errors import DataError, InputError, UsageError
from core.redact import Formatter, redact
from core.storage import Folder
from ingest.adopt import run as adopt
from ingest.config import AdoptConfig
from tests.shardkit.parts import jpeg
from train.export import load_weights

ROOT = Path(__file__).parent.parent
FOLDERS = ("core", "ingest", "dedup", "shardkit", "train", "report", "demo")
SOURCES = [ROOT / "cli.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
# Calls that run what data says. Ray and multiprocessing pickle our own functions between our own processes.
NEVER = {"eval", "exec", "pickle.load", "pickle.loads", "os.system", "os.popen", "yaml.load", "joblib.load", "marshal.loads",
         "shelve.open", "extractall", "extract", "unpack_archive", "numpy.load", "np.load"}  # fmt: skip


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), call) for call in found]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_call_runs_what_data_says(path: Path) -> None:
    for name, call in calls(path):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name.rpartition(".")[2] == "load" and given.get("allow_pickle") == "False":
            continue
        assert name not in NEVER and name.rpartition(".")[2] not in ("extractall", "unpack_archive"), f"{path}: {name}"
        if name == "torch.load":
            assert given.get("weights_only") == "True", f"{path}: torch.load without weights_only"
        assert given.get("shell") != "True", f"{path}: a shell"
        assert given.get("allow_pickle") != "True", f"{path}: a pickle"


class Bomb:
    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.where,)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"state_dict": {"x": Bomb(mark)}}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises((DataError, InputError)):
            load_weights(str(tmp_path / name), None)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../escaped.jpg", "/tmp/pairmill-escaped.jpg", "a/../../escaped.jpg", "link.jpg"])
def test_members_of_a_tar_stay_in_it(tmp_path: Path, name: str) -> None:
    """No stage unpacks a tar: names of members become at most words in a column, and links are not followed."""
    tars, work = tmp_path / "tars", tmp_path / "deep/er/work"
    tars.mkdir()
    (tmp_path / "secret.jpg").write_bytes(jpeg(1))
    with tarfile.open(tars / "0.tar", "w") as archive:
        for member, body in ((name, jpeg(2)), (name.replace(".jpg", ".txt"), b"a caption")):
            info = tarfile.TarInfo(member)
            info.size = len(body)
            if member == "link.jpg":
                info.type, info.linkname, info.size = tarfile.SYMTYPE, str(tmp_path / "secret.jpg"), 0
            archive.addfile(info, io.BytesIO(body) if info.size else None)
    before = {path for path in tmp_path.rglob("*") if work not in path.parents}
    summary = adopt(AdoptConfig(shards=str(tars), work=str(work), workers=1, min_side=0))
    assert summary["ok"] == (0 if name == "link.jpg" else 1)
    assert {path for path in tmp_path.rglob("*") if work not in path.parents} - before <= {*work.parents, work}
    assert not Path("/tmp/pairmill-escaped.jpg").exists()


@dataclass(frozen=True, kw_only=True)
class SavedConfig(UnitsConfig):
    """Has places as settings."""

    source: str = ""
    """A place."""
    sources: tuple[str, ...] = ()
    """Places."""


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ("hunter2", "https://me:hunter2@host.test/list.csv"),
        ("hunter2", "cannot reach s3://AKIAX:hunter2@bucket/work: 403"),
        ("AbC%2F9", "https://b.s3.amazonaws.com/l.csv?X-Amz-Date=1&X-Amz-Signature=AbC%2F9&x=1"),
        ("AKIA77", "https://b.s3.amazonaws.com/l.csv?X-Amz-Credential=AKIA77/20260101&X-Amz-Date=1"),
        ("sv=9", "https://x.blob.core.windows.net/c/l.csv?sig=sv=9&se=2027"),
        ("tok3n", "https://host.test/l.csv?token=tok3n"),
    ],
)
def test_secrets_in_urls_reach_no_log_and_no_saved_setting(secret: str, text: str) -> None:
    record = logging.LogRecord("pairmill.x", logging.INFO, "x.py", 1, "read %s", (text,), None)
    assert secret not in Formatter("%(message)s").format(record)
    assert secret not in repr(SavedConfig(source=text, sources=(text,)).fingerprint())
    assert redact("https://host.test/a?size=3&keyword=cat ends at 10:30@noon") == (
        "https://host.test/a?size=3&keyword=cat ends at 10:30@noon"
    )


def test_a_whole_run_with_a_password_in_its_list_keeps_it_nowhere(tmp_path: Path) -> None:
    with SmallList(tmp_path / "list", 12) as small:
        command = small.command("ingest", str(tmp_path / "work"), "--workers", "1")
        command[4] = small.base.replace("//", "//me:hunter2@") + "/list.parquet?token=tok3n"  # which is not there
        process = start(command)
        out, said = process.communicate(timeout=120)
    assert process.returncode == 2 and "list.parquet" in said, said
    kept = [path.read_bytes() for path in (tmp_path / "work").rglob("*") if path.is_file()]
    for secret in ("hunter2", "tok3n"):
        assert secret not in out + said
        assert not any(secret.encode() in body for body in kept)


def test_queries_only_read(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with SmallList(tmp_path / "list", 12) as small:
        run(small.command("ingest", str(work), "--workers", "1"))
    from report.config import SqlConfig
    from report.sql import run as sql

    before = sorted(work.rglob("*"))
    for query in ("DROP VIEW pairs", f"COPY (SELECT 1) TO '{work}/out.csv'", "CREATE TABLE t AS SELECT 1",
                  "SELECT 1; DROP VIEW pairs", f"ATTACH '{tmp_path}/x.duckdb'", "INSTALL httpfs"):  # fmt: skip
        with pytest.raises(UsageError):
            sql(SqlConfig(query=query, work=str(work)))
    assert sorted(work.rglob("*")) == before
    with connect(Folder(work)) as connection:
        assert connection.execute("SELECT count(*) FROM pairs").fetchall() == [(12,)]
