"""A demo that is run again serves the same list from the same port, and never beside another in one folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from core.errors import ConfigError, WorkFolderError
from demo.config import DemoConfig
from demo.play import serve_world
from demo.world import World


def test_a_continued_demo_serves_the_same_list_and_no_two_share_a_folder(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder, tmp_path / "world")
    config = DemoConfig(work=str(tmp_path), pictures=world.pictures)
    lists = []
    for _ in range(2):
        with serve_world(config) as served:
            lists.append(Path(served.overrides["ingest"]["urls"]).read_bytes())
            with pytest.raises(WorkFolderError, match="in use by another run"), serve_world(config):
                pass
    assert lists[0] == lists[1]


def test_a_demo_needs_a_folder_of_its_own_disk() -> None:
    with pytest.raises(ConfigError, match="local work folder"), serve_world(DemoConfig(work="memory://demo")):
        pass
