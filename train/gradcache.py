"""Gradients of a batch larger than memory, exactly (GradCache, Gao et al. 2021).

A contrastive loss is no sum over pairs, so adding up the losses of micro-batches trains another loss. Instead: embed
every micro-batch without keeping activations, evaluate the loss ONCE over all embeddings of this rank, keep its
gradient with respect to them, then embed each micro-batch again, with the same random numbers, and push its slice of
that gradient through. One more forward pass buys the activations of one micro-batch only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from core.errors import ConfigError
from train.towers import CLIP, unwrap

LossFn = Callable[..., Tensor]
"""(img_bE, txt_bE, log_scale[, bias]) -> scalar; see `CLIP.loss_scalars`."""


def gradcache_step(
    model: nn.Module, pixels_BCHW: Tensor, tokens_BL: Tensor, loss_fn: LossFn, micro: int | None = None
) -> Tensor:
    """Backward pass of one step: gradients are added to the parameters, the detached loss is returned.

    `model` is a `CLIP` or DDP around one; `loss_fn` sees the embeddings of this rank's whole batch. `micro` is the
    number of pairs held with activations at a time (the last micro-batch may be smaller); None or at least the batch
    makes it the plain step. Every gradient equals the unsplit batch's, the log scale's included, after DDP's average.
    """
    batch = len(pixels_BCHW)
    if micro is not None and micro < 1:
        raise ConfigError(f"micro_batch must be at least 1, found {micro}.")
    if micro is None or micro >= batch:
        return _plain_step(model, pixels_BCHW, tokens_BL, loss_fn)
    parts = list(zip(pixels_BCHW.split(micro), tokens_BL.split(micro), strict=True))
    cached, states = _embed_all(unwrap(model), parts)
    loss, grads, scalar_grads = _loss_gradients(unwrap(model), cached, loss_fn)
    for i, (pixels, tokens) in enumerate(parts):
        last = i == len(parts) - 1
        with contextlib.nullcontext() if last else _no_sync(model), _replayed(states[i], pixels.device):
            img, txt = model(pixels, tokens)
            rows = slice(i * micro, i * micro + len(pixels))
            surrogate = (img * grads[0][rows]).sum() + (txt * grads[1][rows]).sum()
            if last:  # the scalars join the one pass that DDP averages
                for scalar, grad in zip(unwrap(model).loss_scalars(), scalar_grads, strict=True):
                    surrogate = surrogate + scalar * grad
            surrogate.backward()
    return loss


def _plain_step(model: nn.Module, pixels: Tensor, tokens: Tensor, loss_fn: LossFn) -> Tensor:
    img, txt = model(pixels, tokens)
    loss = loss_fn(img, txt, *unwrap(model).loss_scalars())
    loss.backward()
    return loss.detach()


def _embed_all(model: CLIP, parts: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], list[list[Tensor]]]:
    """Embeddings of all micro-batches, and the random states each one started from."""
    images: list[Tensor] = []
    texts: list[Tensor] = []
    states: list[list[Tensor]] = []
    with torch.no_grad():
        for pixels, tokens in parts:
            states.append(_random_states(pixels.device))
            img, txt = model(pixels, tokens)
            images.append(img)
            texts.append(txt)
    return (torch.cat(images), torch.cat(texts)), states


def _loss_gradients(
    model: CLIP, cached: tuple[Tensor, Tensor], loss_fn: LossFn
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One evaluation: the loss, its gradients for both embeddings, its gradients for the scalars."""
    leaves = [x.detach().requires_grad_() for x in (*cached, *model.loss_scalars())]
    loss = loss_fn(*leaves)
    grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), grads[:2], grads[2:]


@contextlib.contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    """Gradients stay on this rank inside."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextlib.contextmanager
def _replayed(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """Run with the random states of the first pass, then go on as if this second pass had drawn nothing."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield
