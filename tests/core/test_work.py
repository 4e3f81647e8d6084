"""The work folder: locked while in use, refuses other settings, knows when a stage is finished."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from core.config import UnitsConfig
from core.errors import WorkFolderError
from core.storage import Folder
from core.work import fingerprint, open_stage, read_settings

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class BakeConfig(UnitsConfig):
    """Bake bread."""

    flour: str = "rye"
    """Kind of flour."""
    note: str | None = None
    """A note."""


def bake(config: BakeConfig, inputs: str = "", redo: bool = True) -> str:
    """Runs the stage for real unless it is finished; says which."""
    with open_stage(config, "bake", home="bread", inputs=inputs, redo=redo) as stage:
        if stage.finished:
            return "finished"
        stage.folder.write("bread/loaf", b"loaf")
        stage.finish({"loaves": 1})
        return "baked"


def test_finished_work_is_not_done_again_until_its_input_changes(tmp_path: Path) -> None:
    config = BakeConfig(work=str(tmp_path / "w"))
    assert bake(config) == "baked"
    assert bake(config) == "finished"
    assert bake(replace(config, workers=3)) == "finished"
    assert bake(config, inputs="other grain") == "baked"
    assert bake(config, inputs="other grain") == "finished"
    with pytest.raises(WorkFolderError, match="of another input"):
        bake(config, inputs="a third", redo=False)
    assert Folder(config.work).exists("bread/loaf"), "refusing takes nothing away"


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"\xff\xfe", b'{"loaves": 1'], ids=str)
def test_a_damaged_mark_marks_nothing(tmp_path: Path, damaged: bytes) -> None:
    config = BakeConfig(work=str(tmp_path))
    bake(config)
    (tmp_path / "bread/done.json").write_bytes(damaged)
    assert bake(config) == "baked"
    assert bake(config) == "finished"


def test_other_settings_are_refused_naming_the_setting(tmp_path: Path) -> None:
    config = BakeConfig(work=str(tmp_path))
    bake(config)
    with pytest.raises(WorkFolderError, match="flour was 'rye', now 'oat'"):
        bake(replace(config, flour="oat"))
    with pytest.raises(WorkFolderError, match="note was None, now 'x'"):
        bake(replace(config, note="x"))
    assert bake(replace(config, flour="oat", fresh=True)) == "baked"
    assert read_settings(Folder(tmp_path))["bake"]["flour"] == "oat"


def test_a_folder_older_than_a_setting_was_made_with_its_default(tmp_path: Path) -> None:
    config = BakeConfig(work=str(tmp_path))
    bake(config)
    saved = tmp_path / "pairmill.toml"
    saved.write_text(saved.read_text().replace('flour = "rye"\n', ""))
    assert "flour" not in read_settings(Folder(tmp_path))["bake"]
    with pytest.raises(WorkFolderError, match="flour was 'rye', now 'oat'"):
        bake(replace(config, flour="oat"))
    assert bake(config) == "finished"
    assert read_settings(Folder(tmp_path))["bake"]["flour"] == "rye"


@pytest.mark.parametrize("change", ["fresh", "input"])
def test_a_kill_while_old_results_are_thrown_away_leaves_nothing_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    config = BakeConfig(work=str(tmp_path))
    bake(config)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        bake(replace(config, fresh=change == "fresh"), inputs="" if change == "fresh" else "other grain")
    assert bake(config) == "baked"


def test_damaged_settings_are_one_sentence(tmp_path: Path) -> None:
    for damage in (b"[bake\n", b"\xff\xfe"):
        (tmp_path / "pairmill.toml").write_bytes(damage)
        with pytest.raises(WorkFolderError, match=r"pairmill\.toml is damaged"):
            bake(BakeConfig(work=str(tmp_path)))


def test_settings_that_made_nothing_bind_nobody(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_stage(BakeConfig(work=str(tmp_path)), "bake", home="bread"):
        raise ZeroDivisionError
    assert bake(BakeConfig(work=str(tmp_path), flour="oat")) == "baked"


def test_two_runs_do_not_share_a_folder_and_death_frees_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from core.config import StageConfig; from core.work import open_stage\n"
        f"with open_stage(StageConfig(work={str(tmp_path)!r}), 'x', home='x'): print('in', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"in\n"
    with pytest.raises(WorkFolderError, match=f"in use by another run .process {child.pid}"):
        bake(BakeConfig(work=str(tmp_path)))
    child.kill()
    child.wait()
    child.stdout.close()
    assert bake(BakeConfig(work=str(tmp_path))) == "baked"


def test_fingerprint_sees_names_and_contents(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("a.txt", b"one")
    first = fingerprint(folder, "*.txt")
    folder.write("a.txt", b"two")
    second = fingerprint(folder, "*.txt")
    folder.write("b.txt", b"")
    assert len({first, second, fingerprint(folder, "*.txt")}) == 3
