"""STAGE `train`: prepares the run folder, starts the ranks (or joins them), and reports how it ended.

One rank trains in this process; several are started through torchrun, each executing this module. Under torchrun or
srun the stage joins the ranks that are already there.

WORK/runs/NAME: config.json (settings as run), metrics.jsonl, eval.jsonl, examples.json, quarantine.jsonl,
skipped.jsonl, checkpoints/, done.json (the summary of a finished run).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import errors
from core.config import build, plain
from core.errors import ConfigError, PairmillError, RunError, WorkFolderError
from core.redact import redacted
from core.storage import Folder
from core.work import locked, package_version
from train import checkpoint
from train.boards import check_boards
from train.config import Precision, TrainConfig
from train.distributed import (
    Ended,
    World,
    barrier,
    choose_device,
    choose_precision,
    gather_objects,
    launch_ranks,
    launched,
    ranks_from_env,
    world,
)
from train.evaluate import val_folder
from train.export import run_folder
from train.models import model_config

if TYPE_CHECKING:
    import torch

log = logging.getLogger("pairmill.train")

SETTINGS = "config.json"
DONE = "done.json"
FAILED = "failed.json"
LOCK = ".lock"

# What gloo and NCCL say when a rank at the other end is gone.
LOST_CONTACT = re.compile(r"gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|TCPStore")

NOT_NEGATIVE = ("cache_gb", "micro_batch", "ranks", "steps", "warmup", "eval_every", "checkpoint_every",
                "keep_every", "workers", "grad_clip", "lr", "wd")  # fmt: skip


class LostContact(RunError):
    """Another rank died, which knows why, or was killed; this one has nothing to add."""


def run(config: TrainConfig) -> dict[str, Any]:
    """Train, or continue a run, or return the summary of a finished one.

    Returns `steps`, `samples_seen`, `loss`, `pairs_per_s`, `wait_share`, `mfu`, `checkpoint`, `run`, `seconds`, and
    `retrieval` where there is a retrieval set.

    Raises:
        ConfigError: settings that cannot be; WorkFolderError: a run of this name with other settings, or in use.
        HardwareError: a GPU or DALI was asked for and is not there.
        InputError, DataError, RunError: see `loop.train`.
    """
    home = Path(run_folder(config.work, config.name))
    check(config)
    if launched():
        _check_launched(config)
        return _join(config, home)
    ranks = config.ranks or _default_ranks(config)
    check_share(config, ranks)
    if ranks == 1:
        return _join(config, home)
    return _launch(config, home, ranks)


def check(config: TrainConfig) -> None:
    """Refuse settings that cannot be, before anything is started or written."""
    model_config(config.model)
    for name in ("batch_size", "log_every", "keep"):
        if getattr(config, name) < 1:
            raise ConfigError(f"expected {name} of at least 1, found {getattr(config, name)}")
    for name in NOT_NEGATIVE:
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"expected {name} of at least 0, found {getattr(config, name)}")
    if abs(config.seed) >= 1 << 63:
        raise ConfigError(f"expected a seed of at most 63 bits, found {config.seed}")
    if config.lock_image and not config.init:
        raise ConfigError("a locked image tower learns nothing: name with --init the weights that it has already")
    if config.epochs < 1 and not config.steps:
        raise ConfigError(f"expected at least one epoch or step, found epochs {config.epochs} and steps 0")
    if not 0 < config.crop <= 1:
        raise ConfigError(f"expected a crop in (0, 1], the share of a picture's area to keep, found {config.crop}")
    if not 0 <= config.ema < 1:
        raise ConfigError(f"expected ema in [0, 1), the weight of the past, found {config.ema}")
    check_boards(config.log)
    if not 0 <= config.colour <= 1:
        raise ConfigError(f"expected a colour in [0, 1], the strength of its changes, found {config.colour}")


def check_share(config: TrainConfig, ranks: int) -> None:
    """Refuse a batch that the ranks cannot share equally."""
    if config.batch_size % ranks:
        below, above = config.batch_size // ranks * ranks, -(-config.batch_size // ranks) * ranks
        near = " or ".join(str(n) for n in (below, above) if n)
        raise ConfigError(
            f"a batch of {config.batch_size} cannot be shared equally by {ranks} ranks; use --batch-size {near}, or other "
            "--ranks"
        )


def _check_launched(config: TrainConfig) -> None:
    """Refuse `--ranks` that is neither what a launcher started here nor what it started in all."""
    size = ranks_from_env()[1]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if config.ranks not in (0, here, size):
        raise ConfigError(
            f"{here} ranks were started on this machine ({size} in all), and --ranks asks for {config.ranks}; leave it out "
            "under torchrun and srun"
        )


def _default_ranks(config: TrainConfig) -> int:
    """One a GPU; one on a CPU."""
    import torch

    device = choose_device(config.device, 0)
    return torch.cuda.device_count() if device.type == "cuda" else 1


# -- one rank ----------------------------------------------------------------------------------------------------------


def _join(config: TrainConfig, home: Path) -> dict[str, Any]:
    """Train as the rank that the environment says this process is."""
    from train import loop

    started = time.perf_counter()
    with world(config.device) as ranks:
        check_share(config, ranks.size)
        # rank 0's word goes for all: hosts may differ
        config = gather_objects(_with_precision(config, home, ranks.device))[0]
        with _lost_contact(ranks), _prepared(config, home, ranks):
            barrier()
            finished = gather_objects(read_done(home))[0]  # a host may have its own folder for runs
            if finished is not None:
                return _same_data(config, home, finished)
            with _memory_errors(config, ranks):
                summary = loop.train(config, ranks, home, val_folder(config.work, config.val))
            summary["seconds"] = round(time.perf_counter() - started, 3)
            if ranks.main:
                Folder(home).write(DONE, json.dumps(summary, indent=1).encode())
            barrier()
        return summary


def _with_precision(config: TrainConfig, home: Path, device: torch.device) -> TrainConfig:
    """The settings with `auto` replaced by what the run began with, else by what suits the device."""
    begun = {} if config.fresh or config.precision != "auto" else _recorded(Folder(home), "settings")
    precision: Precision = begun.get("precision") or choose_precision(config.precision, device)
    return dataclasses.replace(config, precision=precision)


@contextlib.contextmanager
def _memory_errors(config: TrainConfig, ranks: World) -> Iterator[None]:
    """A full device is the commonest end of a first step, and has a remedy."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        share = config.batch_size // ranks.size
        held = min(config.micro_batch or share, share)
        raise RunError(
            f"the memory of {ranks.device} is full with {held} pairs at a time; use --micro-batch {max(1, held // 2)}, or "
            "--checkpointing; the run goes on from its newest checkpoint"
        ) from error


@contextlib.contextmanager
def _lost_contact(ranks: World) -> Iterator[None]:
    """Raises LostContact for what gloo and NCCL say when another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1 or not LOST_CONTACT.search(str(error)):
            raise
        raise LostContact(
            f"rank {ranks.rank} lost contact with another rank; what that one said last, or its host, tells why"
        ) from error


@contextlib.contextmanager
def _prepared(config: TrainConfig, home: Path, ranks: World) -> Iterator[None]:
    """On rank 0: the run folder locked, empty if `--fresh`, with the settings it belongs to."""
    if not ranks.main:
        yield
        return
    with _locked(home):
        _prepare(config, home)
        yield


def _prepare(config: TrainConfig, home: Path) -> None:
    if config.fresh:
        for leftover in home.iterdir():
            if leftover.name != LOCK:
                Folder(home).remove(leftover.name)
        if config.checkpoints:
            checkpoint.remove_all(config.checkpoints)
    _check_settings(config, home)


def _locked(home: Path) -> contextlib.AbstractContextManager[object]:
    """Hold the run folder, which is made where it is not there yet."""
    Folder(home).make()
    return locked(home / LOCK, f"the run {home}", "--name")


def _check_settings(config: TrainConfig, home: Path) -> None:
    """Compare with the settings the run began with, or write them down. A run without a checkpoint binds nobody."""
    folder, wanted = Folder(home), plain(config.fingerprint())
    if folder.exists(SETTINGS) and (folder.exists(DONE) or checkpoint.steps_saved(checkpoints_of(config, home))):
        for key, was, now in checkpoint.changed_settings(_recorded(folder, "settings"), wanted):
            raise WorkFolderError(
                f"{home} holds a run of other settings ({key} was {was!r}, now {now!r}); choose another --name, or throw the "
                "run away with --fresh"
            )
        return
    before = _recorded(folder, "as_run").get("checkpoints") or str(home / "checkpoints")
    if folder.exists(SETTINGS) and checkpoint.steps_saved(before):
        raise WorkFolderError(
            f"{home} has its checkpoints in {before}, and there are none in {checkpoints_of(config, home)}; name the former "
            "with --checkpoints, or throw the run away with --fresh"
        )
    everything = {f.name: redacted(getattr(config, f.name)) for f in dataclasses.fields(config)}
    record = {"settings": wanted, "as_run": plain(everything), "version": package_version()}
    folder.write(SETTINGS, json.dumps(record, indent=1).encode())


def _recorded(folder: Folder, key: str) -> dict[str, Any]:
    """Settings in the run's config.json; empty where it is not there, or no JSON any more."""
    try:
        return dict(json.loads(folder.read(SETTINGS)).get(key, {})) if folder.exists(SETTINGS) else {}
    except (ValueError, AttributeError, TypeError) as error:
        raise WorkFolderError(
            f"{folder.path(SETTINGS)} is damaged ({error}); throw the run away with --fresh, or choose another --name"
        ) from error


def checkpoints_of(config: TrainConfig, home: Path) -> str:
    """Where a run keeps its checkpoints."""
    return config.checkpoints or str(home / "checkpoints")


def read_done(home: Path) -> dict[str, Any] | None:
    """The summary of a finished run; none where it is damaged, and the run's last checkpoint then makes it anew."""
    try:
        found = json.loads((home / DONE).read_text()) if (home / DONE).exists() else None
    except ValueError:
        log.warning("%s is damaged; it is made anew", home / DONE)
        return None
    return found if isinstance(found, dict) else None


def _same_data(config: TrainConfig, home: Path, finished: dict[str, Any]) -> dict[str, Any]:
    from shardkit.reader import ShardSet

    now = ShardSet.open(shards_folder(config), on_bad=config.on_bad_shard).fingerprint
    if now != finished.get("data"):
        raise WorkFolderError(
            f"{home} was trained on other shards than there are now (was {finished.get('data')}, now {now}); choose "
            "another --name, or throw the run away with --fresh"
        )
    log.info("%s is finished already", home)
    return finished


def shards_folder(config: TrainConfig) -> str | tuple[str, ...]:
    """What `--shards` names."""
    return config.shards or f"{config.work}/shards"


# -- several ranks -----------------------------------------------------------------------------------------------------


def _launch(config: TrainConfig, home: Path, ranks: int) -> dict[str, Any]:
    """Start the ranks, wait for them, and raise here what was raised in the first of them that failed."""
    from shardkit.reader import ShardSet
    from train.data import Plan

    config = _with_precision(config, home, choose_device(config.device, 0))
    with _locked(home):
        _prepare(config, home)
    finished = read_done(home)
    if finished is not None:
        return _same_data(config, home, finished)
    # What every rank would complain about is found here first, where it is one sentence and not torchrun's page.
    shard_set = ShardSet.open(shards_folder(config), on_bad=config.on_bad_shard)
    Plan.of(shard_set, config.seed, config.batch_size, config.weights)
    (home / FAILED).unlink(missing_ok=True)
    config = dataclasses.replace(config, fresh=False)
    values = json.dumps(plain({f.name: getattr(config, f.name) for f in dataclasses.fields(config)}))
    ended = launch_ranks(["-m", "train.run", values], ranks, env=_rank_paths())
    if ended.code != 0:
        _raise_failure(home, ended)
    finished = read_done(home)
    if finished is None:
        raise RunError(f"the ranks ended without a summary in {home}; run the same command again to continue")
    return finished


def _rank_paths() -> dict[str, str]:
    """The ranks find our modules, and not a user's `train.py` or `core/` in the folder that the command was given in."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def _raise_failure(home: Path, ended: Ended) -> None:
    try:
        failed = json.loads((home / FAILED).read_text())
    except (OSError, ValueError):
        who = "a rank" if ended.rank is None else f"rank {ended.rank}"
        how = f"died (exit code {ended.code}); its own words are above"
        if ended.signal:
            how = f"was killed by {signal.Signals(ended.signal).name}; a kernel short of memory does that (see `dmesg`)"
        raise RunError(
            f"{who} of the run in {home} {how}; the others were stopped; run the same command again to continue from the "
            "newest checkpoint"
        ) from None
    kind = getattr(errors, failed["error"], RunError)
    raise kind(failed["message"])


def main() -> None:
    """One rank under torchrun: `python -m train.run SETTINGS`, a JSON object."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("pairmill").setLevel(logging.INFO)
    values = json.loads(sys.argv[1])
    config = build(TrainConfig, values, where="the launcher")
    home, rank = Path(run_folder(config.work, config.name)), ranks_from_env()[0]
    try:
        run(config)
    except LostContact as error:
        log.error("%s", error)
        sys.exit(error.exit_code)
    except PairmillError as error:
        _leave_word(home, error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        log.exception("rank %d failed", rank)
        _leave_word(home, RunError(f"rank {rank} failed: {type(error).__name__}: {error}; its traceback is above"))
        sys.exit(RunError.exit_code)


def _leave_word(home: Path, error: PairmillError) -> None:
    """Tell the launcher what happened; the first rank to fail is the one that knows."""
    words = json.dumps({"error": type(error).__name__, "message": str(error), "rank": ranks_from_env()[0]})
    try:
        with (home / FAILED).open("x") as file:
            file.write(words)
    except FileExistsError:
        pass
    except OSError:  # a full disk is no reason to lose the sentence
        log.error("%s", error)


if __name__ == "__main__":
    main()
