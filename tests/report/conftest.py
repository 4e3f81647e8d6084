from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.folder import make_work


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished work folder; tests only read it."""
    return make_work(tmp_path_factory.mktemp("report") / "work")
