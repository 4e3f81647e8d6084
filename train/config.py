"""Settings of the training verbs. Cheap to import: no torch, no numpy."""

from __future__ import annotations

import dataclasses
from typing import Literal

from core.config import StageConfig, UnitsConfig, VerbConfig, setting

Precision = Literal["auto", "bf16", "fp16", "fp32", "int8", "fp8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(StageConfig):
    """Train a CLIP on shards: exact batches on any number of ranks, checkpoints that continue exactly.

    The run lives in WORK/runs/NAME. Running the same command again continues it from its newest checkpoint, on any
    number of ranks that divides the batch.
    """

    shards: tuple[str, ...] = setting(())
    """Folder of shards made by `shard`, or any webdataset folder, pattern or URL; none takes WORK/shards. Several are read
    as one set, or mixed by `weights`."""
    weights: tuple[float, ...] = setting(())
    """Share of each batch that each of several `shards` gets, in their order; only the ratios matter. An epoch then ends
    when the first set has been seen once, and the others go on where they are. None mixes them by their sizes."""
    on_bad_shard: Literal["stop", "skip"] = setting("stop", stable=False)
    """What a missing or damaged shard does at the start: `stop` names it, `skip` leaves it out and counts what is lost."""
    cache_gb: float = setting(100.0, stable=False)
    """Gigabytes of local disk, in ~/.cache/pairmill (XDG_CACHE_HOME), that keep shards of s3:// and other URLs; all ranks of
    a machine share them. Best is room for the whole set; local shards need none."""
    name: str = setting("main", stable=False)
    """Name of the run, a folder under WORK/runs. Other settings need another name."""
    model: str = setting("small-112")
    """Shape of both towers: `small-112` or `tiny-48` train on a CPU, `ViT-B-32` and up want GPUs."""
    batch_size: int = setting(256)
    """Pairs a step over all ranks. Larger batches give more negatives; ranks must divide it."""
    micro_batch: int = setting(0, stable=False)
    """Pairs a rank holds with activations at a time; 0 holds its whole share. Lower it when memory ends: the gradients
    stay those of the whole batch, at about a third more compute."""
    ranks: int = setting(0, stable=False)
    """Processes on this machine; 0 takes one a GPU, or one on a CPU, where threads already use every core."""
    epochs: int = setting(1)
    """Passes over the shards; ignored where `steps` is given."""
    steps: int = setting(0)
    """Optimiser steps; 0 takes as many as `epochs` hold."""
    lr: float = setting(5e-4)
    """Peak learning rate. 5e-4 suits batches up to some thousands, 1e-3 small towers; too high shows as spikes."""
    warmup: int = setting(0)
    """Steps of linear warm-up before the cosine; 0 takes a tenth of the run, at most 2,000. Too few
    collapse a small model: its loss then stays at the logarithm of the batch."""
    wd: float = setting(0.2)
    """Weight decay of matrices and embeddings (gains, biases and the scale have none)."""
    grad_clip: float = setting(1.0)
    """Largest gradient norm of a tower; a longer gradient is scaled down to it. 0 turns clipping off, norms are logged
    anyway."""
    ema: float = setting(0.0)
    """Weight of the past in a moving average of the weights, which is then what is evaluated and exported; 0 keeps none.
    0.999 suits some thousands of steps, 0.9999 more."""
    lock_image: bool = setting(False)
    """Train the text tower only, on the image tower that `init` brings (LiT)."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "int8", "fp8"] = setting("auto")
    """Type of the matrix products; parameters and the loss stay in fp32 either way. `auto` takes bf16 where the device
    multiplies it, else fp16 on GPUs and fp32 on CPUs; a run keeps what it began with. `int8` and `fp8` (SwitchBack) take the
    towers' linear layers in 8 bits on GPUs that can, the rest in bf16."""
    loss: Literal["clip", "siglip"] = setting("clip")
    """Symmetric softmax over the global batch, or SigLIP's pairwise sigmoid."""
    seed: int = setting(0)
    """Seed of the first weights, of the order of the samples and of every crop and caption choice."""
    init: str = setting("")
    """Weights to start from: a checkpoint or run folder of ours, an open_clip folder, a .safetensors or .pt file."""
    val: str = setting("", stable=False)
    """Shards to measure retrieval on; empty takes WORK/holdout if it is there, `none` turns it off."""
    zero_shot: str = setting("", stable=False)
    """Folder of class folders with pictures to classify at each evaluation; a folder's name is its class. A file
    templates.txt beside them replaces the general caption templates: one a line, `{}` where the class name goes."""
    eval_every: int = setting(0, stable=False)
    """Steps between evaluations; 0 evaluates at the end only."""
    checkpoint_every: int = setting(500, stable=False)
    """Steps between checkpoints; one is also written half an hour after the last, at the end, on SIGTERM and on SIGUSR1. 0
    counts no steps."""
    checkpoints: str = setting("", stable=False)
    """Folder or URL (s3://) to keep the checkpoints in; empty takes the run's own."""
    keep: int = setting(3, stable=False)
    """Newest checkpoints to keep; at least 2 leaves one to fall back to when the newest is damaged."""
    keep_every: int = setting(0, stable=False)
    """Checkpoints of every so many-th step are kept for good beside the newest; 0 keeps none."""
    log_every: int = setting(10, stable=False)
    """Steps a row of metrics.jsonl covers."""
    log: tuple[str, ...] = setting((), stable=False)
    """Where the numbers of metrics.jsonl and eval.jsonl go as well: `tensorboard` (files in the run's folder), `wandb`
    (WANDB_MODE=offline keeps them there too). Each needs its package."""
    crop: float = setting(0.9)
    """Smallest share of a picture's area that a random crop keeps; 1 turns random crops off (middle square)."""
    flip: bool = setting(False)
    """Mirror half of the pictures. Wrong for captions that say left or right, or pictures with writing."""
    colour: float = setting(0.0)
    """Strength of random changes of brightness, contrast, saturation and hue, 0 to 1 (SimCLR's scale: 0.4 is usual for
    CLIP on few pictures); an eighth of it is the share of pictures shown in grey. Wrong where captions name colours."""
    patch_dropout: float = setting(0.0)
    """Share of image patches dropped in training (FLIP): 0.5 nearly halves the image tower's work."""
    decode: Literal["auto", "cpu", "dali"] = setting("auto", stable=False)
    """Who decodes: `dali` on GPUs, libjpeg-turbo on CPUs; `auto` takes DALI where it and a GPU are there."""
    workers: int = setting(0, stable=False)
    """Processes that decode for a rank (threads of DALI's); 0 shares the machine's cores out over its ranks."""
    checkpointing: bool = setting(False, stable=False)
    """Recompute activations in the backward pass: much less memory for about a third more compute."""
    fsdp: bool = setting(False, stable=False)
    """Share out parameters and optimiser over the ranks (FSDP2) when a GPU cannot hold them; the same steps, more traffic."""
    compile: bool = setting(False, stable=False)
    """Compile the towers with torch.compile: pays on GPUs in long runs, not on CPUs."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", stable=False)
    """Where to train; `auto` takes GPUs where there are any, `cuda` refuses to start without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(VerbConfig):
    """Measure a checkpoint: retrieval on shards with captions, zero-shot classification on class folders."""

    checkpoint: str = setting("")
    """What to measure: a checkpoint or run folder, an open_clip folder, a .safetensors or .pt file; empty takes the
    newest checkpoint of the run `name`."""
    name: str = setting("main")
    """Run whose newest checkpoint is measured and whose eval.jsonl receives the figures."""
    model: str = setting("")
    """Shape of the towers, needed only for bare weight files, which do not name theirs."""
    val: str = setting("")
    """Shards to measure retrieval on; empty takes WORK/holdout if it is there, `none` turns it off."""
    zero_shot: str = setting("")
    """Folder of class folders with pictures; a folder's name is its class (underscores read as spaces). A file
    templates.txt beside them replaces the general caption templates: one a line, `{}` where the class name goes."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "int8", "fp8"] = setting("auto")
    """Type of the matrix products, as in `train`."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """Where to run; `auto` takes a GPU where there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig(UnitsConfig):
    """Give every fetched pair a `clip_score`: the cosine of picture and caption by a checkpoint, for `dedup` to filter by.

    It runs between ingest and dedup: in one process, whose threads use every core (or the GPU), or on a Ray cluster.
    """

    checkpoint: str = setting("")
    """Whose embeddings to take: a checkpoint or run folder, an open_clip folder, a .safetensors or .pt file; empty takes the
    newest checkpoint of WORK/runs/main."""
    model: str = setting("")
    """Shape of the towers, needed only for bare weight files, which do not name theirs."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "int8", "fp8"] = setting("auto")
    """Type of the matrix products, as in `train`."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", stable=False)
    """Where to run; `auto` takes a GPU where there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(VerbConfig):
    """Write a checkpoint as files that open_clip loads."""

    checkpoint: str = setting("")
    """What to export: a checkpoint or run folder; empty takes the newest checkpoint of the run `name`."""
    name: str = setting("main")
    """Run whose newest checkpoint is exported."""
    out: str = setting("")
    """Folder to write, which open_clip loads as `local-dir:OUT`; empty takes WORK/runs/NAME/export. A name that ends in .pt
    is that of one file instead, a state dict for open_clip's `--pretrained`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseConfig(VerbConfig):
    """Say what a run waits for: read its metrics, then try the loader alone, the model alone, and both.

    Settings left empty are those of the run NAME; without such a run the trials alone decide.
    """

    name: str = setting("main")
    """Run to look at, finished or still running; its settings are used for the trials."""
    shards: str = setting("")
    """Shards to read in the trials; empty takes the run's, or WORK/shards."""
    model: str = setting("")
    """Shape of the towers; empty takes the run's, or small-112."""
    batch_size: int = setting(0)
    """Pairs a step of the trials; 0 takes one rank's share of the run's batch, or 256."""
    seconds: float = setting(6.0)
    """Seconds for each trial; 0 reads the run's metrics only. Longer is steadier on a busy machine."""
    budget: float = setting(0.0)
    """Largest share of a step that may be waiting, as 0.1; above it the exit code is 3. 0 sets no budget."""
    apply: int = setting(0)
    """Number of the fix to try, 1 for the first: the loop runs once more with it, on a copy where it changes the data. Of
    one that cannot be tried from here (more cores) the next best is tried instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(VerbConfig):
    """What a run will cost: operations, days or MFU, and memory a GPU. Arithmetic only; nothing is run."""

    what: Literal["run", "scaling"] = setting("run", argument=True)
    """`run` plans one; `scaling` fits error against compute over the runs of a CSV file, and draws it."""
    table: str = setting("", argument=True)
    """CSV file of `scaling`: compute, error (or accuracy), and optionally name and data."""
    model: str = setting("ViT-L-14")
    """Shape of both towers, as in `train`."""
    pairs: float = setting(400e6)
    """Pairs in the data set; 400e6 is fine."""
    epochs: float = setting(32.0)
    """Passes over the pairs."""
    gpus: int = setting(8)
    """Number of GPUs."""
    gpu: str = setting("A100-80GB")
    """Kind of GPU; an unknown name lists the known ones."""
    days: float = setting(0.0)
    """Days the run took or may take: gives the utilisation (MFU) this means. 0 plans the days from `mfu`."""
    mfu: float = setting(0.4)
    """Share of the GPUs' peak that does the model's work; 0.3 to 0.5 is usual for ViT-L on A100s, less for small models."""
    price: float = setting(0.0)
    """What a GPU costs an hour, in any currency; gives the cost of the run."""
    batch_size: int = setting(32768)
    """Pairs a step over all GPUs. How many of them a GPU holds at a time is part of the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig(VerbConfig):
    """Check this machine: what is installed, what is fast, what is slow or wrong, and what to do about it."""
