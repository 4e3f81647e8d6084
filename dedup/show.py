"""The summary of `dedup` as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def summary(found: dict[str, Any]) -> RenderableType:
    """What stays, what each rule dropped, what evaluation sets held, and the largest groups of captions."""
    share = found["kept"] / max(found["pairs"], 1)
    stay = "would stay" if found.get("dry_run") else "stay"
    parts: list[RenderableType] = [
        Text(f"{found['kept']:,} of {found['pairs']:,} pairs {stay} ({share:.1%})", style="bold").append(
            f"; {found['clusters']:,} clusters of duplicates, {found['seconds']:,.1f} s", style="not bold"
        )
    ]
    rows: list[tuple[Any, ...]]
    if found["rules"]:
        rows = [(rule["rule"], rule["alone"], rule["in_sequence"]) for rule in found["rules"]]
        parts.append(_table("Conditions, in their order", ("", "fail it", "dropped by it"), rows))
    if found["dropped"]:
        parts.append(_table("Dropped", ("", "pairs"), list(found["dropped"].items())))
    if found["against"]:
        keys = ("set", "items", "items_matched", "matched", "removed")
        rows = [tuple(report[key] for key in keys) for report in found["against"]]
        parts.append(_table("Evaluation sets", ("", "items", "in the data", "pairs", "removed"), rows))
    if found["largest"]:
        rows = [(" ".join((group["caption"] or "").split())[:70], group["pairs"]) for group in found["largest"]]
        parts.append(_table("Largest groups of captions", ("", "pairs"), rows))
    recall = ", ".join(f"{share:.1%} at {similarity}" for similarity, share in found["expected_recall"].items())
    parts.append(Text(f"Expected recall of near-duplicate captions by their similarity: {recall}", style="dim"))
    measured = found["measured"]
    if measured["pairs"]:
        parts.append(
            Text(
                f"Measured on {measured['sampled']:,} captions of yours and all {measured['pairs']:,} near-duplicates of theirs: "
                f"recall {measured['recall']:.2%}, precision {measured['precision'] or 0:.2%}",
                style="dim",
            )
        )
    return Group(*(item for part in parts for item in (part, Text(""))))


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for first, *figures in rows:
        table.add_row(Text(str(first)), *(f"{figure:,}" for figure in figures))
    return table
