"""How well picture and caption of each pair go together: the cosine of a checkpoint's embeddings. STAGE `score`.

Way in: `WORK/ingest/parts` and the images they point to. Way out: `WORK/scores/UNIT.parquet`, a row a fetched pair with
`clip_score`, which the view `pairs` shows as a column, so that `dedup --preset laion` or `--where "clip_score > 0.25"` reads it.

A picture with several captions is decoded and embedded once. A picture that cannot be read has no score. On one machine a
single process decodes and computes on every core, or with the GPU; on Ray each GPU of the cluster, or else each core, scores
a part at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import platform
import time
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash

from core import catalog
from core.errors import ConfigError, DataError, InputError, RunError
from core.plan import Unit
from core.runner import cores, run_units, tick
from core.schema import Outcome
from core.storage import Folder
from core.work import fingerprint, fingerprint_of, open_stage
from shardkit.reader import Sample
from train.config import ScoreConfig
from train.data import Preparer, make_decoder
from train.distributed import choose_device, choose_precision
from train.evaluate import EVAL_BATCH, embed_images, embed_texts
from train.export import Weights, load_weights, run_folder
from train.tokenizer import Tokenizer
from train.towers import CLIP

log = logging.getLogger("pairmill.train")

HOME, PARTS = "scores", "ingest/parts"
MARK = b"pairmill.part"
READ = ("uid", "unit", "row", "caption", "outcome", "tar", "tar_offset", "tar_size")
SCORES = pa.schema(
    [
        pa.field("unit", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("uid", pa.string(), nullable=False),
        pa.field("clip_score", pa.float32()),
    ]
)


def run(config: ScoreConfig) -> dict[str, Any]:
    """Score every fetched pair that has no score of this checkpoint yet.

    Returns `pairs`, `scored`, `unreadable`, `mean`, `p10`, `p50`, `p90`, `checkpoint`, `seconds`.

    Raises:
        InputError: no pairs, or no checkpoint there.
        WorkFolderError: the folder holds the scores of another checkpoint (`--fresh` replaces them).
    """
    start = time.monotonic()
    # one type on every node of a cluster, and recorded as what it was
    config = dataclasses.replace(config, precision=choose_precision(config.precision, choose_device(config.device, 0)))
    folder = Folder(config.work)
    parts = folder.list(f"{PARTS}/*.parquet")
    if not parts:
        raise InputError(f"{folder} holds no pairs yet; run `pairmill ingest` or `pairmill adopt` first")
    weights = load_weights(config.checkpoint or run_folder(config.work, "main"), config.model)
    if weights.shape is None:
        raise ConfigError(f"{weights.source} does not say which model it is of; name it with --model")
    digest = _digest(weights)
    inputs = f"{fingerprint(folder, f'{PARTS}/*.parquet')} {digest}"
    with open_stage(config, "score", home=HOME, inputs=inputs, keep=_names(parts)) as stage:
        if stage.finished and len(folder.list(f"{HOME}/*.parquet")) == len(parts):
            return stage.finished
        stage.reopen()
        folder.sweep(HOME)
        stage.share()
        scorer = Scorer(dataclasses.replace(config, checkpoint=weights.source), digest)
        units = [Unit(_unit(name), i, i + 1) for i, name in enumerate(parts)]
        workers = config.workers if config.engine == "ray" else 1
        with contextlib.closing(scorer):
            for _ in run_units(
                units, scorer.score_part, done=scorer.is_scored, workers=workers, engine=config.engine, label="score",
                unit_of_progress="parts", part=stage.part, gpu=config.device != "cpu",
            ):  # fmt: skip
                pass
        if partial := stage.left_to_others(lambda: sum(not scorer.is_scored(unit) for unit in units)):
            return partial
        finished = stage.finish({**_summary(folder), "checkpoint": weights.source, "seconds": time.monotonic() - start})
    catalog.write(folder)
    return finished


def _digest(weights: Weights) -> str:
    """Of the parameters themselves: the newest checkpoint of a run is another one tomorrow."""
    digest = xxhash.xxh3_64()
    for name, value in sorted(weights.state.items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _names(parts: list[str]) -> tuple[str, ...]:
    return tuple(name.rpartition("/")[2] for name in parts)


def _unit(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".parquet")


@dataclass(frozen=True)
class Tools:
    """What embeds, held by a process from its first part on."""

    model: CLIP
    preparer: Preparer
    device: torch.device


_tools: dict[str, Tools] = {}  # by digest; on a cluster a process scores many parts


@dataclass(frozen=True)
class Scorer:
    """Scores one part after another by the checkpoint that `config` names, in whatever process or machine that happens."""

    config: ScoreConfig
    digest: str

    @property
    def folder(self) -> Folder:
        return Folder(self.config.work)

    def tools(self) -> Tools:
        """The towers, loaded once a process.

        Raises:
            RunError: the checkpoint is another one than where the run began.
        """
        if self.digest not in _tools:
            self.close()
            _tools[self.digest] = _load(self.config, self.digest)
        return _tools[self.digest]

    def close(self) -> None:
        """Let go what this process loaded."""
        while _tools:
            _tools.popitem()[1].preparer.decoder.close()

    def is_scored(self, unit: Unit) -> bool:
        """Whether this very part has its scores by this very model."""
        name = f"{HOME}/{unit.id}.parquet"
        if not self.folder.exists(name):
            return False
        with self.folder.open(name) as file:
            metadata = pq.read_schema(file).metadata or {}
        return bool(metadata.get(MARK) == self._mark(unit))

    def _mark(self, unit: Unit) -> bytes:
        return f"{fingerprint_of(self.folder, [f'{PARTS}/{unit.id}.parquet'])} {self.digest}".encode()

    def score_part(self, unit: Unit) -> int:
        """Write the scores of one part; returns how many pairs have one."""
        tools, mark, rows = self.tools(), self._mark(unit), self._rows(unit)
        places = {
            place: i for i, place in enumerate(dict.fromkeys((r["tar"], r["tar_offset"], r["tar_size"]) for r in rows))
        }
        numbered = iter(places.items())
        parts = iter(lambda: [self._sample(i, *p) for p, i in itertools.islice(numbered, EVAL_BATCH)], [])
        img_PE, valid_P = embed_images(tools.model, tools.preparer, parts, tools.device)
        txt_NE = embed_texts(tools.model, tools.preparer, [r["caption"] or "" for r in rows], tools.device)
        at_N = torch.tensor([places[(r["tar"], r["tar_offset"], r["tar_size"])] for r in rows], dtype=torch.int64)
        score_N = (img_PE[at_N.to(tools.device)] * txt_NE).sum(dim=1).cpu().numpy()
        valid_N = valid_P.cpu().numpy()[at_N.numpy()]
        columns = [pa.array([r[n] for r in rows], SCORES.field(n).type) for n in ("unit", "row", "uid")]
        columns.append(pa.array(score_N.astype("float32"), mask=~valid_N))
        table = pa.Table.from_arrays(columns, schema=SCORES).replace_schema_metadata({MARK: mark})
        with self.folder.staged(f"{HOME}/{unit.id}.parquet") as path:
            pq.write_table(table, path, compression="zstd")
        tick(unit.rows, pairs=len(rows))
        return int(valid_N.sum())

    def _rows(self, unit: Unit) -> list[dict[str, Any]]:
        name = f"{PARTS}/{unit.id}.parquet"
        try:
            with self.folder.open(name) as file:
                table = pq.read_table(file, columns=list(READ), use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{self.folder.path(name)} is not a whole Parquet file ({error}); delete it and run the verb that made it "
                "again"
            ) from error
        return [row for row in table.to_pylist() if row["outcome"] == Outcome.OK and row["tar"] is not None]

    def _sample(self, number: int, tar: str, offset: int, size: int) -> Sample:
        try:
            data, reason = self.folder.read_range(tar, offset, size), ""
        except OSError as error:
            data, reason = b"", f"{tar} cannot be read: {error}"
        return Sample(data, [""], f"{tar}:{offset}", number, str(offset), tar, 0, 0, number, reason)


def _load(config: ScoreConfig, digest: str) -> Tools:
    weights = load_weights(config.checkpoint, config.model)
    if weights.shape is None or _digest(weights) != digest:
        raise RunError(
            f"{weights.source} holds other weights on {platform.node()} than where the run began; put the checkpoint where "
            "every node sees the same one"
        )
    device = choose_device(config.device, 0)
    model = CLIP(weights.shape, config.precision, logit_bias="logit_bias" in weights.state)
    weights.into(model)
    model.to(device).eval()
    # torch's threads are the cores that a task of Ray has
    threads = min(cores(), torch.get_num_threads())
    decoder = make_decoder("auto", weights.shape.image_size, threads, EVAL_BATCH, device)
    return Tools(model, Preparer(decoder, Tokenizer(), weights.shape.context), device)


def _summary(folder: Folder) -> dict[str, Any]:
    source = catalog.literal(folder, f"{HOME}/*.parquet")
    with catalog.connect(folder, views=()) as connection:
        row = connection.execute(
            f"""SELECT count(*), count(clip_score), avg(clip_score), quantile_disc(clip_score, [0.1, 0.5, 0.9])
            FROM read_parquet({source})"""
        ).fetchall()[0]
    pairs, scored, mean, points = row
    figures = {name: json.loads(f"{p:.4g}") for name, p in zip(("p10", "p50", "p90"), points or [], strict=False)}
    return {"pairs": pairs, "scored": scored, "unreadable": pairs - scored, "mean": mean and round(mean, 4), **figures}
