"""`diagnose`: why the GPU (or the CPU that trains) starves, what there is to gain, and what to change first.

Two sources: the metrics of a run, which say what happened on every rank, and short trials (`train.trials`), which say
what each part could do alone. `judge.judge` turns them into a verdict; "not input-bound: stop tuning the loader" is one.
`--apply` tries a fix and measures what it gains (`train.remedies`); one that cannot be tried here is skipped, and said.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, InputError
from core.runner import cores
from core.storage import Folder
from train.config import TrainConfig
from train.judge import OVERSIZE, Evidence, Straggler, judge

if TYPE_CHECKING:
    from rich.console import RenderableType

    from train.config import DiagnoseConfig
    from train.trials import Bench, Trial

log = logging.getLogger("pairmill.diagnose")

OVER_BUDGET = 3  # exit code
SLOWER = 1.25  # a straggler's own time over the other ranks'
SAME_RANK = 0.7  # share of rows in which it is the same rank
RECENT = 30  # rows of metrics.jsonl that count
PLACES = {"decode": "waiting for a batch", "h2d": "copying to the device", "compute": "computing"}
COMM = "of which in collectives"


def run(config: DiagnoseConfig) -> dict[str, Any]:
    """Diagnose a run, or shards and a model without one.

    Returns verdict, cause, says, confidence, wait_share, ceiling_gain, losses, split, stages, ranks, gpu (as in a row of
    metrics.jsonl), data, fixes, measured (the evidence), applied (with `--apply`) and exit_code (3 where the wait share is
    above `--budget`).

    Raises:
        ConfigError: settings that cannot be.
        InputError: neither a run with metrics nor shards to try.
    """
    _check(config)
    folder = Folder(config.work)
    rows, recorded = _rows(folder, config.name), _recorded(folder, config.name)
    settings = _settings(config, recorded)
    shards = Folder(settings.shards[0] if settings.shards else f"{config.work}/shards")
    tried = config.seconds > 0 and bool(settings.shards or shards.list("*.tar"))
    if not rows and not tried:
        where = f"or shards in {shards}, found neither" if config.seconds else "where --seconds is 0, found none"
        raise InputError(
            f"expected metrics of the run {config.name!r} {where}; run `pairmill shard` or `pairmill train` first"
        )
    observed = _observed(rows) if rows else None
    quarantined = _count_lines(folder, f"runs/{config.name}/quarantine.jsonl")
    bench = _bench(config, settings, rows) if tried else None
    evidence, both = _try(bench, config.seconds) if bench else (observed, None)
    assert evidence is not None
    evidence = dataclasses.replace(evidence, remote="://" in str(shards), quarantined=quarantined)
    if observed is not None:
        evidence = dataclasses.replace(
            evidence, run_wait_share=observed.wait_share, straggler=observed.straggler, comm_share=observed.comm_share,
            common_wait=observed.common_wait, busy=observed.busy,
        )  # fmt: skip
    found = judge(evidence)
    if bench:
        evidence = dataclasses.replace(evidence, rehearsed=_rehearse(bench, found["fixes"], config.seconds))
        found = judge(evidence)
    summary = {
        **found,
        "split": _trial_split(both) if both else split_of(rows[-1]),
        "stages": _stages(evidence, both, found["verdict"]),
        "ranks": _ranks(rows),
        "gpu": both.gpu if both else rows[-1].get("gpu"),
        "data": {"progressive": evidence.progressive, "oversize": evidence.oversize, "quarantined": quarantined},
        "measured": {key: value for key, value in dataclasses.asdict(evidence).items() if value is not None},
        "applied": _apply(config, found["fixes"], bench, evidence) if config.apply else None,
    }
    over = bool(config.budget) and summary["wait_share"] > config.budget
    return {**summary, "budget": config.budget or None, "exit_code": OVER_BUDGET if over else 0}


def _check(config: DiagnoseConfig) -> None:
    if not 0 <= config.seconds < math.inf or not 0 <= config.budget < 1:
        raise ConfigError("expected --seconds of 0 or more and a --budget between 0 and 1, as 0.1 for 10 %")
    if config.batch_size < 0 or config.apply < 0:
        raise ConfigError("expected --batch-size and --apply of 0 or more")
    if config.apply and not config.seconds:
        raise ConfigError("--apply measures, so it needs the trials: give --seconds above 0")


def _apply(
    config: DiagnoseConfig, fixes: list[dict[str, Any]], bench: Bench | None, before: Evidence
) -> dict[str, Any]:
    """Try fix number `--apply`, or the first that can be tried, and measure it.

    Returns {fix, number, predicted_gain, measured_gain, rate, note}: null where nothing could be tried, and why in `note`.
    """
    wanted = config.apply
    able = [number for number, fix in enumerate(fixes, 1) if fix["apply"]] if bench is not None else []
    nothing = dict.fromkeys(("fix", "number", "predicted_gain", "measured_gain", "rate"))
    note = ""
    if wanted > len(fixes):
        note = f"There is no fix {wanted}."
    elif wanted not in able:
        note = f"Fix {wanted} ({fixes[wanted - 1]['fix']}) cannot be tried from here."
    if bench is None or not able:
        return {**nothing, "note": f"{note} Nothing was tried."}
    from train import remedies

    number = wanted if wanted in able else able[0]
    fix = fixes[number - 1]
    log.info("diagnose: trying fix %d: %s", number, fix["fix"])
    try:
        after = remedies.measure(fix["apply"], bench, config.seconds)
    except InputError as error:
        return {**nothing, "note": f"{note} Fix {number} could not be tried: {error}.".strip()}
    return {
        "fix": fix["fix"], "number": number, "predicted_gain": fix["predicted_gain"],
        "measured_gain": after.rate / before.rate - 1, "rate": after.rate, "note": note or None,
    }  # fmt: skip


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
    values |= {"work": config.work, "device": "auto", "fresh": False}  # the run may have been another machine's
    values |= {"shards": (config.shards,)} if config.shards else {}
    values |= {"model": config.model} if config.model else {}
    return TrainConfig(**values)


def _observed(rows: list[dict[str, Any]]) -> Evidence:
    def mean(place: str, of: str = "mean") -> float:
        return sum(row["waits"].get(place, {}).get(of, 0.0) for row in rows) / len(rows)

    step = sum(mean(place) for place in PLACES) or 1e-9
    decoding = mean("reader") + mean("decode_busy") or 1e-9
    rates = [row["pairs_per_s"] for row in rows if row.get("pairs_per_s")]
    several = rows[-1].get("ranks", 1) > 1 and "comm" in rows[-1]["waits"]
    busy = [row["gpu"]["busy"]["mean"] for row in rows if "busy" in (row.get("gpu") or {})]
    return Evidence(
        wait_share=mean("decode") / step,
        h2d_share=mean("h2d") / step,
        steps=len(rows) * 10,  # a row covers several steps
        rate=sum(rates) / len(rates) if rates else 0.0,
        reading_share=mean("reader") / decoding,
        comm_share=mean("comm", "min") / step if several else None,
        common_wait=mean("decode", "min") / step if several else None,
        straggler=_straggler(rows, step) if several else None,
        busy=sum(busy) / len(busy) if busy else None,
        gpu=bool(busy),
        cores=cores(),
        workers=cores(),
    )


def _straggler(rows: list[dict[str, Any]], step: float) -> Straggler | None:
    """The rank whose own part of a step is the longest, if it is mostly the same one and clearly longer than the others'."""
    slowest = [row["waits"]["own"]["slowest_rank"] for row in rows]
    rank = max(set(slowest), key=slowest.count)
    if slowest.count(rank) < SAME_RANK * len(rows):
        return None
    own, others = (sum(values) / len(rows) for values in zip(*(_own_and_others(row) for row in rows), strict=True))
    if own < SLOWER * others:
        return None
    waits = sum(row["waits"]["decode"]["max"] * (row["waits"]["decode"]["slowest_rank"] == rank) for row in rows) / len(
        rows
    )
    place = "decode" if waits > (own - others) / 2 else "compute"
    return Straggler(rank, min(0.99, (own - others) / step), place)


def _own_and_others(row: dict[str, Any]) -> tuple[float, float]:
    """Own seconds a step of the slowest rank, and the mean of the others."""
    own, ranks = row["waits"]["own"], row["ranks"]
    return own["max"], (own["mean"] * ranks - own["max"]) / (ranks - 1)


def split_of(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of a step by place, {p50, p99, share}, of a row; `comm`, where there are several ranks, is a part of `compute`."""
    waits = row["waits"]
    whole = sum(waits[place]["mean"] for place in PLACES) or 1e-9
    several = ("comm",) if row.get("ranks", 1) > 1 and "comm" in waits else ()
    return {
        place: {"p50": waits[place]["p50"], "p99": waits[place]["p99"], "share": waits[place]["mean"] / whole}
        for place in (*PLACES, *several)
    }


def _ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds that the ranks wait for their data in a step, of the latest row, and the share of rows in which the rank that
    waits longest is this one."""
    if not rows:
        return {}
    wait = rows[-1]["waits"]["decode"]
    same = sum(row["waits"]["decode"]["slowest_rank"] == wait["slowest_rank"] for row in rows) / len(rows)
    found = {key: wait[key] for key in ("min", "mean", "max", "slowest_rank")}
    return {"ranks": rows[-1].get("ranks", 1), **found, "same": same}


def _count_lines(folder: Folder, name: str) -> int:
    return folder.read(name).count(b"\n") if folder.exists(name) else 0


# ---------------------------------------------------------------- trials


def _bench(config: DiagnoseConfig, settings: TrainConfig, rows: list[dict[str, Any]]) -> Bench:
    """The run's own parts, for one rank's share of the batch."""
    from train.distributed import choose_device
    from train.trials import Bench

    ranks = max(1, int(rows[-1].get("ranks", 1)) if rows else 1)
    batch = config.batch_size or max(1, settings.batch_size // ranks)
    device = choose_device(settings.device, 0)
    return Bench(settings, batch, ranks, device)


def _try(bench: Bench, seconds: float) -> tuple[Evidence, Trial]:
    """All trials; what they say, and the one of the whole loop."""
    from train.distributed import choose_precision

    log.info("diagnose: %s, batches of %d, about %.0f s", bench.config.model, bench.batch_size, 6 * seconds)
    read = bench.read(seconds / 2)
    loaded, held = bench.load(seconds)
    computed = bench.compute(held, seconds)
    double = bench.double(held, seconds)
    oversize = bench.pictures.pixels / bench.shape.image_size**2
    both = bench.both(seconds)
    busy = both.places["decode_busy"]
    decoding = busy["sum"] + both.places["reader"]["sum"]
    evidence = Evidence(
        wait_share=both.share("decode"),
        h2d_share=both.share("h2d"),
        steps=both.steps,
        rate=both.rate,
        model_rate=computed.rate,
        double_rate=computed.rate * _double_gain(computed, double) if double else None,
        loader_rate=loaded.rate,
        read_rate=read.rate,
        decode_rate=_alone(loaded.places["decode_busy"], bench.batch_size),
        small_bytes=bench.small_bytes() if oversize > OVERSIZE else None,
        reading_share=both.places["reader"]["sum"] / decoding if decoding else 0.0,
        gpu=bench.device.type == "cuda",
        workers=bench.workers,
        cores=cores(),
        oversize=oversize,
        progressive=bench.pictures.progressive,
        precision=bench.config.precision,
        native=choose_precision("auto", bench.device),
    )
    return evidence, both


def _rehearse(bench: Bench, fixes: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Pairs a second of the loop with each fix that can be tried from here."""
    from train import remedies

    rates = {}
    for kind in (fix["apply"] for fix in fixes if fix["apply"]):
        log.info("diagnose: rehearsing the fix %r on pictures in memory", kind)
        rates[kind] = remedies.rehearse(kind, bench, seconds).rate
    return rates


def _double_gain(single: Trial, double: Trial) -> float:
    """Times as many pairs a second with twice the pairs at a time, by the medians of the steps: what else the machine was
    doing in one of the two trials must not look like overhead."""
    return 2 * single.places["compute"]["p50"] / (double.places["compute"]["p50"] or 1e-9)


def _alone(busy: dict[str, float], batch: int) -> float | None:
    return batch * busy["n"] / busy["sum"] if busy["sum"] else None


def _trial_split(both: Trial) -> dict[str, dict[str, float]]:
    return {
        place: {"p50": both.places[place]["p50"], "p99": both.places[place]["p99"], "share": both.share(place)}
        for place in PLACES
    }


def _stages(e: Evidence, both: Trial | None, verdict: str) -> list[dict[str, Any]]:
    """What each stage delivers alone, how busy it is in the loop, how full the queue behind it, what limits it, and which
    one is the bottleneck (the slowest, or what the verdict names)."""
    from train.data import QUEUE_DEPTH

    share = both.share if both else {"decode_busy": 0.0, "compute": 1 - e.wait_share - e.h2d_share}.__getitem__
    rows: list[tuple[str, float | None, float | None, float | None, str]] = [
        ("read and verify", e.read_rate, None, 1 - e.reading_share, "network" if e.remote else "disk"),
        (
            "decode, augment, tokenise", e.decode_rate, min(1.0, share("decode_busy")) if both else None,
            both.ready / QUEUE_DEPTH if both else None, f"{e.workers} of {e.cores} cores",
        ),
        ("model", e.model_rate, share("compute"), None, "GPU" if e.gpu else f"{e.cores} cores"),
    ]  # fmt: skip
    known = {name: rate for name, rate, *_ in rows if rate is not None}
    slowest = {"read_bound": "read and verify", "decode_bound": "decode, augment, tokenise"}.get(
        verdict, min(known, key=lambda name: known[name], default="model")
    )
    return [
        {"stage": name, "pairs_per_s": rate, "busy": busy, "queue": queue, "limit": limit, "slowest": name == slowest}
        for name, rate, busy, queue, limit in rows
        if rate is not None or busy is not None
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
            f"verdict {summary['verdict']}, cause {summary['cause']}, confidence {summary['confidence']}; at most "
            f"{summary['ceiling_gain']:.0%} to gain from a perfect loader",
            style="dim",
        ),
        Text(""),
    ]
    if summary["split"]:
        lines += [_split_table(summary["split"]), Text("")]
    if summary["stages"]:
        lines += [_stage_table(summary["stages"]), Text("")]
    lines += [*_facts(summary), *_todo(summary)]
    if summary["exit_code"]:
        words = f"Over budget: {summary['wait_share']:.1%} waiting, allowed are {summary['budget']:.1%}."
        lines += [Text(""), Text(words, style="bold red")]
    return Group(*lines)


def _todo(summary: dict[str, Any]) -> list[RenderableType]:
    """The fixes with their gains, and how to try the first one."""
    from rich.text import Text

    lines: list[RenderableType] = [Text("What to do", style="bold")]
    for i, fix in enumerate(summary["fixes"], 1):
        gain = fix["predicted_gain"]
        lines.append(Text(f" {i}. {fix['fix']}").append(f"  (+{gain:.0%} predicted)" if gain else "", style="green"))
    if applied := summary["applied"]:
        lines += [Text(""), *([Text(applied["note"], style="yellow")] if applied["note"] else [])]
        if applied["fix"]:
            predicted, measured = applied["predicted_gain"], applied["measured_gain"]
            words = f"Tried {applied['number']}. {applied['fix']}: {measured:+.0%} measured"
            words += f", {predicted:+.0%} predicted" if predicted is not None else ""
            lines.append(Text(words, style="bold green" if measured > 0 else "bold yellow"))
    elif summary["fixes"][0]["apply"]:
        lines.append(Text(" `pairmill diagnose --apply 1` tries the first one on a copy and measures it.", style="dim"))
    return lines


def _facts(summary: dict[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    from train import card

    ranks, data, said = summary["ranks"], summary["data"], []
    if ranks.get("ranks", 1) > 1:
        said.append(
            f"{ranks['ranks']} ranks wait {ranks['min']:.3f} to {ranks['max']:.3f} s a step; rank {ranks['slowest_rank']} "
            f"longest, as in {ranks['same']:.0%} of the intervals"
        )
    if summary["gpu"]:
        said.append(card.words(summary["gpu"]))
    if data["quarantined"]:
        said.append(f"{data['quarantined']} unreadable pictures in quarantine.jsonl")
    if data["progressive"]:
        said.append(f"{data['progressive']:.0%} of the JPEGs are progressive")
    if data["oversize"] > OVERSIZE:
        said.append(f"stored pictures have {data['oversize']:.1f} times the area of the model's input")
    return [*(Text(f"· {words}") for words in said), Text("")] if said else []


def _split_table(split: dict[str, dict[str, float]]) -> RenderableType:
    rows = [
        (
            words,
            f"{1e3 * split[place]['p50']:,.1f}",
            f"{1e3 * split[place]['p99']:,.1f}",
            f"{split[place]['share']:.1%}",
        )
        for place, words in {**PLACES, "comm": COMM}.items()
        if place in split
    ]
    return _table("A step", ("p50, ms", "p99, ms", "share"), rows)


def _stage_table(stages: list[dict[str, Any]]) -> RenderableType:
    def share(value: float | None) -> str:
        return f"{value:.0%}" if value is not None else ""

    rows = [
        (
            s["stage"], f"{s['pairs_per_s']:,.0f}" if s["pairs_per_s"] else "", share(s["busy"]), share(s["queue"]), s["limit"],
            "← bottleneck" if s["slowest"] else "",
        )
        for s in stages
    ]  # fmt: skip
    return _table("Stages", ("alone, pairs/s", "busy", "queue full", "limit", ""), rows)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> RenderableType:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "limit") else "right")
    for row in rows:
        table.add_row(*row)
    return table
