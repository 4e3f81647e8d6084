"""What a diagnosis concludes from its evidence: verdict, cause, fixes and their gains.

Pure: neither torch nor a clock, so that recorded evidence decides the same again. Every cause is weighed by the share of
a step that it costs; the heaviest above its threshold is the verdict, and below all of them the model is the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Share of a step from which on a cause is worth an afternoon.
THRESHOLDS = {
    "straggler": 0.10,
    "read_bound": 0.05,
    "decode_bound": 0.05,
    "copy_bound": 0.10,
    "communication_bound": 0.20,
    "overhead_bound": 0.20,
    "cores_shared": 0.20,
}
INPUT_BOUND = THRESHOLDS["decode_bound"]
CLEAR = 2.0  # times a threshold, above which (or one over it, below which) a busy machine would not change the verdict
# A stored picture may be this much larger in area than the model's input before decoding it is waste (random crops).
OVERSIZE = 1.8
PROGRESSIVE = 0.2
AMPLE = 4.0  # times the model's rate, at which a loader keeps no step waiting
WORTH = 0.02  # a rehearsed gain below this is noise


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for in most rows."""

    rank: int
    lost: float
    """Share of a step that the others spend waiting for it."""
    place: str
    """Where it is slower: `decode` (waiting for its data) or `compute`."""


@dataclass(frozen=True)
class Evidence:
    """What is known, from a run, from trials, or both. Rates are pairs a second of the ranks that were measured, CPU
    seconds are of this process and a pair."""

    wait_share: float
    """Share of a step in which the loop waited for a batch."""
    steps: int
    rate: float
    h2d_share: float = 0.0
    model_rate: float | None = None
    """The model alone on a batch that is already there."""
    double_rate: float | None = None
    """The same with twice as many pairs at a time."""
    loader_rate: float | None = None
    read_rate: float | None = None
    decode_rate: float | None = None
    """Decoding and tokenising alone, without waiting for bytes."""
    small_bytes: float | None = None
    """Bytes of a picture stored as small as the model needs it over those of one as it is stored."""
    rehearsed: Mapping[str, float] = field(default_factory=dict)
    """The loop with each fix that can be tried, by `Fix.apply`, on pictures in memory (`train.remedies`)."""
    reading_share: float = 0.0
    """Share of the decoder's time spent waiting for bytes."""
    run_wait_share: float | None = None
    """Of the run, where `wait_share` is of the trials."""
    comm_share: float | None = None
    """Share of the run's step in which collectives held up even the rank that waits for no other."""
    common_wait: float | None = None
    """Share of the run's step in which even the rank that waits least waited for a batch."""
    straggler: Straggler | None = None
    busy: float | None = None
    """Share of the time in which the GPU ran a kernel, as its driver tells."""
    gpu: bool = False
    remote: bool = False
    """Whether the shards lie behind a URL."""
    workers: int = 1
    cores: int = 1
    oversize: float = 1.0
    """Area of a stored picture over the model's input."""
    progressive: float = 0.0
    quarantined: int = 0
    precision: str = "bf16"
    native: str = "bf16"
    """The type that this device multiplies fastest: `--precision auto`."""


@dataclass(frozen=True)
class Fix:
    """Something to change, what for, and how many times 1 + `gain` the rate would be; None where nobody can tell."""

    cause: str
    words: str
    gain: float | None = None
    apply: str = ""
    """What `--apply` calls it (train.remedies); empty where it cannot be tried here."""


def judge(e: Evidence) -> dict[str, Any]:
    """Verdict, cause, sentence, confidence, wait_share, ceiling_gain, losses and fixes, best first."""
    lost = losses(e)
    verdict = max(lost, key=lambda name: lost[name] / THRESHOLDS[name] * (lost[name] >= THRESHOLDS[name]), default="")
    if not verdict or lost[verdict] < THRESHOLDS[verdict]:
        verdict = "not_input_bound"
    found = sorted(fixes(verdict, e), key=_place)
    return {
        "verdict": verdict,
        "cause": found[0].cause,
        "says": says(verdict, e),
        "confidence": confidence(verdict, lost, e),
        "wait_share": e.wait_share,
        "ceiling_gain": ceiling(e),
        "losses": lost,
        "fixes": [
            {"fix": f.words, "cause": f.cause, "predicted_gain": f.gain, "apply": f.apply or None} for f in found
        ],
    }


def _place(fix: Fix) -> tuple[bool, float]:
    """First what can be tried here and gains something, then by gain."""
    return not (fix.apply and (fix.gain is None or fix.gain >= WORTH)), -(fix.gain or 0.0)


def losses(e: Evidence) -> dict[str, float]:
    """Share of a step that each possible cause costs, where it is known.

    A small batch and shared cores cost nothing while the loop waits for data anyway. It does not where the loader alone is many
    times as fast as the model: then a batch is there, and taking it is what takes so long beside a short step.
    """
    waiting = "read_bound" if _reading_limits(e) else "decode_bound"
    alone = e.straggler is not None and e.straggler.place == "decode"  # then only one rank's data comes late
    lost: dict[str, float | None] = {
        waiting: e.common_wait if alone else e.wait_share,
        "copy_bound": e.h2d_share,
        "communication_bound": e.comm_share,
        "straggler": e.straggler.lost if e.straggler else None,
    }
    ample = e.model_rate is not None and (e.loader_rate or 0.0) > AMPLE * e.model_rate
    if e.wait_share < INPUT_BOUND or ample:
        if e.model_rate and e.double_rate:
            lost["overhead_bound"] = max(0.0, 1 - e.model_rate / e.double_rate)
        elif e.busy is not None:  # a run alone: nobody waits, and yet the GPU has nothing to do
            lost["overhead_bound"] = max(0.0, 1 - e.busy - e.wait_share - e.h2d_share)
        if e.model_rate and not e.gpu:
            lost["cores_shared"] = max(0.0, 1 - e.rate / e.model_rate)
    return {name: share for name, share in lost.items() if share is not None}


def _reading_limits(e: Evidence) -> bool:
    """Whether bytes come too late, rather than their decoding."""
    if e.read_rate is not None and e.decode_rate is not None and e.read_rate < e.decode_rate:
        return True
    return e.reading_share > 0.5


def ceiling(e: Evidence) -> float:
    """What a perfect loader would gain: the model alone over the loop."""
    gain = e.model_rate / e.rate - 1 if e.model_rate and e.rate else e.wait_share / max(1e-9, 1 - e.wait_share)
    return max(0.0, gain)


def says(verdict: str, e: Evidence) -> str:
    """The verdict in a sentence or two."""
    waits, gain = f"{e.wait_share:.1%} of a step is waiting", ceiling(e)
    if verdict == "straggler" and e.straggler is not None:
        why = "waits for its data" if e.straggler.place == "decode" else "computes"
        return f"Rank {e.straggler.rank} holds up the others for {e.straggler.lost:.0%} of a step: it {why} longer than they do."
    if verdict == "communication_bound":
        return f"Communication-bound: even the rank that waits for no other spends {e.comm_share:.0%} of a step in collectives."
    if verdict == "overhead_bound" and e.model_rate and e.double_rate:
        more = e.double_rate / e.model_rate - 1
        return (
            f"Not input-bound, but the device has too little to do at a time: with twice the pairs at once it does {more:.0%} "
            "more of them a second."
        )
    if verdict == "overhead_bound":
        idle = 1 - (e.busy or 0.0)
        return f"Not input-bound, but the GPU is idle for {idle:.0%} of the time: it has too little to do at a time."
    if verdict == "cores_shared":
        return (
            f"Not input-bound, but decoding takes cores from the model: {waits}, yet with batches ready in memory it would be "
            f"{gain:.0%} faster."
        )
    if verdict == "copy_bound":
        return f"Copying to the device takes {e.h2d_share:.0%} of a step."
    if verdict == "not_input_bound":
        return f"Not input-bound: {waits}, and a perfect loader would gain {gain:.0%}. Stop tuning the loader."
    what = "the bytes come too late from the shards" if verdict == "read_bound" else "decoding is too slow"
    return f"Input-bound: {waits}, because {what}. A perfect loader would gain {gain:.0%}."


def confidence(verdict: str, lost: dict[str, float], e: Evidence) -> str:
    """high, medium or low: whether a repetition on a busy machine would say the same."""
    if e.steps < 8:
        return "low"
    shares = {name: share / THRESHOLDS[name] for name, share in lost.items()}
    own = shares.pop(verdict, 0.0)
    rival = max(shares.values(), default=0.0)
    clear = own >= CLEAR and rival < own / CLEAR if verdict in THRESHOLDS else rival < 1 / CLEAR
    sides = {share >= INPUT_BOUND for share in (e.wait_share, e.run_wait_share) if share is not None}
    return "high" if clear and len(sides) == 1 else "medium"


# ---------------------------------------------------------------- fixes


def fixes(verdict: str, e: Evidence) -> list[Fix]:
    """What to change, not yet in order."""
    if verdict == "straggler" and e.straggler is not None:
        part = "disk and network" if e.straggler.place == "decode" else "clocks, temperature and other processes"
        gain = e.straggler.lost / (1 - e.straggler.lost)
        return [Fix("slow_rank", f"look at the {part} of the machine of rank {e.straggler.rank}", gain)]
    if verdict == "communication_bound":
        share = e.comm_share or 0.0
        words = (
            "a larger batch a rank (--batch-size): the same gradients are then sent half as often for twice the pairs"
        )
        return [
            Fix("slow_collectives", words, share / (2 - share)),
            Fix("slow_collectives", "look at the link between the ranks: NCCL_DEBUG=INFO says which one it uses"),
        ]
    if verdict == "copy_bound":
        return [Fix("copies", "decode on the GPU: --decode dali, so that compressed bytes are copied")]
    if verdict == "overhead_bound":
        words = "a larger batch (--batch-size), or --micro-batch 0 where memory allows it"
        larger = Fix("small_batch", words, gain_of(e, "batch"), "batch")
        joined = [Fix("small_batch", "--compile, which joins small operations")] if e.gpu else []
        return [*_precision(e), larger, *joined]
    if verdict == "read_bound":
        cause = "slow_network" if e.remote else "slow_disk"
        words = "copy the shards to a local SSD"
        if e.remote:
            words += ", or let --cache-gb hold them all: from the second epoch on they then are there"
        fix = Fix(cause, words, gain_of(e, "local"), "local")
        return [fix, *_smaller(e)]
    if verdict == "decode_bound":
        return _decode_fixes(e)
    if verdict == "cores_shared":
        words = "more cores, so that decoding and the model do not share them"
        return [*_precision(e), *_smaller(e), Fix("shared_cores", words, ceiling(e))]
    return _precision(e) or [
        Fix("compute", "spend the effort on the model: larger batch, --compile on GPUs, more ranks")
    ]


def _decode_fixes(e: Evidence) -> list[Fix]:
    found = _smaller(e)
    if e.workers < e.cores:
        words = f"use every core: --workers {e.cores}"
        found.append(Fix("few_workers", words, gain_of(e, "workers"), "workers"))
    if e.gpu:
        found.append(Fix("slow_cores", "decode on the GPU: --decode dali"))
    if e.progressive > PROGRESSIVE:
        words = f"re-encode: {e.progressive:.0%} of the JPEGs are progressive, which decode slowly (ingest --size)"
        found.append(Fix("progressive", words))
    return found or [Fix("slow_cores", "more or faster cores; the pictures are small and every core decodes already")]


def _precision(e: Evidence) -> list[Fix]:
    """Where the model limits, in a type that this device emulates or does slowly."""
    if (e.precision == "fp32") == (e.native == "fp32"):
        return []
    words = f"--precision {e.native}, which this device multiplies faster than {e.precision}"
    return [Fix("slow_precision", words, gain_of(e, "precision"), "precision")]


def _smaller(e: Evidence) -> list[Fix]:
    if e.oversize <= OVERSIZE:
        return []
    words = f"pack smaller pictures: they have {e.oversize:.1f} times the model's area (ingest or shard --size)"
    return [Fix("large_pictures", words, gain_of(e, "smaller"), "smaller")]


def gain_of(e: Evidence, fix: str) -> float | None:
    """What the rehearsal of a fix promises where bytes go on coming as they do; None where there was none."""
    if fix not in e.rehearsed or not e.rate:
        return None
    read = e.read_rate or math.inf
    if fix == "smaller" and e.small_bytes:
        read /= e.small_bytes
    return max(0.0, min(e.rehearsed[fix], math.inf if fix == "local" else read) / e.rate - 1)
