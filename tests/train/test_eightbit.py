"""Products in 8 bits: near the exact ones, exact where they must be, refused where the hardware has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.errors import HardwareError
from tests.train.shards import make_work
from train.config import TrainConfig
from train.distributed import choose_precision
from train.eightbit import KINDS, linear_8bit
from train.linear import linear
from train.run import run

Given = tuple[Tensor, Tensor, Tensor, Tensor]

# Relative errors that the types' own steps allow: half a step of 127 of the largest value; 3 bits of mantissa, of gradients 2.
ALLOWED = {"int8": 0.02, "fp8": 0.08}


def products(kind: str, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Forward, and the gradients of the three inputs."""
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    y = linear_8bit(x, weight, bias, kind) if kind else linear(x, weight, bias)
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


@pytest.fixture
def given() -> Given:
    torch.manual_seed(0)
    x = torch.randn(96, 64).bfloat16()
    return x, torch.randn(128, 64) * 0.1, torch.randn(128), torch.randn(96, 128).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_near_and_the_gradient_of_the_weight_has_16_bits(kind: str, given: Given) -> None:
    names = ("y", "x", "weight", "bias")
    for name, found, exact in zip(names, products(kind, *given), products("", *given), strict=True):
        error = float((found.float() - exact.float()).norm() / exact.float().norm())
        assert found.dtype == exact.dtype
        assert error < (ALLOWED[kind] if name in "yx" else 0.005), name
        if name in "yx":
            assert error > 1e-4, "the product had more than 8 bits"


def test_a_row_far_out_costs_the_other_rows_nothing_in_int8(given: Given) -> None:
    x, weight, bias, grad = given
    far = x.clone()
    far[0] *= 1000
    assert torch.equal(products("int8", far, weight, bias, grad)[0][1:], products("int8", x, weight, bias, grad)[0][1:])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str, given: Given) -> None:
    x, weight, bias, grad = given
    y, d_x, *_ = products(kind, torch.zeros_like(x), weight, torch.zeros_like(bias), torch.zeros_like(grad))
    assert not y.any() and not d_x.any()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(16, 64, 128), (96, 60, 128), (96, 64, 100)])
def test_sides_that_the_kernels_refuse_are_multiplied_as_ever(rows: int, inputs: int, outputs: int) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    assert torch.equal(linear(x, weight, eight_bits="int8"), linear(x, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_refused_where_the_hardware_has_none(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_work(tmp_path, 8)
    with pytest.raises(HardwareError, match=f"--precision {kind} needs a GPU.*found a CPU; use --precision auto"):
        run(TrainConfig(work=str(work), model="test-32", batch_size=4, device="cpu", precision=kind))  # type: ignore[arg-type]
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(HardwareError, match=r"found one of 7\.5"):
        choose_precision(kind, gpu)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_precision(kind, gpu) == kind  # type: ignore[arg-type]
