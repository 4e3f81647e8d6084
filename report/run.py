"""`report`: one offline HTML page for a work folder, finished or not."""

from __future__ import annotations

import datetime
import logging
import time
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import InputError
from core.storage import Folder
from core.work import package_version, read_settings
from report import audit, gallery, html, runs

if TYPE_CHECKING:
    from rich.console import RenderableType

    from report.config import ReportConfig

log = logging.getLogger("pairmill.report")
PICTURES = 6  # samples of each reason to drop, about 5 kB each; twice as many of a cluster
PICTURE_BYTES = 6_500_000  # of data URLs; the rest of the page takes a few hundred kB
LARGEST_CLUSTERS = 6


def run(config: ReportConfig) -> dict[str, Any]:
    """Write the page; returns {report, bytes, sections, seconds}.

    Raises:
        InputError: the work folder holds nothing to report, or no run of the name asked for.
        DataError: a file of it is damaged.
    """
    start = time.perf_counter()
    folder = Folder(config.work)
    with catalog.reading(folder):
        report = collect(folder, run_name=config.name)
    page = html.render(report).encode("utf-8", "replace")  # lone surrogates in captions have no UTF-8
    if len(page) > html.MAX_BYTES:
        log.warning("the report is %.1f MB, more than browsers open quickly", len(page) / 1e6)
    folder.write(config.out, page)
    catalog.write(folder)  # with the views of runs, whose files are younger than the data stages
    seconds = round(time.perf_counter() - start, 3)
    return {"report": folder.path(config.out), "bytes": len(page), "funnel": report["audit"].get("funnel", {}),
            "run": (report["run"] or {}).get("name"), "seconds": seconds}  # fmt: skip


def collect(folder: Folder, *, run_name: str = "") -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    connection = catalog.connect(folder)
    page = audit.gather(connection)
    latest = runs.load(folder, run_name)
    if not page and latest is None:
        raise InputError(f"{folder} holds nothing to report yet; run `pairmill ingest` first")
    thumbnails = gallery.Thumbnails(folder, PICTURE_BYTES)
    largest = page.get("clusters", {}).get("largest", [])[:LARGEST_CLUSTERS]
    examples = runs.examples(folder, latest, thumbnails) if latest else {}
    settings = all_settings(folder, latest)
    return {
        "title": str(folder),
        "folder": str(folder),
        "made_at": f"{datetime.datetime.now().astimezone():%d %B %Y, %H:%M}",
        "version": package_version(),
        "audit": page,
        "failures": gallery.failures(connection),
        "dropped": gallery.dropped(connection, thumbnails, PICTURES),
        "clusters": gallery.clusters(connection, thumbnails, largest, 2 * PICTURES),
        "run": {**latest, "examples": examples} if latest else None,
        "settings": settings,
        "recipe": recipe(settings, str(folder)),
    }


def all_settings(folder: Folder, run: dict[str, Any] | None) -> dict[str, Any]:
    """Settings of every stage that ran: those that bind the folder, those a stage may change afterwards, the run's."""
    settings = read_settings(folder)
    for stage, home in (("dedup", "dedup"), ("shard", "shards")):
        noted = runs.json_file(folder, f"{home}/done.json")
        if stage in settings and isinstance(noted, dict) and isinstance(noted.get("settings"), dict):
            settings[stage] = {**settings[stage], **noted["settings"]}
    if run and run["config"]:
        settings.setdefault("train", run["config"])
    return settings


def recipe(settings: dict[str, Any], work: str) -> str:
    """The settings as a recipe that `pairmill run` takes; what the stages noted for themselves is left out."""
    import tomli_w

    noted = ("inputs", "version")
    stages = {
        stage: {key: value for key, value in values.items() if key not in noted and value is not None}
        for stage, values in settings.items()
        if isinstance(values, dict)
    }
    order = ["ingest", "adopt", "score", "dedup", "shard", "train", "eval", "report"]
    return tomli_w.dumps({"work": work} | {stage: stages[stage] for stage in order if stage in stages})


def render(summary: dict[str, Any]) -> RenderableType:
    """Where the page is, for a terminal."""
    from rich.text import Text

    words = f"  {summary['bytes'] / 1e6:.2f} MB, made in {summary['seconds']:.1f} s; open it in any browser"
    return Text(summary["report"], style="bold").append(words, style="not bold dim")
