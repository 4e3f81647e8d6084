"""One thread a process: two busy cores shared with spawned ranks would otherwise spend the tests' time spinning."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
