"""What the benches that train beside open_clip share: our verbs as commands, and first weights that both trainers load."""

from __future__ import annotations

import json
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
    command = [sys.executable, "-m", "cli", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"pairmill {' '.join(words)} ended with {done.returncode}; its own words are above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


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
