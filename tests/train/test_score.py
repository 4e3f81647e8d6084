"""Scores against the towers themselves, and how dedup reads them."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bench.peers import ready
from core import catalog
from core.errors import InputError, WorkFolderError
from core.images import encode_jpeg, read_header
from core.schema import pair_schema
from core.storage import Folder
from dedup.config import DedupConfig
from dedup.keep import run as dedup
from shardkit.config import ShardConfig
from shardkit.pack import run as shard
from tests.train.shards import photograph
from train import checkpoint
from train.config import ScoreConfig
from train.data import Preparer
from train.decode_cpu import CpuDecoder, Picture, middle_view, render
from train.export import ExportConfig
from train.export import run as export
from train.models import model_config
from train.optim import make_optimizer
from train.score import run
from train.tokenizer import Tokenizer
from train.towers import CLIP

SHAPE = model_config("test-32")


def make_pairs(
    work: Path, part: int, captions: list[str], broken: int | None = None, size: tuple[int, int] = (64, 48)
) -> list[bytes]:
    """One ingest part whose pictures carry two captions each; returns the pictures."""
    parts = work / "ingest" / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    name, bodies, rows = f"u{part:06d}", [], []
    with tarfile.open(parts / f"{name}.tar", "w") as tar:
        for i in range(0, len(captions), 2):
            body = b"no picture" if broken == i else encode_jpeg(photograph(10 * part + i, *size), 90)
            info = tarfile.TarInfo(f"{i}.jpg")
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
            bodies.append(body)
    with tarfile.open(parts / f"{name}.tar") as tar:
        places = [(m.offset_data, m.size) for m in tar.getmembers()]
    for i, caption in enumerate(captions):
        offset, size = places[i // 2]
        row: dict[str, Any] = {"uid": f"{part}-{i}", "unit": name, "row": i, "caption": caption, "outcome": "ok"}
        rows.append({**row, "tar": f"ingest/parts/{name}.tar", "tar_offset": offset, "tar_size": size})
    rows.append({"uid": f"{part}-lost", "unit": name, "row": len(rows), "caption": "lost", "outcome": "timeout"})
    pq.write_table(pa.Table.from_pylist(rows, pair_schema()), parts / f"{name}.parquet")
    return bodies


@pytest.fixture
def work(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    model = CLIP(SHAPE)
    meta = {"model": dataclasses.asdict(SHAPE), "data": "d"}
    checkpoint.save(tmp_path / "runs/main/checkpoints", 7, model, make_optimizer(model, 1e-3), meta)
    return tmp_path


def scores(work: Path) -> dict[str, float | None]:
    with catalog.connect(Folder(work)) as connection:
        return dict(connection.execute("SELECT uid, clip_score FROM pairs WHERE outcome = 'ok'").fetchall())


def test_scores_are_the_cosine_of_the_towers(work: Path) -> None:
    captions = ["a red thing", "something blue", "two green ones", "a rather longer caption of a thing"]
    bodies = make_pairs(work, 0, captions)
    summary = run(ScoreConfig(work=str(work), precision="fp32"))
    torch.manual_seed(3)
    model = CLIP(SHAPE, "fp32").eval()
    found = scores(work)
    preparer = Preparer(CpuDecoder(SHAPE.image_size, 1), Tokenizer(), SHAPE.context)
    for i, caption in enumerate(captions):
        header = read_header(bodies[i // 2])
        view = middle_view(header.width, header.height)
        pixels = render(Picture(bodies[i // 2], header, view), SHAPE.image_size)[None]
        with torch.inference_mode():
            cosine = float((model.encode_image(pixels) * model.encode_text(preparer.tokens([caption]))).sum())
        assert found[f"0-{i}"] == pytest.approx(cosine, abs=1e-4)
    assert (summary["pairs"], summary["scored"], summary["unreadable"]) == (4, 4, 0)
    preparer.decoder.close()


def test_a_broken_picture_has_none_and_new_parts_are_added(work: Path) -> None:
    make_pairs(work, 0, ["one", "two", "three", "four"], broken=2)
    first = run(ScoreConfig(work=str(work)))
    assert (first["scored"], first["unreadable"]) == (2, 2)
    assert scores(work)["0-2"] is None and run(ScoreConfig(work=str(work))) == first
    stamp = (work / "scores" / "u000000.parquet").stat().st_mtime_ns
    make_pairs(work, 1, ["five", "six"])
    assert run(ScoreConfig(work=str(work)))["pairs"] == 6
    assert (work / "scores" / "u000000.parquet").stat().st_mtime_ns == stamp
    make_pairs(work, 0, ["other", "words"])
    assert run(ScoreConfig(work=str(work)))["scored"] == 4
    assert (work / "scores" / "u000000.parquet").stat().st_mtime_ns != stamp


def test_an_open_clip_folder_scores_the_same(work: Path, tmp_path: Path) -> None:
    make_pairs(work, 0, ["a red thing", "something blue"])
    run(ScoreConfig(work=str(work)))
    ours = scores(work)
    export(ExportConfig(work=str(work), out=str(tmp_path / "exported")))
    settings = {"work": str(work), "checkpoint": str(tmp_path / "exported")}
    with pytest.raises(WorkFolderError, match="checkpoint"):
        run(ScoreConfig(**settings))
    run(ScoreConfig(**settings, fresh=True))
    assert scores(work) == pytest.approx(ours, abs=1e-6)


@pytest.mark.skipif(ready("open_clip") is None, reason="needs open_clip's side environment: make peers")
def test_a_checkpoint_of_open_clips_gives_open_clips_own_cosines(tmp_path: Path) -> None:
    captions = [
        "a red thing", "something blue", "Zwei grüne Äpfel auf einem Tisch", "a photo of 3 dogs, running!",
        "the same word " * 30, "",
    ]  # fmt: skip
    bodies = make_pairs(tmp_path, 0, captions, size=(224, 224))
    for i, body in enumerate(bodies):
        (tmp_path / f"{i}.jpg").write_bytes(body)
    asked = [tmp_path / name for name in ("weights.pt", "asked.json", "scores.json")]
    asked[1].write_text(json.dumps([[str(tmp_path / f"{i // 2}.jpg"), c] for i, c in enumerate(captions)]))
    peer = Path(__file__).with_name("open_clip_scores.py")
    done = subprocess.run([str(ready("open_clip")), peer, "ViT-B-32", *asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run(ScoreConfig(work=str(tmp_path), checkpoint=str(asked[0]), model="ViT-B-32", precision="fp32", device="cpu"))
    found, theirs = scores(tmp_path), json.loads(asked[2].read_text())
    assert max(theirs) - min(theirs) > 1e-3  # random towers still tell these pairs apart
    assert [found[f"0-{i}"] for i in range(len(captions))] == pytest.approx(theirs, abs=1e-4)


def test_nothing_to_score_or_to_score_with(work: Path) -> None:
    with pytest.raises(InputError, match="pairmill ingest"):
        run(ScoreConfig(work=str(work)))
    make_pairs(work, 0, ["a", "b"])
    with pytest.raises(InputError, match="expected weights at"):
        run(ScoreConfig(work=str(work), checkpoint=str(work / "nowhere")))


def test_scored_pairs_become_shards(work: Path) -> None:
    make_pairs(work, 0, ["a red thing", "something blue", "two green ones", "a rather longer caption"])
    run(ScoreConfig(work=str(work), device="cpu", precision="fp32"))
    dedup(DedupConfig(work=str(work), workers=1, where="clip_score > -1"))
    assert shard(ShardConfig(work=str(work), size=(32,), workers=1))["captions"] == 4
