"""`plan`: what a run will cost, by arithmetic. Pure functions, no torch.

Operations count a multiply-add as two, the backward pass as two forwards, matrix products and attention alike
(Kaplan et al. 2020, appendix; Chowdhery et al. 2022, appendix B, who define MFU and HFU). Sizes are bytes, 1 GB = 1e9.

Letters: P parameters, B pairs of a step over all GPUs, b of one GPU, m of one micro-batch, d width of the embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, nearest
from train import scaling
from train.models import (
    MLP_RATIO,
    ModelConfig,
    flops_per_pair,
    forward_flops,
    model_config,
    param_count,
    resnet_convolutions,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from train.config import PlanConfig

DAY_S = 86_400.0
TILE = 4096  # the loss's tile on GPUs
# One core of a 2023 server: libjpeg-turbo on 256-px shards and an antialiased resize to 224 px.
DECODE_PER_CORE_S = 1000.0
STORED_BYTES = 20_000  # a 256-px JPEG of quality 90, about
GPUS_A_NODE = 8
PADDED, TRIMMED = 77.0, 18.0  # text positions of a pair: as published runs count, and about what trimmed captions need
FEW = 32  # pairs at a time below which recomputing activations is the better way to save memory
USABLE = 0.92  # the allocator, cuBLAS and NCCL keep some of a card's memory for themselves


@dataclass(frozen=True)
class Gpu:
    """Makers' figures: dense 16-bit matrix peak (bf16, or fp16 where there is no bf16) and memory."""

    peak_flops: float
    """Operations per second."""
    memory: float
    """Bytes."""
    dtype: str = "bf16"


GPUS: dict[str, Gpu] = {
    "T4": Gpu(65e12, 16e9, "fp16"),
    "V100-16GB": Gpu(125e12, 16e9, "fp16"),
    "V100-32GB": Gpu(125e12, 32e9, "fp16"),
    "A10": Gpu(125e12, 24e9),
    "A100-40GB": Gpu(312e12, 40e9),
    "A100-80GB": Gpu(312e12, 80e9),
    "A6000": Gpu(154.8e12, 48e9),
    "L4": Gpu(121e12, 24e9),
    "L40S": Gpu(362e12, 48e9),
    "RTX-3090": Gpu(71e12, 24e9),
    "RTX-4090": Gpu(165.2e12, 24e9),
    "H100-PCIe": Gpu(756e12, 80e9),
    "H100": Gpu(989e12, 80e9),
    "H200": Gpu(989e12, 141e9),
    "B200": Gpu(2250e12, 180e9),
    "MI250X": Gpu(383e12, 128e9),
    "MI300X": Gpu(1307e12, 192e9),
}
ALIASES = {"V100": "V100-32GB", "A100": "A100-80GB"}


def gpu(name: str) -> Gpu:
    """The kind of GPU called `name`, in any case; ConfigError naming the nearest ones otherwise."""
    known = {key.lower(): value for key, value in GPUS.items()}
    known |= {alias.lower(): GPUS[target] for alias, target in ALIASES.items()}
    if name.lower() not in known:
        raise ConfigError(f"no GPU is called {name!r}: {nearest(name, [*GPUS, *ALIASES])}")
    return known[name.lower()]


def run_flops(cfg: ModelConfig, pairs: float, epochs: float, text_len: float = 77.0) -> float:
    """Operations of a whole run."""
    return flops_per_pair(cfg, text_len) * pairs * epochs


def mfu_of(flops: float, gpus: int, peak: float, days: float) -> float:
    """Share of the GPUs' peak that a run of `flops` over `days` used for the model's own work."""
    return flops / (gpus * peak * days * DAY_S)


def days_of(flops: float, gpus: int, peak: float, mfu: float) -> float:
    """Days that `flops` take at a utilisation of `mfu`."""
    return flops / (gpus * peak * mfu * DAY_S)


def recompute_factor(*, checkpointing: bool, gradcache: bool) -> float:
    """Operations done over operations of the model (HFU / MFU): each kind of recompute is one more forward of three."""
    return 1.0 + (checkpointing + gradcache) / 3.0


def activation_bytes(cfg: ModelConfig, pairs: int, text_len: float, *, checkpointing: bool) -> float:
    """Bytes of the activations that wait for the backward pass, of `pairs` at a time, in bf16 with fused attention.

    A transformer block saves, in units of width a token: two layer-norm inputs and outputs 4, queries, keys and values
    3, attention output 1, the MLP's hidden values before and after its activation 2 x 4. With checkpointing only each
    block's input stays, and one block at a time is recomputed. A ResNet saves each convolution's output and what its
    normalisation made of it.
    """
    a_block = 4 + 3 + 1 + 2 * MLP_RATIO
    towers = [(text_len, cfg.text_width, cfg.text_layers)]
    values = 0.0
    if isinstance(cfg.vision_layers, int):
        kept_patches = max(1, int(cfg.patches * (1.0 - cfg.patch_dropout)))
        towers.append((kept_patches + 1.0, cfg.vision_width, cfg.vision_layers))
    else:
        grids = [outputs * side**2 for _, outputs, _, side in resnet_convolutions(cfg)]
        values = sum(grids) / 3 + 6 * max(grids) if checkpointing else 2.0 * sum(grids)
    for tokens, width, layers in towers:
        units = (layers + a_block) if checkpointing else layers * a_block
        values += tokens * width * units
    return 2.0 * pairs * values


def logit_bytes(batch: int, gpus: int, form: str, *, element: int = 4) -> float:
    """Bytes of the logits that one GPU holds at a time; the softmax and its gradient need about as much again.

    `form` is `full` (B x B on every GPU), `local` (b x B in both directions) or `tile` (one tile).
    """
    share = -(-batch // gpus)
    entries = {"full": batch * batch, "local": 2 * share * batch, "tile": min(TILE, share) * min(TILE, batch)}
    return float(element * entries[form])


def gathered_bytes(batch: int, width: int, *, towers: int = 1, element: int = 4) -> float:
    """Bytes of the embeddings gathered on every GPU: one tower's for the symmetric tile, two for local loss."""
    return float(batch * width * towers * element)


def memory(
    cfg: ModelConfig, *, batch: int, gpus: int, micro: int = 0, text_len: float = 77.0, checkpointing: bool = False
) -> dict[str, float]:
    """Bytes on one GPU under DDP: fp32 weights, gradients and AdamW's two moments, bf16 weights of the forward pass.

    `total` counts the tiled loss (three tiles live at once); full and local logits are there to compare.
    """
    params = param_count(cfg)
    at_once = micro or -(-batch // gpus)
    parts = {
        "weights": 4.0 * params,
        "weights_bf16": 2.0 * params,
        "gradients": 4.0 * params,
        "optimiser": 8.0 * params,
        "activations": activation_bytes(cfg, at_once, text_len, checkpointing=checkpointing),
        "pixels": float(3 * cfg.image_size**2 * -(-batch // gpus)),
        "gathered": gathered_bytes(batch, cfg.embed_dim),
        "logits_tile": logit_bytes(batch, gpus, "tile"),
    }
    total = sum(parts.values()) + 2 * parts["logits_tile"]
    return {
        **parts,
        "total": total,
        "logits_local": logit_bytes(batch, gpus, "local"),
        "logits_full": logit_bytes(batch, gpus, "full"),
    }


def largest_micro(cfg: ModelConfig, card: Gpu, *, batch: int, gpus: int, checkpointing: bool) -> int:
    """Most pairs a GPU can hold with activations at a time: its whole share, else a power of two; 0 if not even one."""
    share = -(-batch // gpus)
    sizes = memory(cfg, batch=batch, gpus=gpus, micro=share, checkpointing=checkpointing)
    room = USABLE * card.memory - (sizes["total"] - sizes["activations"])
    most = int(room / (sizes["activations"] / share))
    return share if most >= share else 1 << (most.bit_length() - 1) if most > 0 else 0


def held_at_once(cfg: ModelConfig, card: Gpu, *, batch: int, gpus: int) -> tuple[int, bool]:
    """Pairs that a GPU should hold with activations at a time (0 if not even one fits), and whether to recompute
    activations (`train --checkpointing`): only where too few fit otherwise."""
    share = -(-batch // gpus)
    plain, lean = (largest_micro(cfg, card, batch=batch, gpus=gpus, checkpointing=way) for way in (False, True))
    return (plain, False) if plain >= min(FEW, share) or lean == plain else (lean, True)


def communication(cfg: ModelConfig, *, batch: int, gpus: int) -> dict[str, float]:
    """Bytes one GPU sends a step with ring collectives: texts gathered, their gradients scattered home, gradients."""
    ring = (gpus - 1) / gpus
    embeddings = gathered_bytes(batch, cfg.embed_dim) * ring
    return {"gather": embeddings, "reduce_scatter": embeddings, "gradients": 2 * ring * 4.0 * param_count(cfg)}


def run(config: PlanConfig) -> dict[str, Any]:
    """The arithmetic of one plan, or the law that fits a table of runs (`scaling.run`).

    Raises:
        ConfigError: an unknown model or GPU, or a number that cannot be.
        InputError: a table without runs.
    """
    if config.what == "scaling":
        if not config.table:
            raise ConfigError("expected a CSV file of runs, as in `pairmill plan scaling runs.csv`")
        return scaling.run(config.table)
    _check(config)
    cfg, card = model_config(config.model), gpu(config.gpu)
    flops = run_flops(cfg, config.pairs, config.epochs, PADDED)
    mfu = mfu_of(flops, config.gpus, card.peak_flops, config.days) if config.days else config.mfu
    if mfu > 1:
        raise ConfigError(
            f"{config.days:g} days on {config.gpus} x {config.gpu} would need {mfu:.0%} of their peak; "
            f"at {config.mfu:.0%} it takes {days_of(flops, config.gpus, card.peak_flops, config.mfu):.2g} days"
        )
    share = -(-config.batch_size // config.gpus)
    fitting, checkpointing = held_at_once(cfg, card, batch=config.batch_size, gpus=config.gpus)
    at_once = fitting or 1
    hfu = mfu * recompute_factor(checkpointing=checkpointing, gradcache=at_once < share)
    rate = config.gpus * card.peak_flops * mfu / flops_per_pair(cfg, PADDED)
    sizes = memory(cfg, batch=config.batch_size, gpus=config.gpus, micro=at_once, checkpointing=checkpointing)
    return {
        "model": config.model,
        "params": param_count(cfg),
        "flops_per_pair": flops_per_pair(cfg, PADDED),
        "flops_per_pair_trimmed": flops_per_pair(cfg, TRIMMED),
        "forward_flops": forward_flops(cfg, PADDED),
        "flops": flops,
        "gpu": config.gpu,
        "gpus": config.gpus,
        "peak_flops": card.peak_flops,
        "days": config.days or days_of(flops, config.gpus, card.peak_flops, mfu),
        "gpu_hours": flops / (card.peak_flops * mfu * 3600.0),
        "cost": config.price * flops / (card.peak_flops * mfu * 3600.0) or None,
        "mfu": mfu,
        "hfu": hfu,
        "steps": math.ceil(config.pairs * config.epochs / config.batch_size),
        "step_s": config.batch_size / rate,
        "pairs_per_s": rate,
        "loader": _loader(rate, config.gpus),
        "batch": {"global": config.batch_size, "gpu": share, "micro": at_once},
        "memory": sizes,
        "gpu_memory": card.memory,
        "fits": fitting > 0,
        "checkpointing": checkpointing,
        "communication": communication(cfg, batch=config.batch_size, gpus=config.gpus),
    }


def _check(config: PlanConfig) -> None:
    for name in ("pairs", "epochs", "gpus", "batch_size"):
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"expected --{name.replace('_', '-')} above 0, found {getattr(config, name)}")
    if not 0 <= config.days < math.inf or not 0 <= config.price < math.inf:
        raise ConfigError("expected --days and --price of 0 or more")
    if not 0 < config.mfu <= 1:
        raise ConfigError(f"expected --mfu between 0 and 1, found {config.mfu}; 0.4 is 40 %")


def _loader(rate: float, gpus: int) -> dict[str, float]:
    """What one node's loader must deliver to keep its GPUs busy."""
    node = rate * min(gpus, GPUS_A_NODE) / gpus
    return {"pairs_per_s_node": node, "decode_cores": node / DECODE_PER_CORE_S, "bytes_per_s": node * STORED_BYTES}


def render(summary: dict[str, Any]) -> RenderableType:
    """The plan as tables for a terminal."""
    if "scaling" in summary:
        return scaling.render(summary)
    from rich.console import Group
    from rich.text import Text

    title = Text(f"{summary['model']} on {summary['gpus']} x {summary['gpu']}", style="bold")
    fits = Text(_how_it_fits(summary), style="green" if summary["fits"] else "bold red")
    return Group(title, Text(""), _cost_table(summary), Text(""), _memory_table(summary), fits)


def _how_it_fits(s: dict[str, Any]) -> str:
    if not s["fits"]:
        return "It does not fit, even with one pair at a time: take a larger card or a smaller model."
    flags = f" --micro-batch {s['batch']['micro']}" * (s["batch"]["micro"] < s["batch"]["gpu"])
    flags += " --checkpointing" * s["checkpointing"]
    return f"It fits with `train{flags}`." if flags else "It fits."


def _cost_table(s: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    loader = s["loader"]
    for name, value in (
        ("parameters", f"{s['params'] / 1e6:,.1f} M"),
        ("operations a pair", f"{s['flops_per_pair'] / 1e9:,.1f} GFLOP (forward {s['forward_flops'] / 1e9:,.1f})"),
        (
            "captions trimmed",
            f"{s['flops_per_pair_trimmed'] / 1e9:,.1f} GFLOP ({TRIMMED:.0f} of {PADDED:.0f} positions)",
        ),
        ("operations in all", f"{s['flops']:.3g} FLOP"),
        ("utilisation", f"{s['mfu']:.1%} MFU, {s['hfu']:.1%} with recompute (HFU)"),
        (
            "time",
            f"{s['days']:,.2f} days, {s['gpu_hours']:,.0f} GPU hours, {s['steps']:,.0f} steps of {s['step_s']:.3g} s",
        ),
        *((("cost", f"{s['cost']:,.0f}"),) if s["cost"] else ()),
        ("speed", f"{s['pairs_per_s']:,.0f} pairs/s"),
        (
            "loader, a node",
            f"{loader['pairs_per_s_node']:,.0f} images/s: about {loader['decode_cores']:.1f} cores to decode, "
            f"{loader['bytes_per_s'] / 1e6:,.0f} MB/s from the shards",
        ),
        ("batch", f"{s['batch']['global']:,}, {s['batch']['gpu']:,} a GPU, {s['batch']['micro']:,} at a time"),
        ("sent a step, a GPU", f"{sum(s['communication'].values()) / 1e6:,.0f} MB"),
    ):
        table.add_row(name, value)
    return table


def _memory_table(s: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(title="Memory of one GPU, GB", title_justify="left", title_style="bold", box=None, show_header=False,
                  pad_edge=False)  # fmt: skip
    table.add_column()
    table.add_column(justify="right")
    sizes = s["memory"]
    for name, value in sizes.items():
        if not name.startswith("logits"):
            table.add_row(name.replace("_", " "), f"{value / 1e9:,.3f}", style="bold" if name == "total" else "")
    table.add_row("the card has", f"{s['gpu_memory'] / 1e9:,.0f}")
    forms = (("tile, as here", "logits_tile"), ("local loss", "logits_local"), ("full matrix", "logits_full"))
    for name, key in forms:
        table.add_row(f"logits: {name}", f"{sizes[key] / 1e9:,.3f}", style="dim")
    return table
