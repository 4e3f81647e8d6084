"""Flickr8k, from a URL list to retrieval on the standard test split.

Method: a local web server serves the photographs (a folder of the user's), a URL list with all 40,455 captions names
them, and `pairmill run examples/flickr8k.toml` does the rest: ingest, dedup (test photographs protected and their
duplicates taken out of training), shards, training on the 6,000 training photographs, retrieval over the 1,000 test
photographs with 5 captions each, report. Everything is timed by the stages themselves; the whole by the wall clock.

    python -m bench.flickr8k --data DIR     DIR holds images/, captions.tsv (file, caption) and images.tsv (file, ..., split)

Result: docs/results/flickr8k.md, rewritten by this command.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.machine import claim, machine

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "flickr8k.toml"
PAGE = ROOT / "docs" / "results" / "flickr8k.md"
MINUTES, RECALL = 45.0, 0.12


def serve(folder: str, port: int) -> None:
    """Serve `folder` on 127.0.0.1 until terminated."""
    from aiohttp import web

    app = web.Application()
    app.router.add_static("/", folder)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, handle_signals=True)


@contextmanager
def served(folder: Path, port: int) -> Iterator[str]:
    """The base URL of `folder`, served by a child process while the block runs."""
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(str(folder), port), daemon=True)
    child.start()
    asyncio.run(_reachable(port))
    if not child.is_alive():  # who answers there is somebody else
        sys.exit(f"port {port} is taken; choose another with --port")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.join()


async def _reachable(port: int) -> None:
    for _ in range(200):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            await writer.wait_closed()
            return
    sys.exit(f"nothing answers on 127.0.0.1:{port}; is the port taken? choose another with --port")


def captions(data: Path) -> Iterator[tuple[str, str, str]]:
    """(file, caption, split) of every caption, in the source's order."""
    with (data / "images.tsv").open(encoding="utf-8") as file:
        split = {row["file"]: row["split"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}
    with (data / "captions.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield row["file"], row["caption"], split[row["file"]]


def write_list(data: Path, base_url: str, target: Path) -> int:
    """The URL list (url, caption, split), one row a caption in the source's order; returns its rows."""
    rows = 0
    with target.open("w", encoding="utf-8") as out:
        out.write("url\tcaption\tsplit\n")
        for file, caption, split in captions(data):
            quoted = '"' + caption.replace('"', '""') + '"'
            out.write(f"{base_url}/{file}\t{quoted}\t{split}\n")
            rows += 1
    return rows


def run(data: Path, work: Path, port: int) -> dict[str, Any]:
    """The recipe's summaries by stage, and `wall`, the seconds of the whole command."""
    work.mkdir(parents=True, exist_ok=True)
    with served(data / "images", port) as base_url:
        urls = work / "urls.tsv"
        write_list(data, base_url, urls)
        started = time.monotonic()
        command = [sys.executable, "-m", "cli", "run", str(RECIPE), "--work", str(work / "work"), "--json"]
        environment = {**os.environ, "FLICKR8K_URLS": str(urls)}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"pairmill run failed with exit code {done.returncode}")
    return {**json.loads(done.stdout.splitlines()[-1]), "wall": time.monotonic() - started}


def page(found: dict[str, Any]) -> str:
    """The results page."""
    retrieval = found["eval"]["retrieval"]
    stages = [name for name in found if name != "wall"]
    lines = [
        "# Flickr8k: from a URL list to retrieval",
        "",
        "    make flickr8k DATA=/path/to/flickr8k",
        "",
        f"Run on {machine()} ({time.strftime('%Y-%m-%d')}); the whole command took **{found['wall'] / 60:.1f} minutes**.",
        "The recipe is [examples/flickr8k.toml](../../examples/flickr8k.toml), the bench",
        "[bench/flickr8k.py](../../bench/flickr8k.py).",
        "",
        "| retrieval on 1,000 test photographs, 5,000 captions | R@1 | R@5 | R@10 |",
        "|---|---|---|---|",
    ]
    for way, words in (("t2i", "text to image"), ("i2t", "image to text")):
        lines.append(f"| {words} | " + " | ".join(f"{retrieval[f'{way}_r{k}']:.1%}" for k in (1, 5, 10)) + " |")
    lines += ["", "Chance at R@10 is about 1 %.", "", "| funnel | |", "|---|---|"]
    lines += [f"| {name} | {count:,} |" for name, count in found["report"]["funnel"].items()]
    lines += ["", "| stage | seconds |", "|---|---|"]
    lines += [f"| {name} | {found[name]['seconds']:,.0f} |" for name in stages]
    train = found["train"]
    lines += [
        "",
        f"Training: {train['steps']:,} steps, {train['samples_seen']:,} pairs at {train['pairs_per_s']:,.0f} pairs/s, loss "
        f"{train['loss']:.3f}, {train['wait_share']:.1%} of the time spent waiting for data.",
        "",
        "![the report page](flickr8k-report.png)",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with images/, captions.tsv and images.tsv")
    parser.add_argument(
        "--work", type=Path, default=Path("work-flickr8k"), help="where the list and the work folder go"
    )
    parser.add_argument("--port", type=int, default=8808, help="port of the local web server")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON")
    options = parser.parse_args()
    found = run(options.data, options.work, options.port)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(found), encoding="utf-8")
    retrieval = found["eval"]["retrieval"]
    claims = [
        claim("Flickr8k text-to-image R@10", retrieval["t2i_r10"], goal=RECALL, at_least=True),
        claim("Flickr8k image-to-text R@10", retrieval["i2t_r10"], goal=RECALL, at_least=True),
        claim("Flickr8k minutes in all", found["wall"] / 60, goal=MINUTES, at_least=False),
    ]
    print(json.dumps(claims) if options.json else PAGE.read_text())


if __name__ == "__main__":
    main()
