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


def inputs(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor, Path]:
    g = torch.Generator().manual_seed(3)
    pixels = torch.randn(3, 3, size, size, generator=g)
    tokens = torch.zeros(3, 77, dtype=torch.int64)
    for row, length in zip(tokens, (1, 20, 75), strict=True):
        row[0], row[length + 1] = 49406, 49407
        row[1 : length + 1] = torch.randint(1, 49000, (length,), generator=g)
    path = folder / "inputs.npz"
    np.savez(path, pixels=pixels.numpy(), tokens=tokens.numpy())
    return pixels, tokens, path


def peer(name: str, given: Path, *more: str) -> dict[str, torch.Tensor]:
    out = given.with_name("out.npz")
    done = subprocess.run([str(ready("open_clip")), PEER, name, given, out, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {key: torch.from_numpy(value) for key, value in np.load(out).items()}


def assert_same(model: CLIP, pixels: torch.Tensor, tokens: torch.Tensor, theirs: dict[str, torch.Tensor]) -> None:
    model.eval()
    with torch.no_grad():
        ours = {
            "image": model.encode_image(pixels, normalize=False), "text": model.encode_text(tokens, normalize=False),
        }  # fmt: skip
    for key, value in theirs.items():
        assert float((ours[key] - value).abs().max()) <= TOLERANCE * float(value.abs().max()), key


@pytest.mark.parametrize("name", ["ViT-B-32", "RN50-quickgelu"])
def test_its_weights_in_our_towers(name: str, tmp_path: Path) -> None:
    pixels, tokens, given = inputs(tmp_path, 224)
    theirs = peer(name, given, str(tmp_path / "weights.pt"))
    plain = name.removesuffix("-quickgelu")
    model = CLIP(replace(MODELS[plain], quick_gelu=name != plain))
    load_weights(str(tmp_path / "weights.pt"), plain).into(model)
    assert_same(model, pixels, tokens, theirs)


@pytest.mark.parametrize("name", ["small-112", "small-rn-112"])
def test_our_export_in_its_towers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = CLIP(MODELS[name])
    pixels, tokens, given = inputs(tmp_path, model.cfg.image_size)
    with torch.no_grad():
        model.train().encode_image(pixels)  # running statistics that are not the first ones
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    folder = Folder(str(tmp_path / "export"))
    folder.make()
    checkpoint.write_tensors(folder, export.WEIGHTS[0], model.state_dict())
    folder.write(export.CONFIG, json.dumps(export.open_clip_config(model.cfg)).encode())
    assert_same(model, pixels, tokens, peer(f"local-dir:{folder}", given))
