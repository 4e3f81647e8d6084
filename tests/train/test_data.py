"""The loader: the same batches and choices for any number of ranks and threads, bad pictures, starvation, order."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from core.errors import ConfigError, InputError, RunError
from core.images import encode_jpeg
from core.metrics import Jsonl
from shardkit.reader import ShardSet
from tests.train.shards import make_work, photograph
from train.data import FEW_BAD, Augment, Batch, Loader, Plan, Preparer, Quarantine, make_decoder
from train.decode_cpu import CpuDecoder
from train.decode_dali import dali_installed
from train.decode_pool import GREY
from train.tokenizer import Tokenizer

SIZE, CONTEXT, BATCH = 32, 77, 24
needs_dali = pytest.mark.skipif(not dali_installed(), reason="DALI is not installed")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_work(tmp_path_factory.mktemp("data"), 100)


@pytest.fixture(scope="module")
def plan(work: Path) -> Plan:
    return Plan.of(ShardSet.open(work / "shards"), seed=3, batch_size=BATCH)


def load(
    plan: Plan, quarantine: Path, rank: int = 0, ranks: int = 1, start: int = 0, stop: int = 6, threads: int = 2,
    max_bad: float = 0.01, kind: str = "cpu",
) -> list[Batch]:  # fmt: skip
    with closing(make_decoder(kind, SIZE, threads, plan.batch_size, torch.device("cpu"))) as decoder:
        preparer = Preparer(decoder, Tokenizer(), CONTEXT)
        loader = Loader(
            plan, preparer, Quarantine(quarantine, rank, max_bad), rank=rank, ranks=ranks, start=start, stop=stop,
            crop=0.9, flip=True,
        )  # fmt: skip
        with loader:
            return list(loader)


def rows_by_uid(batches: list[Batch]) -> dict[tuple[int, str], tuple[bytes, list[int]]]:
    """(step, uid) -> the pixels and the tokens without padding."""
    return {
        (b.step, uid): (b.pixels_bCSS[i].numpy().tobytes(), [t for t in b.tokens_bL[i].tolist() if t])
        for b in batches
        for i, uid in enumerate(b.uids)
    }


def test_batches_have_the_promised_shapes(plan: Plan, tmp_path: Path) -> None:
    batches = load(plan, tmp_path / "q.jsonl")
    assert [b.step for b in batches] == list(range(6))
    for b in batches:
        assert b.pixels_bCSS.shape == (BATCH, 3, SIZE, SIZE) and b.pixels_bCSS.dtype == torch.uint8
        assert b.valid_b.all() and len(set(b.uids)) == BATCH and len(b.group_b.unique()) == BATCH
        ends = b.tokens_bL.argmax(dim=1)
        assert b.tokens_bL.shape[1] == ends.max() + 1 < CONTEXT  # cut behind the longest caption
        assert (b.tokens_bL[:, 0] == 49406).all() and (b.tokens_bL.gather(1, ends[:, None]) == 49407).all()
    assert not (tmp_path / "q.jsonl").exists()


def test_an_epoch_shows_every_sample_once_and_the_next_another_order(plan: Plan, tmp_path: Path) -> None:
    steps = plan.steps_per_epoch
    assert steps == 4  # 100 samples in batches of 24
    first = [uid for b in load(plan, tmp_path / "q", stop=steps) for uid in b.uids]
    second = [uid for b in load(plan, tmp_path / "q", start=steps, stop=2 * steps) for uid in b.uids]
    assert max(Counter(first).values()) == 1 and len(first) == len(second) == 96
    assert first[:BATCH] != second[:BATCH]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_share_the_same_batches_crops_and_captions(plan: Plan, tmp_path: Path, ranks: int) -> None:
    whole = rows_by_uid(load(plan, tmp_path / "q", stop=5))
    parts = [load(plan, tmp_path / "q", rank, ranks, stop=5, threads=1) for rank in range(ranks)]
    assert all(len(b.uids) == BATCH // ranks for part in parts for b in part)
    shared = [rows_by_uid(part) for part in parts]
    assert sum(len(s) for s in shared) == len(whole)
    assert {k: v for s in shared for k, v in s.items()} == whole


def test_starting_in_the_middle_gives_the_same_batches(plan: Plan, tmp_path: Path) -> None:
    whole = load(plan, tmp_path / "q", stop=9)
    for start in (3, 4, 7):
        later = load(plan, tmp_path / "q", start=start, stop=9)
        assert rows_by_uid(later) == rows_by_uid(whole[start:])


def test_captions_and_windows_change_from_epoch_to_epoch(plan: Plan) -> None:
    samples = plan.shard_set.read(np.arange(60))
    chosen = [[Augment(3, epoch, 0.9, True)(s, 64, 48) for s in samples] for epoch in (0, 1)]
    assert chosen[0] == [Augment(3, 0, 0.9, True)(s, 64, 48) for s in samples]
    assert 15 < sum(caption for _, caption in chosen[0]) < 45  # each sample has two captions
    assert sum(a[0] == b[0] for a, b in zip(*chosen, strict=True)) < 5
    assert chosen[0] != [Augment(4, 0, 0.9, True)(s, 64, 48) for s in samples]
    assert all(view.width == view.height == 48 for view, _ in (Augment(3, 0, 1.0, False)(s, 64, 48) for s in samples))


def test_bad_pictures_are_grey_invalid_and_written_down_once(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    good = make_work(folder, 60)
    flip_a_byte(good, [4, 9])
    plan = Plan.of(ShardSet.open(good / "shards"), seed=0, batch_size=20)
    batches = load(plan, tmp_path / "q.jsonl", stop=6)
    bad = {b.uids[i] for b in batches for i in (~b.valid_b).nonzero().flatten().tolist()}
    assert len(bad) == 2
    assert sum(int((~b.valid_b).sum()) for b in batches) == 4  # both of them in both epochs
    for b in batches:
        assert (b.pixels_bCSS[~b.valid_b] == GREY).all()
    rows = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert {row["uid"] for row in rows} == bad and len(rows) == 2
    assert all("crc32" in row["reason"] and row["shard"].endswith(".tar") for row in rows)


def flip_a_byte(work: Path, numbers: list[int]) -> None:
    """Damage the picture of some samples where it lies in its shard; sizes stay."""
    import pyarrow.parquet as pq

    rows = pq.read_table(work / "shards/samples.parquet").to_pylist()
    for number in numbers:
        with (work / "shards" / rows[number]["shard"]).open("r+b") as file:
            file.seek(rows[number]["jpg_offset"] + rows[number]["jpg_size"] // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0xFF]))


def test_too_many_bad_pictures_stop_the_run_and_say_where_to_look(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work", 60)
    flip_a_byte(work, list(range(0, 60, 2)))
    plan = Plan.of(ShardSet.open(work / "shards"), seed=0, batch_size=20)
    with pytest.raises(RunError, match=r"pictures could not be decoded \(limit 10.00%.*q\.jsonl"):
        load(plan, tmp_path / "q.jsonl", stop=3, max_bad=0.1)
    assert len(Jsonl(tmp_path / "q.jsonl").rows()) > FEW_BAD
    assert len(load(plan, tmp_path / "other.jsonl", stop=3, max_bad=0.9)) == 3


def test_a_batch_without_a_single_good_picture_stops_the_run(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work", 8)
    flip_a_byte(work, list(range(8)))
    plan = Plan.of(ShardSet.open(work / "shards"), seed=0, batch_size=8)
    with pytest.raises(RunError, match="8 of 8 pictures"):
        load(plan, tmp_path / "q.jsonl", stop=1, max_bad=1.0)


@pytest.mark.parametrize(("batch", "ranks"), [(1, 1), (2, 1), (8, 4), (8, 8)])
def test_a_bad_picture_ends_no_run_however_small_a_ranks_share(tmp_path: Path, batch: int, ranks: int) -> None:
    work = make_work(tmp_path / "work", 16)
    flip_a_byte(work, [3, 9])
    plan = Plan.of(ShardSet.open(work / "shards"), seed=0, batch_size=batch)
    parts = [load(plan, tmp_path / "q.jsonl", rank, ranks, stop=16 // batch) for rank in range(ranks)]
    assert sum(int((~b.valid_b).sum()) for part in parts for b in part) == 2


def damaged(pixels: np.ndarray, kind: int) -> bytes:
    """One of six ways in which a picture in a shard is no picture."""
    whole = encode_jpeg(pixels, 90)
    if kind == 5:  # a wrong extension: a PNG under .jpg is decoded all the same
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return out.getvalue()
    middle = len(whole) // 2
    return [
        whole[:middle],
        b"",
        b"<html><body>404 Not Found</body></html>",
        whole[:middle] + bytes(len(whole) - middle - 2) + whole[-2:],
        whole[:-2],
    ][kind]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars of another tool, without checksums, with six damaged pictures among 192."""
    folder = tmp_path_factory.mktemp("foreign")
    for shard in range(2):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard * 96, shard * 96 + 96):
                pixels = photograph(number)
                body = damaged(pixels, number // 32) if number % 32 == 7 else encode_jpeg(pixels, 90)
                for name, data in ((f"{number:04d}.jpg", body), (f"{number:04d}.txt", f"picture {number}".encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return folder


@pytest.mark.parametrize("kind", ["cpu", pytest.param("dali", marks=needs_dali)])
def test_a_run_goes_on_past_every_kind_of_bad_picture(foreign: Path, tmp_path: Path, kind: str) -> None:
    plan = Plan.of(ShardSet.open(foreign), seed=0, batch_size=BATCH)
    batches = load(plan, tmp_path / "q.jsonl", stop=16, kind=kind)
    assert all(b.pixels_bCSS.shape == (BATCH, 3, SIZE, SIZE) and len(b.tokens_bL) == BATCH for b in batches)
    bad = sorted({b.uids[i].rpartition("/")[2] for b in batches for i in (~b.valid_b).nonzero().flatten().tolist()})
    # cut, empty, HTML, bits gone, no end; the PNG is fine. Where bits are gone inside the scan, DALI shows what is left of
    # the picture and says nothing: only a checksum tells, which shards of other tools lack.
    assert bad == ["0007", "0039", "0071", *(["0103"] if kind == "cpu" else []), "0135"]
    assert all((b.pixels_bCSS[~b.valid_b] == GREY).all() for b in batches)
    rows = Jsonl(tmp_path / "q.jsonl").rows()
    assert sorted(row["key"] for row in rows) == bad and all(row["reason"] for row in rows)
    seen = {uid.rpartition("/")[2] for b in batches for i, uid in enumerate(b.uids) if b.valid_b[i]}
    assert len(seen) == 192 - len(bad) and "0167" in seen


def test_a_mixture_of_sets_is_loaded_in_its_shares(work: Path, foreign: Path, tmp_path: Path) -> None:
    shard_set = ShardSet.open([str(work / "shards"), str(foreign)])
    plan = Plan.of(shard_set, 0, BATCH, weights=(1, 3))
    assert plan.steps_per_epoch == 192 // 18
    assert "25.0% (asked for 25.0%), 75.0%" in plan.describe()
    ours = {sample.uid for sample in shard_set.read(np.arange(100))}
    batches = load(plan, tmp_path / "q.jsonl", stop=14, max_bad=0.1)
    assert {sum(uid in ours for uid in b.uids) for b in batches} == {6}
    parts = [load(plan, tmp_path / "q.jsonl", rank, 3, start=9, stop=12, max_bad=0.1) for rank in range(3)]
    assert {k: v for p in parts for k, v in rows_by_uid(p).items()} == rows_by_uid(batches[9:12])
    assert "draws from 5 of 5 shards" in Plan.of(shard_set, 0, BATCH).describe()
    with pytest.raises(ConfigError, match="a weight above 0 for each of 2 shard sets"):
        Plan.of(shard_set, 0, BATCH, weights=(1, 2, 3))


# The decoder's workers, or DALI's threads in this process, are stopped for good, as a debugger does.
_FREEZE = """
import ctypes, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long] * 4
for thread in map(int, sys.argv[1:]):
    assert ptrace(0x4206, thread, 0, 0) == 0 and ptrace(0x4207, thread, 0, 0) == 0  # PTRACE_SEIZE, PTRACE_INTERRUPT
print("frozen", flush=True)
sys.stdin.read()
"""
_FROZEN = """
import os, signal, subprocess, sys, torch
from contextlib import closing
from pathlib import Path
from shardkit.reader import ShardSet
from train.data import Loader, Plan, Preparer, Quarantine, make_decoder
from train.tokenizer import Tokenizer
work, kind, freeze = sys.argv[1:]
plan = Plan.of(ShardSet.open(f"{work}/shards"), 3, 24)
before = set(os.listdir("/proc/self/task"))
decoder = make_decoder(kind, 32, 2, 24, torch.device("cpu"))
own = set(os.listdir("/proc/self/task")) - before
if kind == "cpu":
    for worker in decoder._pool._crew:
        worker._pid = worker._greeting()
        os.kill(worker._pid, signal.SIGSTOP)
else:
    freezer = subprocess.Popen([sys.executable, "-c", freeze, *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if freezer.stdout.readline() != b"frozen\\n":
        sys.exit(77)
loader = Loader(
    plan, Preparer(decoder, Tokenizer(), 77), Quarantine(Path(work) / "q", 0, 0.01), rank=0, ranks=1, start=2, stop=9,
    crop=0.9, flip=False, starved_s=0.5,
)
with closing(decoder), loader:
    next(iter(loader))
"""


@pytest.mark.parametrize("kind", ["cpu", pytest.param("dali", marks=needs_dali)])
def test_a_decoder_whose_threads_hang_is_named_and_holds_up_no_end(kind: str, work: Path) -> None:
    command = [sys.executable, "-c", _FROZEN, str(work), kind, _FREEZE]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=200, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this machine lets no process stop another's threads")
    words = r"rank 0 starved in stage decode: step 2 was not decoded within 0\.5 s, its samples are of 0000\d\.tar"
    assert re.search(words, done.stderr), done.stderr
    assert done.returncode == (RunError.exit_code if kind == "dali" else 1)


def test_settings_that_cannot_be_are_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="24 cannot be shared equally by 5 ranks"):
        load(plan, tmp_path / "q", 0, 5)
    with pytest.raises(InputError, match="at least one batch of 101 samples, found 100"):
        Plan.of(plan.shard_set, seed=0, batch_size=101)


def test_a_loader_may_be_left_early_and_waits_are_measured(plan: Plan, tmp_path: Path) -> None:
    with closing(CpuDecoder(SIZE, 1)) as decoder:
        preparer = Preparer(decoder, Tokenizer(), CONTEXT)
        loader = Loader(
            plan, preparer, Quarantine(tmp_path / "q", 0, 0.01), rank=0, ranks=1, start=0, stop=40, crop=0.9, flip=False
        )
        with loader:
            for batch in loader:
                if batch.step == 5:
                    break
        assert not loader._thread.is_alive()
    assert len(loader.waits.decode.values) == 6
    assert 6 <= len(loader.waits.decode_busy.values) <= 6 + 3 + 2
    assert all(v > 0 for v in loader.waits.decode_busy.values)
