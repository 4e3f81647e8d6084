"""`diagnose`: why the GPU (or the CPU that trains) starves, what there is to gain, and what to change first.

Two sources: the metrics of a run, which say what happened on every rank, and three short trials (`train.trials`), which
say what each part could do alone. `judge` turns them into a verdict; "not input-bound: stop tuning the loader" is one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, InputError
from core.runner import cores
from core.storage import Folder
from train.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import RenderableType

    from train.config import DiagnoseConfig
    from train.trials import Bench

log = logging.getLogger("pairmill.diagnose")

INPUT_BOUND = 0.05  # share of a step spent waiting from which on the loader is worth an afternoon
CLEAR = (0.02, 0.12)  # below or above, the verdict would survive a busy machine
OVER_BUDGET = 3  # exit code
STRAGGLER = 1.5  # the slowest rank's wait over the mean
SAME_RANK = 0.7  # share of rows in which it is the same rank
COPYING = 0.10
RECENT = 30  # rows of metrics.jsonl that count
PLACES = {"decode": "waiting for a batch", "h2d": "copying to the device", "compute": "computing"}
# A stored picture may be this much larger in area than the model's input before decoding it is waste (random crops).
OVERSIZE = 1.8


@dataclass(frozen=True)
class Evidence:
    """What is known, from a run, from trials, or both. Rates are pairs a second of all ranks that were measured."""

    wait_share: float
    steps: int
    rate: float
    h2d_share: float = 0.0
    model_rate: float | None = None
    """The model alone on a batch that is already there."""
    loader_rate: float | None = None
    read_rate: float | None = None
    decode_rate: float | None = None
    """Decoding and tokenising alone, without waiting for bytes."""
    reading_share: float = 0.0
    """Share of the decoder's time spent waiting for bytes."""
    run_wait_share: float | None = None
    """Of the run, where `wait_share` is of the trials."""
    straggler: tuple[int, float] | None = None
    """Rank that waits longest in most rows, and its wait over the mean."""
    gpu: bool = False
    threads: int = 1
    cores: int = 1
    oversize: float = 1.0
    """Area of a stored picture over the model's input."""
    progressive: float = 0.0
    quarantined: int = 0
    precision: str = "bf16"


def run(config: DiagnoseConfig) -> dict[str, Any]:
    """Diagnose a run, or shards and a model without one.

    Returns verdict, says, confidence, wait_share, ceiling_gain, split, stages, ranks, data, fixes, exit_code (3 where
    the wait share is above `--budget`).

    Raises:
        InputError: neither a run with metrics nor shards to try.
    """
    if config.seconds < 0 or not 0 <= config.budget < 1:
        raise ConfigError("expected --seconds of 0 or more and a --budget between 0 and 1, as 0.1 for 10 %")
    if config.batch_size < 0 or config.threads < 0:
        raise ConfigError("expected --batch-size and --threads of 0 or more")
    folder = Folder(config.work)
    rows, recorded = _rows(folder, config.name), _recorded(folder, config.name)
    settings = _settings(config, recorded)
    shards = Folder(settings.shards or f"{config.work}/shards")
    tried = config.seconds > 0 and bool(settings.shards or shards.list("*.tar"))
    if not rows and not tried:
        where = f"or shards in {shards}, found neither" if config.seconds else "where --seconds is 0, found none"
        raise InputError(
            f"expected metrics of the run {config.name!r} {where}; run `pairmill shard` or `pairmill train` first"
        )
    observed = _observed(rows) if rows else None
    quarantined = _count_lines(folder, f"runs/{config.name}/quarantine.jsonl")
    evidence, measured = _try(config, settings, rows) if tried else (observed, {})
    assert evidence is not None
    if observed is not None:
        evidence = dataclasses.replace(
            evidence, run_wait_share=observed.wait_share, straggler=observed.straggler, quarantined=quarantined
        )
    summary = {
        **judge(evidence),
        "split": measured.get("split") or _split(rows),
        "stages": _stages(evidence, measured),
        "ranks": _ranks(rows),
        "data": {"progressive": evidence.progressive, "oversize": evidence.oversize, "quarantined": quarantined},
        "measured": {key: value for key, value in dataclasses.asdict(evidence).items() if value is not None},
    }
    over = bool(config.budget) and summary["wait_share"] > config.budget
    return {**summary, "budget": config.budget or None, "exit_code": OVER_BUDGET if over else 0}


# ---------------------------------------------------------------- judging


def judge(e: Evidence) -> dict[str, Any]:
    """Verdict, sentence, confidence, wait_share, ceiling_gain and fixes, best first."""
    gain = e.model_rate / e.rate - 1 if e.model_rate and e.rate else e.wait_share / max(1e-9, 1 - e.wait_share)
    gain = max(0.0, gain)
    verdict = _verdict(e, gain)
    return {
        "verdict": verdict,
        "says": _says(verdict, e, gain),
        "confidence": _confidence(e),
        "wait_share": e.wait_share,
        "ceiling_gain": gain,
        "fixes": sorted(_fixes(verdict, e), key=lambda fix: -(fix["predicted_gain"] or 0.0)),
    }


def _verdict(e: Evidence, gain: float) -> str:
    if e.straggler is not None and (e.run_wait_share or e.wait_share) >= INPUT_BOUND:
        return "straggler"
    if e.wait_share >= INPUT_BOUND:
        return "read_bound" if _reading_limits(e) else "decode_bound"
    if e.h2d_share >= COPYING:
        return "copy_bound"
    if not e.gpu and e.model_rate is not None and gain >= 2 * INPUT_BOUND:
        return "cores_shared"
    return "not_input_bound"


def _reading_limits(e: Evidence) -> bool:
    """Whether bytes come too late, rather than their decoding."""
    if e.read_rate is not None and e.decode_rate is not None and e.read_rate < e.decode_rate:
        return True
    return e.reading_share > 0.5


def _says(verdict: str, e: Evidence, gain: float) -> str:
    waits = f"{e.wait_share:.1%} of a step is waiting"
    if verdict == "not_input_bound":
        return f"Not input-bound: {waits}, and a perfect loader would gain {gain:.0%}. Stop tuning the loader."
    if verdict == "cores_shared":
        return (
            f"Not input-bound, but decoding takes cores from the model: {waits}, yet with batches ready in memory it would be "
            f"{gain:.0%} faster."
        )
    if verdict == "straggler" and e.straggler is not None:
        return (
            f"Rank {e.straggler[0]} holds up the others: it waits {e.straggler[1]:.1f} times the mean for its batches."
        )
    if verdict == "copy_bound":
        return f"Copying to the device takes {e.h2d_share:.0%} of a step."
    what = "the bytes come too late from the shards" if verdict == "read_bound" else "decoding is too slow"
    return f"Input-bound: {waits}, because {what}. A perfect loader would gain {gain:.0%}."


def _confidence(e: Evidence) -> str:
    if e.steps < 8:
        return "low"
    sides = [share >= INPUT_BOUND for share in (e.wait_share, e.run_wait_share) if share is not None]
    clear = not CLEAR[0] < e.wait_share < CLEAR[1]
    return "high" if clear and len(set(sides)) == 1 else "medium"


def _fixes(verdict: str, e: Evidence) -> list[dict[str, Any]]:
    """{fix, predicted_gain}: the gain is a share of the present rate, None where it cannot be told beforehand."""
    if verdict == "not_input_bound":
        if e.precision == "fp32":
            return [_fix("train in bf16: --precision bf16", None)]
        return [_fix("spend the effort on the model: larger batch, --compile on GPUs, more ranks", None)]
    if verdict == "straggler":
        rank = e.straggler[0] if e.straggler else 0
        return [_fix(f"look at the disk and the other processes of rank {rank}'s machine", None)]
    if verdict == "copy_bound":
        return [_fix("decode on the GPU: --decode dali, so that compressed bytes are copied", None)]
    if verdict == "read_bound":
        return [_fix("copy the shards to a local SSD", _gain(e, e.decode_rate, e.model_rate))]
    return _decode_fixes(e)


def _decode_fixes(e: Evidence) -> list[dict[str, Any]]:
    fixes = []
    decode = e.decode_rate or e.loader_rate
    if e.oversize > OVERSIZE:
        words = f"pack smaller pictures: they have {e.oversize:.1f} times the model's area (ingest or shard --size)"
        fixes.append(_fix(words, _gain(e, decode * e.oversize / 1.3 if decode else None, e.read_rate, e.model_rate)))
    if e.threads < e.cores:
        more = e.cores / e.threads
        fixes.append(
            _fix(
                f"use every core: --threads {e.cores}",
                _gain(e, decode * more if decode else None, e.read_rate, e.model_rate),
            )
        )
    if e.gpu:
        fixes.append(_fix("decode on the GPU: --decode dali", None))
    if e.progressive > 0.2:
        fixes.append(
            _fix(
                f"re-encode: {e.progressive:.0%} of the JPEGs are progressive, which decode slowly (ingest --size)",
                None,
            )
        )
    return fixes or [_fix("more or faster cores; the pictures are small and every core decodes already", None)]


def _gain(e: Evidence, rate: float | None, *others: float | None) -> float | None:
    """Gain where the changed stage delivers `rate` and the others stay: the slowest of all decides."""
    if rate is None or None in others or not e.rate:
        return None
    return max(0.0, min(rate, *(other for other in others if other is not None)) / e.rate - 1)


def _fix(words: str, gain: float | None) -> dict[str, Any]:
    return {"fix": words, "predicted_gain": gain}


# ---------------------------------------------------------------- the run's metrics


def _rows(folder: Folder, name: str) -> list[dict[str, Any]]:
    """The run's latest rows with waits; empty without a run."""
    path = f"runs/{name}/metrics.jsonl"
    if not folder.exists(path):
        return []
    rows = []
    for line in folder.read(path).splitlines()[-RECENT:]:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a running run
            continue
        if row.get("waits") and row.get("wait_share") is not None:
            rows.append(row)
    return rows


def _recorded(folder: Folder, name: str) -> dict[str, Any]:
    """The run's settings; empty without a run."""
    path = f"runs/{name}/config.json"
    if not folder.exists(path):
        return {}
    found = json.loads(folder.read(path))
    return dict(found.get("as_run", found))


def _settings(config: DiagnoseConfig, recorded: dict[str, Any]) -> TrainConfig:
    """The run's settings with what the command names in their place."""
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    values = {key: value for key, value in recorded.items() if key in known}
    values |= {"work": config.work, "device": config.device, "fresh": False}
    for key in ("shards", "model", "precision", "decode", "threads"):
        if getattr(config, key):
            values[key] = getattr(config, key)
    return TrainConfig(**values)


def _observed(rows: list[dict[str, Any]]) -> Evidence:
    def mean(place: str) -> float:
        return sum(row["waits"][place]["mean"] for row in rows) / len(rows)

    step = sum(mean(place) for place in PLACES) or 1e-9
    decoding = mean("reader") + mean("decode_busy") or 1e-9
    rates = [row["pairs_per_s"] for row in rows if row.get("pairs_per_s")]
    return Evidence(
        wait_share=mean("decode") / step,
        h2d_share=mean("h2d") / step,
        steps=len(rows) * 10,  # a row covers several steps
        rate=sum(rates) / len(rates) if rates else 0.0,
        reading_share=mean("reader") / decoding,
        straggler=_straggler(rows),
        cores=cores(),
        threads=cores(),
    )


def _straggler(rows: list[dict[str, Any]]) -> tuple[int, float] | None:
    """The rank that waits longest for its batches, if it is mostly the same one and clearly longer than the others."""
    waits = [row["waits"]["decode"] for row in rows if row.get("ranks", 1) > 1]
    if not waits:
        return None
    ranks = [w["slowest_rank"] for w in waits]
    most = max(set(ranks), key=ranks.count)
    ratio = sum(w["max"] for w in waits) / max(1e-9, sum(w["mean"] for w in waits))
    return (most, ratio) if ranks.count(most) >= SAME_RANK * len(ranks) and ratio >= STRAGGLER else None


def _split(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of a step by place, {p50, p99, share}, of the latest row."""
    if not rows:
        return {}
    waits = rows[-1]["waits"]
    whole = sum(waits[place]["mean"] for place in PLACES) or 1e-9
    return {
        place: {"p50": waits[place]["p50"], "p99": waits[place]["p99"], "share": waits[place]["mean"] / whole}
        for place in PLACES
    }


def _ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {}
    wait = rows[-1]["waits"]["decode"]
    return {"ranks": rows[-1].get("ranks", 1), **{key: wait[key] for key in ("min", "mean", "max", "slowest_rank")}}


def _count_lines(folder: Folder, name: str) -> int:
    return folder.read(name).count(b"\n") if folder.exists(name) else 0


# ---------------------------------------------------------------- trials


def _try(config: DiagnoseConfig, settings: TrainConfig, rows: list[dict[str, Any]]) -> tuple[Evidence, dict[str, Any]]:
    """The three trials (and bytes alone), for one rank's share of the batch."""
    from train.distributed import choose_device
    from train.trials import Bench

    ranks = max(1, int(rows[-1].get("ranks", 1)) if rows else 1)
    batch = config.batch_size or max(1, settings.batch_size // ranks)
    bench = Bench(settings, batch, ranks, choose_device(config.device, 0))
    log.info("diagnose: trying %s with batches of %d, about %.0f s", settings.model, batch, 3.5 * config.seconds)
    read = bench.read(config.seconds / 2)
    loaded, held = bench.load(config.seconds)
    computed = bench.compute(held, config.seconds)
    both = bench.both(config.seconds)
    busy = both.places["decode_busy"]
    decoding = busy["sum"] + both.places["reader"]["sum"]
    evidence = Evidence(
        wait_share=both.share("decode"),
        h2d_share=both.share("h2d"),
        steps=both.steps,
        rate=both.rate,
        model_rate=computed.rate,
        loader_rate=loaded.rate,
        read_rate=read.rate,
        decode_rate=_alone(loaded.places["decode_busy"], batch),
        reading_share=both.places["reader"]["sum"] / decoding if decoding else 0.0,
        gpu=bench.device.type == "cuda",
        threads=bench.threads,
        cores=cores(),
        oversize=bench.pictures.pixels / bench.shape.image_size**2,
        progressive=bench.pictures.progressive,
        precision=settings.precision,
    )
    return evidence, {"split": _trial_split(both), "both": both, "bench": _about(bench, batch)}


def _about(bench: Bench, batch: int) -> dict[str, Any]:
    return {"batch": batch, "threads": bench.threads, "samples": len(bench.shard_set), "device": str(bench.device)}


def _alone(busy: dict[str, float], batch: int) -> float | None:
    return batch * busy["n"] / busy["sum"] if busy["sum"] else None


def _trial_split(both: Any) -> dict[str, dict[str, float]]:
    return {
        place: {"p50": both.places[place]["p50"], "p99": both.places[place]["p99"], "share": both.share(place)}
        for place in PLACES
    }


def _stages(e: Evidence, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """What each stage delivers alone, how busy it is in the loop, and which one is the slowest."""
    both = measured.get("both")
    rates = {"read": e.read_rate, "decode and tokenise": e.decode_rate, "loader": e.loader_rate, "model": e.model_rate}
    busy = {
        "decode and tokenise": min(1.0, both.share("decode_busy")) if both else None,
        "model": both.share("compute") if both else 1 - e.wait_share - e.h2d_share,
    }
    known = {name: rate for name, rate in rates.items() if rate is not None and name != "loader"}
    slowest = min(known, key=lambda name: known[name], default=None)
    return [
        {"stage": name, "pairs_per_s": rate, "busy": busy.get(name), "slowest": name == slowest}
        for name, rate in rates.items()
        if rate is not None or busy.get(name) is not None
    ]


# ---------------------------------------------------------------- the page


def render(summary: dict[str, Any]) -> RenderableType:
    """The diagnosis for a terminal."""
    from rich.console import Group
    from rich.text import Text

    good = summary["verdict"] == "not_input_bound"
    lines: list[RenderableType] = [
        Text(summary["says"], style="bold green" if good else "bold yellow"),
        Text(
            f"confidence: {summary['confidence']}; at most {summary['ceiling_gain']:.0%} to gain from a perfect loader",
            style="dim",
        ),
        Text(""),
    ]
    if summary["split"]:
        lines += [_split_table(summary["split"]), Text("")]
    if summary["stages"]:
        lines += [_stage_table(summary["stages"]), Text("")]
    lines += _facts(summary)
    lines.append(Text("What to do", style="bold"))
    for i, fix in enumerate(summary["fixes"], 1):
        gain = fix["predicted_gain"]
        lines.append(Text(f" {i}. {fix['fix']}").append(f"  (+{gain:.0%} predicted)" if gain else "", style="green"))
    if summary["exit_code"]:
        words = f"Over budget: {summary['wait_share']:.1%} waiting, allowed are {summary['budget']:.1%}."
        lines += [Text(""), Text(words, style="bold red")]
    return Group(*lines)


def _facts(summary: dict[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    ranks, data, said = summary["ranks"], summary["data"], []
    if ranks.get("ranks", 1) > 1:
        said.append(
            f"{ranks['ranks']} ranks wait {ranks['min']:.3f} to {ranks['max']:.3f} s a step, rank {ranks['slowest_rank']} longest"
        )
    if data["quarantined"]:
        said.append(f"{data['quarantined']} unreadable pictures in quarantine.jsonl")
    if data["progressive"]:
        said.append(f"{data['progressive']:.0%} of the JPEGs are progressive")
    if data["oversize"] > OVERSIZE:
        said.append(f"stored pictures have {data['oversize']:.1f} times the area of the model's input")
    return [*(Text(f"· {words}") for words in said), Text("")] if said else []


def _split_table(split: dict[str, dict[str, float]]) -> RenderableType:
    from rich.table import Table

    table = Table(
        title="A step", title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False
    )
    table.add_column("")
    for name in ("p50, ms", "p99, ms", "share"):
        table.add_column(name, justify="right")
    for place, words in PLACES.items():
        figures = split[place]
        table.add_row(words, f"{1e3 * figures['p50']:,.1f}", f"{1e3 * figures['p99']:,.1f}", f"{figures['share']:.1%}")
    return table


def _stage_table(stages: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(
        title="Stages", title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False
    )
    table.add_column("")
    table.add_column("alone, pairs/s", justify="right")
    table.add_column("busy", justify="right")
    table.add_column("")
    for stage in stages:
        rate, busy = stage["pairs_per_s"], stage["busy"]
        words = (f"{rate:,.0f}" if rate else "", f"{busy:.0%}" if busy is not None else "")
        table.add_row(stage["stage"], *words, "← slowest" if stage["slowest"] else "")
    return table
