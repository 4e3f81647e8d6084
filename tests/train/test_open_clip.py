"""open_clip itself on our weights and we on its: the same embeddings (made by `make peers`, skipped without).

The peer runs in a process of its own, with its own torch and torchvision.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.peers import ready
from core.storage import Folder
from train import checkpoint, export
from train.export import load_weights
from train.models import MODELS
from train.towers import CLIP

PEER = Path(__file__).with_name("open_clip_peer.py")
TOLERANCE = 1e-5  # of the largest entry, fp32
pytestmark = pytest.mark.skipif(ready("open_clip") is None, reason="needs open_clip's side environment: make peers")


def inputs(folder: Path, size: int) -> None:
    """Random pictures and texts of three lengths, as inputs.npz."""
    g = torch.Generator().manual_seed(3)
    pixels = torch.randn(3, 3, size, size, generator=g)
    tokens = torch.zeros(3, 77, dtype=torch.int64)
    for row, length in zip(tokens, (1, 20, 75), strict=True):
        row[0], row[length + 1] = 49406, 49407
        row[1 : length + 1] = torch.randint(1, 49000, (length,), generator=g)
    np.savez(folder / "inputs.npz", pixels=pixels.numpy(), tokens=tokens.numpy())


NAMED = ("ViT-B-32", "RN50-quickgelu")
OURS = ("small-112", "small-rn-112")


def write_export(name: str, folder: Folder) -> None:
    """A model of ours, written to `folder` as `export` writes it."""
    torch.manual_seed(5)
    model = CLIP(MODELS[name])
    side = model.cfg.image_size
    with torch.no_grad():
        model.train().encode_image(torch.randn(3, 3, side, side))  # running statistics that are not the first ones
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    folder.make()
    checkpoint.write_tensors(folder, export.WEIGHTS[0], model.state_dict())
    folder.write(export.CONFIG, json.dumps(export.open_clip_config(model.cfg)).encode())


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model: a folder with inputs.npz, the peer's out.npz, and its weights.pt or our export/."""
    found = {name: tmp_path_factory.mktemp(name) for name in (*NAMED, *OURS)}
    asked: list[str | Path] = []
    for name, home in found.items():
        inputs(home, 224 if name in NAMED else MODELS[name].image_size)
        if name in OURS:
            write_export(name, Folder(home / "export"))
        model, weights = (name, home / "weights.pt") if name in NAMED else (f"local-dir:{home / 'export'}", "")
        asked += [model, home / "inputs.npz", home / "out.npz", weights]
    done = subprocess.run([str(ready("open_clip")), PEER, *asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return found


def assert_same(model: CLIP, home: Path) -> None:
    given, theirs = np.load(home / "inputs.npz"), np.load(home / "out.npz")
    pixels, tokens = (torch.from_numpy(given[key]) for key in ("pixels", "tokens"))
    model.eval()
    with torch.no_grad():
        ours = {
            "image": model.encode_image(pixels, normalize=False), "text": model.encode_text(tokens, normalize=False),
        }  # fmt: skip
    for key, embedded in ours.items():
        value = torch.from_numpy(theirs[key])
        assert float((embedded - value).abs().max()) <= TOLERANCE * float(value.abs().max()), key


@pytest.mark.parametrize("name", NAMED)
def test_its_weights_in_our_towers(name: str, homes: dict[str, Path]) -> None:
    plain = name.removesuffix("-quickgelu")
    model = CLIP(replace(MODELS[plain], quick_gelu=name != plain))
    load_weights(str(homes[name] / "weights.pt"), plain).into(model)
    assert_same(model, homes[name])


@pytest.mark.parametrize("name", OURS)
def test_our_export_in_its_towers(name: str, homes: dict[str, Path]) -> None:
    model = CLIP(MODELS[name])
    load_weights(str(homes[name] / "export")).into(model)
    assert_same(model, homes[name])
