"""The sections of the page, each from the part of the report that it shows, or None where that part is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from report import charts
from report.charts import number, percent, size
from report.markup import Child, Markup, tag

REASONS = {
    "image_duplicate": "copy of a kept picture",
    "caption_duplicate": "caption like a kept one, on too many pictures",
    "pair_duplicate": "copy of a kept pair",
    "caption_cap": "one caption too many of its picture",
    "holdout": "picture is held out for evaluation",
    "where": "the run's own rule (--where)",
    "balance": "says what many others say (--balance)",
    "kept": "a random sample of what stays",
}
MEASURES = {
    "width": "Width as received",
    "height": "Height as received",
    "aspect": "Aspect ratio",
    "bytes": "Size as received",
    "caption_chars": "Caption length",
    "caption_words": "Words in a caption",
}
SPLIT_TONES = ("b", "c", "a")
GPU_TONES = ("a", "b", "d")


def build(report: dict[str, Any]) -> Iterator[tuple[str, str, Child]]:
    """(anchor, heading, body) of each section, in the page's order."""
    audit = report.get("audit", {})
    yield "dropped", "What was dropped, and why", dropped(report)
    yield "duplicates", "Duplicate clusters", duplicates(audit, report.get("clusters", []))
    yield "data", "The data", data(audit)
    run = report.get("run")
    yield "training", "Training", training(run) if run else None
    yield "evaluation", "What it learned", evaluation(run) if run else None
    yield "settings", "Settings, and how to do it again", settings(report)


# ---------------------------------------------------------------- dropped


def dropped(report: dict[str, Any]) -> Child:
    """Reasons as bars, examples of rows that were not fetched, and a gallery that can be filtered by reason."""
    audit = report.get("audit", {})
    figures = []
    lost = [row for row in audit.get("outcomes", []) if row["name"] != "ok"]
    rows = audit.get("pairs", {}).get("rows", 0)
    if lost:
        note = f"{number(sum(r['rows'] for r in lost))} of {number(rows)} rows"
        figures.append(charts.bars("Not fetched", [_spelled(r) for r in lost], note=note, tone="b", total=rows))
    if audit.get("dropped"):
        note = f"{number(audit['decisions']['dropped'])} of {number(audit['decisions']['pairs'])} fetched pairs"
        total = audit["decisions"]["pairs"]
        figures.append(charts.bars("Dropped after the fetch", audit["dropped"], note=note, tone="b", total=total))
    if audit.get("evidence"):
        figures.append(charts.bars("How copies were recognised", [_spelled(r) for r in audit["evidence"]], tone="c"))
    if not figures:
        return None
    return [tag("div", figures, class_="grid"), _failures(report.get("failures", [])), _gallery(report)]


def _spelled(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "name": str(row["name"]).replace("_", " ")}


def _failures(failures: list[dict[str, Any]]) -> Child:
    if not failures:
        return None
    rows = []
    for failure in failures:
        for i, example in enumerate(failure["examples"] or []):
            first = tag("th", failure["outcome"].replace("_", " "), scope="row") if i == 0 else tag("td")
            rows.append(tag("tr", first, tag("td", example["url"], class_="url"), tag("td", example["detail"] or "")))
    head = tag("tr", *(tag("th", words, scope="col") for words in ("outcome", "for example", "detail")))
    table = tag("table", tag("thead", head), tag("tbody", rows))
    return tag("details", tag("summary", "Examples of rows that were not fetched"), tag("div", table, class_="scroll"))


def _gallery(report: dict[str, Any]) -> Child:
    reasons = [reason for reason in report.get("dropped", []) if reason["pairs"]]
    where = report.get("settings", {}).get("dedup", {}).get("where")
    if not reasons:
        return None
    chips = [_chip("all", "all", pressed=True)]
    groups = []
    for reason in reasons:
        name = str(reason["reason"] or "unknown")
        chips.append(_chip(name, f"{name} {number(reason['rows'])}"))
        meaning = f"not kept by the rule {where}" if name == "where" and where else REASONS.get(name, _rule(name))
        heading = tag("h4", name, tag("span", meaning))
        copies = any(pair["survivor"] for pair in reason["pairs"])
        cards = tag("ul", [card(pair) for pair in reason["pairs"]], class_="cards" if copies else "cards small")
        groups.append(tag("div", heading, cards, class_="group", data_reason=name))
    return [
        tag("h3", "Sample pictures"),
        tag("div", chips, class_="chips", role="group", aria_label="Show only one reason"),
        tag("div", groups, class_="gallery"),
    ]


def _rule(name: str) -> str:
    preset, colon, rule = name.partition(":")
    if preset == "against" and colon:
        return f"picture or caption of the evaluation set {rule}"
    return f"rule {rule} of the preset {preset}" if colon else ""


def _chip(reason: str, words: str, *, pressed: bool = False) -> Markup:
    return tag("button", words, type="button", data_reason=reason, aria_pressed="true" if pressed else "false")


def card(pair: dict[str, Any], note: Child = None) -> Markup:
    """One pair and what else is to say of it; a copy shows the pair that stands for it beside it."""
    survivor = pair.get("survivor")
    pictures = [_picture(pair, "dropped" if survivor else "")]
    evidence = None
    if survivor:
        pictures.append(_picture(survivor, "kept instead"))
        alike = f", {percent(pair['similarity'])} alike" if pair.get("similarity") is not None else ""
        evidence = tag("small", f"by {str(pair.get('evidence') or 'rule').replace('_', ' ')}{alike}")
    other = None
    if survivor and survivor["caption"] != pair["caption"]:
        other = tag("p", "kept: ", survivor["caption"], class_="other", dir="auto")
    return tag("li", tag("div", pictures, class_="pair"), tag("p", pair["caption"], dir="auto"), other, evidence, note)


def _picture(pair: dict[str, Any], words: str) -> Markup:
    label = f"{words}: " if words else ""
    if pair["picture"]:
        image = tag("img", src=pair["picture"], alt=label + pair["caption"], title=pair.get("url"), loading="lazy")
    else:
        image = tag("span", "no picture", class_="blank")
    return tag("figure", image, tag("figcaption", words) if words else None)


# ---------------------------------------------------------------- duplicates


def duplicates(audit: dict[str, Any], largest: list[dict[str, Any]]) -> Child:
    """Clusters by size, and the largest ones with their pictures."""
    sizes = audit.get("clusters", {}).get("sizes", [])
    if not sizes:
        return None
    rows = [{"name": f"{row['size']} pairs", "rows": row["clusters"]} for row in sizes[:10]]
    if len(sizes) > 10:
        rest = sum(row["clusters"] for row in sizes[10:])
        rows.append({"name": f"{sizes[10]['size']} to {sizes[-1]['size']} pairs", "rows": rest})
    held = sum(row["size"] * row["clusters"] for row in sizes)
    note = f"{number(audit['clusters']['clusters'])} clusters hold {number(held)} pairs"
    cards = []
    for cluster in largest:
        members = [member(pair) for pair in cluster["pairs"]]
        more = cluster["rows"] - len(members)
        if more > 0:
            members.append(tag("li", tag("span", f"and {number(more)} more", class_="blank")))
        heading = tag("h4", f"{number(cluster['rows'])} pairs", tag("span", cluster["cluster"][:12]))
        cards.append(tag("div", heading, tag("ul", members, class_="cards small"), class_="group"))
    return [
        tag("div", charts.bars("Clusters by size", rows, note=note, tone="c"), class_="grid"),
        tag("h3", "The largest") if cards else None,
        tag("div", cards, class_="clusters"),
    ]


def member(pair: dict[str, Any]) -> Markup:
    """One pair of a cluster."""
    return tag("li", _picture(pair, "kept" if pair["kept"] else "dropped"), tag("p", pair["caption"], dir="auto"),
               class_="kept" if pair["kept"] else None)  # fmt: skip


# ---------------------------------------------------------------- data


def data(audit: dict[str, Any]) -> Child:
    """Sizes, captions, languages, formats and hosts."""
    figures = []
    for name, heading in MEASURES.items():
        h = audit.get("histograms", {}).get(name)
        if h and h["bins"]:
            note = f"{h['unit']}, 90 % from {number(h['p05'])} to {number(h['p95'])}"
            figures.append(charts.histogram(heading, h["bins"], note=note, median=h["p50"]))
    for key, heading in (("languages", "Languages"), ("formats", "Formats"), ("hosts", "Hosts")):
        if audit.get(key):
            total = audit.get("pairs", {}).get("rows" if key == "hosts" else "ok", 0)
            rows = [{**row, "tip": _tip(row)} for row in audit[key][:10]]
            figures.append(charts.bars(heading, rows, note=_others(audit[key], total), total=total))
    figures += _over_time_of_fetching(audit.get("over_time", {}))
    for view, heading in (("samples", "Captions of a training sample"), ("holdout", "Captions of a held-out sample")):
        counts = audit.get(view, {}).get("captions_a_sample", [])
        if len(counts) > 1:
            rows = [
                {"name": f"{row['captions']} caption{'s' * (row['captions'] != 1)}", "rows": row["samples"]}
                for row in counts
            ]
            note = f"{number(audit[view]['samples'])} samples, {size(audit[view]['bytes'])} of pictures"
            figures.append(charts.bars(heading, rows, note=note))
    if not figures:
        return None
    return [tag("div", figures, class_="grid"), _words(audit)]


def _over_time_of_fetching(found: dict[str, Any]) -> list[Markup]:
    """Share of attempts that succeeded, by minutes since the first."""
    periods = found.get("periods", [])
    if len(periods) < 2:
        return []
    starts = [datetime.fromisoformat(row["from"]) for row in periods]
    minutes = [(start - starts[0]).total_seconds() / 60 for start in starts]
    shares: list[float | None] = [row["ok"] / row["rows"] for row in periods]
    note = f"by minutes since {periods[0]['from']} UTC"
    series: list[charts.Series] = [("fetched", "a", shares)]
    return [charts.lines("Success over time", minutes, series, y=percent, zero=True, note=note, x_name="minute")]


def _tip(row: dict[str, Any]) -> str:
    words = [f"{number(row['ok'])} fetched"] if "ok" in row else []
    return ", ".join([*words, *([size(row["bytes"])] if row.get("bytes") else [])])


def _others(rows: list[dict[str, Any]], total: int) -> str | None:
    rest = total - sum(row["rows"] for row in rows[:10])
    return f"the ten most frequent; {number(rest)} elsewhere" if rest > 0 and len(rows) >= 10 else None


def _words(audit: dict[str, Any]) -> Child:
    top = audit.get("words", {}).get("top", [])
    figures = []
    if top:
        sampled = audit["words"]["sampled"]
        note = f"in a {percent(sampled)} sample of the captions" if sampled < 1 else "in all captions"
        cloud = [tag("li", w["word"], tag("small", number(w["rows"])), dir="auto") for w in top]
        figures.append(charts.figure("Frequent words", tag("ul", cloud, class_="words"), note=note, marks=False))
    if audit.get("captions"):
        rows = [{"name": row["caption"], "rows": row["rows"]} for row in audit["captions"][:10]]
        total = audit.get("pairs", {}).get("ok", 0)
        figures.append(charts.bars("Captions used more than once", rows, total=total, tone="c", long=True))
    return tag("div", figures, class_="grid") if figures else None


# ---------------------------------------------------------------- training and evaluation


def training(run: dict[str, Any]) -> Child:
    """Curves of one run and where its time went."""
    steps, figures = run.get("steps", {}), []
    x = steps.get("step", [])
    if len(x) < 2:
        return tag("p", "The run has not logged two rows yet.", class_="quiet")
    wanted = (
        ("loss", "Loss", "a", charts.number), ("acc", "Accuracy inside the batch", "a", percent),
        ("scale", "Logit scale", "c", charts.number), ("lr", "Learning rate", "d", charts.number),
        ("grad_norm", "Gradient norm", "e", charts.number), ("pairs_per_s", "Pairs a second", "a", charts.short),
    )  # fmt: skip
    for key, heading, tone, words in wanted:
        values = steps.get(key)
        if values and sum(v is not None for v in values) > 1:
            zero = key in ("pairs_per_s", "lr", "acc")
            note = f"at the end {words(next(v for v in reversed(values) if v is not None))}"
            figures.append(charts.lines(heading, x, [(heading.lower(), tone, values)], y=words, zero=zero, note=note))
    if run.get("split"):
        series = [(n, t, v) for (n, v), t in zip(run["split"].items(), SPLIT_TONES, strict=False)]
        figures.append(
            charts.stacked(
                "Where a step's time goes", x, series, wide=True, note="share of the step, mean of the ranks"
            )
        )
    if run.get("gpu"):
        gpu: list[charts.Series] = [(n, t, v) for (n, v), t in zip(run["gpu"].items(), GPU_TONES, strict=False)]
        note = "share of the time, of the power limit and of the card's memory, mean of the ranks"
        figures.append(charts.lines("The GPUs", x, gpu, y=percent, zero=True, top=1.0, wide=True, note=note))
    heading = f"Run {run['name']}"
    note = tag("p", heading, *(f" · {words}" for words in _run_words(run)), class_="quiet")
    return [note, tag("div", figures, class_="grid")]


def _run_words(run: dict[str, Any]) -> list[str]:
    config, last = run.get("config", {}), run.get("last", {})
    words = [str(config["model"])] if config.get("model") else []
    if config.get("batch_size"):
        words.append(f"batch {number(config['batch_size'])}")
    if last.get("samples_seen"):
        words.append(f"{number(last['samples_seen'])} samples seen")
    if last.get("mfu"):
        words.append(f"{percent(last['mfu'])} MFU")
    return words


def evaluation(run: dict[str, Any]) -> Child:
    """Retrieval and zero-shot, at the end and over time, with examples."""
    figures = []
    if retrieval := run.get("retrieval"):
        for way, heading in (("t2i", "Caption to picture"), ("i2t", "Picture to caption")):
            rows = [
                {"name": f"in the first {k}", "rows": retrieval[f"{way}_r{k}"]}
                for k in (1, 5, 10)
                if f"{way}_r{k}" in retrieval
            ]
            if rows:
                figures.append(_recalls(heading, rows))
    if zero := run.get("zero_shot"):
        rows = [{"name": "accuracy", "rows": zero["accuracy"]}, {"name": "chance", "rows": zero["chance"]}]
        figures.append(_recalls(f"Zero-shot over {zero['classes']} classes", rows))
        if zero.get("per_class"):
            ordered = sorted(zero["per_class"].items(), key=lambda item: (-item[1], item[0]))
            rows = [{"name": name.replace("_", " "), "rows": share} for name, share in _ends(ordered, 24)]
            figures.append(_recalls("Zero-shot by class", rows))
    figures += _over_time(run.get("evals", []))
    examples = _examples(run.get("examples", {}))
    return [tag("div", figures, class_="grid"), examples] if figures or examples else None


def _ends(items: list[Any], wanted: int) -> list[Any]:
    """The first and last items where there are more than `wanted`: the best and the worst."""
    return items if len(items) <= wanted else items[: wanted // 2] + items[-(wanted // 2) :]


def _recalls(heading: str, rows: list[dict[str, Any]]) -> Markup:
    items = [
        tag("li", tag("span", row["name"], class_="name"),
            tag("span", tag("i", style=f"width:{100 * min(row['rows'], 1):.2f}%"), class_="track full"),
            tag("span", percent(row["rows"]), class_="value"), class_="mark", data_tip=f"{row['name']}: {percent(row['rows'])}")
        for row in rows
    ]  # fmt: skip
    return charts.figure(heading, tag("ol", items, class_="bars tone-a"))


def _over_time(evals: list[dict[str, Any]]) -> list[Markup]:
    figures = []
    found = [
        row for row in evals if (row.get("retrieval") or {}).get("t2i_r10") is not None and row.get("step") is not None
    ]
    if len(found) > 1:
        series: list[charts.Series] = [
            ("caption to picture", "a", [row["retrieval"]["t2i_r10"] for row in found]),
            ("picture to caption", "d", [row["retrieval"].get("i2t_r10") for row in found]),
        ]
        x = [row["step"] for row in found]
        figures.append(charts.lines("In the first 10, over training", x, series, y=percent, zero=True))
    found = [row for row in evals if row.get("zero_shot") and row.get("step") is not None]
    if len(found) > 1:
        values = [row["zero_shot"]["accuracy"] for row in found]
        level = ("chance", float(found[-1]["zero_shot"]["chance"]))
        x = [row["step"] for row in found]
        figures.append(
            charts.lines("Zero-shot, over training", x, [("accuracy", "a", values)], y=percent, zero=True, level=level)
        )
    return figures


def _examples(found: dict[str, list[dict[str, Any]]]) -> Child:
    """Pictures with their nearest captions and captions with their nearest pictures; the right answers are marked."""
    if not any(found.values()):
        return None
    images = []
    for example in found.get("images", []):
        best = example["captions"][0]["caption"] if example["captions"] else ""
        picture = _picture({"picture": example["picture"], "caption": best}, "")
        images.append(tag("li", picture, tag("ol", [_ranked(caption) for caption in example["captions"]])))
    texts = []
    for example in found.get("texts", []):
        answers = [_answer(i, answer, example["caption"]) for i, answer in enumerate(example["pictures"], 1)]
        texts.append(tag("li", tag("p", example["caption"], dir="auto"), tag("ol", answers, class_="answers")))
    return [
        tag("h3", "Pictures and their nearest captions") if images else None,
        tag("p", "Ticked captions are the picture's own.", class_="quiet") if images else None,
        tag("ul", images, class_="examples"),
        tag("h3", "Captions and their nearest pictures") if texts else None,
        tag("p", "The framed picture is the caption's own.", class_="quiet") if texts else None,
        tag("ul", texts, class_="examples texts"),
    ]


def _answer(place: int, answer: dict[str, Any], caption: str) -> Markup:
    words = f"place {place}, {'the right picture' if answer['right'] else 'another picture'} for: {caption}"
    return tag(
        "li",
        _picture({"picture": answer["picture"], "caption": words}, ""),
        class_="right" if answer["right"] else None,
    )


def _ranked(caption: dict[str, Any]) -> Markup:
    score = f"{caption['score']:.2f}" if caption.get("score") is not None else None
    words = tag("span", caption["caption"], dir="auto")
    return tag("li", words, tag("small", score) if score else None, class_="right" if caption.get("right") else None)


# ---------------------------------------------------------------- settings


def settings(report: dict[str, Any]) -> Child:
    """What every stage was told, and the recipe and command that do it again."""
    tables = []
    for stage, values in report.get("settings", {}).items():
        rows = [
            tag("tr", tag("th", key, scope="row"), tag("td", value if isinstance(value, str) else json.dumps(value)))
            for key, value in sorted(values.items())
        ]
        tables.append(tag("details", tag("summary", stage), tag("table", tag("tbody", rows))))
    if not tables and not report.get("recipe"):
        return None
    again = None
    if report.get("recipe"):
        again = [
            tag("p", "Save this as recipe.toml and run ", tag("code", "pairmill run recipe.toml"), ":"),
            tag("pre", report["recipe"], tabindex=0),
        ]
    return [again, tag("div", tables, class_="stages")]
