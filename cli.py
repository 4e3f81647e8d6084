"""The command line: one verb a stage, `run` and `demo` chain them. No logic here.

Config classes are cheap to import; a stage's module, with torch, DuckDB or DALI behind it, only when its verb runs.
"""

from __future__ import annotations

import importlib
import json as jsonlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from core.config import VerbConfig, command, load_recipe
from core.errors import PairmillError, StorageError
from core.redact import Formatter, redact
from core.storage import is_of_a_store
from dedup.config import DedupConfig
from demo.config import DemoConfig
from ingest.config import AdoptConfig, IngestConfig
from report.config import AuditConfig, BrowseConfig, ReportConfig, SqlConfig
from shardkit.config import ShardConfig, VerifyConfig
from train.config import DiagnoseConfig, DoctorConfig, EvalConfig, ExportConfig, PlanConfig, ScoreConfig, TrainConfig
from train.distributed import ranks_from_env

Summary = dict[str, Any]
INTERRUPTED = 130  # Typer catches Ctrl-C before `main` could, and ends with this code and no word

# What a recipe may hold, in the order in which it runs.
STAGES: dict[str, tuple[type[VerbConfig], str]] = {
    "ingest": (IngestConfig, "ingest.fetch"),
    "adopt": (AdoptConfig, "ingest.adopt"),
    "score": (ScoreConfig, "train.score"),
    "dedup": (DedupConfig, "dedup.keep"),
    "shard": (ShardConfig, "shardkit.pack"),
    "train": (TrainConfig, "train.run"),
    "eval": (EvalConfig, "train.evaluate"),
    "report": (ReportConfig, "report.run"),
}
TOOLS: dict[str, tuple[type[VerbConfig], str]] = {
    "verify": (VerifyConfig, "shardkit.verify"),
    "export": (ExportConfig, "train.export"),
    "audit": (AuditConfig, "report.audit"),
    "sql": (SqlConfig, "report.sql"),
    "browse": (BrowseConfig, "report.browse"),
    "diagnose": (DiagnoseConfig, "train.diagnose"),
    "plan": (PlanConfig, "train.budget"),
    "doctor": (DoctorConfig, "train.doctor"),
}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="From a list of image URLs with alt text to a trained CLIP. Start with `pairmill demo`.",
)


def main() -> None:
    """Entry point: errors of pairmill's own and of disks and networks become one sentence and an exit code.

    Anything else is a mistake of ours and keeps its traceback.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("pairmill").setLevel(logging.INFO)  # other packages only warn
    try:
        app()
    except PairmillError as error:
        print(f"pairmill: {redact(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if not isinstance(error, OSError) and not is_of_a_store(error):
            raise
        print(
            f"pairmill: a disk, network or store failed: {redact(str(error))}; what was finished is kept, run the same "
            "command again to continue",
            file=sys.stderr,
        )
        sys.exit(StorageError.exit_code)
    except SystemExit as done:
        if done.code == INTERRUPTED:
            print("pairmill: stopped; run the same command again to continue", file=sys.stderr)
        raise


def _stage(module: str) -> Callable[[Any], Summary]:
    def run(config: Any) -> Summary:
        if address := getattr(config, "ray_address", ""):
            os.environ["RAY_ADDRESS"] = address  # where Ray itself looks
        summary: Summary = importlib.import_module(module).run(config)
        return summary

    return run


def _shower(module: str) -> Callable[[Summary, bool], None]:
    def show(summary: Summary, json: bool) -> None:
        if module == "train.run" and ranks_from_env()[0]:
            return  # under torchrun or srun every rank comes here, and one speaks for all
        if json:
            print(jsonlib.dumps(summary, default=str))
        else:
            _print(importlib.import_module(module), summary)
        if code := summary.get("exit_code"):
            raise typer.Exit(code)

    return show


def _print(module: Any, summary: Summary) -> None:
    """A stage's own `render(summary)` where it has one, else its plain figures."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if hasattr(module, "render") and "part" not in summary:  # a part has nothing to show before the last one is done
        rendered = module.render(summary)
    else:
        rendered = Table(show_header=False, box=None)
        for key, value in summary.items():
            words = f"{value:,}" if isinstance(value, (int, float)) else str(value)
            rendered.add_row(Text(key, style="bold"), Text(words))  # a path in brackets is no markup
    Console().print(rendered)


def run_recipe(
    path: str, *, common: dict[str, Any], overrides: dict[str, dict[str, Any]] | None = None
) -> dict[str, Summary]:
    """Run the stages of a recipe in order; each skips what it has already done. `common` and `overrides` win over it."""
    from rich.console import Console

    console = Console(stderr=True)
    summaries: dict[str, Summary] = {}
    stages = {name: config for name, (config, _) in STAGES.items()}
    for name, config in load_recipe(path, stages, common=common, overrides=overrides).items():
        console.rule(f"[bold]{name}", align="left")
        started = time.monotonic()
        summary = _stage(STAGES[name.split()[0]][1])(config)
        summaries[name] = {"seconds": round(time.monotonic() - started, 1), **summary}
    return summaries


@app.command(rich_help_panel="The whole way")
def run(
    recipe: Annotated[str, typer.Argument(help="TOML recipe: one table a stage; see examples/.")],
    work: Annotated[str | None, typer.Option(help="Work folder, instead of the recipe's.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes, instead of the recipe's.")] = None,
    engine: Annotated[str | None, typer.Option(help="`local` or `ray`, instead of the recipe's.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="The cluster of `--engine ray`, `HOST:PORT`.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh/--resume", help="Throw earlier results away.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one summary object as the last line.")] = False,
) -> None:
    """Run a recipe: ingest, dedup, shard, train, eval, report, skipping what is finished."""
    given = {"work": work, "workers": workers, "engine": engine, "ray_address": ray_address, "fresh": fresh or None}
    common = {name: value for name, value in given.items() if value is not None}
    summaries = run_recipe(recipe, common=common)
    if json:
        print(jsonlib.dumps(summaries, default=str))
    else:
        for name, summary in summaries.items():
            _print(importlib.import_module(STAGES[name.split()[0]][1]), summary)


def _demo(config: DemoConfig) -> Summary:
    from demo.play import serve_world, summarise

    with serve_world(config) as served:
        recipe = str(Path(__file__).parent / "demo" / "recipe.toml")
        common = {"work": config.work, "workers": config.workers, "engine": config.engine,
                  "ray_address": config.ray_address, "fresh": config.fresh}  # fmt: skip
        summaries = run_recipe(recipe, common=common, overrides=served.overrides)
    return summarise(served, summaries)


def _register() -> None:
    app.command("demo", rich_help_panel="The whole way")(command(DemoConfig, _demo, _shower("demo.play")))
    for panel, verbs in (("Stages", STAGES), ("Tools", TOOLS)):
        for name, (config, module) in verbs.items():
            app.command(name, rich_help_panel=panel)(command(config, _stage(module), _shower(module)))


_register()

if __name__ == "__main__":
    main()
