"""The race: one URL list to a trained CLIP, by one `pairmill run` and by the four packages one would join for it.

Method: a list of the Flickr8k training captions, in random order, one caption a row, served by nginx on loopback, with
planted faults (what was planted is known):
  row        the same URL and caption once more
  mirror     the same file under another URL, its caption with one word put in
  recoded    the same picture compressed anew under another URL, its caption with one word put in
  not_found, refused            URLs that answer 404, or where nobody listens
  truncated, not_image          half a JPEG; an HTML page called .jpg
Ours is one `pairmill run` of the recipe below. The peers' chain is img2dataset (pictures of the same size and quality,
as many processes and downloads), a datasketch MinHashLSH script over its tables, the kept samples written by
webdataset's ShardWriter, and open_clip_train (bench/chain_peer.py, and the commands below), each in its own environment.
Both train one shape from the same first weights with the same batch, steps, schedule, crops, precision and seed, on the
pairs that each has kept. `pairmill eval` measures both checkpoints on the 1,000 test photographs with 5 captions each.

CPU seconds are what the kernel charged a command and all its children, start-up and imports included; nginx, the list and
the evaluation are in neither. Memory is the largest sum of proportional set sizes (PSS) of a command's processes, by
samples. The stages of the one `pairmill run` are told apart by its own summary, whose seconds cut the sampled CPU time.

    python -m bench.chain [STEP...] --data DIR --keep FOLDER [--pictures 6000] [--steps 100] [--seeds 3] [--page] [--json]

DIR is Flickr8k: images/, captions.tsv (file, caption), images.tsv (file, ..., split). STEP is one of world, ours, download,
dedup, reshard, open_clip-SEED, ours-SEED; without one all run whose costs are not yet in FOLDER. `--page` writes
docs/results/race.md and its picture. Needs nginx (apt-get install nginx) and the peers (python -m bench.peers all).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import socket
import statistics
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench import flickr8k
from bench.cost import Sampler, timed
from bench.machine import claim, machine
from bench.peers import peer_python
from bench.sides import ROOT, first_weights, pairmill
from bench.web import nginx
from core.runner import cores

PAGE = ROOT / "docs" / "results" / "race.md"
PICTURE = PAGE.with_suffix(".svg")
OTHERS = "\n## On other machines\n"
GOAL = 1 / 3
KS = (1, 5, 10)
EPOCHS = 2  # of open_clip, each over less than it has kept; ours counts steps
CONCURRENCY = 64
DUPLICATES = ("row", "mirror", "recoded")
DEAD = ("not_found", "refused", "truncated", "not_image")
FAULTS = {"row": 20, "mirror": 20, "recoded": 20, "not_found": 20, "refused": 60, "truncated": 40, "not_image": 60}
"""One row of a kind for so many photographs."""
WORDS = ("nice", "quiet", "cheerful", "old")

RECIPE = """\
[ingest]
urls = "{urls}"
size = 128
quality = 95
concurrency = 64
per_host = 64          # one server stands for the whole web
allow_private = true   # and it is on loopback

[dedup]

[shard]
size = 128
samples_per_shard = 1000

[train]
model = "small-112"
init = "{init}"
batch_size = 200
steps = {steps}
lr = 5e-4
warmup = {warmup}
wd = 0.2
precision = "bf16"
seed = 0
val = "none"

[report]
"""


@dataclass(frozen=True)
class Cost:
    """What a stage took: CPU and wall seconds, peak bytes of memory, bytes it left on disk."""

    cpu: float
    wall: float
    memory: int
    disk: int


@dataclass(frozen=True)
class Race:
    """Where the data lies, where everything goes, and how much of it."""

    data: Path
    keep: Path
    pictures: int
    steps: int

    @property
    def list(self) -> Path:
        return self.keep / "list.parquet"

    @property
    def work(self) -> Path:
        return self.keep / "ours"

    @property
    def shards(self) -> Path:
        return self.keep / "peers" / "shards"

    @property
    def downloads(self) -> Path:
        return self.keep / "peers" / "img2dataset"

    @property
    def kept(self) -> Path:
        return self.keep / "peers" / "kept.txt"

    def init(self, seed: int) -> Path:
        """First weights of a seed, a folder that both trainers load."""
        return self.keep / f"init-vit-{seed}"  # open_clip takes a ViT's betas where the name says vit

    def recipe(self, seed: int = 0) -> str:
        init = self.init(seed)
        return RECIPE.format(urls=self.list, init=init, steps=self.steps, warmup=self.steps // 5)


# ---- what both are given -----------------------------------------------------------------------------------------------


def make_world(race: Race) -> None:
    """The served pictures, the test set, and the first weights of every seed."""
    web = race.keep / "web"
    web.mkdir(parents=True, exist_ok=True)
    rows = _rows(race, "http://127.0.0.1", "http://127.0.0.1")
    for file in {row["file"] for row in rows}:
        if not (web / file).is_symlink():
            (web / file).symlink_to((race.data / "images" / file).resolve())
    for row in rows:
        _serve(race, web, row)
    _write_test_set(race)


def _serve(race: Race, web: Path, row: dict[str, Any]) -> None:
    """Put a planted row's file into `web`."""
    from PIL import Image

    target, source = web / row["url"].rpartition("/")[2], race.data / "images" / row["file"]
    if row["kind"] == "mirror":
        target.write_bytes(source.read_bytes())
    elif row["kind"] == "recoded":
        Image.open(source).convert("RGB").save(target, quality=70)
    elif row["kind"] == "truncated":
        target.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    elif row["kind"] == "not_image":
        target.write_text("<!doctype html><title>Sign in</title><p>Please sign in to see this picture.")


def _captions(data: Path, split: str) -> dict[str, list[str]]:
    """Captions by file of one split."""
    found: dict[str, list[str]] = {}
    for file, caption, of in flickr8k.captions(data):
        if of == split:
            found.setdefault(file, []).append(caption)
    return found


def _rows(race: Race, base: str, nobody: str) -> list[dict[str, Any]]:
    """The list in its order: url, caption, id, and what we know and the chains do not (file, kind, twin's id)."""
    captions = dict(list(_captions(race.data, "train").items())[: race.pictures])
    draw = random.Random(0)
    rows = [
        {"url": f"{base}/{file}", "caption": text, "id": f"{file}-{i}", "file": file, "kind": "", "twin": ""}
        for file, texts in captions.items()
        for i, text in enumerate(texts)
    ]
    originals = [row for row in rows if len(set(row["caption"].split())) >= 6]
    for kind, every in FAULTS.items():
        for n, row in enumerate(draw.sample(originals, len(captions) // every)):
            url, caption, twin = row["url"], row["caption"], row["id"]
            if kind != "row":
                url = f"{nobody if kind == 'refused' else base}/{kind}-{n}.jpg"
            if kind in ("mirror", "recoded"):
                words = caption.split()
                words.insert(draw.randrange(1, len(words)), next(word for word in WORDS if word not in words))
                caption = " ".join(words)
            extra = {
                "url": url,
                "caption": caption,
                "id": f"{kind}-{n}",
                "file": row["file"],
                "kind": kind,
                "twin": twin,
            }
            rows.append(extra)
    draw.shuffle(rows)
    return rows


@contextmanager
def served(race: Race) -> Iterator[list[dict[str, Any]]]:
    """Serve the pictures, with the list written for this address."""
    with nginx(race.keep / "web") as base, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused, and nobody takes the port
        rows = _rows(race, base, f"http://127.0.0.1:{closed.getsockname()[1]}")
        pq.write_table(pa.table({name: [row[name] for row in rows] for name in ("url", "caption", "id")}), race.list)
        yield rows


def _write_test_set(race: Race) -> None:
    """The 1,000 test photographs with all their captions, as shards for the one evaluator."""
    urls = race.keep / "test.parquet"
    with nginx(race.data / "images") as base:
        pairs = [(f"{base}/{file}", text) for file, texts in _captions(race.data, "test").items() for text in texts]
        pq.write_table(pa.table({"url": [url for url, _ in pairs], "caption": [text for _, text in pairs]}), urls)
        work = ["--work", str(race.keep / "test")]
        pairmill("ingest", str(urls), "--allow-private", "--size", "256", *work)
    pairmill("dedup", "--threshold", "1", *work)  # all but equal captions of equal pictures
    pairmill("shard", "--size", "256", *work)


def _settings(race: Race, seed: int = 0) -> dict[str, Any]:
    """The recipe's [train] table."""
    return dict(tomllib.loads(race.recipe(seed))["train"])


# ---- measuring ---------------------------------------------------------------------------------------------------------


def measured(command: list[str], leaves: Path, stages: Sequence[str] = ()) -> dict[str, Cost]:
    """Costs of a command that leaves files under `leaves`; by stage where it announces `stages` on standard error.

    What comes before the first stage belongs to it. A stage's files are not told apart here.

    Raises:
        SystemExit: it failed.
    """
    begun: dict[str, float] = {}

    def heard(line: str) -> None:
        name = line.strip(" \u2500\n")
        if name in stages:
            begun[name] = time.monotonic()

    before = _bytes(leaves)
    sampler, started = Sampler(), time.monotonic()
    sampler.start()
    _, cpu, wall = timed(command, heard)
    samples = sampler.stop()
    if set(begun) != set(stages):
        sys.exit(f"expected the stages {', '.join(stages)}, heard of {', '.join(begun)}")
    names = list(begun) or [""]
    moments = [started, *list(begun.values())[1:], started + wall]
    spent = [0.0, *(_spent(samples, moment) for moment in moments[1:-1]), cpu]
    found = {}
    for name, (begin, end), (low, high) in zip(names, pairwise(moments), pairwise(spent), strict=True):
        nearest = min(samples, key=lambda sample: abs(sample[0] - (begin + end) / 2))[2]
        memory = max([nearest, *(memory for moment, _, memory in samples if begin <= moment <= end)])
        found[name] = Cost(high - low, end - begin, memory, _bytes(leaves) - before)
    return found


def _spent(samples: list[tuple[float, float, int]], moment: float) -> float:
    """CPU seconds at a moment, on the line between the samples around it."""
    for (t0, c0, _), (t1, c1, _) in pairwise(samples):
        if t0 <= moment <= t1:
            return c0 + (c1 - c0) * (moment - t0) / (t1 - t0)
    return samples[-1][1]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


# ---- the two sides -----------------------------------------------------------------------------------------------------

OURS = {"ingest": "ingest", "dedup": "dedup", "shard": "shards", "train": "runs"}
"""Stages of ours, and the folder of the work folder that each leaves."""


def ours(race: Race) -> dict[str, Cost]:
    """The whole chain of ours, by stage."""
    recipe = race.keep / "recipe.toml"
    recipe.write_text(race.recipe())
    with served(race):
        command = [sys.executable, "-m", "cli", "run", str(recipe), "--work", str(race.work), "--fresh", "--json"]
        costs = measured(command, race.work, [*OURS, "report"])
    by_stage = {name: _bytes(race.work / OURS.get(name, name)) for name in costs}
    by_stage["report"] = _bytes(race.work) - sum(by_stage.values())
    return {name: dataclasses.replace(cost, disk=by_stage[name]) for name, cost in costs.items()}


def ours_again(race: Race, seed: int) -> dict[str, Cost]:
    """Training of ours alone, on the shards that are there."""
    settings = _settings(race, seed) | {"seed": seed, "name": f"seed-{seed}", "work": str(race.work)}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return measured([sys.executable, "-m", "cli", "train", *options, "--json"], race.work)


def download_command(race: Race) -> list[str]:
    return [
        str(peer_python("img2dataset").with_name("img2dataset")), f"--url_list={race.list}", "--input_format=parquet",
        "--url_col=url", "--caption_col=caption", "--save_additional_columns=[\"id\"]", "--output_format=webdataset",
        f"--output_folder={race.downloads}", "--image_size=128", "--resize_mode=keep_ratio",
        "--resize_only_if_bigger=True", "--encode_quality=95", f"--processes_count={cores()}",
        f"--thread_count={CONCURRENCY}", "--number_sample_per_shard=1000",
    ]  # fmt: skip


def download(race: Race) -> dict[str, Cost]:
    with served(race):
        return measured(download_command(race), race.downloads)


def _peer_script(peer: str, *arguments: object) -> list[str]:
    return [str(peer_python(peer)), str(ROOT / "bench" / "chain_peer.py"), *map(str, arguments)]


def dedup(race: Race) -> dict[str, Cost]:
    return measured(_peer_script("dedup", "dedup", race.downloads, race.kept), race.kept.parent)


def reshard(race: Race) -> dict[str, Cost]:
    command = _peer_script("webdataset0", "reshard", race.downloads, race.kept, race.shards, 1000)
    return measured(command, race.shards)


def open_clip_command(race: Race, seed: int) -> list[str]:
    given = _settings(race, seed)
    shards = sorted(race.shards.glob("*.tar"))
    return [
        str(peer_python("open_clip")), "-m", "open_clip_train.main", f"--model=local-dir:{race.init(seed)}",
        f"--train-data={race.shards}/{{00000..{len(shards) - 1:05d}}}.tar", "--dataset-type=webdataset",
        f"--train-num-samples={given['steps'] * given['batch_size'] // EPOCHS}", f"--epochs={EPOCHS}",
        f"--batch-size={given['batch_size']}", f"--lr={given['lr']}", f"--warmup={given['warmup']}", f"--wd={given['wd']}",
        "--grad-clip-norm=1.0", "--precision=amp_bf16", f"--seed={seed}", "--workers=1", "--device=cpu",
        "--save-frequency=0", f"--logs={race.keep}/peers/logs", f"--name=seed-{seed}", "--log-every-n-steps=10",
    ]  # fmt: skip


def open_clip(race: Race, seed: int) -> dict[str, Cost]:
    return measured(open_clip_command(race, seed), race.keep / "peers" / "logs")


# ---- what came out -----------------------------------------------------------------------------------------------------


def recall(race: Race, seed: int) -> dict[str, dict[str, float]]:
    """R@1, 5 and 10 of both sides, both ways, by the one evaluator."""
    theirs = race.keep / "peers" / "logs" / f"seed-{seed}" / "checkpoints" / f"epoch_{EPOCHS}.pt"
    places = {"ours": race.work / "runs" / (f"seed-{seed}" if seed else "main"), "peers": theirs}
    common = ["--model", _settings(race)["model"], "--val", str(race.keep / "test" / "shards")]
    common += ["--work", str(race.keep / "test")]
    return {side: pairmill("eval", "--checkpoint", str(place), *common)["retrieval"] for side, place in places.items()}


def outcome(race: Race) -> dict[str, Any]:
    """Pairs kept, planted duplicates missed by kind, and bad pictures kept, of both sides."""
    rows = {row["id"]: row for row in _rows(race, "", "")}
    query = "SELECT id, bool_or(kept) FROM pairs JOIN decisions USING (uid) GROUP BY id"
    answer = pairmill("sql", query, "--limit", "0", "--work", str(race.work))
    kept = {"ours": [i for i, stays in answer["rows"] if stays], "peers": _kept_by_peers(race)}
    found: dict[str, Any] = {"planted": Counter(row["kind"] for row in rows.values() if row["kind"]), "rows": len(rows)}
    for side, ids in kept.items():
        stay = set(ids)
        missed = Counter(rows[i]["kind"] for i in stay if rows[i]["kind"] in DUPLICATES and rows[i]["twin"] in stay)
        bad = Counter(rows[i]["kind"] for i in stay if rows[i]["kind"] in DEAD)
        found[side] = {"kept": len(stay), "missed": missed, "bad": bad}
    return found


def _kept_by_peers(race: Race) -> list[str]:
    keys = set(race.kept.read_text().split())
    tables = (pq.read_table(p, columns=["key", "id"]) for p in race.downloads.glob("*.parquet"))
    return [row["id"] for table in tables for row in table.to_pylist() if row["key"] in keys]


# ---- figures -----------------------------------------------------------------------------------------------------------

CHAINS = {
    "ours": ("ingest", "dedup", "shard", "train", "report"),
    "peers": ("download", "dedup", "reshard", "open_clip"),
}
WORDS_OF = {"download": "img2dataset", "dedup": "datasketch", "reshard": "webdataset", "open_clip": "open_clip_train"}
TONES = ("#0a7d7d", "#d98b1f", "#6a5acd", "#4f7fb8", "#999999")


@dataclass(frozen=True)
class Figures:
    """Everything that was measured. `training` holds the CPU seconds of each seed's training by side."""

    costs: dict[str, dict[str, Cost]]
    training: dict[str, list[float]]
    outcome: dict[str, Any]
    recalls: list[dict[str, dict[str, float]]]

    def cpu(self, side: str) -> float:
        """CPU seconds of a whole chain, its training the mean over the seeds."""
        train = CHAINS[side][3]
        data = sum(cost.cpu for stage, cost in self.costs[side].items() if stage != train)
        return data + statistics.mean(self.training[side])

    def r10(self, side: str) -> list[float]:
        """R@10 of each seed, the mean of both ways."""
        return [(found[side]["t2i_r10"] + found[side]["i2t_r10"]) / 2 for found in self.recalls]


def figures(race: Race, seeds: int) -> Figures:
    """What the finished steps have left in KEEP.

    Raises:
        SystemExit: a step is missing.
    """
    found = {name: _cost(race, name) for name in steps(race, seeds)}
    costs = {"ours": found["ours"], "peers": {name: found[name][""] for name in CHAINS["peers"][:3]}}
    costs["peers"]["open_clip"] = found["open_clip-0"][""]
    training = {
        "ours": [found["ours"]["train"].cpu, *(found[f"ours-{seed}"][""].cpu for seed in range(1, seeds))],
        "peers": [found[f"open_clip-{seed}"][""].cpu for seed in range(seeds)],
    }
    cache = race.keep / "recalls.json"
    if not cache.exists():
        cache.write_text(json.dumps([recall(race, seed) for seed in range(seeds)]))
    return Figures(costs, training, outcome(race), json.loads(cache.read_text()))


def _cost(race: Race, name: str) -> dict[str, Cost]:
    path = race.keep / "costs" / f"{name}.json"
    if not path.exists():
        sys.exit(f"expected the costs of {name} in {path}, found none; run: python -m bench.chain {name} …")
    return {stage: Cost(**cost) for stage, cost in json.loads(path.read_text()).items()}


def claims(found: Figures) -> list[dict[str, Any]]:
    seeds = len(found.recalls)
    mine, theirs = found.cpu("ours"), found.cpu("peers")
    r10 = {side: statistics.mean(found.r10(side)) for side in CHAINS}
    return [
        claim(f"URL list to trained CLIP: CPU seconds in all, training the mean of {seeds} seeds", mine, peer=theirs,
              goal=GOAL * theirs, at_least=False),
        claim(f"R@10, mean of both ways and of {seeds} seeds", r10["ours"], peer=r10["peers"], goal=r10["peers"], at_least=True),
    ]  # fmt: skip


# ---- the page ----------------------------------------------------------------------------------------------------------


def picture(found: Figures) -> str:
    """The stages of both sides as two bars of CPU seconds."""
    most = max(found.cpu(side) for side in CHAINS)
    drawn = []
    for row, (side, stages) in enumerate(CHAINS.items()):
        x, y = 90.0, 30 + 70 * row
        drawn.append(
            f'<text x="80" y="{y + 24}" text-anchor="end">{"pairmill" if side == "ours" else "the peers"}</text>'
        )
        for tone, stage in zip(TONES, stages, strict=False):
            cpu = statistics.mean(found.training[side]) if stage == stages[3] else found.costs[side][stage].cpu
            width, name = 560 * cpu / most, WORDS_OF[stage] if side == "peers" else stage
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="36" fill="{tone}">'
                f"<title>{name}: {cpu:.1f} s</title></rect>"
            )
            if width > 90:
                drawn.append(f'<text x="{x + 6:.1f}" y="{y + 23}" fill="white">{name} {cpu:.0f}</text>')
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 24}">{found.cpu(side):.0f} s</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 160" font-family="sans-serif" font-size="13">'
        '<rect width="720" height="160" fill="white"/><text x="90" y="18">CPU seconds from the URL list to the model</text>'
        + "".join(drawn) + "</svg>\n"
    )  # fmt: skip


def _stage_table(found: Figures) -> list[str]:
    lines = ["| | stage | CPU s | wall s | peak memory, MB | on disk, MB |", "|---|---|---|---|---|---|"]
    for side, stages in CHAINS.items():
        for stage in stages:
            c, name = found.costs[side][stage], WORDS_OF[stage] if side == "peers" else stage
            lines.append(
                f"| {side} | {name} | {c.cpu:.1f} | {c.wall:.1f} | {c.memory / 1e6:,.0f} | {c.disk / 1e6:,.1f} |"
            )
        costs = found.costs[side].values()
        lines.append(
            f"| **{side}** | **in all, first seed** | **{sum(c.cpu for c in costs):.1f}** | {sum(c.wall for c in costs):.1f} | "
            f"{max(c.memory for c in costs) / 1e6:,.0f} | {sum(c.disk for c in costs) / 1e6:,.1f} |"
        )
    return lines


def _outcome_table(found: Figures) -> list[str]:
    planted, sides = found.outcome["planted"], [found.outcome[side] for side in CHAINS]
    lines = ["| | planted | pairmill | the peers |", "|---|---|---|---|"]
    lines.append(
        f"| pairs kept, of {found.outcome['rows']:,} rows | | " + " | ".join(f"{s['kept']:,}" for s in sides) + " |"
    )
    for key, kinds, words in (("missed", DUPLICATES, "duplicates missed"), ("bad", DEAD, "bad pictures kept")):
        lines += [
            f"| {words}: {kind} | {planted[kind]} | " + " | ".join(str(s[key][kind]) for s in sides) + " |"
            for kind in kinds
        ]
    return lines


def _recall_table(found: Figures) -> list[str]:
    lines = [
        "| | seed | text to image R@1 / 5 / 10 | image to text R@1 / 5 / 10 | training, CPU s |",
        "|---|---|---|---|---|",
    ]
    for side in CHAINS:
        for seed, recalls in enumerate(found.recalls):
            shown = (" / ".join(f"{recalls[side][f'{way}_r{k}']:.1%}" for k in KS) for way in ("t2i", "i2t"))
            lines.append(f"| {side} | {seed} | {' | '.join(shown)} | {found.training[side][seed]:.0f} |")
    return lines


def _by_way(found: Figures) -> str:
    """R@10 of each way, the mean over the seeds, and what one seed's figure may be off by."""
    ways = {"t2i_r10": "Text to image", "i2t_r10": "image to text"}
    means = {way: [statistics.mean(r[side][way] for r in found.recalls) for side in CHAINS] for way in ways}
    share = means["i2t_r10"][1]
    error = (share * (1 - share) / found.recalls[0]["ours"]["images"]) ** 0.5
    words = ", ".join(f"{name} {means[way][0]:.2%} against {means[way][1]:.2%}" for way, name in ways.items())
    return f"{words}; the standard error of such a share of 1,000 photographs is {error:.2%}."


def page(race: Race, found: Figures) -> str:
    """docs/results/race.md."""
    cost, quality = claims(found)
    spread = {side: f"{min(found.r10(side)):.1%} to {max(found.r10(side)):.1%}" for side in CHAINS}
    places = {str(race.keep): "RACE", str(ROOT): "."}

    def shown(command: list[str]) -> str:
        text = shlex.join(command)
        for place, name in places.items():
            text = text.replace(place, name)
        return "    " + text

    return "\n".join([
        "# The race: one URL list, two ways to a trained CLIP", "",
        "    python -m bench.chain --data /path/to/flickr8k --keep RACE --page", "",
        f"Run on {machine()} ({time.strftime('%Y-%m-%d')}). [bench/chain.py](../../bench/chain.py) says how everything is "
        "measured.", "",
        f"![CPU seconds of both sides by stage]({PICTURE.name})", "",
        f"- **CPU seconds in all: {cost['ours']:.0f} against {cost['peer']:.0f}, {cost['ratio']:.3f} of them** (goal: at most a "
        f"third): {'holds' if cost['holds'] else 'does not hold'}.",
        f"- **R@10: {quality['ours']:.2%} against {quality['peer']:.2%}** (mean of both ways over {len(found.recalls)} "
        f"seeds, which range from {spread['ours']} and {spread['peers']}; chance is 1 %): "
        f"{'holds' if quality['holds'] else 'does not hold'}. {_by_way(found)}", "",
        "## By stage", "", *_stage_table(found), "",
        "## What was kept", "", *_outcome_table(found), "",
        NOTES_OF_KEPT, "",
        "## Retrieval on 1,000 test photographs", "", *_recall_table(found), "",
        "## Ours: one command", "", "    pairmill run recipe.toml --work RACE/ours", "",
        "```toml", race.recipe().replace(str(race.keep), "RACE").rstrip(), "```", "",
        "## The peers: four packages and a script", "",
        shown(download_command(race)),
        *(shown(_peer_script(peer, *arguments)) for peer, arguments in (
            ("dedup", ("dedup", race.downloads, race.kept)),
            ("webdataset0", ("reshard", race.downloads, race.kept, race.shards, 1000)))),
        shown(open_clip_command(race, 0)), "",
        "```python", (ROOT / "bench" / "chain_peer.py").read_text().rstrip(), "```", "",
        "with, in `bench/dedup_peer.py`,", "", "```python", _datasketch(), "```", "",
        NOTES_OF_FAIRNESS, "",
    ])  # fmt: skip


NOTES_OF_KEPT = """\
The two mean different things by a duplicate. The script compares captions alone, as MinHash does, so it also takes out like
captions of different photographs; ours takes out pairs whose picture and caption are both nearly the same (`--policy both`,
the default). Missed is a planted pair of which both sides are kept."""

NOTES_OF_FAIRNESS = """\
## What is alike, and what is not

- Alike: list, server, cores, size (128 pixels on the shorter side) and quality (95), downloads at once, shape and first weights
  of the model, batch, steps, learning rate, warm-up, cosine, weight decay, betas, crops, bf16, seeds, torch 2.13.
- img2dataset downloads a URL once for every row that names it, so each photograph five times; ours once. Who lists each
  photograph once pays a fifth there, and has one caption of it.
- open_clip computes 77 text positions of every caption, ours as many as it has: most of the difference in training. Smaller
  towers make it larger, larger ones smaller (`python -m bench.train`: [training](train.md)).
- Gradients are clipped to 1 over both towers in open_clip, tower by tower in ours. Pairs of one photograph in a batch are
  negatives of each other in open_clip; ours has a photograph once an epoch.
- A training this short shows the cost of each step, and that both learn alike; it is no measure of how far either gets
  ([Flickr8k](flickr8k.md) is longer)."""


def _datasketch() -> str:
    import inspect

    from bench import dedup_peer

    return inspect.getsource(dedup_peer.datasketch).rstrip()


# ---- all of it ---------------------------------------------------------------------------------------------------------


def steps(race: Race, seeds: int) -> dict[str, Callable[[], dict[str, Cost]]]:
    """Every measured step by name, in an order in which they can run."""
    named: dict[str, Callable[[], dict[str, Cost]]] = {
        "ours": partial(ours, race),
        "download": partial(download, race),
        "dedup": partial(dedup, race),
        "reshard": partial(reshard, race),
    }
    for seed in range(seeds):
        named[f"open_clip-{seed}"] = partial(open_clip, race, seed)
        if seed:
            named[f"ours-{seed}"] = partial(ours_again, race, seed)
    return named


def run_steps(race: Race, names: list[str], seeds: int) -> None:
    """Run the named steps, or all that are missing; their costs go to KEEP/costs."""
    costs = race.keep / "costs"
    costs.mkdir(parents=True, exist_ok=True)
    known = steps(race, seeds)
    if unknown := set(names) - {"world", *known}:
        sys.exit(f"expected steps out of world, {', '.join(known)}, found {', '.join(sorted(unknown))}")
    if "world" in names or not (names or (race.keep / "test" / "shards").exists()):
        make_world(race)
        for seed in range(seeds):
            first_weights(race.init(seed), _settings(race)["model"], seed)
    for name in known if not names else [name for name in names if name != "world"]:
        target = costs / f"{name}.json"
        if not names and target.exists():
            continue
        found = known[name]()
        target.write_text(json.dumps({stage: dataclasses.asdict(cost) for stage, cost in found.items()}))
        print(name, target.read_text(), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="*", metavar="STEP")
    parser.add_argument("--data", type=Path, required=True, help="folder with images/, captions.tsv and images.tsv")
    parser.add_argument("--keep", type=Path, required=True, help="folder for everything that is made and measured")
    parser.add_argument("--pictures", type=int, default=6000, help="training photographs in the list")
    parser.add_argument("--steps", type=int, default=100, help="steps of both trainers, an even number")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each side")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and its picture")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON only")
    options = parser.parse_args()
    race = Race(options.data, options.keep.resolve(), options.pictures, options.steps)
    run_steps(race, options.step, options.seeds)
    if options.step:
        return
    found = figures(race, options.seeds)
    if options.page:
        # what is written by hand of other machines stays
        _, heading, others = (PAGE.read_text(encoding="utf-8") if PAGE.exists() else "").partition(OTHERS)
        PAGE.write_text(page(race, found).rstrip() + "\n" + heading + others, encoding="utf-8")
        PICTURE.write_text(picture(found), encoding="utf-8")
    print(json.dumps(claims(found), indent=None if options.json else 1))


if __name__ == "__main__":
    main()
