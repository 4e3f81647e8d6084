"""Settings of the verbs that look at a work folder."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import VerbConfig, setting


@dataclass(frozen=True, kw_only=True)
class AuditConfig(VerbConfig):
    """Dataset statistics of a work folder, or of a bare folder of shards."""

    folder: str = setting("", argument=True)
    """A bare folder to look at instead of the work folder: shards with their samples.parquet, what img2dataset wrote (its
    .parquet files are read), or any webdataset tars."""
    html: str = setting("", stable=False)
    """Also write the statistics as one offline HTML page to this file."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig(VerbConfig):
    """One offline HTML page for a work folder: what came in, what was dropped and why, and what was learned."""

    out: str = setting("report.html", stable=False)
    """File to write; a relative name lies in the work folder."""
    name: str = setting("")
    """Training run to show; the latest one where this is empty."""


@dataclass(frozen=True, kw_only=True)
class BrowseConfig(VerbConfig):
    """Serve the report with every pair, dropped pair and cluster behind it, page by page, by any SQL condition."""

    port: int = setting(8383)
    """Port to serve on; 0 takes a free one."""
    host: str = setting("127.0.0.1")
    """Address to serve on. Any other than loopback shows the data to whoever reaches it."""


@dataclass(frozen=True, kw_only=True)
class SqlConfig(VerbConfig):
    """Run one SQL query over everything that the stages have written."""

    query: str = setting(argument=True)
    """The query, in DuckDB's SQL, over the views pairs, signatures, clusters, decisions, against, samples, holdout, steps and
    evals. It reads only: the views are made in memory, over the files of the work folder."""
    limit: int = setting(1000)
    """Most rows to return; 0 returns all. What was left out is said."""
