"""`ingest --engine img2dataset`: that package downloads, its shards are adopted, and its failures become rows.

Way in: our plan, which that package reads as a parquet list, so that every form of list works here too. Way out: the
parts of `adopt`, pointing into `WORK/img2dataset/shards`. It runs as a program, because its dependencies rarely fit into
one environment with ours; what it does to hosts, addresses and pixels is its own.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, HardwareError, RunError
from core.runner import cores
from core.storage import Folder
from core.work import open_stage
from ingest import adopt, fetch, staging, urllist
from ingest.config import AdoptConfig

if TYPE_CHECKING:
    from ingest.config import IngestConfig

log = logging.getLogger("pairmill.ingest")


def run(config: IngestConfig) -> dict[str, Any]:
    """Download with img2dataset and adopt what it wrote; the summary has the keys of `ingest`.

    Raises:
        HardwareError: the program is not installed.
        ConfigError: the work folder is not local, or failures are to be tried again.
        WorkFolderError: the work folder holds another list, other settings, or the pairs of our own engine.
        RunError: the program failed.
    """
    program = find_program()
    if config.retry_failed:
        raise ConfigError(
            "--engine img2dataset cannot take up failures again; leave --retry-failed out, or use --fresh"
        )
    folder = Folder(config.work) / "img2dataset"
    if folder.local is None:
        raise ConfigError(f"--engine img2dataset needs a local work folder, found {config.work}")
    started = time.monotonic()
    shards = folder.local.absolute() / "shards"
    before = os.times()
    inputs = fetch.fingerprint_list(config.urls)
    with open_stage(config, "img2dataset", home="img2dataset", inputs=inputs, redo=False) as stage:
        if not config.fresh:
            staging.refuse_other(stage.folder, "adopt")
        if stage.finished is None:
            urllist.write_plan(config, folder)
            _download(command(program, config, folder.local.absolute() / urllist.HOME, shards), shards)
            stage.finish({})
    after = os.times()
    summary = adopt.run(
        AdoptConfig(
            work=config.work, workers=config.workers, fresh=config.fresh, shards=str(shards),
            allow_empty=config.allow_empty, min_side=config.min_side,
        )
    )  # fmt: skip
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    summary["rows"] = summary.pop("pairs")
    return {**summary, "seconds": time.monotonic() - started, "cpu_seconds": cpu, "units": summary["shards"]}


def find_program() -> str:
    """Path of the img2dataset program: beside this Python, or wherever else it is installed.

    Raises:
        HardwareError: nowhere.
    """
    beside = Path(sys.executable).parent / "img2dataset"
    program = str(beside) if beside.exists() else shutil.which("img2dataset")
    if program is None:
        raise HardwareError(
            "--engine img2dataset needs that program, which is not installed; run: pip install 'pairmill[img2dataset]', or "
            "pipx install img2dataset"
        )
    return program


def command(program: str, config: IngestConfig, plan: Path, shards: Path) -> list[str]:
    """Our settings in its words. Opt-outs are obeyed and nothing is enlarged, as here."""
    options: dict[str, Any] = {
        "url_list": plan, "input_format": "parquet", "url_col": "url", "caption_col": "caption_raw",
        "save_additional_columns": json.dumps(["uid"]), "output_format": "webdataset", "output_folder": shards,
        "image_size": config.size, "resize_mode": "keep_ratio",
        "resize_only_if_bigger": True, "encode_quality": config.quality, "number_sample_per_shard": config.unit_urls,
        "processes_count": config.workers or cores(), "thread_count": config.concurrency,
        "timeout": int(config.timeout), "retries": config.retries, "user_agent_token": "pairmill",
        "disallowed_header_directives": json.dumps(["noai", "noimageai", "noindex", "noimageindex", "none"]),
    }  # fmt: skip
    if config.keep_original:
        options |= {"resize_mode": "no", "skip_reencode": True}
    return [program, *(f"--{name}={value}" for name, value in options.items())]


def _download(words: list[str], shards: Path) -> None:
    log.info("running %s", " ".join(words))
    shards.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0 or not list(shards.glob("*.tar")):
        last = " ".join(done.stdout.split()[-60:])
        raise RunError(f"img2dataset ended with code {done.returncode} and said: {last}")
