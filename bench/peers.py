"""Side environments for the packages that we are measured against or that must read our files.

Each peer gets a virtual environment of its own in `.peers/NAME`, because their pins rarely fit together or with ours.

    python -m bench.peers                  list them and say which are ready
    python -m bench.peers NAME [NAME...]   make them (`all` makes every one)

Benches call `peer_python(NAME)`, which makes what is missing; tests call `ready(NAME)` and skip where it gives None, so
that a plain `make test` downloads nothing of this.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".peers"

# torchvision's wheels hold binaries for CUDA builds of torch only. Beside a CPU build its operators cannot be loaded, and
# its import fails for want of two declarations, which this makes; open_clip uses none of these operators.
_TORCHVISION_ON_CPU = """\
import torch
if torch.__version__.endswith("+cpu"):
    torchvision_operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        torchvision_operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@dataclass(frozen=True)
class Peer:
    """What goes into one environment.

    packages: with their dependencies; alone: without them; imports: modules that must import when all is done; startup:
    code that the environment's Python runs first.
    """

    packages: tuple[str, ...]
    imports: tuple[str, ...]
    alone: tuple[str, ...] = ()
    startup: str = ""


PEERS = {
    "img2dataset": Peer(("img2dataset==1.47.0",), ("img2dataset", "cv2")),
    "dedup": Peer(("datasketch==2.0.0", "rensa==0.5.0", "pyarrow"), ("datasketch", "rensa")),
    "webdataset0": Peer(("webdataset==0.2.86", "pillow"), ("webdataset",)),
    "webdataset1": Peer(("webdataset==1.0.2", "pillow"), ("webdataset",)),
    # what `train --log` shows runs in; tests put these packages behind our own
    "boards": Peer(("tensorboard==2.21.0", "wandb==0.31.0"), ("tensorboard", "wandb")),
    "audit": Peer(("pip-audit==2.10.1",), ("pip_audit",)),
    # pairmill itself beside Ray, whose workers import it; at the versions that everything else is tested with
    "ray": Peer(
        ("--constraint", "requirements.lock", "--editable", ".[ray,s3]", "ray[default]==2.60.0"), ("ray", "core.runner")
    ),
    "open_clip": Peer(
        (
            "torch==2.13.0",
            "numpy",
            "pillow",
            "regex",
            "ftfy",
            "tqdm",
            "huggingface_hub",
            "safetensors",
            "timm==1.0.22",
            "webdataset==0.2.86",
            "pandas",
        ),
        ("open_clip", "open_clip_train.data", "torchvision.transforms"),
        alone=("torchvision==0.28.0", "open_clip_torch==3.3.0"),
        startup=_TORCHVISION_ON_CPU,
    ),
}


def ready(name: str) -> Path | None:
    """The Python of a peer's environment where that has been made from the present table, else None.

    Raises:
        KeyError: no such peer.
    """
    marker = PLACE / name / "ready"
    made = marker.exists() and marker.read_text() == _digest(PEERS[name])
    return PLACE / name / "bin" / "python" if made else None


def peer_python(name: str) -> Path:
    """The Python of a peer's environment, which is made first where it is missing (one to ten minutes, with network).

    Raises:
        SystemExit: the packages cannot be had; pip's own words stand above.
    """
    if found := ready(name):
        return found
    return _make(name, PEERS[name])


def _make(name: str, peer: Peer) -> Path:
    folder = PLACE / name
    print(f"making {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _do(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _do(*pip, *peer.packages)
    if peer.alone:
        _do(*pip, "--no-deps", *peer.alone)
    if peer.startup:
        (next((folder / "lib").glob("python*")) / "site-packages" / "sitecustomize.py").write_text(peer.startup)
    _do(str(python), "-c", f"import {', '.join(peer.imports)}")
    (folder / "ready").write_text(_digest(peer))
    return python


def _do(*command: str) -> None:
    if subprocess.run(command, stdout=sys.stderr, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"this failed, with its reason above: {' '.join(command)}")


def _digest(peer: Peer) -> str:
    """Of all that the environment was made from: where pairmill itself is in it, of what that asks for as well."""
    files = ("pyproject.toml", "requirements.lock") if "--editable" in peer.packages else ()
    return hashlib.sha256(b"".join([repr(peer).encode(), *((ROOT / name).read_bytes() for name in files)])).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*PEERS, "all"]))
    names = parser.parse_args().names
    if unknown := set(names) - {*PEERS, "all"}:
        parser.error(f"expected peers out of {', '.join([*PEERS, 'all'])}, found {', '.join(sorted(unknown))}")
    for name in PEERS if "all" in names else names:
        print(name, peer_python(name))
    if not names:
        print("\n".join(f"{name:12} {ready(name) or 'not made'}" for name in PEERS))


if __name__ == "__main__":
    main()
