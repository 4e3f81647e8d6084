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


def test_what_pairmill_asks_for_makes_its_environment_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency that came later is missing in an environment that was made before."""
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    (tmp_path / "requirements.lock").write_text("numpy==2.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    ours, other = peers.Peer(("--editable", "."), ("core",)), peers.Peer(("pip",), ("pip",))
    before = peers._digest(ours), peers._digest(other)
    (tmp_path / "requirements.lock").write_text("numpy==2.0\nuvloop==0.22\n")
    assert peers._digest(ours) != before[0] and peers._digest(other) == before[1]
