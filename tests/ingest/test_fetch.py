"""From a list to parts: every row accounted for, pictures staged once, and nothing lost to kill -9 or to a bad hour."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import signal
import socketserver
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from bench.peers import ready
from core.errors import ConfigError, DataError, HardwareError, InputError, RunError, StorageError, WorkFolderError
from core.images import decode, read_header
from core.schema import Outcome, pair_fields
from core.storage import Folder
from ingest import fetch, staging
from ingest.config import IngestConfig
from ingest.tally import JUDGED_ROWS, progress_words
from tests.ingest.server import Server, picture

ROOT = Path(__file__).parents[2]
PASSING = ["attempts", "elapsed_s", "fetched_at"]  # what another run may know differently

NO_RESIZE = 72  # the pictures' own side: torch, which resizes, takes seconds to import in every process


def write_list(path: Path, rows: list[tuple[str, str]]) -> str:
    table = pa.table({"url": [r[0] for r in rows], "caption": [r[1] for r in rows], "split": ["train"] * len(rows)})
    pq.write_table(table, path)
    return str(path)


def settings(tmp_path: Path, urls: str, **more: Any) -> dict[str, Any]:
    common = {"urls": urls, "work": str(tmp_path / "work"), "allow_private": True, "workers": 1, "retries": 1}
    return {**common, "size": 48, "min_side": 16, "timeout": 60.0, **more}


def run(tmp_path: Path, urls: str, **more: Any) -> dict[str, Any]:
    return fetch.run(IngestConfig(**settings(tmp_path, urls, **more)))


def parts(work: Path) -> pa.Table:
    tables = [pq.read_table(path) for path in sorted((work / "ingest/parts").glob("*.parquet"))]
    return pa.concat_tables(tables).sort_by("row")


def staged(work: Path, row: dict[str, Any]) -> bytes:
    with (work / row["tar"]).open("rb") as file:
        file.seek(row["tar_offset"])
        return file.read(row["tar_size"])


def test_every_row_has_its_outcome_and_pictures_are_staged(tmp_path: Path, server: Server) -> None:
    kinds = {
        "missing": Outcome.HTTP_4XX, "html": Outcome.NOT_IMAGE, "tiny": Outcome.TOO_SMALL, "half": Outcome.TRUNCATED,
        "until_well": Outcome.HTTP_5XX, "cut": Outcome.TRUNCATED, "once_503": Outcome.OK, "gzipped": Outcome.OK,
    }  # fmt: skip
    rows = [(server.url(f"/pic/{i}.jpg"), f"picture &amp; number {i}") for i in range(20)]
    rows += [(server.url(f"/fault/{kind}"), kind) for kind in kinds]
    rows += [(server.url("/pic/3.jpg"), "another caption"), (server.url("/pic/99.jpg"), " "), ("ftp://x/y", "no web")]
    summary = run(tmp_path, write_list(tmp_path / "list.parquet", rows), unit_urls=8)

    table = parts(tmp_path / "work")
    assert table.schema.names == [f.name for f in pair_fields()] + ["split"]
    found = {row["row"]: row for row in table.to_pylist()}
    assert sorted(found) == list(range(len(rows)))
    outcomes = [*["ok"] * 20, *kinds.values(), "ok", "empty_caption", "bad_url"]
    assert [found[i]["outcome"] for i in range(len(rows))] == outcomes
    assert summary["outcomes"] == dict(Counter(outcomes)) and summary["ok"] == outcomes.count("ok")
    assert summary["rows"] == len(rows) and summary["units"] >= 3
    assert {"seconds", "cpu_seconds", "bytes"} <= set(summary)

    first = found[3]
    assert first["caption"] == "picture & number 3" and first["caption_raw"] == "picture &amp; number 3"
    assert first["sha256"] == hashlib.sha256(picture(3)).hexdigest() and first["bytes"] == len(picture(3))
    assert (first["format"], first["width"], first["height"], first["lang"]) == ("jpeg", 96, 72, first["lang"])
    stored = staged(tmp_path / "work", first)
    assert (
        decode(stored, read_header(stored)).shape == (48, 64, 3) == (first["stored_height"], first["stored_width"], 3)
    )
    assert read_header(stored).baseline_420
    assert len(first["image_hash"]) == len(first["image_hash_mirrored"]) == 32

    twin = found[20 + len(kinds)]
    assert (twin["tar"], twin["tar_offset"]) == (first["tar"], first["tar_offset"]) and twin["uid"] != first["uid"]
    assert server.hits["/pic/3.jpg"] == 1 and server.hits["/pic/99.jpg"] == 0


class Rude(socketserver.StreamRequestHandler):
    """Answers each path with the bytes that the test has put there, right or wrong."""

    answers: ClassVar[dict[str, bytes]] = {}

    def handle(self) -> None:
        path = self.rfile.readline().split()[1].decode()
        while self.rfile.readline().strip():
            pass
        self.wfile.write(self.answers[path])


def test_no_answer_of_a_server_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reason phrases and headers in Latin-1 or worse end up in `detail`, which has to fit into a Parquet column."""
    answers = {
        "/reason": (b"HTTP/1.1 404 P\xe1gina no encontrada\r\n\r\n", "http_4xx"),
        "/coding": (b"HTTP/1.1 200 OK\r\nContent-Encoding: \xe1\r\n\r\nabc", "unsupported"),
        "/place": (b"HTTP/1.1 302 Found\r\nLocation: /\xe1\r\nContent-Length: 0\r\n\r\n", "bad_url"),
        "/host": (b"HTTP/1.1 302 Found\r\nLocation: http://n[`Z@/\xe1\r\nContent-Length: 0\r\n\r\n", "bad_url"),
        "/noise": (b"\xff\x00\r\n\r\n", "connect"),
    }
    monkeypatch.setattr(Rude, "answers", {path: answer for path, (answer, _) in answers.items()})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Rude) as rude:
        threading.Thread(target=rude.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{rude.server_address[1]}"
        run(tmp_path, write_list(tmp_path / "list.parquet", [(base + path, path) for path in answers]), retries=0)
        rude.shutdown()
    found = parts(tmp_path / "work").to_pylist()
    assert [row["outcome"] for row in found] == [outcome for _, outcome in answers.values()]
    assert all(row["detail"] and "\n" not in row["detail"] for row in found)


def test_tars_are_plain_sorted_and_dateless(tmp_path: Path, server: Server) -> None:
    rows = [(server.url(f"/pic/{i}.jpg"), f"picture {i}") for i in range(12)]
    run(tmp_path, write_list(tmp_path / "list.parquet", rows))
    table = parts(tmp_path / "work").to_pylist()
    with tarfile.open(tmp_path / "work/ingest/parts/u000000.tar") as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == [f"{row['uid']}.jpg" for row in table]
        assert [m.offset_data for m in members] == [row["tar_offset"] for row in table]
        assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in members} == {(0, 0, 0, "", 0o644)}


def test_originals_are_kept_byte_by_byte(tmp_path: Path, server: Server) -> None:
    rows = [(server.url("/pic/1.jpg"), "one")]
    run(tmp_path, write_list(tmp_path / "list.parquet", rows), keep_original=True)
    (row,) = parts(tmp_path / "work").to_pylist()
    assert staged(tmp_path / "work", row) == picture(1)
    assert (row["stored_width"], row["stored_height"]) == (96, 72)


def test_what_fits_already_is_not_encoded_again(tmp_path: Path, server: Server) -> None:
    run(tmp_path, write_list(tmp_path / "list.parquet", [(server.url("/pic/1.jpg"), "one")]), size=256)
    (row,) = parts(tmp_path / "work").to_pylist()
    assert staged(tmp_path / "work", row) == picture(1)


def test_a_finished_stage_is_not_repeated_and_other_inputs_are_refused(tmp_path: Path, server: Server) -> None:
    urls = write_list(tmp_path / "list.parquet", [(server.url("/pic/1.jpg"), "one")])
    assert run(tmp_path, urls) == run(tmp_path, urls)
    assert server.hits["/pic/1.jpg"] == 1
    with pytest.raises(WorkFolderError, match="size was 48, now 64"):
        run(tmp_path, urls, size=64)
    write_list(Path(urls), [(server.url("/pic/2.jpg"), "two")])
    with pytest.raises(WorkFolderError, match="another input"):
        run(tmp_path, urls)
    assert run(tmp_path, urls, fresh=True)["ok"] == 1


def test_bad_input_is_told_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("link,caption\nhttp://a.test/1,x\n")
    with pytest.raises(InputError, match="'link'"):
        run(tmp_path, str(tmp_path / "list.csv"))


def test_the_other_engine_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (Path(sys.executable).parent / "img2dataset").exists():
        pytest.skip("it is installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HardwareError, match="pip install"):
        run(tmp_path, "list.csv", engine="img2dataset")


PEER = """#!{python}
import io, json, pathlib, sys, tarfile
options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(options["output_folder"]); folder.mkdir(exist_ok=True)
import pyarrow.parquet as pq
with tarfile.open(folder / "00000.tar", "w") as tar:
    for i, row in enumerate(pq.read_table(options["url_list"]).to_pylist()):
        for kind, data in (("txt", row["caption_raw"].encode()), ("json", json.dumps(row).encode())):
            info = tarfile.TarInfo(f"{{i:09d}}.{{kind}}"); info.size = len(data); tar.addfile(info, io.BytesIO(data))
"""


def test_the_other_engine_takes_no_other_list_or_settings_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "img2dataset"
    program.parent.mkdir()
    program.write_text(PEER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr("ingest.peer.find_program", lambda: str(program))
    first, second = (write_list(tmp_path / f"{n}.parquet", [(f"http://a.test/{n}", f"caption {n}")]) for n in (1, 2))
    assert run(tmp_path, first, engine="img2dataset")["rows"] == 1
    assert run(tmp_path, first, engine="img2dataset")["rows"] == 1
    with pytest.raises(WorkFolderError, match="another input"):
        run(tmp_path, second, engine="img2dataset")
    with pytest.raises(WorkFolderError, match="size was 48, now 64"):
        run(tmp_path, first, engine="img2dataset", size=64)
    with pytest.raises(ConfigError, match="retry-failed"):
        run(tmp_path, first, engine="img2dataset", retry_failed=True)
    run(tmp_path, second, engine="img2dataset", fresh=True)
    assert parts(tmp_path / "work")["caption"].to_pylist() == ["caption 2"]


def test_the_other_engine_for_real(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    python = ready("img2dataset")
    if python is None:
        pytest.skip("img2dataset is not there; make it with: python -m bench.peers img2dataset")
    monkeypatch.setattr("ingest.peer.find_program", lambda: str(python.parent / "img2dataset"))
    rows = [(server.url(f"/pic/{i}.jpg"), f"picture {i}") for i in range(8)]
    rows += [(server.url("/fault/missing"), "gone"), (server.url("/fault/tagged?tag=noai"), "not for us")]
    urls = write_list(tmp_path / "list.parquet", rows)
    summary = run(tmp_path, urls, engine="img2dataset", workers=1, timeout=20.0)
    assert summary["outcomes"] == {"ok": 8, "http_4xx": 1, "opted_out": 1}
    found = parts(tmp_path / "work").to_pylist()
    assert {(row["url"], row["caption"]) for row in found} == set(rows)
    plan = pq.read_table(tmp_path / "work/img2dataset/ingest/plan")
    assert {row["uid"] for row in found} == set(plan["uid"].to_pylist())
    assert run(tmp_path, urls, engine="img2dataset", workers=1, timeout=20.0)["ok"] == 8


@pytest.mark.parametrize(
    "wrong",
    [{"concurrency": 0}, {"per_host": 0}, {"unit_urls": 0}, {"retries": -1}, {"size": 0}, {"quality": 101}, {"timeout": 0.0},
     {"timeout": float("nan")}, {"min_side": -1}, {"workers": -1}],
    ids=str,
)  # fmt: skip
def test_numbers_without_a_meaning_are_refused(tmp_path: Path, server: Server, wrong: dict[str, Any]) -> None:
    urls = write_list(tmp_path / "list.parquet", [(server.url("/pic/1.jpg"), "one")])
    flag = next(iter(wrong)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"expected --{flag} from"):
        run(tmp_path, urls, **wrong)
    assert not server.hits


def test_a_part_that_got_lost_is_fetched_again(tmp_path: Path, server: Server) -> None:
    urls = write_list(tmp_path / "list.parquet", [(server.url(f"/pic/{i}.jpg"), f"picture {i}") for i in range(12)])
    run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)
    before, hits = outputs(tmp_path / "work"), server.hits.total()
    lost = pq.read_table(tmp_path / "work/ingest/parts/u000001.parquet").num_rows
    part = tmp_path / "work/ingest/parts/u000001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    (tmp_path / "work/ingest/done.json").unlink()
    with pytest.raises(DataError, match=r"u000001.*delete it and run"):
        run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)
    part.unlink()
    assert run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)["rows"] == 12
    assert server.hits.total() == hits + lost
    after = outputs(tmp_path / "work")
    assert before[0] == after[0] and before[1].equals(after[1])


def test_a_round_of_retries_that_is_killed_leaves_no_old_figures(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = write_list(tmp_path / "list.parquet", [(server.url("/fault/until_well"), "later")])
    assert run(tmp_path, urls, retries=0, size=NO_RESIZE)["ok"] == 0
    server.well.set()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(fetch.catalog, "write", lambda folder: 1 / 0)
        run(tmp_path, urls, retry_failed=True, size=NO_RESIZE)
    assert run(tmp_path, urls, size=NO_RESIZE)["outcomes"] == {"ok": 1}


def test_a_txt_list_needs_no_captions_and_an_object_store_is_a_work_folder(tmp_path: Path, server: Server) -> None:
    (tmp_path / "list.txt").write_text(f"{server.url('/pic/1.png')}\n{server.url('/fault/missing')}\n")
    store = Folder(f"memory://{tmp_path.name}")
    summary = run(tmp_path, str(tmp_path / "list.txt"), work=store.url, size=NO_RESIZE)
    assert summary["outcomes"] == {"http_4xx": 1, "ok": 1}
    rows = staging.read_part(store, "u000000").to_pylist()
    good = next(row for row in rows if row["outcome"] == "ok")
    assert good["caption"] is None and good["lang"] is None
    stored = store.read_range(good["tar"], good["tar_offset"], good["tar_size"])
    assert read_header(stored).baseline_420


def test_a_collapse_stops_the_run_and_names_hosts(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(server.url(f"/fault/missing?{i}"), "gone") for i in range(30)]
    urls = write_list(tmp_path / "list.parquet", rows)
    assert run(tmp_path, urls)["ok"] == 0  # too few to be judged
    monkeypatch.setattr("ingest.tally.JUDGED_ROWS", 30)
    for _ in range(2):  # that all rows are there makes them no better
        with pytest.raises(RunError, match=rf"0 of 30 rows.*http_4xx \(30\).*127.0.0.1:{server.port} \(30\)"):
            run(tmp_path, urls)
    assert run(tmp_path, urls, retry_failed=True)["ok"] == 0


def test_a_collapse_stops_before_the_list_ends(tmp_path: Path, server: Server) -> None:
    for work, good in (("well", 3 * JUDGED_ROWS // 50), ("ill", 0)):
        rows = [(server.url(f"/pic/{i}.jpg"), "there") for i in range(good)]
        rows += [(f"data:,{i}", "no URL to ask") for i in range(2 * JUDGED_ROWS - good)]
        urls = write_list(tmp_path / f"{work}.parquet", rows)
        more = {"work": str(tmp_path / work), "unit_urls": 500}
        if good:
            assert run(tmp_path, urls, **more)["ok"] == good
            continue
        with pytest.raises(RunError, match=r"only 0 of [\d,]+ rows succeeded.*bad_url"):
            run(tmp_path, urls, **more)
        assert len(list((tmp_path / work / "ingest/parts").glob("*.parquet"))) < 8  # units of the whole list


def test_a_full_temporary_disk_is_one_sentence(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write_list(tmp_path / "list.parquet", [(server.url("/pic/1.jpg"), "one")])
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr("ingest.journal._opened", lambda path: full)
        with pytest.raises(StorageError, match="disk is full while writing temporary files"):
            run(tmp_path, urls, size=NO_RESIZE, work=f"memory://{tmp_path.name}")


def test_retry_failed_mends_what_may_mend_and_leaves_the_rest(tmp_path: Path, server: Server) -> None:
    rows = [(server.url(f"/pic/{i}.jpg"), f"picture {i}") for i in range(6)]
    rows += [(server.url("/fault/until_well"), "later"), (server.url("/fault/missing"), "never")]
    rows += [(server.url("/fault/until_well"), "later too")]
    urls = write_list(tmp_path / "list.parquet", rows)
    assert run(tmp_path, urls, retries=0)["outcomes"] == {"ok": 6, "http_5xx": 2, "http_4xx": 1}
    before = parts(tmp_path / "work")
    server.well.set()
    hits = Counter(server.hits)
    summary = run(tmp_path, urls, retries=0, retry_failed=True)
    assert summary["outcomes"] == {"ok": 8, "http_4xx": 1}
    assert server.hits - hits == {"/fault/until_well": 1}
    after = parts(tmp_path / "work")
    moved = ["tar", "tar_offset"]
    assert after.drop_columns(moved).slice(0, 6).equals(before.drop_columns(moved).slice(0, 6))
    old = {i: picture(i) for i in range(6)}
    for row in after.slice(0, 6).to_pylist():
        assert row["sha256"] == hashlib.sha256(old[row["row"]]).hexdigest()
        stored = staged(tmp_path / "work", row)
        assert decode(stored, read_header(stored)).shape == (48, 64, 3)
    assert [p.name for p in sorted((tmp_path / "work/ingest/parts").glob("*.tar"))] == ["u000000.r1.tar"]
    (tmp_path / "work/ingest/parts/u000000.tar").write_bytes(b"what a killed retry would leave")
    # nothing is left to mend, so another round asks no one
    hits = Counter(server.hits)
    assert run(tmp_path, urls, retries=0, retry_failed=True)["ok"] == 8
    assert server.hits == hits
    assert not (tmp_path / "work/ingest/parts/u000000.tar").exists()


@pytest.mark.parametrize("damage", ["cut", "cut in a header", "overwritten"])
def test_a_damaged_tar_is_never_carried_over_by_a_retry(tmp_path: Path, server: Server, damage: str) -> None:
    rows = [(server.url(f"/pic/{i}.jpg"), f"picture {i}") for i in range(3)] + [
        (server.url("/fault/until_well"), "later")
    ]
    urls = write_list(tmp_path / "list.parquet", rows)
    assert run(tmp_path, urls, retries=0, size=NO_RESIZE)["ok"] == 3
    server.well.set()
    tar = tmp_path / "work/ingest/parts/u000000.tar"
    before = parts(tmp_path / "work").to_pylist()
    offset = max(row["tar_offset"] for row in before if row["tar"])
    data = tar.read_bytes()
    wrong = {"cut": data[: offset + 9], "cut in a header": data[: offset - 500], "overwritten": b"\xff" * len(data)}
    tar.write_bytes(wrong[damage])
    with pytest.raises(DataError, match=r"u000000\.tar is damaged.*delete it and run the same command again"):
        run(tmp_path, urls, retries=0, size=NO_RESIZE, retry_failed=True)
    assert parts(tmp_path / "work").to_pylist() == before
    tar.unlink()
    assert run(tmp_path, urls, retries=0, size=NO_RESIZE, retry_failed=True)["ok"] == 4
    for row in parts(tmp_path / "work").to_pylist():
        assert staged(tmp_path / "work", row) == (picture(3) if row["caption"] == "later" else picture(row["row"]))


def test_a_damaged_plan_is_one_sentence(tmp_path: Path, server: Server) -> None:
    urls = write_list(tmp_path / "list.parquet", [(server.url(f"/pic/{i}.jpg"), f"picture {i}") for i in range(12)])
    run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)
    plan = tmp_path / "work/ingest/plan/00000.parquet"
    whole = plan.read_bytes()
    middle = whole[:100] + bytes(200) + whole[300:]
    for damaged in (b"", whole[:-50], middle):
        (tmp_path / "work/ingest/parts/u000000.parquet").unlink(missing_ok=True)
        plan.write_bytes(damaged)
        with pytest.raises(DataError, match=r"00000\.parquet cannot be read.*delete it and run the same command again"):
            run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)
    plan.unlink()
    assert run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)["ok"] == 12


def outputs(work: Path) -> tuple[dict[str, bytes], pa.Table]:
    tars = {path.name: path.read_bytes() for path in (work / "ingest/parts").glob("*.tar")}
    return tars, parts(work).drop_columns(PASSING)


def started(arguments: dict[str, Any]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.ingest.run_ingest", json.dumps(arguments)]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def started_and_held(server: Server, requests: int, arguments: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A run whose server has seen so many requests and lets no more pass, however slow this machine is to notice."""
    server.limit = server.hits.total() + requests
    process = started(arguments)
    while server.hits.total() < server.limit:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process


@pytest.mark.timeout(900)  # many starts of a whole process, on a machine that may be busy
def test_kill_9_at_any_moment_loses_nothing_and_repeats_only_what_was_under_way(tmp_path: Path, server: Server) -> None:
    rows = [(server.url(f"/pic/{i % 330}.{'png' if i % 2 else 'jpg'}"), f"caption {i}") for i in range(400)]
    rows += [(server.url(f"/fault/missing?{i}"), "gone") for i in range(40)]
    urls = write_list(tmp_path / "list.parquet", rows)
    common: dict[str, Any] = {"unit_urls": 90, "concurrency": 4, "size": NO_RESIZE}
    run(tmp_path / "calm", urls, **common)

    server.hits.clear()
    server.delay = 0.01
    moments = random.Random(9)
    workers = [1, 2, 1, 1, 2, 1]
    for number in workers:
        arguments = settings(tmp_path, urls, workers=number, **common)
        process = started_and_held(server, moments.randint(20, 50), arguments)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "work/ingest/done.json").exists()
    server.delay, server.limit = 0.0, math.inf
    part_folder = tmp_path / "work/ingest/parts"
    done = {path.name: path.stat().st_mtime_ns for path in part_folder.glob("u*.parquet")}
    assert run(tmp_path, urls, **common)["rows"] == 440
    assert all((part_folder / name).stat().st_mtime_ns == then for name, then in done.items())
    assert not list(part_folder.glob(".tmp-*")) and not (tmp_path / "work/ingest/journal").exists()
    tars, table = outputs(tmp_path / "work")
    calm_tars, calm_table = outputs(tmp_path / "calm/work")
    assert tars == calm_tars
    assert table.equals(calm_table)
    repeated = server.hits.total() - len(server.hits)
    assert repeated <= sum(workers) * fetch.AHEAD * common["concurrency"]


def test_ctrl_c_keeps_what_was_fetched(tmp_path: Path, server: Server) -> None:
    rows = [(server.url(f"/pic/{i}.jpg"), f"caption {i}") for i in range(120)]
    urls = write_list(tmp_path / "list.parquet", rows)
    process = started_and_held(server, 60, settings(tmp_path, urls, concurrency=4, size=NO_RESIZE))
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=120)[1]  # which the command line turns into a sentence
    server.limit = math.inf
    assert run(tmp_path, urls, concurrency=4, size=NO_RESIZE)["ok"] == 120
    assert server.hits.total() - len(server.hits) <= fetch.AHEAD * 4


FULL_DISK = """
mount -t tmpfs -o size=600k none "$1" || exit 77
"$2" -m tests.ingest.run_ingest "$3"; echo "first $?"
mount -o remount,size=20m "$1"
"$2" -m tests.ingest.run_ingest "$3"; echo "second $?"
cp -r "$1" "$4"
"""


@pytest.mark.timeout(900)  # many starts of a whole process, on a machine that may be busy
def test_a_full_disk_stops_the_run_with_a_sentence_and_more_room_lets_it_continue(
    tmp_path: Path, server: Server
) -> None:
    """On a real small file system, which a user namespace lets anybody mount."""
    rows = [(server.url(f"/pic/{i}.jpg"), f"caption {i}") for i in range(200)]
    urls = write_list(tmp_path / "list.parquet", rows)
    (tmp_path / "disk").mkdir()
    arguments = {
        **settings(tmp_path, urls, unit_urls=60, keep_original=True, size=NO_RESIZE),
        "work": str(tmp_path / "disk/work"),
    }
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", FULL_DISK, "sh", str(tmp_path / "disk")]
    try:
        done = subprocess.run(
            [*command, sys.executable, json.dumps(arguments), str(tmp_path / "copy")],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no unshare program to make a small disk with")
    if "first" not in done.stdout:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert "first 1" in done.stdout and "second 0" in done.stdout, done
    assert "StorageError: the disk is full" in done.stderr
    run(tmp_path / "calm", urls, unit_urls=60, keep_original=True, size=NO_RESIZE)
    full, calm = outputs(tmp_path / "copy/work"), outputs(tmp_path / "calm/work")
    assert full[0] == calm[0] and full[1].equals(calm[1])


def test_a_tar_that_got_lost_is_fetched_again(tmp_path: Path, server: Server) -> None:
    rows = [(server.url(f"/pic/{i}.jpg"), f"caption {i}") for i in range(12)]
    rows += [(server.url("/fault/missing"), "a unit without pictures has no tar")]
    urls = write_list(tmp_path / "list.parquet", rows)
    run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)
    before = outputs(tmp_path / "work")
    (tmp_path / "work/ingest/parts/u000001.tar").unlink()
    assert run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)["ok"] == 12
    after = outputs(tmp_path / "work")
    assert before[0] == after[0] and before[1].equals(after[1])
    hits = server.hits.total()
    run(tmp_path, urls, unit_urls=4, size=NO_RESIZE)
    assert server.hits.total() == hits


def test_a_list_may_be_spelt_otherwise_the_next_time(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = write_list(tmp_path / "list.parquet", [(server.url("/pic/1.jpg"), "one")])
    run(tmp_path, urls, size=NO_RESIZE)
    monkeypatch.chdir(tmp_path)
    for spelling in ("list.parquet", "./list.parquet", f"file://{urls}", str(tmp_path / "li*.parquet")):
        assert run(tmp_path, spelling, size=NO_RESIZE)["ok"] == 1
    assert server.hits.total() == 1


def test_the_summary_names_outcomes_and_hosts(tmp_path: Path, server: Server) -> None:
    rows = [(server.url("/pic/1.jpg"), "one"), (server.url("/fault/missing"), "gone"), ("http://[::1", "no url")]
    rows += [(f"http://user:secret@127.0.0.1:{server.port}/fault/missing?2", "gone"), ("//", "none")]
    summary = run(tmp_path, write_list(tmp_path / "list.parquet", rows), size=NO_RESIZE)
    here = {"host": f"127.0.0.1:{server.port}", "rows": 3, "ok": 1, "failure": "http_4xx"}
    assert here in summary["hosts"] and "secret" not in json.dumps(summary)
    out = io.StringIO()
    Console(file=out, width=100).print(fetch.render(summary))
    text = out.getvalue()
    assert "1 of 5 rows are pictures now (20.0%)" in text and "http_4xx" in text and here["host"] in text


def test_the_progress_line_counts_successes_and_not_rows() -> None:
    counts = {"ok": 30, "http_4xx": 15, "dns": 5, "bytes": 4_000_000}
    assert progress_words(counts, 2.0) == "15.0 ok/s 2.00 MB/s 60.0% ok http_4xx 15 dns 5"
    assert progress_words({}, 2.0) == ""


def test_workers_share_what_is_allowed_at_a_host() -> None:
    config = IngestConfig(urls="", per_host=8)
    assert [fetch._for_one_worker(config, n).per_host for n in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_two_workers_write_what_one_writes(tmp_path: Path, server: Server) -> None:
    rows = [(server.url(f"/pic/{i}.{'png' if i % 2 else 'jpg'}"), f"caption {i}") for i in range(60)]
    urls = write_list(tmp_path / "list.parquet", rows)
    run(tmp_path / "one", urls, unit_urls=10, size=NO_RESIZE)
    arguments = settings(tmp_path / "two", urls, unit_urls=10, workers=2, size=NO_RESIZE)
    command = [sys.executable, "-W", "error", "-m", "tests.ingest.run_ingest", json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] == 60
    one, two = outputs(tmp_path / "one/work"), outputs(tmp_path / "two/work")
    assert one[0] == two[0] and one[1].equals(two[1])
