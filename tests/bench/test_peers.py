from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import peers


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for environments, and a peer that needs nothing from outside: pip itself."""
    monkeypatch.setattr(peers, "PLACE", tmp_path)
    monkeypatch.setattr(peers, "PEERS", {"small": peers.Peer(("pip",), ("pip",), startup="import sys; sys.first = 1")})
    return tmp_path


def test_an_environment_that_was_not_finished_does_not_count_as_ready(place: Path) -> None:
    with pytest.raises(SystemExit, match="this failed"):
        peers._make("small", peers.Peer(("pip",), ("no_such_module",)))
    assert (place / "small/bin/python").exists()
    assert peers.ready("small") is None


def test_a_change_of_the_table_makes_the_environment_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = peers.peer_python("small")
    assert peers.ready("small") == python
    code = "import sys; print(sys.first, sys.prefix)"
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert said == ["1", str(place / "small")] != ["1", sys.prefix]
    monkeypatch.setitem(peers.PEERS, "small", peers.Peer(("pip",), ("pip", "json")))
    assert peers.ready("small") is None
