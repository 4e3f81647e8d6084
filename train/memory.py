"""Memory of a run: estimated before it starts, where it may be too much, and compared with what its first steps took.

On a GPU the estimate is `budget.memory`. On a CPU it is what the process grows by: the same parts, but with the weights of
written-out attention and what the C allocator and oneDNN keep for themselves.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

import psutil
import torch

from train.budget import memory
from train.config import TrainConfig
from train.data import QUEUE_DEPTH, Plan
from train.distributed import World
from train.models import MLP_RATIO, ModelConfig, param_count, resnet_convolutions
from train.tokenizer import Tokenizer

log = logging.getLogger("pairmill.train")

COMPARED = 20  # steps after which nothing grows any more
LOOKED_AT = 256  # captions
A_BLOCK = 4 + 3 + 1 + 2 * MLP_RATIO  # saved by a block, in widths a token: see budget.activation_bytes
POOLED_BLOCK = 0.35  # of a block is computed for all positions in the last one, which is read at one position
PASSING = 10  # widths a token that the backward pass of one block holds at a time
# Measured on small-112, tiny-48 and small-rn-112 over 20 steps with captions of many lengths. The optimiser's temporary
# values and the bf16 copies of the weights take 3.2 bytes a parameter; of activations 15 % lie idle between what the
# allocator gave out. In bf16 oneDNN keeps code and working space for every shape it has met, which comes to as much again.
PASSING_PARAMS = 3.2
IDLE, IDLE_BF16 = 1.15, 2.0
CODE_BF16 = 125e6


@dataclass(frozen=True)
class Load:
    """What decides a rank's memory: pairs of its share and at a time, mean text positions, bytes of a value."""

    share: int
    at_once: int
    ranks: int
    text_len: float
    checkpointing: bool
    precision: str

    @property
    def element(self) -> int:
        return 2 if self.precision != "fp32" else 4


def estimate(cfg: ModelConfig, load: Load, *, gpu: bool) -> float:
    """Bytes that a rank needs for a run, beyond what the process holds before it has a model."""
    if gpu:
        return memory(
            cfg, batch=load.share * load.ranks, gpus=load.ranks, micro=load.at_once, text_len=load.text_len,
            checkpointing=load.checkpointing,
        )["total"]  # fmt: skip
    params = 16.0 * param_count(cfg) + PASSING_PARAMS * param_count(cfg)
    pixels = 3.0 * cfg.image_size**2 * (QUEUE_DEPTH + 2) * load.share
    idle, code = (IDLE_BF16, CODE_BF16) if load.precision == "bf16" else (IDLE, 0.0)
    return params + idle * load.at_once * _a_pair(cfg, load) + code + pixels


def _a_pair(cfg: ModelConfig, load: Load) -> float:
    """Bytes that one pair's activations hold until the backward pass, on a CPU."""
    towers = [(load.text_len, cfg.text_width, cfg.text_layers, cfg.text_heads)]
    values = 2.0 * 3 * cfg.image_size**2
    if isinstance(cfg.vision_layers, int):
        kept = max(1, int(cfg.patches * (1.0 - cfg.patch_dropout)))
        towers.append((kept + 1.0, cfg.vision_width, cfg.vision_layers, cfg.vision_heads))
    else:
        values += 2.0 * sum(outputs * side**2 for _, outputs, _, side in resnet_convolutions(cfg))
    for tokens, width, layers, heads in towers:
        block = tokens * (A_BLOCK * width + heads * tokens)
        blocks = layers - 1 + POOLED_BLOCK
        values += block + blocks * tokens * width if load.checkpointing else blocks * block
        values += PASSING * tokens * width
    return load.element * values


class Watch:
    """One rank's: made before the model, asked after each step."""

    def __init__(self, cfg: ModelConfig, load: Load, device: torch.device) -> None:
        self.device = device
        self.base = _held(device)
        self.estimated = estimate(cfg, load, gpu=device.type == "cuda")
        self.measured: float | None = None
        free = _free(device)
        if self.estimated > free:
            log.warning(
                "about %.2f GB of memory are needed a rank and %.2f GB are free; if it does not fit, use --micro-batch %d or "
                "--checkpointing", self.estimated / 1e9, free / 1e9, max(1, load.at_once // 2),
            )  # fmt: skip

    def after(self, steps: int) -> None:
        """After so many steps of this process: compare, once."""
        if steps == COMPARED:
            self.measured = _peak(self.device) - self.base
            log.info(
                "memory: %.2f GB estimated, %.2f GB taken (%+.0f %%)", self.estimated / 1e9, self.measured / 1e9,
                100 * (self.estimated / self.measured - 1) if self.measured else 0.0,
            )  # fmt: skip


def watch(config: TrainConfig, ranks: World, cfg: ModelConfig, plan: Plan, tokenizer: Tokenizer) -> Watch:
    """Of a run that is about to make its model."""
    share = plan.batch_size // ranks.size
    at_once = min(config.micro_batch, share) or share
    length = text_length(plan, tokenizer, cfg.context)
    return Watch(cfg, Load(share, at_once, ranks.size, length, config.checkpointing, config.precision), ranks.device)


def text_length(plan: Plan, tokenizer: Tokenizer, context: int) -> float:
    """Mean positions of the captions, from some of them."""
    shard_set = plan.shard_set
    every = max(1, len(shard_set) // LOOKED_AT)
    captions = [words for i in range(0, len(shard_set), every) for words in shard_set.captions(i)[:1]]
    return float((tokenizer.encode(captions, context).argmax(axis=1) + 1).mean()) if captions else float(context)


def _held(device: torch.device) -> float:
    return (
        float(torch.cuda.memory_allocated(device))
        if device.type == "cuda"
        else float(psutil.Process().memory_info().rss)
    )


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _free(device: torch.device) -> float:
    return (
        float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float(psutil.virtual_memory().available)
    )
