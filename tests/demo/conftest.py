"""One small world for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from demo.faults import Row
from demo.world import World, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("demo") / "world", pictures=120)


@pytest.fixture(scope="session")
def rows(world: World) -> Callable[[str], list[Row]]:
    """Rows of one planted kind."""
    found = world.rows()
    return lambda kind: [row for row in found if row.planted == kind]


@pytest.fixture(scope="session")
def file_of(world: World) -> Callable[[str], Path]:
    """The file that a listed path stands for."""
    return lambda path: world.folder / path.replace("/i/", "pictures/").replace("/fault/", "faults/")
