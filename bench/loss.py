"""The symmetric tiled loss against open_clip's, forward and backward: CPU time, memory, bytes between ranks.

Method: B normalised pairs of width D in fp32, one CPU thread. `tiled` is `train.loss.clip_loss` with the masks that
training passes; `open_clip` is `open_clip.ClipLoss(local_loss=True, gather_with_grad=True)` in its own environment
(`python -m bench.peers open_clip`; where that is missing, the same two matrices and cross-entropies written here);
`products` are the four B x B x D matrix products that no exact form can avoid. Each form runs in a process of its own:
CPU seconds are the best of some, taken in turns so that a busy machine is busy for all; memory is the peak above what
the embeddings themselves took.

Bytes: four gloo ranks run `clip_loss` and `local_loss` once, forward and backward, and every collective is counted with
what a ring moves a rank: (N - 1) / N of the whole for a gather or a reduce-scatter, twice that for an all-reduce.

    python -m bench.loss [--batch 16384] [--width 512] [--repeat 2] [--json]
    python -m bench.loss --variants        what gathering wrongly does to the gradients (4 ranks; docs/results/train.md)

Result: docs/results/train.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.machine import claim
from bench.sides import in_a_process

FORMS = ("tiled", "open_clip", "products")
TIME_GOAL, MEMORY_GOAL, BYTES_GOAL = 0.55, 0.10, 0.51
RANKS = 4


# -- time and memory, one process a form --------------------------------------------------------------------------------


def measure(form: str, batch: int, width: int) -> dict[str, Any]:
    """CPU seconds of one forward and backward pass, and peak bytes beyond the inputs, of one form in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    img = torch.nn.functional.normalize(torch.randn(batch, width), dim=1).requires_grad_()
    txt = torch.nn.functional.normalize(img.detach() + 0.1 * torch.randn(batch, width), dim=1).requires_grad_()
    scale = torch.tensor(3.5, requires_grad=True)
    name, step = _step(form)
    step(img[:64], txt[:64], scale)  # start-up costs of the library
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    step(img, txt, scale)
    seconds = time.process_time() - start
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"form": name, "seconds": seconds, "bytes": peak}


def _step(form: str) -> tuple[str, Callable[..., None]]:
    """What a form is called, and one pass of it as a function of (images, texts, log scale)."""
    import torch
    from torch import Tensor

    def tiled(img: Tensor, txt: Tensor, scale: Tensor) -> None:
        from train.loss import clip_loss

        valid, group = torch.ones(len(img), dtype=torch.bool), torch.arange(len(img))
        clip_loss(img, txt, scale, valid_b=valid, group_b=group).backward()

    def products(img: Tensor, txt: Tensor, scale: Tensor) -> None:
        with torch.no_grad():
            logits = img @ txt.T
            torch.mm(img, txt.T, out=logits)
            logits @ txt, logits.T @ img

    def two_matrices(img: Tensor, txt: Tensor, scale: Tensor) -> None:
        own = torch.arange(len(img))
        by_image, by_text = scale.exp() * img @ txt.T, scale.exp() * txt @ img.T
        cross_entropy = torch.nn.functional.cross_entropy
        ((cross_entropy(by_image, own) + cross_entropy(by_text, own)) / 2).backward()

    def open_clip(img: Tensor, txt: Tensor, scale: Tensor) -> None:
        peer(img, txt, scale.exp()).backward()

    if form == "open_clip":
        try:
            from open_clip.loss import ClipLoss  # type: ignore[import-not-found]
        except ImportError:
            return "two matrices", two_matrices
        peer = ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=False)
        return "open_clip", open_clip
    return form, {"tiled": tiled, "products": products}[form]


def _apart(form: str, batch: int, width: int) -> dict[str, Any]:
    from bench.peers import ready

    python = (ready("open_clip") if form == "open_clip" else None) or sys.executable
    return dict(in_a_process("loss", f"--form={form}", f"--batch={batch}", f"--width={width}", python=python))


# -- bytes and wrong variants, four ranks -------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Bytes that this rank's collectives move through a ring while the block runs."""
    import torch.distributed as dist

    moved = {"bytes": 0.0}
    whole = {"all_gather_single": 1, "all_gather_into_tensor": 1, "all_gather": 1, "reduce_scatter_single": 1,
             "reduce_scatter_tensor": 1, "all_reduce": 2}  # fmt: skip
    kept = {name: getattr(dist, name) for name in whole if hasattr(dist, name)}

    def count(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            largest = max(x.numel() * x.element_size() for x in args if hasattr(x, "numel"))
            size = dist.get_world_size()
            moved["bytes"] += whole[name] * largest * (size - 1) / size
            return real(*args, **kwargs)

        return call

    for name, real in kept.items():
        setattr(dist, name, count(name, real))
    try:
        yield moved
    finally:
        for name, real in kept.items():
            setattr(dist, name, real)


def _rank(rank: int, task: str, store: str, batch: int, width: int, out: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    found = _count_bytes(batch, width) if task == "bytes" else _wrong_gradients()
    if rank == 0:
        out.put(found)
    dist.destroy_process_group()


def _pairs(batch: int, width: int) -> tuple[Any, Any, Any]:
    import torch

    g = torch.Generator().manual_seed(0)
    img = torch.nn.functional.normalize(torch.randn(batch, width, generator=g), dim=1)
    txt = torch.nn.functional.normalize(img + torch.randn(batch, width, generator=g) / width**0.5, dim=1)
    return img, txt, torch.tensor(3.0)


def _count_bytes(batch: int, width: int) -> dict[str, float]:
    """The reference form's collectives run below `torch.distributed`, so they are counted by its own arithmetic."""
    import torch.distributed as dist

    from train.loss import clip_loss

    share, rank = batch // RANKS, dist.get_rank()
    img, txt, scale = _pairs(batch, width)
    img, txt = (x[rank * share : (rank + 1) * share].requires_grad_() for x in (img, txt))
    with counted() as moved:
        clip_loss(img, txt, scale).backward()
    # images and texts, gathered on the way there and reduce-scattered on the way back
    local = 4 * batch * width * 4 * (RANKS - 1) / RANKS
    return {"tiled": moved["bytes"], "local": local}


def _wrong_gradients() -> dict[str, dict[str, float]]:
    """Cosine and length of the gradient of the image embeddings against the right one, after the ranks' average."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from train.loss import full_loss

    rank, share = dist.get_rank(), 32
    img, txt, scale = (x.double() for x in _pairs(RANKS * share, 64))
    mix = torch.eye(64, dtype=torch.float64).requires_grad_()  # a tower of one matrix, whose gradient the ranks average
    own = slice(rank * share, (rank + 1) * share)

    def normed(x: Any) -> Any:
        return torch.nn.functional.normalize(x @ mix, dim=1)

    (truth,) = torch.autograd.grad(full_loss(normed(img), normed(txt), scale), [mix])

    def gathered(x: Any, whole: Any) -> Any:
        """Own rows with a gradient, those of others without."""
        return torch.cat([whole[: own.start].detach(), x, whole[own.stop :].detach()])

    def loss_of(own_rows_only: bool, gradients_from_all: bool) -> Any:
        u, v = normed(img[own]), normed(txt[own])
        U, V = normed(img), normed(txt)
        if not gradients_from_all:
            U, V = gathered(u, U), gathered(v, V)
        if own_rows_only:
            labels = torch.arange(own.start, own.stop)
            a, b = scale.exp() * u @ V.T, scale.exp() * v @ U.T
        else:
            labels = torch.arange(len(U))
            a, b = scale.exp() * U @ V.T, scale.exp() * V @ U.T
        return (cross_entropy(a, labels) + cross_entropy(b, labels)) / 2

    found = {}
    for name, case in {"local loss, gather without gradients": (True, False), "neither": (False, False)}.items():
        (grad,) = torch.autograd.grad(loss_of(*case), [mix])
        dist.all_reduce(grad)
        grad /= RANKS
        cosine = float((grad * truth).sum() / grad.norm() / truth.norm())
        found[name] = {"cosine": cosine, "norm": float(grad.norm() / truth.norm())}
    return found


def on_ranks(task: str, batch: int = 64, width: int = 64) -> dict[str, Any]:
    """Run a task on four gloo ranks; what rank 0 found."""
    import multiprocessing
    import tempfile

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = context.SimpleQueue()
        store = f"{folder}/store"
        ranks = [context.Process(target=_rank, args=(r, task, store, batch, width, out)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed; its own words are above")
        return out.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.form:
        print(json.dumps(measure(options.form, options.batch, options.width)))
        return
    if options.variants:
        print(json.dumps(on_ranks("variants"), indent=1))
        return
    runs = [{f: _apart(f, options.batch, options.width) for f in FORMS} for _ in range(options.repeat)]
    best = {f: (min(run[f]["seconds"] for run in runs), float(min(run[f]["bytes"] for run in runs))) for f in FORMS}
    (ours, memory), (peer, peer_memory), (floor, _) = (best[form] for form in FORMS)
    moved = on_ranks("bytes", min(options.batch, 4096), options.width)
    what = (
        f"CLIP loss beside {runs[0]['open_clip']['form']}, {options.batch} pairs of width {options.width}, one thread"
    )
    claims = [
        claim(f"{what}: CPU seconds", ours, peer=peer, floor=floor, goal=TIME_GOAL * peer, at_least=False),
        claim(f"{what}: peak bytes", memory, peer=peer_memory, goal=MEMORY_GOAL * peer_memory, at_least=False),
        claim(
            f"bytes a rank moves for the loss at {RANKS} ranks", moved["tiled"], peer=moved["local"],
            goal=BYTES_GOAL * moved["local"], at_least=False,
        ),
    ]  # fmt: skip
    if options.json:
        print(json.dumps(claims))
    else:
        for form, (seconds, peak) in best.items():
            print(f"{form:12}  {seconds:7.2f} s CPU  {peak / 2**20:8.0f} MiB")
        print(f"bytes a rank: {moved['tiled'] / 2**20:.1f} MiB tiled, {moved['local'] / 2**20:.1f} MiB local loss")


if __name__ == "__main__":
    main()
