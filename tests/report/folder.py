"""A small but real work folder: rendered pictures in tars, Parquet parts, decisions, samples and a run's metrics."""

from __future__ import annotations

import base64
import io
import json
import math
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from core import schema

HOSTILE = '<script>document.title="owned"</script> & "quoted" \'captions\' </script>'
COLOURS = ["red", "green", "blue", "orange", "purple", "teal"]
PAIRS = 60  # rows that were fetched
FAILED = {"http_4xx": 6, "timeout": 3, "not_image": 2, "too_small": 1}


def picture(i: int) -> bytes:
    """One JPEG; pictures `i` and `i + 30` show the same thing."""
    size = (96 + 2 * (i % 5), 72 + i % 7)
    image = Image.new("RGB", size, (235 - i % 40, 230, 220 + i % 30))
    colour, at = COLOURS[i % 6], 8 + i % 30
    ImageDraw.Draw(image).ellipse([at, 10, at + 44, 54], fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def caption(i: int) -> str:
    if i == 7:
        return HOSTILE
    return f"a {COLOURS[i % 6]} ball" if i % 10 == 0 else f"a {COLOURS[i % 6]} ball number {i} on a pale ground"


def uid(i: int) -> str:
    return f"{i:032x}"


def make_work(folder: Path, *, upto: str = "train") -> Path:
    """Fill `folder` with what the stages up to `upto` (ingest, dedup, shard, train) leave; returns it."""
    stages = ["ingest", "dedup", "shard", "train"]
    for stage in stages[: stages.index(upto) + 1]:
        MAKERS[stage](folder)
    return folder


def _ingest(folder: Path) -> None:
    parts = folder / "ingest" / "parts"
    parts.mkdir(parents=True)
    for unit in range(2):
        tar = parts / f"u{unit:06d}.tar"
        offsets = _tar(tar, {uid(i): picture(i) for i in range(unit * 30, unit * 30 + 30)})
        rows = [
            _fetched(i, unit, f"ingest/parts/{tar.name}", *offsets[uid(i)]) for i in range(unit * 30, unit * 30 + 30)
        ]
        if unit == 1:
            rows += [_failed(n, outcome) for n, outcome in enumerate(o for o, k in FAILED.items() for _ in range(k))]
        wanted = schema.pair_schema([pa.field("split", pa.string())])
        pq.write_table(pa.Table.from_pylist(rows, wanted), parts / f"u{unit:06d}.parquet")
    settings = '[ingest]\nurls = "list.tsv"\nsize = 96\ninputs = "ab"\nversion = "0.1.0"\n'
    (folder / "pairmill.toml").write_text(settings)


def _tar(path: Path, files: dict[str, bytes]) -> dict[str, tuple[int, int]]:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(f"{name}.jpg")
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    with tarfile.open(path) as tar:
        return {m.name.removesuffix(".jpg"): (m.offset_data, m.size) for m in tar.getmembers()}


def _fetched(i: int, unit: int, tar: str, offset: int, size: int) -> dict[str, Any]:
    return {
        "uid": uid(i), "unit": f"u{unit:06d}", "row": i, "url": f"http://host{i % 3}.example:8080/{i}.jpg",
        "caption": caption(i), "caption_raw": caption(i), "outcome": "ok", "status": 200, "attempts": 1, "elapsed_s": 0.1,
        "bytes": 4 * size, "sha256": f"{i:064x}", "format": "png" if i % 4 == 0 else "jpeg",
        "width": 4 * (96 + 2 * (i % 5)), "height": 4 * (72 + i % 7), "stored_width": 96, "stored_height": 72,
        "tar": tar, "tar_offset": offset, "tar_size": size, "lang": "de" if i % 12 == 0 else "en", "split": "train",
    }  # fmt: skip


def _failed(n: int, outcome: str) -> dict[str, Any]:
    return {
        "uid": uid(1000 + n), "unit": "u000001", "row": 60 + n, "url": f"http://lost.example/{n}.jpg", "caption": "lost",
        "caption_raw": "lost", "outcome": outcome, "detail": "404 <b>Not</b> Found", "status": 404, "attempts": 3,
        "elapsed_s": 1.5,
    }  # fmt: skip


def _dedup(folder: Path) -> None:
    """Pairs 30-39 copy pictures 0-9; 40-43 fall to a rule; 50-54 are held out."""
    rows = []
    for i in range(PAIRS):
        row: dict[str, Any] = {
            "uid": uid(i), "kept": True, "holdout": 50 <= i < 55, "image_group": uid(i % 30 if i < 40 else i),
        }  # fmt: skip
        if i < 10 or 30 <= i < 40:
            row["cluster"] = uid(i % 30 if i % 30 > 2 else 0)
        if 30 <= i < 40:
            row |= {"kept": False, "reason": "image_duplicate", "survivor": uid(i - 30), "evidence": "image_hash"}
            row["similarity"] = 0.97
        if 40 <= i < 44:
            row |= {"kept": False, "reason": "align:aspect"}
        rows.append(row)
    path = folder / "dedup" / "decisions.parquet"
    path.parent.mkdir()
    with (folder / "pairmill.toml").open("a") as file:
        file.write('[dedup]\ncaptions = ""\ninputs = "cd"\nversion = "0.1.0"\n')
    (path.parent / "done.json").write_text(json.dumps({"kept": 46, "settings": {"where": "width < 1000"}}))
    pq.write_table(pa.Table.from_pylist(rows, schema.decision_schema()), path)


def _shard(folder: Path) -> None:
    kept = [i for i in range(PAIRS) if not 30 <= i < 44]
    for name, chosen in (
        ("shards", [i for i in kept if not 50 <= i < 55]),
        ("holdout", [i for i in kept if 50 <= i < 55]),
    ):
        home = folder / name
        home.mkdir()
        offsets = _tar(home / "00000.tar", {uid(i): picture(i) for i in chosen})
        rows = [
            {
                "shard": "00000.tar", "key": uid(i), "uid": uid(i), "uids": [uid(i)], "caption": caption(i),
                "captions": [caption(i)], "url": f"http://host{i % 3}.example/{i}.jpg", "jpg_offset": offsets[uid(i)][0],
                "jpg_size": offsets[uid(i)][1], "width": 96, "height": 72, "crc32": 1, "sha256": f"{i:064x}",
                "image_group": uid(i),
            }
            for i in chosen
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema.sample_schema()), home / "samples.parquet")


def _train(folder: Path) -> None:
    home = folder / "runs" / "first"
    home.mkdir(parents=True)
    settings = {"model": "test-32", "batch_size": 8, "lr": 5e-4}
    (home / "config.json").write_text(
        json.dumps({"settings": settings, "as_run": {**settings, "work": "work"}, "version": "0.1.0"})
    )
    (home / "examples.json").write_text(json.dumps(_examples()))
    with (home / "metrics.jsonl").open("w") as file:
        for step in range(10, 210, 10):
            file.write(json.dumps(step_row(step)) + "\n")
    with (home / "eval.jsonl").open("w") as file:
        for step in (100, 200):
            row = {
                "step": step,
                "retrieval": {f"{way}_r{k}": min(1.0, step / 1000 * k) for way in ("t2i", "i2t") for k in (1, 5, 10)},
                "zero_shot": {"accuracy": step / 400, "chance": 0.05, "classes": 20, "per_class": {"red_ball": 0.9}},
            }
            file.write(json.dumps(row) + "\n")


def _examples() -> dict[str, Any]:
    """As the evaluation writes them: pictures with captions, captions with pictures, the right answers second."""
    jpegs = [base64.b64encode(picture(i)).decode() for i in range(50, 55)]
    images: list[dict[str, Any]] = [
        {
            "uid": uid(50 + k), "jpeg": jpegs[k], "captions": [caption(50 + k)],
            "top": [{"caption": caption(50 + (k + i + 4) % 5), "score": 0.3 - i / 20, "right": i == 1} for i in range(5)],
        }
        for k in range(5)
    ]  # fmt: skip
    images[0]["top"][0]["caption"] = HOSTILE
    texts = [
        {
            "caption": caption(50 + k),
            "top": [
                {"uid": uid(50 + i), "jpeg": jpegs[(k + i + 4) % 5], "score": 0.3, "right": i == 1} for i in range(5)
            ],
        }
        for k in range(2)
    ]
    return {"step": 200, "images": images, "texts": texts}


def step_row(step: int, *, wait: float = 0.08) -> dict[str, Any]:
    """One row of metrics.jsonl, of a run that waits the share `wait` of its time for data."""
    return {
        "step": step, "epoch": step // 50, "samples_seen": 8 * step, "loss": 2.1 * math.exp(-step / 150) + 0.3,
        "acc": 0.2, "scale": 14.3 + step / 50, "lr": 5e-4 * min(1.0, step / 50), "grad_norm": 1.0,
        "pairs_per_s": 800.0, "wait_share": wait, "mfu": None, "time": 1.7e9 + step,
        "waits": {
            place: {"p50": s, "p99": 2 * s, "mean": s, "min": s, "max": s, "slowest_rank": 0}
            for place, s in (
                ("decode", 0.01 * wait), ("h2d", 0.0), ("compute", 0.01 * (1 - wait)), ("reader", 0.001),
                ("decode_busy", 0.008),
            )
        },
        "queue": 3.0, "ranks": 1, "text_len": 12.0, "invalid": 0, "skipped": 0, "batch_hash": "0",
    }  # fmt: skip


MAKERS = {"ingest": _ingest, "dedup": _dedup, "shard": _shard, "train": _train}
