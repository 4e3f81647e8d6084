"""How a run is doing and how it ended, in words: the progress line, the floor under the success rate, the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import RunError
from core.schema import Outcome
from core.storage import Folder

if TYPE_CHECKING:
    from rich.console import RenderableType

MIN_SUCCESS = 0.01  # share of rows; a broken network or a blocked address must not eat the whole list
JUDGED_ROWS = 2000  # rows before it is judged: where 3 % succeed, fewer than 1 % of 2,000 do so by no chance
HOSTS = 10  # in the summary
_HOST = "coalesce(nullif(regexp_extract(coalesce(final_url, url), '://(?:[^/?#]*@)?([^/?#]*)', 1), ''), '(none)')"


@dataclass
class Report:
    """What a worker did: rows by outcome, failed rows by host, seconds of CPU of the worker's process."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failing_hosts: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0

    def add(self, other: Report) -> None:
        self.outcomes.update(other.outcomes)
        self.failing_hosts.update(other.failing_hosts)  # += would look through all hosts so far each time
        self.cpu_seconds += other.cpu_seconds


def check_success(report: Report) -> None:
    """Stop a run that collapses.

    Raises:
        RunError: after at least `JUDGED_ROWS` rows, a smaller share than `MIN_SUCCESS` has succeeded.
    """
    rows, ok = report.outcomes.total(), report.outcomes[Outcome.OK]
    if rows < JUDGED_ROWS or ok >= MIN_SUCCESS * rows:
        return
    failures = Counter({k: n for k, n in report.outcomes.items() if k != Outcome.OK})
    words = [", ".join(f"{name} ({n:,})" for name, n in c.most_common(3)) for c in (failures, report.failing_hosts)]
    raise RunError(
        f"only {ok:,} of {rows:,} rows succeeded, fewer than {MIN_SUCCESS:.0%}; most common are {words[0]}, on the hosts "
        f"{words[1]}; look into these, then run the same command again with --retry-failed, which goes on regardless"
    )


def check_whole(summary: dict[str, Any], folder: Folder) -> None:
    """Raise RunError where all rows together, whichever run has fetched them, are enough and fall short of `least`."""
    if summary["rows"] >= JUDGED_ROWS and summary["ok"] < MIN_SUCCESS * summary["rows"]:
        with catalog.connect(folder) as connection:
            found = connection.execute(
                f"SELECT {_HOST}, count(*) FROM pairs WHERE outcome != 'ok' GROUP BY ALL"
            ).fetchall()
        check_success(Report(Counter(summary["outcomes"]), Counter(dict(found))))


def host_of(url: str) -> str:
    """Host and port of a URL, as the tables name it."""
    authority = url.partition("://")[2].partition("/")[0].partition("?")[0]
    return authority.rpartition("@")[2] or "(none)"


def hosts(folder: Folder) -> list[dict[str, Any]]:
    """The hosts on which most rows failed: host, rows, ok, and their most common failure."""
    with catalog.connect(folder) as connection:
        found = connection.execute(
            f"SELECT {_HOST} AS host, count(*) AS total, count(*) FILTER (outcome = 'ok') AS good, "
            "mode(outcome ORDER BY outcome) FILTER (outcome != 'ok') AS failure "
            f"FROM pairs GROUP BY host HAVING good < total ORDER BY total - good DESC, host LIMIT {HOSTS}"
        ).fetchall()
    return [dict(zip(("host", "rows", "ok", "failure"), row, strict=True)) for row in found]


def progress_words(counts: Mapping[str, int], seconds: float) -> str:
    """Successes and megabytes a second, the success rate, and what goes wrong most."""
    outcomes = Counter({name: n for name, n in counts.items() if name in set(Outcome)})
    rows, ok = outcomes.total(), outcomes.pop(Outcome.OK, 0)
    if not rows:
        return ""
    speed = f"{ok / seconds:,.1f} ok/s {counts.get('bytes', 0) / 1e6 / seconds:,.2f} MB/s {ok / rows:.1%} ok"
    return " ".join([speed, *(f"{name} {n:,}" for name, n in outcomes.most_common(3))])


def render(summary: dict[str, Any]) -> RenderableType:
    """The summary for people: one line, rows by outcome, and the hosts that failed most."""
    from rich.console import Group
    from rich.text import Text

    rows, ok = summary["rows"], summary["ok"]
    head = (
        f"{ok:,} of {rows:,} rows are pictures now ({ok / max(rows, 1):.1%}), {summary['bytes'] / 1e6:,.1f} MB received"
    )
    if summary.get("seconds"):
        head += f", {summary['seconds']:,.1f} s"
    outcomes = [[name, f"{n:,}", f"{n / max(rows, 1):.1%}"] for name, n in summary["outcomes"].items()]
    tables = [_table(["outcome", "rows", "share"], outcomes)]
    if worst := summary.get("hosts"):
        lines = [[h["host"], f"{h['rows']:,}", f"{h['ok']:,}", h["failure"]] for h in worst]
        tables.append(_table(["host with most failures", "rows", "ok", "most common failure"], lines))
    return Group(Text(head), *tables)


def _table(heads: list[str], lines: list[list[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, justify="right" if head in ("rows", "share", "ok") else "left")
    for line in lines:
        table.add_row(*map(Text, line))  # a host in brackets is no markup
    return table
