"""One self-contained page: first screen with the story in a sentence, headline figures and the funnel, then sections.

`render` takes plain dicts, each of which may be missing. Nothing is loaded from anywhere: styles, script and pictures
are in the page, and its content policy lets nothing else run, so that a caption with markup stays words.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Sequence
from importlib import resources
from typing import Any

from report import sections
from report.charts import number, percent, short
from report.markup import Child, Markup, join, tag

MAX_BYTES = 10_000_000
STAGES = {
    "rows": ("Rows in", "in the URL list"),
    "fetched": ("Fetched", "pictures that arrived and could be used"),
    "unique": ("Unique", "no copy of another pair"),
    "kept": ("Kept", "passed every rule"),
    "sharded": ("In shards", "packed for training or held out"),
    "seen": ("Seen", "drawn in training"),
}
LOSSES = {
    "fetched": "not fetched",
    "unique": "duplicates",
    "kept": "dropped by rules",
    "sharded": "not packed",
}


def render(report: dict[str, Any]) -> str:
    """The whole page as text; `report` may hold title, folder, made_at, version, audit, failures, dropped, clusters,
    run, runs, settings and recipe."""
    audit = report.get("audit", {})
    title = str(report.get("title") or audit.get("folder") or "pairmill").rstrip("/").rsplit("/", 1)[-1] or "pairmill"
    parts = [(key, heading, body) for key, heading, body in sections.build(report) if body]
    page = [
        _header(report, title),
        _navigation(parts),
        tag("main", [_section(key, heading, body) for key, heading, body in parts]),
        tag("footer", "Made by pairmill ", str(report.get("version", "")), ". This page opens no connection."),
        tag("div", id="tip", role="status", aria_live="polite", hidden=True),
    ]
    return _document(title, join(page))


def _document(title: str, body: Markup) -> str:
    files = resources.files("report")
    style = (files / "page.css").read_text(encoding="utf-8")
    script = (files / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{title} · pairmill report"),
            Markup(f"<style>{style}</style>"),
        ]
    )
    end = Markup(f"<script>{script}</script>")
    return "<!doctype html>\n" + tag("html", tag("head", head), tag("body", body, end), lang="en") + "\n"


def _section(key: str, heading: str, body: Child) -> Markup:
    return tag("section", tag("h2", heading, id=f"{key}-title"), body, id=key, aria_labelledby=f"{key}-title")


def _navigation(parts: Sequence[tuple[str, str, Child]]) -> Markup | None:
    if len(parts) < 2:
        return None
    return tag("nav", [tag("a", heading, href=f"#{key}") for key, heading, _ in parts], aria_label="Sections")


# ---------------------------------------------------------------- first screen


def _header(report: dict[str, Any], title: str) -> Markup:
    audit, run = report.get("audit", {}), report.get("run") or {}
    made = " · ".join(str(report[key]) for key in ("made_at", "folder") if report.get(key))
    return tag(
        "header",
        tag("p", "pairmill report", tag("span", made), class_="over"),
        tag("h1", title),
        tag("p", story(audit, run), class_="story"),
        _headlines(audit, run),
        _funnel(audit),
        id="top",
    )


def story(audit: dict[str, Any], run: dict[str, Any]) -> str:
    """What happened, in two sentences."""
    funnel = audit.get("funnel", {})
    said = []
    if "rows" in funnel and "kept" in funnel:
        lost = []
        if missing := funnel["rows"] - funnel["fetched"]:
            lost.append(f"{number(missing)} could not be fetched")
        if dropped := funnel["fetched"] - funnel["kept"]:
            lost.append(f"{number(dropped)} were dropped as copies or by rules")
        tail = f": {' and '.join(lost)}" if lost else ""
        said.append(f"Of {number(funnel['rows'])} rows, {number(funnel['kept'])} pairs were kept{tail}.")
    elif "rows" in funnel:
        said.append(f"Of {number(funnel['rows'])} rows, {number(funnel['fetched'])} pictures were fetched.")
    elif "samples" in audit:
        said.append(f"{number(audit['samples']['samples'])} samples in {number(audit['samples']['shards'])} shards.")
    if run:
        said.append(_run_story(run))
    return " ".join(said)


def _run_story(run: dict[str, Any]) -> str:
    zero, found = run.get("zero_shot"), (run.get("retrieval") or {}).get("t2i_r10")
    reached = []
    if zero:
        reached.append(f"names {percent(zero['accuracy'])} of pictures right among {zero['classes']} classes")
    if found is not None:
        reached.append(f"finds the right picture among its first 10 for {percent(found)} of captions")
    seen = run.get("last", {}).get("samples_seen", 0)
    return f"After {number(seen)} samples the model " + (" and ".join(reached) if reached else "is in training") + "."


def _headlines(audit: dict[str, Any], run: dict[str, Any]) -> Markup | None:
    """Up to five figures that matter most, with what to compare them to."""
    funnel, last, tiles = audit.get("funnel", {}), run.get("last", {}), []
    if "kept" in funnel:
        of = f"{percent(funnel['kept'] / max(funnel['rows'], 1))} of the rows" if "rows" in funnel else ""
        tiles.append(("pairs kept", number(funnel["kept"]), of))
    elif "fetched" in funnel:
        tiles.append(("fetched", number(funnel["fetched"]), f"of {number(funnel['rows'])} rows"))
    elif "samples" in audit:
        tiles.append(("samples", number(audit["samples"]["samples"]), f"in {audit['samples']['shards']} shards"))
    if zero := run.get("zero_shot"):
        tiles.append(("zero-shot accuracy", percent(zero["accuracy"]), f"chance {percent(zero['chance'])}"))
    if retrieval := run.get("retrieval"):
        for key, words in (("t2i_r10", "caption to picture, R@10"), ("i2t_r10", "picture to caption, R@10")):
            if key in retrieval:
                tiles.append((words, percent(retrieval[key]), f"R@1 {percent(retrieval[key[:5] + '1'])}"))
    if last.get("pairs_per_s"):
        tiles.append(("training speed", short(float(f"{last['pairs_per_s']:.3g}")), "pairs a second"))
    if last.get("wait_share") is not None:
        verdict = "the loader keeps up" if last["wait_share"] < 0.05 else "waiting for data"
        tiles.append(("of a step is waiting", percent(last["wait_share"]), verdict))
    if not tiles:
        return None
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", value, tag("small", note))) for name, value, note in tiles[:5]],
        class_="tiles",
    )  # fmt: skip


def _funnel(audit: dict[str, Any]) -> Markup | None:
    """Columns whose bands narrow from each stage to the next; on a phone, rows with bars."""
    funnel = audit.get("funnel", {})
    if len(funnel) < 2:
        return None
    names = list(funnel)
    first = max(funnel[names[0]], 1)
    items = []
    epochs = funnel.get("seen", 0) / max(audit.get("samples", {}).get("samples", 0), 1)
    shares = list(itertools.accumulate((funnel[name] / first for name in names), min))
    if "seen" in funnel:
        shares[-1] = shares[-2] * min(1.0, epochs)
    for name, share, following in zip(names, shares, [*shares[1:], shares[-1]], strict=True):
        label, meaning = STAGES[name]
        items.append(
            tag(
                "li", tag("span", label, class_="stage"), tag("strong", number(funnel[name])),
                tag("span", f"{epochs:.1f} epochs" if name == "seen" else percent(funnel[name] / first), class_="share"),
                tag("span", tag("i"), class_="band"), _loss(audit, names, name),
                title=meaning, style=f"--s:{share:.4f};--n:{following:.4f}", class_=name,
            )
        )  # fmt: skip
    return tag("ol", items, class_="funnel", aria_label="Funnel: how many are left after each stage")


def _loss(audit: dict[str, Any], names: list[str], name: str) -> Markup:
    """What was lost on the way to a stage, or how many of its pairs are held out."""
    funnel, at = audit["funnel"], names.index(name)
    lost = funnel[names[at - 1]] - funnel[name] if at else 0
    if name in LOSSES and lost > 0:
        return tag("span", f"−{number(lost)} {LOSSES[name]}", class_="loss")
    held = audit.get("decisions", {}).get("holdout", 0)
    return tag("span", f"{number(held)} are held out" if name == "sharded" and held else None, class_="loss plain")
