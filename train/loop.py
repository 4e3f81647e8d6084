"""What every rank of a training run executes, top to bottom.

A run is a function of its settings and its shards: the step is all its state. Killed at any point, it continues from
its newest checkpoint and repeats the same steps; on one process in fp32 on a CPU to the last bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from core.errors import RunError
from core.metrics import Jsonl
from core.progress import Progress
from core.runner import cores
from shardkit.reader import ShardSet, user_cache
from train import checkpoint
from train.config import TrainConfig
from train.data import Batch, Loader, Plan, Preparer, Quarantine, make_decoder
from train.distributed import World, barrier, gather_objects, wrap
from train.evaluate import EVAL_BATCH, Evaluator
from train.export import load_weights
from train.gradcache import LossFn, gradcache_step
from train.loss import clip_loss_and_accuracy, siglip_loss
from train.meter import Meter, peak_flops
from train.models import ModelConfig, model_config
from train.optim import clamp_log_scale, clip_grad_norm, lr_at, make_optimizer, set_lr
from train.tokenizer import Tokenizer
from train.towers import CLIP, unwrap

log = logging.getLogger("pairmill.train")

MAX_SKIPPED = 10  # steps in a row without a finite loss: the weights are lost, and more steps will not bring them back


def train(config: TrainConfig, ranks: World, home: Path, val: str) -> dict[str, Any]:
    """Train from the newest checkpoint in `home` (or from nothing) to the end; the same summary on every rank.

    `val` is the folder of the retrieval set, or empty. Only rank 0 writes.

    Raises:
        ConfigError, InputError: settings or shards that cannot be trained on.
        WorkFolderError: the checkpoints are of other shards, tokenizer or model.
        RunError: too many unreadable pictures or non-finite steps, or the loader starved.
    """
    # ---- data -------------------------------------------------------------------------------------------------------
    shards = config.shards or f"{config.work}/shards"
    shard_set = ShardSet.open(shards, on_bad=config.on_bad_shard, cache=user_cache(config.cache_gb))
    plan = Plan.of(shard_set, config.seed, config.batch_size, config.weights)
    total = config.steps or config.epochs * plan.steps_per_epoch
    tokenizer = Tokenizer()
    shape = dataclasses.replace(model_config(config.model), patch_dropout=config.patch_dropout)

    # ---- model ------------------------------------------------------------------------------------------------------
    saved = _newest_on_all_ranks(home / "checkpoints", ranks)
    weights = load_weights(config.init, config.model) if config.init and saved is None else None
    given = saved.shape if saved is not None else weights.shape if weights is not None else None
    if given is not None:  # the activation is no matter of taste for given weights
        shape = dataclasses.replace(shape, quick_gelu=given.quick_gelu)
    torch.manual_seed(config.seed)
    clip = CLIP(shape, config.precision, logit_bias=config.loss == "siglip")
    clip.set_checkpointing(config.checkpointing)
    if weights is not None:
        weights.into(clip)

    # ---- continue where the run stopped -----------------------------------------------------------------------------
    fixed = _fixed(config, plan, tokenizer, shape)
    if saved is not None:
        checkpoint.check_same(saved, fixed)
        clip.load_state_dict(saved.model)
    start = saved.step if saved is not None else 0
    if ranks.main:
        _forget_after(home, start)
    barrier()

    # ---- optimiser --------------------------------------------------------------------------------------------------
    model = wrap(clip, ranks)
    if config.compile:
        clip.visual.compile()
    optimizer = make_optimizer(clip, config.lr, config.wd)
    if saved is not None:
        checkpoint.restore_optimizer(clip, optimizer, saved.optimizer)

    # ---- the loop ---------------------------------------------------------------------------------------------------
    decoder = make_decoder(
        config.decode, shape.image_size, _threads(config, ranks), plan.batch_size // ranks.size, ranks.device
    )
    preparer = Preparer(decoder, tokenizer, shape.context)
    evaluator = Evaluator(ranks, home, clip, preparer, val, min(EVAL_BATCH, plan.batch_size // ranks.size))
    loader = Loader(
        plan, preparer, Quarantine(home / "quarantine.jsonl", ranks.rank, config.max_bad),
        rank=ranks.rank, ranks=ranks.size, start=start, stop=total, crop=config.crop, flip=config.flip,
        jitter=config.jitter, gray=config.gray,
    )  # fmt: skip
    meter = Meter(ranks, loader, shape, peak_flops(ranks, config.precision), Jsonl(home / "metrics.jsonl"))
    trainer = Trainer(config, ranks, home, model, optimizer, meter, evaluator, fixed, total)
    with contextlib.closing(decoder), _stop_signals() as stop:
        _loop(trainer, loader, stop, start)

        # ---- evaluation and end -------------------------------------------------------------------------------------
        if trainer.step == total:
            trainer.evaluate(examples=True)
    return trainer.summary()


def _loop(trainer: Trainer, loader: Loader, stop: threading.Event, start: int) -> None:
    """Steps from `start` to the end, or to the first step after a signal."""
    config, total = trainer.config, trainer.total
    with (
        loader,
        Progress(f"train {config.name}", total, "steps", done=start) if trainer.ranks.main else _silence() as progress,
    ):
        for batch in loader:
            stopping = trainer.one_step(batch, stop.is_set())
            step, last = trainer.step, trainer.step == total
            saving = stopping or last or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)
            if saving or step % config.log_every == 0:
                row = trainer.log_row()  # also before a checkpoint, so that no interval spans one
                progress.advance(text=f"loss {math.nan if row['loss'] is None else row['loss']:.3f}")
            progress.advance(1)
            if saving:
                trainer.save()
            if stopping and not last:
                raise RunError(f"stopped by a signal after step {step} of {total}; run the same command to continue")
            if not last and config.eval_every > 0 and step % config.eval_every == 0:
                trainer.evaluate(examples=False)


class Trainer:
    """Model, optimiser and files of a run, and what is done with them at each step."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: World,
        home: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        meter: Meter,
        evaluator: Evaluator,
        fixed: dict[str, Any],
        total: int,
    ) -> None:
        self.config, self.ranks, self.home, self.model, self.optimizer = config, ranks, home, model, optimizer
        self.meter, self.evaluator, self.fixed, self.total = meter, evaluator, fixed, total
        self.step = meter.loader.start
        self.objective = Objective(config.loss, meter.loader.plan.shard_set)
        self.warmup = config.warmup or min(2000, math.ceil(total / 10))
        self.lr = 0.0
        self._skipped = 0
        self._evaluated: dict[str, Any] = {}

    def one_step(self, batch: Batch, stop: bool) -> bool:
        """One update of the weights; returns whether any rank was told to stop."""
        self.model.train()
        _seed(self.config.seed, batch.step, self.ranks.rank)
        with self.meter.timed(self.meter.h2d):
            batch = batch.to(self.ranks.device)
        with self.meter.timed(self.meter.compute):
            self.optimizer.zero_grad(set_to_none=True)
            micro = self.config.micro_batch or None
            loss = gradcache_step(self.model, batch.pixels_bCSS, batch.tokens_bL, self.objective.of(batch), micro)
            norm = clip_grad_norm(self.model.parameters(), self.config.grad_clip or None)
            # One look at the device a step: whether to use the gradients has to be known before they are used.
            values = torch.stack([loss.float(), norm.float()]).tolist()
            broken, stopping = _any_rank(self.ranks, not all(map(math.isfinite, values)), stop)
            if not broken:
                self.lr = lr_at(batch.step, peak=self.config.lr, warmup=self.warmup, total=self.total)
                set_lr(self.optimizer, self.lr)
                self.optimizer.step()
                clamp_log_scale(self.model)
        self.step = batch.step + 1
        self.meter.add(batch, values[0], self.objective.accuracy(), values[1], not broken)
        self._skipped = self._skipped + 1 if broken else 0
        if broken:
            self._note_skipped(batch, values)
        return stopping

    def _note_skipped(self, batch: Batch, values: list[float]) -> None:
        """A step whose loss or gradient is not finite was left out: say with which samples."""
        uids = [uid for part in gather_objects(batch.uids) for uid in part]
        if self.ranks.main:
            row = {"step": self.step, "loss": str(values[0]), "grad_norm": str(values[1]), "uids": uids}
            Jsonl(self.home / "skipped.jsonl").append(row)
            log.warning("step %d skipped: loss %s, gradient norm %s", self.step, *values)
        if self._skipped >= MAX_SKIPPED:
            raise RunError(
                f"{MAX_SKIPPED} steps in a row had no finite loss, up to step {self.step}; lower --lr, or look at the "
                f"samples in {self.home / 'skipped.jsonl'}, then continue from an older checkpoint"
            )

    def log_row(self) -> dict[str, Any]:
        scale = float(unwrap(self.model).logit_scale.detach().exp())
        return self.meter.row(self.step, lr=self.lr, scale=scale)

    def save(self) -> None:
        if self.ranks.main:
            epoch = self.step // self.meter.loader.plan.steps_per_epoch
            meta = {**self.fixed, "epoch": epoch, "samples_seen": self.step * self.config.batch_size}
            checkpoint.save(self.home / "checkpoints", self.step, unwrap(self.model), self.optimizer, meta)
            checkpoint.prune(self.home / "checkpoints", self.config.keep)

    def evaluate(self, *, examples: bool) -> None:
        self._evaluated = self.evaluator.run(self.step, examples=examples)

    def summary(self) -> dict[str, Any]:
        path = self.home / "checkpoints" / f"step_{self.step:08d}"
        return {
            "steps": self.step,
            "samples_seen": self.step * self.config.batch_size,
            "samples_left_out": self.meter.loader.plan.shard_set.lost,
            "loss": self._last_loss(),
            **self.meter.summary(),
            "checkpoint": str(path),
            "run": str(self.home),
            "data": self.fixed["data"],
            **self._evaluated,
        }

    def _last_loss(self) -> float | None:
        rows = self.meter.file.rows()
        return rows[-1]["loss"] if rows else None


class Objective:
    """The loss of one batch as `gradcache_step` calls it, and the accuracy that fell out of its last evaluation."""

    def __init__(self, kind: str, shard_set: ShardSet) -> None:
        self.kind = kind
        groups = shard_set.image_groups()
        # Known for the whole set, so all ranks agree, and masks that mask nothing cost nothing.
        self.repeats = len(set(groups.tolist())) < len(groups)
        self._accuracy: Tensor | None = None

    def of(self, batch: Batch) -> LossFn:
        valid_b, group_b = batch.valid_b, batch.group_b if self.repeats else None
        if self.kind == "siglip":
            return lambda img, txt, scale, bias: siglip_loss(img, txt, scale, bias, valid_b=valid_b, group_b=group_b)

        def evaluate(img: Tensor, txt: Tensor, scale: Tensor) -> Tensor:
            loss, self._accuracy = clip_loss_and_accuracy(img, txt, scale, valid_b=valid_b, group_b=group_b)
            return loss

        return evaluate

    def accuracy(self) -> float | None:
        return None if self._accuracy is None else float(self._accuracy)


# -- small parts ------------------------------------------------------------------------------------------------------


def _fixed(config: TrainConfig, plan: Plan, tokenizer: Tokenizer, shape: ModelConfig) -> dict[str, Any]:
    """What no continuation may change (`checkpoint.FIXED`), and the name of the model for whoever reads it back."""
    return {
        "data": plan.shard_set.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "model": dataclasses.asdict(shape),
        "model_name": config.model,
        "loss": config.loss,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "lanes": plan.lanes,
    }


def _newest_on_all_ranks(home: Path, ranks: World) -> checkpoint.Saved | None:
    """Rank 0 chooses, all read the same one."""
    saved = checkpoint.newest(home) if ranks.main else None
    path = gather_objects(saved.path if saved is not None else None)[0]
    return saved if ranks.main or path is None else checkpoint.load(path)


def _forget_after(home: Path, start: int) -> None:
    """Drop what was logged after the checkpoint that the run continues from: it will be done and logged again."""
    if start:
        log.info("continuing after step %d", start)
    for name in ("metrics.jsonl", "eval.jsonl", "quarantine.jsonl", "skipped.jsonl"):
        # quarantine rows carry the number of the step they were met in, the others the number of steps done
        last = start - 1 if name == "quarantine.jsonl" else start
        Jsonl(home / name).keep(lambda row, last=last: row["step"] <= last)


def _seed(seed: int, step: int, rank: int) -> None:
    """Random numbers of one step (patch dropout), so that none have to be saved."""
    torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{step}/{rank}".encode()) >> 1)


def _any_rank(ranks: World, *flags: bool) -> list[bool]:
    """Whether each flag is set on any rank."""
    if ranks.size == 1:
        return list(flags)
    import torch.distributed as dist

    packed = torch.tensor(flags, dtype=torch.int32, device=ranks.device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return [bool(value) for value in packed.tolist()]


def _threads(config: TrainConfig, ranks: World) -> int:
    """Decode threads of this rank; the launcher has divided the cores by the local ranks for OpenMP already."""
    return config.threads or max(1, min(cores(), torch.get_num_threads()))


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGUSR1 set; the run then ends after the step it is in, with a checkpoint."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: FrameType | None) -> None:
        log.warning("%s: a checkpoint follows after this step", signal.Signals(number).name)
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Silence:
    def advance(self, n: int = 0, *, text: str = "") -> None:
        """Other ranks show nothing."""


@contextlib.contextmanager
def _silence() -> Iterator[_Silence]:
    yield _Silence()
