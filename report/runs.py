"""Training runs of a work folder as plain series: runs/NAME/{config.json, metrics.jsonl, eval.jsonl, examples.json}."""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Any

from core.errors import InputError, nearest
from core.storage import Folder

if TYPE_CHECKING:
    from report.gallery import Thumbnails

POINTS = 600  # of a curve; a page needs no more
SERIES = ("loss", "acc", "scale", "lr", "grad_norm", "pairs_per_s", "wait_share", "mfu")
# Where a step's time passes (train.meter), in the order in which the page stacks them.
PLACES = {"decode": "waiting for a batch", "h2d": "copying to the device", "compute": "computing"}
# What the driver tells of the GPUs (train.card), as shares: a reading over its limit, or a share already.
GPU = {"busy": ("busy", ""), "power": ("power_w", "power_limit_w"), "memory": ("memory_bytes", "memory_total_bytes")}
EXAMPLES = 12


def load(folder: Folder, name: str = "") -> dict[str, Any] | None:
    """The run `name`, or the one that logged last; None where there is no run.

    Returns {name, config, steps: {key: [values]}, split: {place: [shares]}, gpu: {reading: [shares]}, evals, retrieval,
    zero_shot, last}.

    Raises:
        InputError: there is no run of that name.
    """
    names = [path.removeprefix("runs/") for path in folder.list("runs/*")]
    if name and name not in names:
        raise InputError(f"{folder} has no run {name!r}: {nearest(name, names) if names else 'it has none at all'}")
    found = [_load(folder, run) for run in ([name] if name else names)]
    found = [run for run in found if run["last"] or run["evals"] or run["config"]]
    return max(found, key=lambda run: (run["last"].get("time", 0.0), run["name"]), default=None)


def _load(folder: Folder, name: str) -> dict[str, Any]:
    home = f"runs/{name}"
    rows = jsonl(folder, f"{home}/metrics.jsonl", POINTS)
    rows = [row for row in rows if isinstance(row.get("step"), int)]
    evals = _by_step(jsonl(folder, f"{home}/eval.jsonl"))
    return {
        "name": name,
        "config": _settings(json_file(folder, f"{home}/config.json")),
        "steps": {key: [_finite(row.get(key)) for row in rows] for key in ("step", *SERIES)},
        "split": split(rows),
        "gpu": gpu(rows),
        "evals": evals,
        "retrieval": _newest(evals, "retrieval"),
        "zero_shot": _newest(evals, "zero_shot"),
        "last": rows[-1] if rows else {},
    }


def _settings(recorded: Any) -> dict[str, Any]:
    """The settings as run, without those that every verb has."""
    found = recorded.get("as_run", recorded) if isinstance(recorded, dict) else {}
    return {key: value for key, value in found.items() if key not in ("work", "workers", "engine", "fresh")}


def jsonl(folder: Folder, name: str, points: int = 0) -> list[dict[str, Any]]:
    """Whole rows of a JSONL file, thinned out evenly to about `points` with the last one kept; empty without the file."""
    if not folder.exists(name):
        return []
    lines = folder.read(name).splitlines()
    every = max(1, -(-len(lines) // points)) if points else 1
    rows = []
    for i, line in enumerate(lines):
        if i % every and i != len(lines) - 1:
            continue
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that is being written, or was killed
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def split(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Share of each place in a step's time, by the place's words; empty where the rows hold no waits."""
    shares: dict[str, list[float | None]] = {words: [] for words in PLACES.values()}
    if not any(row.get("waits") for row in rows):
        return {}
    for row in rows:
        means = {place: (row.get("waits") or {}).get(place, {}).get("mean", 0.0) for place in PLACES}
        whole = sum(means.values())
        for place, words in PLACES.items():
            shares[words].append(means[place] / whole if whole else None)
    return shares


def gpu(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Readings of the GPUs, means of the ranks, by their words; empty of a run on CPUs, or without NVML."""
    found = {}
    for words, (name, limit) in GPU.items():
        shares = [_over_limit(row.get("gpu") or {}, name, limit) for row in rows]
        if any(share is not None for share in shares):
            found[words] = shares
    return found


def _over_limit(readings: dict[str, dict[str, float]], name: str, limit: str) -> float | None:
    values = [_finite(readings.get(key, {}).get("mean")) for key in (name, limit) if key]
    if None in values or (limit and not values[1]):
        return None
    return values[0] / values[1] if limit else values[0]  # type: ignore[operator]


def examples(folder: Folder, run: dict[str, Any], thumbnails: Thumbnails) -> dict[str, list[dict[str, Any]]]:
    """What the run's last evaluation found, both ways, best answer first.

    Returns {images: [{picture, captions: [{caption, score, right}]}], texts: [{caption, pictures: [{picture, right}]}]}.
    """
    found = json_file(folder, f"runs/{run['name']}/examples.json")
    if not isinstance(found, dict):
        return {"images": [], "texts": []}
    images = [
        {"picture": _thumbnail(item, thumbnails), "captions": item.get("top", [])}
        for item in found.get("images", [])[:EXAMPLES]
    ]
    texts = [
        {"caption": item["caption"], "pictures": [_answer(answer, thumbnails) for answer in item.get("top", [])]}
        for item in found.get("texts", [])[:EXAMPLES]
    ]
    return {"images": images, "texts": texts}


def _answer(answer: dict[str, Any], thumbnails: Thumbnails) -> dict[str, Any]:
    return {"picture": _thumbnail(answer, thumbnails), "right": bool(answer.get("right"))}


def _thumbnail(item: dict[str, Any], thumbnails: Thumbnails) -> str | None:
    """The picture under `jpeg` (base64) made small; None for anything else."""
    try:
        return thumbnails.encode(base64.b64decode(str(item.get("jpeg") or ""), validate=True))
    except binascii.Error:
        return None


def json_file(folder: Folder, name: str) -> Any:
    """The contents of a JSON file; None where it is not there, or half written."""
    if not folder.exists(name):
        return None
    try:
        return json.loads(folder.read(name))
    except ValueError:
        return None


def _by_step(evals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluations in order of steps; those of one step (by `train`, then by `eval`) become one row, where later figures win."""
    steps: dict[int, dict[str, Any]] = {}
    for row in evals:
        if isinstance(row.get("step"), int):
            steps[row["step"]] = {**steps.get(row["step"], {}), **row}
    return [steps[step] for step in sorted(steps)]


def _newest(evals: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    return next((row[key] for row in reversed(evals) if row.get(key)), None)


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) < 1e300 else None  # NaN fails the comparison too
