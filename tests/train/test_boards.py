"""Runs shown in TensorBoard and wandb hold what metrics.jsonl and eval.jsonl hold, read back by those packages' own readers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers import ready
from core.errors import ConfigError
from core.metrics import Jsonl
from tests.train.shards import make_work
from train.boards import check_boards

ROOT = Path(__file__).resolve().parents[2]
# A run of six steps, and then its continuation to twelve; prints all scalars of the event files and of wandb's own file.
RUN = """
import glob, json, sys
from train.config import TrainConfig
from train.run import run
work = sys.argv[1]
settings = dict(work=work, model="test-32", batch_size=24, precision="fp32", log_every=2, device="cpu", eval_every=4)
import train.loop
first = train.loop._loop
class Killed(Exception): ...
def stopped(trainer, loader, stop, start):
    save = trainer.save
    def save_and_die():
        save()
        trainer.writer.finish()
        raise Killed
    trainer.save = save_and_die
    first(trainer, loader, stop, start)
train.loop._loop = stopped
config = TrainConfig(**settings, steps=12, checkpoint_every=6, log=("tensorboard", "wandb"))
try:
    run(config)
except Killed:
    train.loop._loop = first
run(config)

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(f"{work}/runs/main/tensorboard").Reload()
shown = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

from wandb.proto.wandb_internal_pb2 import Record
def records(data):  # LevelDB's log: behind 7 bytes of a header, blocks of 32 KiB of (checksum, length, kind, bytes)
    at, held = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(held)
            held = b""
kept = []
for name in sorted(glob.glob(f"{work}/runs/main/wandb/offline-run-*/run-*.wandb")):
    for record in records(open(name, "rb").read()):
        if record.WhichOneof("record_type") == "history":
            kept.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
print(json.dumps({"tensorboard": shown, "wandb": kept}))
"""


def test_boards_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--log out of tensorboard, wandb; found 'mlflow'"):
        check_boards(("mlflow",))
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(ConfigError, match=r"needs the package wandb .* `pip install wandb`"):
            check_boards(("wandb",))


@pytest.mark.skipif(ready("boards") is None, reason="needs the side environment: python -m bench.peers boards")
def test_both_show_what_the_files_hold(tmp_path: Path) -> None:
    work = make_work(tmp_path, 110, holdout_every=11)
    packages = next((Path(str(ready("boards"))).parents[1] / "lib").glob("python*")) / "site-packages"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", RUN, str(work)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    rows = Jsonl(work / "runs/main/metrics.jsonl").rows()
    evaluated = Jsonl(work / "runs/main/eval.jsonl").rows()
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12] and [row["step"] for row in evaluated] == [4, 8, 12]
    for name, field in (("train/loss", "loss"), ("train/lr", "lr")):
        steps, values = zip(*found["tensorboard"][name], strict=True)
        assert list(steps) == [row["step"] for row in rows]
        assert list(values) == pytest.approx([row[field] for row in rows], rel=1e-6)
        logged = [(row["step"], row[name]) for row in found["wandb"] if name in row]
        assert logged == [(row["step"], row[field]) for row in rows]
    assert [value for _, value in found["tensorboard"]["eval/retrieval/t2i_r10"]] == pytest.approx(
        [row["retrieval"]["t2i_r10"] for row in evaluated]
    )
    assert found["tensorboard"]["train/grad_norms/image"][-1][1] == pytest.approx(rows[-1]["grad_norms"]["image"])
