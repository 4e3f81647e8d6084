"""Pages of this folder as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

FUNNEL = {
    "rows": "rows in",
    "fetched": "fetched",
    "unique": "unique",
    "kept": "kept",
    "sharded": "in shards",
    "seen": "seen in training",
}
MEASURES = {
    "width": "width, px",
    "height": "height, px",
    "aspect": "width / height",
    "bytes": "received, kB",
    "caption_chars": "caption, chars",
    "caption_words": "caption, words",
}


def audit(page: dict[str, Any]) -> RenderableType:
    """The statistics of `audit.run`."""
    parts: list[RenderableType] = []
    if page.get("funnel"):
        parts.append(_funnel(page["funnel"]))
    for key, title in (("outcomes", "Outcomes"), ("dropped", "Dropped by"), ("evidence", "Known by"), ("hosts", "Hosts"),
                       ("formats", "Formats"), ("languages", "Languages")):  # fmt: skip
        if page.get(key):
            parts.append(_counted(title, page[key]))
    if page.get("rules"):
        parts.append(_rules(page["rules"]))
    if page.get("against"):
        parts.append(_against(page["against"]))
    if page.get("over_time"):
        parts.append(_over_time(page["over_time"]))
    if page.get("histograms"):
        parts.append(_measures(page["histograms"]))
    if page.get("captions"):
        parts.append(_counted("Captions used more than once", page["captions"], name="caption"))
    if page.get("words", {}).get("top"):
        parts.append(Text("Frequent words: ", style="bold").append(_words(page["words"]["top"]), style="not bold"))
    if page.get("clusters", {}).get("sizes"):
        parts.append(_clusters(page["clusters"]["sizes"]))
    for view in ("samples", "holdout"):
        if view in page:
            parts.append(_samples(view, page[view]))
    return Group(*(item for part in parts for item in (part, Text(""))))


def rows(summary: dict[str, Any]) -> RenderableType:
    """The rows of `sql.run`."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(summary["columns"]):
        numeric = all(isinstance(row[i], int | float | None) for row in summary["rows"])
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in summary["rows"]:
        table.add_row(*(Text("" if v is None else str(v)) for v in row))
    count = len(summary["rows"])
    words = f"the first {count:,} rows; --limit shows more" if summary["more"] else f"{count:,} rows"
    return Group(table, Text(words, style="dim"))


def size(number: float) -> str:
    """Bytes in words: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(number) < 1000 or unit == "TB":
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1000
    raise AssertionError


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    table.add_column(columns[0], overflow="ellipsis", max_width=60, no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _funnel(funnel: dict[str, int]) -> Table:
    table = _table("Funnel", "", "count", "of rows in", "")
    first = max(next(iter(funnel.values())), 1)
    for name, count in funnel.items():
        share = count / first
        words = f"{share:.1%}" if share <= 1 else f"{share:.1f} times"  # training draws a sample once an epoch
        table.add_row(FUNNEL[name], f"{count:,}", words, Text("█" * round(30 * min(share, 1)), style="cyan"))
    table.columns[-1].justify = "left"
    return table


def _counted(title: str, records: list[dict[str, Any]], *, name: str = "name") -> Table:
    extra = [key for key in ("ok", "bytes", "similarity") if key in records[0]]
    table = _table(title, "", "rows", *extra)
    for record in records:
        cells = [_cell(key, record[key]) for key in extra]
        table.add_row(Text(str(record[name] or "unknown").replace("\n", " ")), f"{record['rows']:,}", *cells)
    return table


def _rules(rules: list[dict[str, Any]]) -> Table:
    table = _table("Conditions", "", "fail it", "dropped by it")
    for rule in rules:
        table.add_row(Text(rule["rule"]), f"{rule['alone']:,}", f"{rule['in_sequence']:,}")
    return table


def _against(sets: list[dict[str, Any]]) -> Table:
    table = _table("Evaluation sets", "", "items", "in the data", "pairs", "removed", "known by")
    for found in sets:
        by = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in found["evidence"].items())
        figures = [f"{found[key]:,}" for key in ("items", "items_matched", "matched", "removed")]
        table.add_row(Text(found["set"]), *figures, by)
    return table


def _over_time(found: dict[str, Any]) -> Text:
    periods = found["periods"]
    shares = [row["ok"] / row["rows"] for row in periods]
    line = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * round(100 * s) // 100)] for s in shares)
    words = f"{line}  from {periods[0]['from']} UTC, {len(periods)} periods of {found['seconds']:,} s, "
    return Text("Success over time: ", style="bold").append(
        f"{words}{min(shares):.0%} to {max(shares):.0%}", style="not bold"
    )


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    return size(value) if key == "bytes" else f"{value:,}"


def _measures(histograms: dict[str, Any]) -> Table:
    table = _table("Sizes", "", "min", "5 %", "median", "95 %", "max", "")
    for name, h in histograms.items():
        figures = [
            f"{h[k]:,.3g}" if isinstance(h[k], float) else f"{h[k]:,}" for k in ("min", "p05", "p50", "p95", "max")
        ]
        table.add_row(MEASURES[name], *figures, Text(_sparkline([b["rows"] for b in h["bins"]]), style="cyan"))
    return table


def _sparkline(counts: list[int]) -> str:
    """One character for every two bins, as high as they are full."""
    sums = [sum(counts[i : i + 2]) for i in range(0, len(counts), 2)]
    high = max(sums, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * n // high)] for n in sums)


def _words(top: list[dict[str, Any]]) -> str:
    return ", ".join(f"{w['word']} {w['rows']:,}" for w in top)


def _clusters(sizes: list[dict[str, Any]]) -> Table:
    table = _table("Duplicate clusters", "pairs in it", "clusters")
    for row in sizes[:12]:
        table.add_row(f"{row['size']:,}", f"{row['clusters']:,}")
    if len(sizes) > 12:
        rest = sum(row["clusters"] for row in sizes[12:])
        table.add_row(f"{sizes[12]['size']:,} to {sizes[-1]['size']:,}", f"{rest:,}")
    return table


def _samples(view: str, section: dict[str, Any]) -> Text:
    title = "Shards" if view == "samples" else "Held out"
    words = (
        f"{section['samples']:,} samples with {section['captions']:,} captions in {section['shards']:,} shards, "
        f"{size(section['bytes'])} of images"
    )
    return Text(f"{title}: ", style="bold").append(words, style="not bold")
