"""What benches with sides share: our verbs and their own parts as commands, and first weights that both trainers load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def pairmill(*words: str) -> dict[str, Any]:
    """Run one of our verbs; its summary.

    Raises:
        SystemExit: it failed.
    """
    return dict(_said([sys.executable, "-m", "cli", *words, "--json"], dict(os.environ)))


def in_a_process(bench: str, *words: str, python: str | Path = sys.executable, one_thread: bool = True) -> Any:
    """The JSON that a bench prints last where it is run with these words: a side of its own, whose memory and CPU time are
    measured apart, in a peer's environment where `python` is of one. It finds our packages and no network.

    Raises:
        SystemExit: it failed.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | (
        {"OMP_NUM_THREADS": "1"} if one_thread else {}
    )
    return _said([str(python), "-m", f"bench.{bench}", *words], env)


def _said(command: list[str], env: dict[str, str]) -> Any:
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[2:])} ended with {done.returncode}; its own words are above")
    return json.loads(done.stdout.splitlines()[-1])


def first_weights(place: Path, model: str, seed: int) -> None:
    """An open_clip folder with random weights of `seed` for a model of ours."""
    import torch

    from core.storage import Folder
    from train.checkpoint import write_tensors
    from train.export import CONFIG, WEIGHTS, open_clip_config
    from train.models import model_config
    from train.towers import CLIP

    torch.manual_seed(seed)
    shape, folder = model_config(model), Folder(str(place))
    folder.make()
    write_tensors(folder, WEIGHTS[0], CLIP(shape).state_dict())
    folder.write(CONFIG, json.dumps(open_clip_config(shape)).encode())


def open_clips_optimizer(model: Any, lr: float, wd: float) -> Any:
    """AdamW with the parameter groups of open_clip's trainer, for a model of its own; runs in its environment."""
    import torch

    named = list(model.named_parameters())
    plain = [p for n, p in named if p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n]
    others = [p for n, p in named if not any(p is q for q in plain)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": wd}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-6)
