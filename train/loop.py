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
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from core.config import plain
from core.errors import RunError
from core.metrics import Jsonl
from core.progress import Progress
from core.runner import cores
from shardkit.reader import ShardSet, user_cache
from train import card, checkpoint, memory
from train.boards import Boards, ShownJsonl
from train.config import TrainConfig
from train.data import Batch, Loader, Plan, Preparer, Quarantine, make_decoder
from train.distributed import World, barrier, gather_objects, is_sharded, wrap
from train.ema import Average
from train.evaluate import EVAL_BATCH, Evaluator
from train.export import Weights, load_weights
from train.gradcache import LossFn, gradcache_step
from train.guard import MAX_ROLLBACKS, MAX_SKIPPED, Guard, LossScale, clip_by_tower, total_norm
from train.loss import clip_loss_and_accuracy, siglip_loss
from train.meter import Meter, peak_flops
from train.models import ModelConfig, model_config
from train.optim import clamp_log_scale, lr_at, make_optimizer, set_lr
from train.tokenizer import Tokenizer
from train.towers import CLIP, unwrap

log = logging.getLogger("pairmill.train")

SAVE_AFTER_S = 1800.0  # what a run may lose at most when it is killed, however slow its steps


def train(config: TrainConfig, ranks: World, home: Path, val: str) -> dict[str, Any]:
    """Train from the newest checkpoint in `home` (or from nothing) to the end; the same summary on every rank.

    `val` is the folder of the retrieval set, or empty. Only rank 0 writes.

    Raises:
        ConfigError, InputError: settings or shards that cannot be trained on.
        WorkFolderError: the checkpoints are of other shards, tokenizer or model.
        RunError: too many unreadable pictures or non-finite steps, or the loader starved.
    """
    # ---- data -------------------------------------------------------------------------------------------------------
    plan, tokenizer = _plan(config), Tokenizer()
    total = config.steps or config.epochs * plan.steps_per_epoch
    if ranks.main:
        log.info("%s", plan.describe())

    # ---- model, from given weights or where the run stopped ---------------------------------------------------------
    writer = checkpoint.Writer(config.checkpoints or str(home / "checkpoints"), config.keep, config.keep_every)
    saved = _newest_on_all_ranks(writer.home.url, ranks)
    weights = load_weights(config.init, config.model) if config.init and saved is None else None
    shape = _shape(config, saved, weights)
    watch = memory.watch(config, ranks, shape, plan, tokenizer)
    share = plan.batch_size // ranks.size
    # its processes start while the model is made
    decoder = make_decoder(config.decode, shape.image_size, _workers(config, ranks), share, ranks.device)
    clip = _model(config, shape, weights)
    fixed = _fixed(config, plan, tokenizer, shape)
    start = _continue(clip, saved, fixed, ranks, home)

    # ---- optimiser --------------------------------------------------------------------------------------------------
    model = wrap(clip, ranks, sharded=config.fsdp)
    if config.compile:
        clip.visual.compile()
    optimizer = make_optimizer(clip, config.lr, config.wd)
    if saved is not None:
        checkpoint.restore_optimizer(clip, optimizer, saved.optimizer)

    # ---- loop, evaluation, end --------------------------------------------------------------------------------------
    with (
        contextlib.closing(decoder),
        _stop_signals() as stop,
        _log_files(config, ranks, home, start) as (rows, figures),
        card.watched(ranks.device) as readings,
    ):
        preparer = Preparer(decoder, tokenizer, shape.context)
        loader = Loader(
            plan, preparer, Quarantine(home / "quarantine.jsonl", ranks.rank), rank=ranks.rank, ranks=ranks.size,
            start=start, stop=total, crop=config.crop, flip=config.flip, colour=config.colour,
        )  # fmt: skip
        evaluator = Evaluator(ranks, home, clip, preparer, val, min(EVAL_BATCH, share), config.zero_shot, figures)
        meter = Meter(ranks, loader, shape, peak_flops(ranks, config.precision), rows, watch, readings)
        trainer = Trainer(config, ranks, home, model, optimizer, meter, evaluator, writer, fixed, total)
        if saved is not None:
            trainer.restore(saved)
        _loop(trainer, loader, stop, start)
        if trainer.step == total:
            trainer.evaluate(examples=True)
    writer.finish()
    return trainer.summary()


def _loop(trainer: Trainer, loader: Loader, stop: threading.Event, start: int) -> None:
    """Steps from `start` to the end, or to the first step after a signal."""
    config, total = trainer.config, trainer.total
    with (
        loader,
        Progress(f"train {config.name}", total, "steps", done=start) if trainer.ranks.main else _silence() as progress,
    ):
        for batch in loader:
            stopping, due = trainer.one_step(batch, stop.is_set())
            step, last = trainer.step, trainer.step == total
            due = due or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)
            saving = stopping or last or due
            if saving or step % config.log_every == 0:
                row = trainer.log_row()  # also before a checkpoint, so that no interval spans one
                progress.advance(text=f"loss {math.nan if row['loss'] is None else row['loss']:.3f}")
            progress.advance(1)
            if saving:
                trainer.save()
            if stopping and not last:
                trainer.writer.finish()
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
        writer: checkpoint.Writer,
        fixed: dict[str, Any],
        total: int,
    ) -> None:
        self.config, self.ranks, self.home, self.model, self.optimizer = config, ranks, home, model, optimizer
        self.meter, self.evaluator, self.writer, self.fixed, self.total = meter, evaluator, writer, fixed, total
        self.step = meter.loader.start
        self.objective = Objective(config.loss, meter.loader.plan.shard_set)
        self.warmup = config.warmup or min(2000, math.ceil(total / 10))
        self.lr = 0.0
        self.norms: dict[str, float | None] = {}
        self.guard = Guard()
        self.loss_scale = LossScale.of(config.precision)
        self.average = Average(unwrap(model), config.ema) if config.ema else None
        self._evaluated: dict[str, Any] = {}

    def restore(self, saved: checkpoint.Saved) -> None:
        """Go on with the averages, the guard and the loss scale of a checkpoint whose weights the model has already."""
        if self.average is not None:
            self.average.restore(saved.average)
        self.guard.restore(saved.meta.get("guard", {}))
        self.loss_scale = LossScale(**saved.meta.get("loss_scale", {"value": self.loss_scale.value}))

    def one_step(self, batch: Batch, stop: bool) -> tuple[bool, bool]:
        """One update of the weights; returns whether any rank was told to stop, and whether it is time to save."""
        self.model.train()
        if self.config.lock_image:
            unwrap(self.model).visual.eval()  # no patch dropout, no running statistics
        _seed(self.config.seed, batch.step, self.ranks.rank)
        with self.meter.copying.timed():
            batch = batch.to(self.ranks.device)
        with self.meter.computing.timed():
            self.optimizer.zero_grad(set_to_none=True)
            micro = self.config.micro_batch or None
            loss_fn, factor = self.objective.of(batch), self.loss_scale.value
            loss = gradcache_step(
                self.model, batch.pixels_bCSS, batch.tokens_bL, lambda *x: loss_fn(*x) * factor, micro
            ) / factor  # fmt: skip
            self.loss_scale.divide(self.model.parameters())
            norms = clip_by_tower(self.model, self.config.grad_clip)
            # One look at the device a step: whether to use the gradients has to be known before they are used.
            values = torch.stack([loss.float(), total_norm(norms), *(n.float() for n in norms.values())]).tolist()
            fault = self.guard.fault(values[0], values[1])
            broken, spike, stopping, due = _any_rank(
                self.ranks, fault == "not finite", fault == "spike", stop, self._time_to_save()
            )
            fault = "not finite" if broken else "spike" if spike else ""
            if self.loss_scale.overflowed(not broken):
                fault = "overflow"
            if not fault:
                self.lr = lr_at(batch.step, peak=self.config.lr, warmup=self.warmup, total=self.total)
                set_lr(self.optimizer, self.lr)
                self.optimizer.step()
                clamp_log_scale(self.model)
                if self.average is not None:
                    self.average.update(batch.step)
        self.step = batch.step + 1
        self.meter.add(batch, values[0], self.objective.accuracy(), values[1], not fault)
        self.norms = {tower: n if math.isfinite(n) else None for tower, n in zip(norms, values[2:], strict=True)}
        if fault != "overflow":  # which fp16 does now and then, and which says nothing about the run
            self.guard.note(values[0], fault)
        if fault and fault != "overflow":
            self._leave_out(batch, values, fault)
        return stopping, due

    def _time_to_save(self) -> bool:
        """By rank 0's clock, because clocks differ."""
        return self.ranks.main and time.monotonic() - self.writer.saved_at >= SAVE_AFTER_S

    def _leave_out(self, batch: Batch, values: list[float], fault: str) -> None:
        """A step was left out: say why and with which samples, and go back when too many were."""
        uids = [uid for part in gather_objects(batch.uids) for uid in part]
        if self.ranks.main:
            row = {"step": self.step, "why": fault, "loss": str(values[0]), "grad_norm": str(values[1]), "uids": uids}
            Jsonl(self.home / "skipped.jsonl").append(row)
            log.warning("step %d skipped (%s): loss %s, gradient norm %s", self.step, fault, *values[:2])
        if self.guard.lost:
            self._roll_back(fault)

    def _roll_back(self, fault: str) -> None:
        """Take the weights of the newest checkpoint from before the steps that were left out, and go on with new data.

        Raises:
            RunError: there is none, or this was done too often; of mere spikes the new level is accepted instead.
        """
        self.writer.finish()
        first, times = self.step - self.guard.skipped, self.guard.rollbacks + 1
        saved = _newest_on_all_ranks(self.writer.home.url, self.ranks, below=first) if times <= MAX_ROLLBACKS else None
        if saved is None and fault == "spike":
            log.warning("the loss stays where it jumped to; from step %d on that counts as usual", self.step)
            self.guard.forget()
            return
        if saved is None:
            raise RunError(
                f"{MAX_SKIPPED} steps in a row had no finite loss, up to step {self.step}; lower --lr, or look at the "
                f"samples in {self.home / 'skipped.jsonl'}, then continue from an older checkpoint"
            )
        log.warning(
            "step %d: %d steps in a row were left out; back to the weights of %s", self.step, MAX_SKIPPED, saved.path
        )
        checkpoint.restore_model(unwrap(self.model), saved.model)
        checkpoint.restore_optimizer(unwrap(self.model), self.optimizer, saved.optimizer)
        if self.average is not None:
            self.average.restore(saved.average)
        self.guard.restore({**saved.meta.get("guard", {}), "rollbacks": times, "skipped": 0})

    def log_row(self) -> dict[str, Any]:
        scale = float(unwrap(self.model).logit_scale.detach().exp())
        return self.meter.row(self.step, lr=self.lr, scale=scale, grad_norms=self.norms)

    def save(self) -> None:
        average = None if self.average is None else self.average.tensors
        files = checkpoint.snapshot(unwrap(self.model), self.optimizer, average) if self._holds_all() else {}
        if self.ranks.main:
            epoch = self.step // self.meter.loader.plan.steps_per_epoch
            seen = {
                "epoch": epoch,
                "samples_seen": self.step * self.config.batch_size,
                "guard": self.guard.state(),
                "loss_scale": dataclasses.asdict(self.loss_scale),
            }
            self.writer.save(self.step, files, {**self.fixed, **seen})

    def _holds_all(self) -> bool:
        """Whether this rank has a part in a checkpoint: rank 0 writes it, and of a sharded model all give theirs."""
        return self.ranks.main or is_sharded(self.model)

    def evaluate(self, *, examples: bool) -> None:
        with contextlib.nullcontext() if self.average is None else self.average.used():
            self._evaluated = self.evaluator.run(self.step, examples=examples)

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.step,
            "samples_seen": self.step * self.config.batch_size,
            "samples_left_out": self.meter.loader.plan.shard_set.lost,
            "loss": self._last_loss(),
            **self.meter.summary(),
            "checkpoint": self.writer.path(self.step),
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
        self.repeats = torch.from_numpy(groups).unique().numel() < len(groups)
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


def _plan(config: TrainConfig) -> Plan:
    shards = config.shards or f"{config.work}/shards"
    shard_set = ShardSet.open(shards, on_bad=config.on_bad_shard, cache=user_cache(config.cache_gb))
    return Plan.of(shard_set, config.seed, config.batch_size, config.weights)


def _shape(config: TrainConfig, saved: checkpoint.Saved | None, weights: Weights | None) -> ModelConfig:
    """The shape to train, with the activation that given weights need: it is no matter of taste for them."""
    shape = dataclasses.replace(model_config(config.model), patch_dropout=config.patch_dropout)
    given = saved.shape if saved is not None else weights.shape if weights is not None else None
    return shape if given is None else dataclasses.replace(shape, quick_gelu=given.quick_gelu)


def _model(config: TrainConfig, shape: ModelConfig, weights: Weights | None) -> CLIP:
    torch.manual_seed(config.seed)
    clip = CLIP(shape, config.precision, logit_bias=config.loss == "siglip")
    clip.set_checkpointing(config.checkpointing)
    clip.visual.requires_grad_(not config.lock_image)
    if weights is not None:
        weights.into(clip)
    return clip


def _continue(clip: CLIP, saved: checkpoint.Saved | None, fixed: dict[str, Any], ranks: World, home: Path) -> int:
    """Take the weights of a checkpoint, if there is one; returns the step that the run goes on from."""
    start = 0
    if saved is not None:
        checkpoint.check_same(saved, fixed)
        clip.load_state_dict(saved.model)
        start = saved.step
    if ranks.main:
        _forget_after(home, start)
    barrier()
    return start


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
        # not where the data and the first weights lie: another machine may have them elsewhere, or need the latter no more
        checkpoint.SETTINGS: {k: v for k, v in plain(config.fingerprint()).items() if k not in ("shards", "init")},
    }


def _newest_on_all_ranks(home: str, ranks: World, below: int | None = None) -> checkpoint.Saved | None:
    """Rank 0 chooses, all read the same one."""
    saved = checkpoint.newest(home, below) if ranks.main else None
    path = gather_objects(saved.path if saved is not None else None)[0]
    return saved if ranks.main or path is None else checkpoint.load(path)


def _forget_after(home: Path, start: int) -> None:
    """Drop what was logged after the checkpoint that the run continues from: it will be done and logged again."""
    if start:
        log.info("continuing after step %d", start)
    for name in ("metrics.jsonl", "eval.jsonl", "quarantine.jsonl", "skipped.jsonl"):
        # quarantine rows carry the number of the step they were met in, the others the number of steps done
        last = start - 1 if name == "quarantine.jsonl" else start
        Jsonl(home / name).keep(lambda row, last=last: row.get("step", math.inf) <= last)


@contextlib.contextmanager
def _log_files(config: TrainConfig, ranks: World, home: Path, start: int) -> Iterator[tuple[Jsonl, Jsonl]]:
    """metrics.jsonl and eval.jsonl, which rank 0 shows elsewhere too where `log` says so."""
    if not (ranks.main and config.log):
        yield Jsonl(home / "metrics.jsonl"), Jsonl(home / "eval.jsonl")
        return
    with contextlib.closing(Boards(config, home, start)) as boards:
        yield ShownJsonl(home / "metrics.jsonl", boards, "train"), ShownJsonl(home / "eval.jsonl", boards, "eval")


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


def _workers(config: TrainConfig, ranks: World) -> int:
    """Decoders of this rank; the launcher has divided the cores by the local ranks for OpenMP already."""
    return config.workers or max(1, min(cores(), torch.get_num_threads()))


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
