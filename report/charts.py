"""Charts of our own: inline SVG that stretches with the page, with axis words in HTML so that they never shrink.

Every mark carries a <title>: browsers show it as it is, and page.js turns it into the tooltip that mouse, touch and
arrow keys share. Coordinates inside the SVGs are percent of width and height.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from report.markup import Markup, tag

Format = Callable[[float], str]
COLUMNS = 120  # most places along a line chart where a tooltip can be asked for


def number(value: float) -> str:
    """12,300 or 0.0123: whole where it is whole, else three digits that count."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    words = f"{value:,.{min(digits, 8)}f}"
    return words.rstrip("0").rstrip(".") if "." in words else words


def percent(value: float) -> str:
    """`value` in [0, 1] as 12 %, 1.2 % or <0.1 %."""
    if 0 < value < 0.0005:
        return "<0.1 %"
    words = f"{100 * value:.0f}" if value >= 0.0995 else f"{100 * value:.1f}".removesuffix(".0")
    return f"{words} %"


def short(value: float) -> str:
    """Axis words: 12k, 3M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}"
    return number(float(f"{value:.3g}"))


def size(value: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def figure(title: str, *body: Any, note: Any = None, wide: bool = False, marks: bool = True) -> Markup:
    """A chart with its heading; focusable where it has marks to walk through."""
    return tag(
        "figure", tag("figcaption", tag("b", title), tag("span", note) if note else None), *body,
        class_="wide" if wide else None, tabindex=0 if marks else None, role="group" if marks else None,
        aria_label=f"{title}: use the arrow keys to read the values" if marks else None,
    )  # fmt: skip


def bars(title: str, rows: Sequence[dict[str, Any]], *, note: Any = None, tone: str = "a", total: float = 0,
         long: bool = False) -> Markup:  # fmt: skip
    """Horizontal bars of {name, rows, tip?}; shares are of `total`, or of the sum. `long` gives the names more room."""
    whole = total or sum(row["rows"] for row in rows) or 1
    high = max((row["rows"] for row in rows), default=1) or 1
    items = []
    for row in rows:
        name, count = str(row["name"] or "unknown"), row["rows"]
        share = percent(count / whole)
        tip = f"{name}: {number(count)}, {share}" + (f"; {row['tip']}" if row.get("tip") else "")
        items.append(
            tag(
                "li", tag("span", name, class_="name", title=name),
                tag("span", tag("i", style=f"width:{max(100 * count / high, 0.4):.2f}%"), class_="track"),
                tag("span", number(count), tag("small", share), class_="value"),
                class_="mark", data_tip=tip,
            )
        )  # fmt: skip
    return figure(title, tag("ol", items, class_=f"bars tone-{tone}{' long' if long else ''}"), note=note)


def histogram(title: str, bins: Sequence[dict[str, Any]], *, note: Any = None, median: float | None = None) -> Markup:
    """Upright bars of {from, to, rows}; the outermost bins hold what lies beyond."""
    high, whole = max((b["rows"] for b in bins), default=1) or 1, sum(b["rows"] for b in bins) or 1
    width = 100 / max(len(bins), 1)
    marks = []
    for i, b in enumerate(bins):
        tall = 96 * b["rows"] / high
        words = f"{number(b['from'])} to {number(b['to'])}: {number(b['rows'])}, {percent(b['rows'] / whole)}"
        marks.append(
            tag(
                "g", tag("title", words), tag("rect", x=f"{i * width:.3f}", y=0, width=f"{width:.3f}", height=100, class_="hit"),
                tag("rect", x=f"{i * width + width * 0.06:.3f}", y=f"{100 - tall:.3f}", width=f"{width * 0.88:.3f}",
                    height=f"{tall:.3f}", class_="fill-a"),
                class_="mark",
            )
        )  # fmt: skip
    first, last = bins[0]["from"], bins[-1]["to"]
    middle = None
    if median is not None and last > first:
        at = min(100.0, max(0.0, 100 * (median - first) / (last - first)))
        middle = tag("line", x1=f"{at:.2f}", x2=f"{at:.2f}", y1=0, y2=100, class_="median")
    ends = tag("div", tag("span", short(first)), tag("span", f"median {number(median)}") if median is not None else None,
               tag("span", short(last)), class_="ends")  # fmt: skip
    return figure(title, tag("div", _svg(marks, middle), class_="plot low"), ends, note=note)


Series = tuple[str, str, list[float | None]]
"""Name, tone (a to f), one value for each x; None where there is none."""


def lines(title: str, x: Sequence[float], series: Sequence[Series], *, y: Format = number, note: Any = None,
          x_name: str = "step", zero: bool = False, top: float | None = None, level: tuple[str, float] | None = None,
          wide: bool = False) -> Markup:  # fmt: skip
    """Lines over a shared x. `level` is a named horizontal mark such as chance; `zero` starts the axis at 0."""
    values = [v for _, _, vs in series for v in vs if v is not None] + ([level[1]] if level else [])
    low, high, ticks = _axis(min(values), max(values) if top is None else top, zero)
    scale = _scaler(x, low, high)
    drawn = [tag("path", d=_path(x, vs, scale), class_=f"line stroke-{tone}") for _, tone, vs in series]
    if level:
        at = f"{scale(x[0], level[1])[1]:.2f}"
        drawn.append(tag("line", x1=0, x2=100, y1=at, y2=at, class_="level"))
    legend = [(name, tone) for name, tone, _ in series] if len(series) > 1 or level else []
    return _chart(title, x, series, drawn, (low, high, ticks), y, note, x_name, legend, level, wide)


def stacked(title: str, x: Sequence[float], series: Sequence[Series], *, y: Format = percent, note: Any = None,
            x_name: str = "step", wide: bool = False) -> Markup:  # fmt: skip
    """Areas on top of each other, of shares that sum to at most 1."""
    scale = _scaler(x, 0.0, 1.0)
    below = [0.0] * len(x)
    drawn = []
    for _, tone, values in series:
        above = [b + (v or 0.0) for b, v in zip(below, values, strict=True)]
        points = [scale(a, b) for a, b in zip(x, above, strict=True)]
        points += [scale(a, b) for a, b in reversed(list(zip(x, below, strict=True)))]
        drawn.append(
            tag("path", d="M" + "L".join(f"{a:.2f} {b:.2f}" for a, b in points) + "Z", class_=f"area fill-{tone}")
        )
        below = above
    legend = [(name, tone) for name, tone, _ in series]
    return _chart(title, x, series, drawn, (0.0, 1.0, [0.0, 0.5, 1.0]), y, note, x_name, legend, None, wide)


def _chart(title: str, x: Sequence[float], series: Sequence[Series], drawn: list[Markup],
           axis: tuple[float, float, list[float]], y: Format, note: Any, x_name: str, legend: list[tuple[str, str]],
           level: tuple[str, float] | None, wide: bool) -> Markup:  # fmt: skip
    low, high, ticks = axis
    places = [(t, 100 - 100 * (t - low) / (high - low)) for t in ticks]
    grid = [tag("line", x1=0, x2=100, y1=f"{at:.2f}", y2=f"{at:.2f}", class_="grid") for _, at in places]
    named = [y(t) for t in ticks]
    if len(set(named)) < len(named):  # a narrow range needs more digits than a value does
        named = [f"{100 * t:.5g} %" if y is percent else f"{t:.6g}" for t in ticks]
    words = [tag("span", name, style=f"top:{at:.2f}%") for name, (_, at) in zip(named, places, strict=True)]
    keys = [tag("span", tag("i", class_=f"swatch tone-{tone}"), name) for name, tone in legend]
    if level:
        keys.append(tag("span", tag("i", class_="swatch dashed"), f"{level[0]} {y(level[1])}"))
    return figure(
        title,
        tag("div", keys, class_="legend") if keys else None,
        tag("div", tag("div", words, class_="yaxis"), _svg(grid, drawn, _columns(x, series, y, x_name)), class_="plot"),
        tag("div", tag("span", f"{x_name} {short(x[0])}"), tag("span", short(x[-1])), class_="ends"),
        note=note, wide=wide,
    )  # fmt: skip


def _columns(x: Sequence[float], series: Sequence[Series], y: Format, x_name: str) -> list[Markup]:
    """Invisible columns that carry the tooltips, at most COLUMNS of them."""
    every = max(1, -(-len(x) // COLUMNS))
    chosen = list(range(0, len(x), every))
    if chosen[-1] != len(x) - 1:
        chosen.append(len(x) - 1)
    scale = _scaler(x, 0.0, 1.0)
    at = [scale(x[i], 0.0)[0] for i in chosen]
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(at)), 100.0]
    columns = []
    for i, place, left, right in zip(chosen, at, edges, edges[1:], strict=False):
        words = "; ".join(f"{name} {y(value)}" for name, _, values in series if (value := values[i]) is not None)
        columns.append(
            tag(
                "g", tag("title", f"{x_name} {number(x[i])}: {words}"),
                tag("rect", x=f"{left:.3f}", y=0, width=f"{right - left:.3f}", height=100, class_="hit"),
                tag("line", x1=f"{place:.3f}", x2=f"{place:.3f}", y1=0, y2=100, class_="cursor"),
                class_="mark",
            )
        )  # fmt: skip
    return columns


def _svg(*children: Any) -> Markup:
    return tag("svg", *children, viewBox="0 0 100 100", preserveAspectRatio="none", aria_hidden="true")


def _scaler(x: Sequence[float], low: float, high: float) -> Callable[[float, float], tuple[float, float]]:
    span = (x[-1] - x[0]) or 1.0
    return lambda a, b: (100 * (a - x[0]) / span, 100 - 100 * (b - low) / (high - low))


def _path(
    x: Sequence[float], values: Sequence[float | None], scale: Callable[[float, float], tuple[float, float]]
) -> str:
    words, pen = [], "M"
    for a, b in zip(x, values, strict=True):
        if b is None:
            pen = "M"
            continue
        px, py = scale(a, b)
        words.append(f"{pen}{px:.2f} {py:.2f}")
        pen = "L"
    return "".join(words)


def _axis(low: float, high: float, zero: bool) -> tuple[float, float, list[float]]:
    """Ends and three to six ticks on round numbers."""
    if zero:
        low = min(low, 0.0)
    if high <= low:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks
