"""`plan scaling`: how fast the best error falls with compute, E = a C^(-k), fitted on the Pareto frontier of a user's runs.

Most runs waste compute (a model too large for its samples, or too small for its budget), so only those count that no
cheaper run beats (Cherti et al. 2023, "Reproducible scaling laws for contrastive language-image learning"). A law holds
for one distribution of data: runs on different data are fitted apart.
"""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import InputError
from core.storage import Folder

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = "compute (operations, or any unit) and error (0 to 1) or accuracy; name and data are optional"
COLOURS = ("#0f6b6b", "#c2553a", "#4f639c", "#b98a2f")


@dataclass(frozen=True)
class Run:
    """One trained model: what it cost and how often it is wrong."""

    name: str
    data: str
    compute: float
    error: float


@dataclass(frozen=True)
class Law:
    """error = a * compute ** -k."""

    k: float
    a: float

    def error(self, compute: float) -> float:
        return float(self.a * compute**-self.k)


def frontier(runs: Sequence[Run]) -> list[Run]:
    """The runs that no run of the same or less compute beats, cheapest first."""
    best, kept = math.inf, []
    for run in sorted(runs, key=lambda r: (r.compute, r.error)):
        if run.error < best:
            kept.append(run)
            best = run.error
    return kept


def fit(runs: Sequence[Run]) -> Law:
    """Least squares on the logarithms.

    Raises:
        InputError: fewer than two different amounts of compute.
    """
    if len({run.compute for run in runs}) < 2:
        raise InputError(f"expected at least two runs on the frontier to draw a line through, found {len(runs)}")
    x, y = ([math.log(value) for value in values] for values in zip(*((r.compute, r.error) for r in runs), strict=True))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return Law(-slope, math.exp(mean_y - slope * mean_x))


def read(path: str) -> list[Run]:
    """The runs of a CSV file with a head.

    Raises:
        InputError: no such file, or a row that holds no run; the message names it.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"expected a CSV file of runs at {path}, found none that can be read: {error}") from error
    if not rows:
        raise InputError(f"expected rows in {path} with the columns {COLUMNS}; found none")
    return [_run(row, f"{path}, row {number}") for number, row in enumerate(rows, 2)]


def _run(row: dict[str, Any], where: str) -> Run:
    try:
        compute = float(row["compute"])
        error = float(row["error"]) if row.get("error") else 1 - float(row["accuracy"])
    except (KeyError, TypeError, ValueError) as problem:
        raise InputError(f"{where}: expected the columns {COLUMNS}; found {row}") from problem
    if not 0 < compute < math.inf or not 0 < error <= 1:
        raise InputError(
            f"{where}: expected compute above 0 and an error above 0 and up to 1; found {compute} and {error}"
        )
    return Run(row.get("name") or "", row.get("data") or "", compute, error)


def run(path: str) -> dict[str, Any]:
    """Fit every data set of the file; {scaling: [{data, k, a, runs, frontier, per_tenfold, next}], plot}.

    `next` are the errors to expect of 10 and 100 times the compute of the largest run. The plot lies beside the file.
    """
    runs = read(path)
    groups = {data: [r for r in runs if r.data == data] for data in sorted({r.data for r in runs})}
    plot = str(Path(path).with_suffix(".svg"))
    laws = {data: fit(frontier(group)) for data, group in groups.items()}
    Folder(Path(plot).parent).write(Path(plot).name, draw(groups, laws).encode())
    return {"scaling": [_fitted(data, groups[data], laws[data]) for data in groups], "plot": plot}


def _fitted(data: str, runs: Sequence[Run], law: Law) -> dict[str, Any]:
    most = max(r.compute for r in runs)
    return {
        "data": data,
        "k": law.k,
        "a": law.a,
        "runs": len(runs),
        "frontier": [{"name": r.name, "compute": r.compute, "error": r.error} for r in frontier(runs)],
        "per_tenfold": 10**-law.k,
        "next": {f"{times:g}": law.error(times * most) for times in (10, 100)},
    }


def draw(groups: dict[str, list[Run]], laws: dict[str, Law], width: int = 720, height: int = 460) -> str:
    """The runs and their laws on two logarithmic axes, as an SVG; runs off the frontier are hollow."""
    everything = [run for group in groups.values() for run in group]
    x, low_x, high_x = _axis([r.compute for r in everything], 70, width - 20)
    y, low_y, high_y = _axis([r.error for r in everything], height - 50, 20)
    parts = [
        f'<path d="M70 20V{height - 50}H{width - 20}" fill="none" stroke="#888"/>',
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">compute</text>',
        f'<text x="16" y="{height / 2}" transform="rotate(-90 16 {height / 2})" text-anchor="middle">error</text>',
        *(
            f'<text x="{x(v):.1f}" y="{height - 32}" text-anchor="{anchor}">{v:.2g}</text>'
            for v, anchor in ((low_x, "start"), (high_x, "end"))
        ),
        *(f'<text x="64" y="{y(v) + 4:.1f}" text-anchor="end">{v:.2g}</text>' for v in (low_y, high_y)),
    ]
    for place, (data, group) in enumerate(groups.items()):
        colour, law, best = COLOURS[place % len(COLOURS)], laws[data], frontier(group)
        ends = [(c, law.error(c)) for c in (best[0].compute, high_x)]
        line = " ".join(f"{x(c):.1f},{y(e):.1f}" for c, e in ends)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for run in group:
            words = html.escape(f"{run.name or data}: {run.compute:.3g}, {run.error:.3f}")
            fill = colour if run in best else "none"
            at = f'cx="{x(run.compute):.1f}" cy="{y(run.error):.1f}"'
            parts.append(f'<circle {at} r="4" fill="{fill}" stroke="{colour}"><title>{words}</title></circle>')
        words = html.escape(f"{data + ': ' if data else ''}E = {law.a:.3g} C^-{law.k:.3f}")
        parts.append(f'<text x="{width - 24}" y="{36 + 18 * place}" text-anchor="end" fill="{colour}">{words}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    back = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, back, *parts, "</svg>", ""])


def _axis(values: Sequence[float], start: float, end: float) -> tuple[Any, float, float]:
    """A function from a value to its place on a logarithmic axis, and the ends, a little beyond the values."""
    low, high = min(values) / 1.2, max(values) * 1.2
    span = math.log(high / low)
    return (lambda v: start + (end - start) * math.log(v / low) / span), low, high


def render(summary: dict[str, Any]) -> RenderableType:
    """The laws for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("data", "E = a C^-k", "runs", "on the frontier", "error per 10x", "at 10x", "at 100x"):
        table.add_column(name, justify="left" if name == "data" else "right")
    for law in summary["scaling"]:
        table.add_row(
            law["data"] or "all", f"{law['a']:.3g} C^-{law['k']:.3f}", str(law["runs"]), str(len(law["frontier"])),
            f"x {law['per_tenfold']:.2f}", *(f"{error:.3f}" for error in law["next"].values()),
        )  # fmt: skip
    return Group(table, Text(f"plot: {summary['plot']}", style="dim"))
