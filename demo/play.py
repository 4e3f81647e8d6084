"""The world as the stages see it: served on loopback, with the settings a recipe cannot know, and the end result.

The stages themselves are chained by the command line; this module never calls them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.progress import Progress
from core.storage import Folder
from core.work import locked
from demo.config import DemoConfig
from demo.server import DemoServer
from demo.world import World, make_world, write_urls

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger("pairmill.demo")


@dataclass(frozen=True)
class ServedWorld:
    """A world being served. `overrides`: by stage, the settings that depend on where the world lies and is served."""

    world: World
    overrides: dict[str, dict[str, Any]]
    started: float


@contextlib.contextmanager
def serve_world(config: DemoConfig) -> Iterator[ServedWorld]:
    """Make the world in WORK/world, unless it is there, and serve it on 127.0.0.1 while the block runs."""
    started = time.monotonic()
    local = Folder(config.work).local
    if local is None:
        raise ConfigError(f"the demo needs a local work folder, found {config.work}; leave --work out")
    Folder(config.work).make()
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(local / ".demo.lock", str(local), "--work"))  # stages hold `.lock`, one at a time
        world = _world(config, local)
        server = stack.enter_context(_served(world.folder))
        Folder(world.eval_dir).write("templates.txt", ("\n".join(world.templates) + "\n").encode())
        overrides = {
            "ingest": {"urls": str(write_urls(world, server.base_url))},
            "eval": {"zero_shot": str(world.eval_dir)},
        }
        yield ServedWorld(world, overrides, started)


def _world(config: DemoConfig, local: Path) -> World:
    with Progress("world", config.pictures, "pictures") as progress:

        def report(done: int, total: int) -> None:
            progress.total = total  # the evaluation's pictures come on top
            progress.advance(done - progress.done)

        return make_world(local / "world", pictures=config.pictures, progress=report)


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[DemoServer]:
    """A server on the port of an earlier run: its URLs are in the list, so a continued demo must serve the same ones."""
    file = folder / "port"
    with DemoServer(folder, port=int(file.read_text()) if file.exists() else 0) as server:
        Folder(folder).write("port", server.base_url.rpartition(":")[2].encode())
        yield server


def summarise(served: ServedWorld, summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The demo's one object: funnel, zero-shot and retrieval figures, share of time spent waiting, where the report is."""
    return {
        "funnel": summaries["report"]["funnel"],
        "samples": summaries["shard"]["samples"],
        "planted": served.world.counts,
        "outcomes": summaries["ingest"]["outcomes"],
        "dropped": summaries["dedup"]["dropped"],
        "zero_shot": summaries["eval"]["zero_shot"],
        "wait_share": summaries["train"]["wait_share"],
        "pairs_per_s": summaries["train"]["pairs_per_s"],
        "report": summaries["report"]["report"],
        "seconds": round(time.monotonic() - served.started, 1),
    }


def render(summary: dict[str, Any]) -> RenderableType:
    """The summary for people: a funnel, then what the model learned."""
    from rich.console import Group
    from rich.table import Table

    funnel = Table(title="From URL rows to training", title_justify="left", box=None, show_header=False)
    rows = summary["funnel"]["rows"]
    for name, count in summary["funnel"].items():
        words = "" if count <= rows else f"each sample {count / summary['samples']:.0f} times"
        funnel.add_row(f"[bold]{name}", f"{count:,}", "█" * round(30 * min(count / rows, 1)), words)
    zero_shot = summary["zero_shot"]
    times = zero_shot["accuracy"] / zero_shot["chance"]
    return Group(
        "",
        funnel,
        "",
        f"Zero-shot on combinations never shown in training: [bold]{zero_shot['accuracy']:.1%}[/] of pictures right over "
        f"{zero_shot['classes']} classes (chance {zero_shot['chance']:.1%}, so {times:.0f}x chance)",
        f"Training waited for data {summary['wait_share']:.1%} of the time, at {summary['pairs_per_s']:,.0f} pairs/s",
        f"Report: [bold]{summary['report']}[/]   (took {summary['seconds']:.0f} s in all)",
    )
