"""Whole runs: killed and continued to the bit, on other numbers of ranks, over bad pictures, and refused where wrong."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ConfigError, HardwareError, InputError, RunError, WorkFolderError
from core.metrics import Jsonl
from tests.train.shards import make_work
from tests.train.test_data import flip_a_byte
from train import checkpoint
from train.config import TrainConfig
from train.export import load_weights
from train.run import _rank_paths, run

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("step", "epoch", "samples_seen", "loss", "acc", "scale", "lr", "grad_norm", "batch_hash", "text_len")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_work(tmp_path_factory.mktemp("loop"), 110, holdout_every=11)


def settings(work: Path, name: str, **other: Any) -> TrainConfig:
    return TrainConfig(
        work=str(work), name=name, model="test-32", batch_size=24, steps=other.pop("steps", 12), lr=2e-3,
        precision="fp32", log_every=1, checkpoint_every=other.pop("checkpoint_every", 4), keep=20,
        workers=1, device="cpu", **other,
    )  # fmt: skip


def home(work: Path, name: str) -> Path:
    return work / "runs" / name


def rows(work: Path, name: str) -> list[dict[str, Any]]:
    return Jsonl(home(work, name) / "metrics.jsonl").rows()


def exact(work: Path, name: str) -> list[tuple[Any, ...]]:
    """What must be equal to the last bit, step by step."""
    return [tuple(row[key] for key in EXACT) for row in rows(work, name)]


@pytest.fixture(scope="module")
def undisturbed(work: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run(settings(work, "undisturbed"))


def start(config: TrainConfig) -> subprocess.Popen[bytes]:
    """The same in a process of its own, which may be killed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "train.run", json.dumps(asdict(config))], env=env, stderr=subprocess.PIPE
    )


def wait_for_step(work: Path, name: str, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not any(row["step"] >= step for row in rows(work, name)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            pytest.fail(process.communicate()[1].decode())
        time.sleep(0.005)


def test_a_finished_run_says_what_it_did(work: Path, undisturbed: dict[str, Any]) -> None:
    wanted = {"steps", "samples_seen", "loss", "pairs_per_s", "wait_share", "mfu", "checkpoint", "run", "seconds"}
    assert wanted <= set(undisturbed)
    assert (undisturbed["steps"], undisturbed["samples_seen"]) == (12, 288)
    found = rows(work, "undisturbed")
    assert [row["step"] for row in found] == list(range(1, 13))
    assert [row["epoch"] for row in found] == [0] * 4 + [1] * 4 + [2] * 4
    assert undisturbed["loss"] == found[-1]["loss"] < found[0]["loss"]
    assert 0 <= undisturbed["wait_share"] < 1 and 0 < undisturbed["mfu"] < 1 and undisturbed["pairs_per_s"] > 0
    assert undisturbed["retrieval"]["images"] == 10
    assert json.loads((home(work, "undisturbed") / "examples.json").read_text())["step"] == 12
    for row in found[3:]:
        assert set(row["waits"]) == {"reader", "decode_busy", "decode", "h2d", "compute", "comm", "own"}
        assert row["waits"]["compute"]["p99"] >= row["waits"]["compute"]["p50"] > 0


def test_running_again_returns_the_summary_and_trains_nothing(work: Path, undisturbed: dict[str, Any]) -> None:
    before = exact(work, "undisturbed")
    assert run(settings(work, "undisturbed")) == undisturbed
    assert exact(work, "undisturbed") == before


@pytest.fixture(scope="module")
def dropping(work: Path) -> dict[str, Any]:
    """A run that draws random numbers in every step."""
    torch.set_num_threads(1)
    return run(settings(work, "dropping", patch_dropout=0.25))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_continued_is_the_same_to_the_bit(
    work: Path, dropping: dict[str, Any], number: signal.Signals
) -> None:
    name = number.name
    config = settings(work, name, patch_dropout=0.25)
    process = start(config)
    wait_for_step(work, name, 6, process)
    process.send_signal(number)
    process.communicate()
    reached = rows(work, name)[-1]["step"]
    assert 6 <= reached < 12 and not (home(work, name) / "done.json").exists()
    saved = checkpoint.steps_saved(home(work, name) / "checkpoints")
    if number == signal.SIGTERM:
        assert process.returncode == RunError.exit_code and saved[-1] == reached
    else:
        assert process.returncode == -signal.SIGKILL and saved in ([], [4], [4, 8])  # the newest may be half written
    run(config)
    assert exact(work, name) == exact(work, "dropping")
    ends = [checkpoint.load(home(work, n) / "checkpoints/step_00000012") for n in (name, "dropping")]
    assert all(torch.equal(value, ends[1].model[key]) for key, value in ends[0].model.items())


def fork(work: Path, source: str, name: str, step: int) -> None:
    """A copy of a run as it was just after the checkpoint of `step`."""
    shutil.copytree(home(work, source), home(work, name))
    (home(work, name) / "done.json").unlink()
    for later in checkpoint.steps_saved(home(work, name) / "checkpoints"):
        if later > step:
            shutil.rmtree(home(work, name) / f"checkpoints/step_{later:08d}")


def test_resumed_on_other_ranks_sees_the_same_batches(work: Path, undisturbed: dict[str, Any]) -> None:
    name, ranks = "ranks4", 4
    fork(work, "undisturbed", name, 4)
    summary = run(settings(work, name, ranks=ranks))
    mine, alone = rows(work, name), rows(work, "undisturbed")
    assert summary["steps"] == 12 and [row["ranks"] for row in mine[4:]] == [ranks] * 8
    assert [row["batch_hash"] for row in mine] == [row["batch_hash"] for row in alone]
    assert len({row["batch_hash"] for row in mine}) == 12
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in alone], rel=1e-3)
    assert summary["retrieval"]["images"] == 10


def test_a_damaged_newest_checkpoint_costs_steps_and_nothing_else(
    work: Path, undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fork(work, "undisturbed", "damaged", 8)
    file = home(work, "damaged") / "checkpoints/step_00000008/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    run(settings(work, "damaged"))
    assert "step_00000008" in caplog.text and "damaged" in caplog.text
    assert exact(work, "damaged") == exact(work, "undisturbed")


def test_killed_in_its_last_evaluation_a_run_still_says_how_fast_it_was(
    work: Path, undisturbed: dict[str, Any]
) -> None:
    fork(work, "undisturbed", "measured", 12)
    summary = run(settings(work, "measured"))
    assert {key for key in undisturbed if summary[key] is None} == set()
    assert (summary["loss"], summary["retrieval"]) == (undisturbed["loss"], undisturbed["retrieval"])
    last = rows(work, "undisturbed")[-1]
    assert all(summary[key] == last[key] for key in ("pairs_per_s", "wait_share", "mfu"))


def test_damaged_records_of_a_finished_run_cost_no_weights(work: Path, undisturbed: dict[str, Any]) -> None:
    fork(work, "undisturbed", "crashed", 12)
    (home(work, "crashed") / "done.json").write_bytes(b"\0\0\0")
    with (home(work, "crashed") / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\0\n3\n[]\n{}\n{" + b"\0" * 9)
    assert run(settings(work, "crashed"))["loss"] == undisturbed["loss"]


def test_micro_batches_do_not_change_the_course(work: Path) -> None:
    config = settings(work, "whole", steps=4, val="none")
    run(config)
    run(replace(config, name="split", micro_batch=7))
    one, two = rows(work, "whole"), rows(work, "split")
    for key in ("loss", "acc", "grad_norm", "scale"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=1e-4), key


def test_a_run_keeps_the_precision_it_began_with(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued where `auto` means another type, as on another kind of machine; another type by name is refused."""
    config = replace(settings(work, "precision", steps=2, val="none"), precision="auto")
    monkeypatch.setattr("train.distributed.cpu_flags", lambda: {"avx512_bf16"})
    run(config)
    recorded = json.loads((home(work, "precision") / "config.json").read_text())
    assert recorded["settings"]["precision"] == recorded["as_run"]["precision"] == "bf16"
    (home(work, "precision") / "done.json").unlink()
    monkeypatch.setattr("train.distributed.cpu_flags", set)
    assert run(config)["steps"] == 2
    with pytest.raises(WorkFolderError, match="precision was 'bf16', now 'fp32'"):
        run(replace(config, precision="fp32"))
    run(replace(config, fresh=True))
    assert json.loads((home(work, "precision") / "config.json").read_text())["settings"]["precision"] == "fp32"


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_small_model_learns_in_bf16(work: Path, loss: str) -> None:
    config = replace(settings(work, f"learns-{loss}", steps=40, checkpoint_every=0, val="none"), precision="bf16")
    summary = run(replace(config, loss=loss))
    found = rows(work, f"learns-{loss}")
    assert summary["loss"] < 0.8 * found[0]["loss"]
    assert all(row["grad_norm"] > 0 for row in found)


def test_fp16_learns_what_fp32_learns_and_goes_on_with_its_factor(work: Path, undisturbed: dict[str, Any]) -> None:
    config = replace(settings(work, "fp16", steps=12, val="none"), precision="fp16")
    run(config)
    mine, other = rows(work, "fp16"), rows(work, "undisturbed")
    taken = [(a["loss"], b["loss"]) for a, b in zip(mine, other, strict=True) if a["loss"] is not None]
    assert len(taken) >= 6 and mine[-1]["loss"] == pytest.approx(other[-1]["loss"], rel=0.2)
    meta = checkpoint.load(home(work, "fp16") / "checkpoints/step_00000012").meta
    assert meta["loss_scale"]["value"] >= 1 and meta["guard"]["skipped"] == 0


def test_training_goes_on_over_bad_pictures(tmp_path: Path) -> None:
    work = make_work(tmp_path, 72)
    flip_a_byte(work, [3, 30, 60])
    summary = run(settings(work, "bad", steps=6, decode="cpu"))
    assert summary["steps"] == 6 and sum(row["invalid"] for row in rows(work, "bad")) == 6
    assert len(Jsonl(home(work, "bad") / "quarantine.jsonl").rows()) == 3
    assert all(row["loss"] > 0 for row in rows(work, "bad"))


def test_an_error_in_a_rank_is_raised_here_in_its_own_words(tmp_path: Path) -> None:
    work = make_work(tmp_path, 72)
    flip_a_byte(work, list(range(0, 72, 2)))
    with pytest.raises(RunError, match=r"pictures could not be decoded.*quarantine\.jsonl"):
        run(settings(work, "bad", ranks=2))


def test_steps_without_a_finite_loss_are_left_out_and_then_end_the_run(work: Path) -> None:
    with pytest.raises(RunError, match=r"10 steps in a row had no finite loss.*skipped\.jsonl"):
        run(replace(settings(work, "diverged", steps=60, val="none"), lr=1e36, warmup=1))
    skipped = Jsonl(home(work, "diverged") / "skipped.jsonl").rows()
    assert len(skipped) == 10 and all(len(set(row["uids"])) == 24 for row in skipped)


def test_ten_lost_steps_go_back_to_the_checkpoint_before_them_and_on_with_new_data(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without end: the weights of step 4 are taken up again at step 16, also when the run is killed after it."""
    from train import loop

    whole = loop.gradcache_step
    config = settings(work, "rolled", steps=20, val="none")

    def broken(model: Any, *args: Any) -> Any:
        loss = whole(model, *args)
        return loss * math.nan if 6 <= seen["steps"] < 16 else loss

    seen = {"steps": 0}

    def counted(self: Any, batch: Any, stop: bool) -> tuple[bool, bool]:
        seen["steps"] = batch.step
        return one_step(self, batch, stop)

    one_step = loop.Trainer.one_step
    monkeypatch.setattr("train.loop.gradcache_step", broken)
    monkeypatch.setattr(loop.Trainer, "one_step", counted)
    run(replace(config, checkpoint_every=5, keep=9))
    skipped = Jsonl(home(work, "rolled") / "skipped.jsonl").rows()
    assert [row["step"] for row in skipped] == list(range(7, 17)) and skipped[0]["why"] == "not finite"
    saved = {step: checkpoint.load(home(work, "rolled") / f"checkpoints/step_{step:08d}") for step in (5, 10, 15, 20)}
    assert torch.equal(saved[10].model["visual.proj"], saved[15].model["visual.proj"])  # the weights of step 6
    assert saved[20].meta["guard"]["rollbacks"] == 1 and saved[20].meta["guard"]["seen"] == 5 + 4
    end = exact(work, "rolled")
    (home(work, "rolled") / "done.json").unlink()
    for step in (10, 15, 20):
        shutil.rmtree(home(work, "rolled") / f"checkpoints/step_{step:08d}")
    run(replace(config, checkpoint_every=5, keep=9))
    assert exact(work, "rolled") == end


def test_a_locked_image_tower_stays_as_it_is_and_the_text_tower_learns(work: Path, undisturbed: dict[str, Any]) -> None:
    first = load_weights(undisturbed["checkpoint"])
    with pytest.raises(ConfigError, match="--init"):
        run(settings(work, "lit", lock_image=True))
    config = settings(work, "lit", steps=2, val="none", lock_image=True, init=undisturbed["checkpoint"])
    run(replace(config, patch_dropout=0.5))
    now = load_weights(str(home(work, "lit")))
    changed = {name for name, value in first.state.items() if not torch.equal(value, now.state[name])}
    assert not any(name.startswith("visual.") for name in changed) and "text_projection" in changed
    assert set(rows(work, "lit")[-1]["grad_norms"]) == {"text", "scalars"}


def test_a_killed_rank_ends_the_run_and_is_named(work: Path) -> None:
    import psutil

    config = settings(work, "killed", steps=5000, val="none", ranks=2)
    code = "import json, sys; from train.config import TrainConfig; from train.run import run; "
    code += (
        "run(TrainConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[1]).items()}))"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(asdict(config))], env=env, stderr=subprocess.PIPE
    )
    wait_for_step(work, "killed", 3, process)
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()
    started = time.monotonic()
    said = process.communicate()[1].decode()
    assert time.monotonic() - started < 60
    assert "rank 1 of the run in" in said and "was killed by SIGKILL" in said and "gloo" not in said


def test_other_settings_are_refused_by_name_and_fresh_starts_over(work: Path, undisturbed: dict[str, Any]) -> None:
    fork(work, "undisturbed", "other", 8)
    config = settings(work, "other")
    with pytest.raises(WorkFolderError, match=r"other settings \(lr was 0.002, now 0.1\).*--name.*--fresh"):
        run(replace(config, lr=0.1))
    run(replace(config, lr=0.1, steps=2, val="none", fresh=True))
    assert [row["step"] for row in rows(work, "other")] == [1, 2]


def test_a_setting_that_a_runs_record_does_not_know_yet_was_at_its_default(
    work: Path, undisturbed: dict[str, Any]
) -> None:
    fork(work, "undisturbed", "older", 12)
    record = home(work, "older") / "config.json"
    found = json.loads(record.read_text())
    del found["settings"]["ema"]
    record.write_text(json.dumps(found))
    with pytest.raises(WorkFolderError, match=r"\(ema was 0.0, now 0.9\)"):
        run(settings(work, "older", ema=0.9))
    assert run(settings(work, "older"))["loss"] == undisturbed["loss"]
    record.write_text("{")
    with pytest.raises(WorkFolderError, match=r"config.json is damaged .*--fresh"):
        run(settings(work, "older"))


def test_checkpoints_kept_elsewhere_are_found_and_not_taken_for_another_runs(work: Path, tmp_path: Path) -> None:
    elsewhere = settings(work, "elsewhere", steps=2, val="none", checkpoints=str(tmp_path / "kept"))
    run(elsewhere)
    assert load_weights(str(home(work, "elsewhere"))).meta["step"] == 2
    with pytest.raises(WorkFolderError, match=r"other values of lr \(was 0.002, now 0.1\)"):
        run(replace(elsewhere, name="another", lr=0.1))
    (home(work, "elsewhere") / "done.json").unlink()
    with pytest.raises(WorkFolderError, match=r"has its checkpoints in .*kept.*--checkpoints"):
        run(replace(elsewhere, checkpoints=""))
    assert [row["step"] for row in rows(work, "elsewhere")] == [1, 2]
    shutil.rmtree(home(work, "elsewhere"))  # another machine, which has the checkpoints only
    assert run(elsewhere)["steps"] == 2


def test_other_shards_are_refused_before_and_after_the_end(work: Path, tmp_path: Path) -> None:
    copy = tmp_path / "work"
    shutil.copytree(work / "shards", copy / "shards")
    config = settings(copy, "main", steps=4, val="none")
    run(config)
    shutil.rmtree(copy / "shards")
    shutil.copytree(make_work(tmp_path / "another", 99) / "shards", copy / "shards")
    with pytest.raises(WorkFolderError, match=r"was trained on other shards"):
        run(config)
    (home(copy, "main") / "done.json").unlink()
    with pytest.raises(WorkFolderError, match=r"other values of the shards"):
        run(config)


def test_a_run_in_use_is_refused(work: Path, undisturbed: dict[str, Any]) -> None:
    import fcntl

    with (home(work, "undisturbed") / ".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WorkFolderError, match=r"in use by another run .process \d+"):
            run(settings(work, "undisturbed"))


def test_settings_that_cannot_be_are_refused_before_anything_is_written(work: Path) -> None:
    config = settings(work, "never")
    for wrong, error, words in (
        ({"ranks": 5}, ConfigError, "24 cannot be shared equally by 5 ranks; use --batch-size 20 or 25"),
        ({"model": "test-23"}, ConfigError, "did you mean 'test-32'"),
        ({"crop": 0.0}, ConfigError, r"crop in \(0, 1\]"),
        ({"colour": 1.5}, ConfigError, r"colour in \[0, 1\], .* found 1.5"),
        ({"colour": math.nan}, ConfigError, r"colour in \[0, 1\]"),
        ({"batch_size": 0}, ConfigError, "batch_size of at least 1"),
        ({"device": "cuda"}, HardwareError, "--device cpu"),
        ({"batch_size": 1000}, InputError, "at least one batch of 1000 samples, found 100"),
        ({"shards": str(work / "nowhere")}, InputError, "nowhere"),
        ({"init": str(work / "nowhere.pt")}, InputError, "expected weights"),
        ({"lr": -1.0}, ConfigError, "lr of at least 0, found -1.0"),
        ({"lr": math.nan}, ConfigError, "lr of at least 0, found nan"),
        ({"cache_gb": math.nan}, ConfigError, "cache_gb of at least 0"),
        ({"wd": math.inf}, ConfigError, "wd of at least 0, found inf"),
        ({"grad_clip": math.nan}, ConfigError, "grad_clip of at least 0"),
        ({"seed": 1 << 70}, ConfigError, "seed of at most 63 bits"),
    ):
        with pytest.raises(error, match=words):
            run(replace(config, **wrong))  # type: ignore[arg-type]
    assert not list(home(work, "never").glob("checkpoints/*"))


def test_a_run_can_begin_with_the_weights_of_another(work: Path, undisturbed: dict[str, Any]) -> None:
    first = work / "first"
    shutil.copytree(undisturbed["checkpoint"], first)
    config = replace(settings(work, "second", steps=1, val="none"), lr=0.0, init=str(first))
    run(config)
    one, two = load_weights(undisturbed["checkpoint"]), load_weights(str(home(work, "second")))
    assert all(torch.equal(value, two.state[key]) for key, value in one.state.items())
    shutil.rmtree(first)
    (home(work, "second") / "done.json").unlink()
    assert run(config)["steps"] == 1  # to continue, the first weights need not be there any more


def test_a_full_gpu_is_a_sentence_with_the_remedy(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("train.loop.gradcache_step", full)
    with pytest.raises(RunError, match=r"is full with 24 pairs at a time; use --micro-batch 12"):
        run(settings(work, "full", val="none"))


def test_under_torchrun_the_ranks_are_those_that_it_started(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"1 ranks were started .*--ranks asks for 2"):
        run(settings(work, "joined", ranks=2))
    monkeypatch.setattr("train.run._default_ranks", lambda config: pytest.fail("it would start ranks of its own"))
    summary = run(settings(work, "joined", steps=1, val="none"))
    assert summary["steps"] == 1 and summary["pairs_per_s"] > 0 and 0 <= summary["wait_share"] <= 1  # though so short


def test_ranks_do_not_import_what_lies_in_the_users_folder(tmp_path: Path) -> None:
    for name in ("train.py", "core.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    env = {**os.environ, **_rank_paths()}
    done = subprocess.run([sys.executable, "-m", "train.config"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_evaluations_on_schedule_leave_the_course_as_it_is(work: Path, undisturbed: dict[str, Any]) -> None:
    run(settings(work, "scheduled", eval_every=5))
    assert [row["step"] for row in Jsonl(home(work, "scheduled") / "eval.jsonl").rows()] == [5, 10, 12]
    assert exact(work, "scheduled") == exact(work, "undisturbed")
