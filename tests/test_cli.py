"""The command line's own part: how a verb ends, and how figures are printed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cli
from core.errors import ConfigError, DataError, HardwareError, PairmillError, RunError, StorageError, WorkFolderError
from core.storage import Folder

ROOT = Path(__file__).parent.parent


def end_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The exit code of `pairmill ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["pairmill", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def make_plan_do(monkeypatch: pytest.MonkeyPatch, verb: Any) -> None:
    monkeypatch.setattr(importlib.import_module("train.budget"), "run", verb)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError, 2), (StorageError, 3), (WorkFolderError, 4), (DataError, 5), (HardwareError, 6), (RunError, 7)],
)
def test_an_error_of_ours_is_one_sentence_and_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[PairmillError], code: int
) -> None:
    def fail(config: Any) -> None:
        raise error("expected this, found that")

    make_plan_do(monkeypatch, fail)
    assert end_of(monkeypatch, "plan", "--json") == code
    said = capsys.readouterr()
    assert said.err == "pairmill: expected this, found that\n" and said.out == ""


def test_of_the_notes_of_other_packages_only_warnings_are_shown() -> None:
    code = (
        "import logging, cli\n"
        "cli.app = lambda: [logging.getLogger(name).log(level, f'{name} {level}')\n"
        "                   for name in ('botocore.credentials', 'pairmill.ingest') for level in (20, 30)]\n"
        "cli.main()"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stderr
    assert said.splitlines() == ["botocore.credentials 30", "pairmill.ingest 20", "pairmill.ingest 30"]


def test_what_the_system_refuses_is_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> None:
        raise OSError(16, "Device or resource busy", "s3://bucket/part")

    make_plan_do(monkeypatch, fail)
    assert end_of(monkeypatch, "plan") == StorageError.exit_code
    said = capsys.readouterr().err
    assert "s3://bucket/part" in said and "run the same command again" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: folder.read("a"),
        lambda folder: folder.read_range("a", 0, 1),
        lambda folder: folder.exists("a"),
        lambda folder: folder.size("a"),
        lambda folder: folder.list("a/*"),
        lambda folder: folder.remove("a"),
    ],
)
def test_a_store_that_cannot_be_reached_is_a_sentence_whatever_was_asked_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], read: Any
) -> None:
    """Its errors are botocore's, and no OSErrors; nobody listens at this endpoint."""
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "word",
                        "MAX_ATTEMPTS": "1"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    make_plan_do(monkeypatch, lambda config: read(Folder("s3://bucket/work")))
    assert end_of(monkeypatch, "plan") == StorageError.exit_code
    said = capsys.readouterr().err.splitlines()[-1]
    assert "127.0.0.1:9" in said and "run the same command again" in said


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    make_plan_do(monkeypatch, interrupted)
    assert end_of(monkeypatch, "plan") == 130
    assert capsys.readouterr().err == "pairmill: stopped; run the same command again to continue\n"


def test_a_path_in_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    class Plain:
        """A stage without a page of its own."""

    cli._print(Plain, {"checkpoint": "/data/[red]/[/x]/step", "samples": 12345, "loss": None})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["checkpoint", "/data/[red]/[/x]/step"], ["samples", "12,345"], ["loss", "None"]]


def test_the_json_object_is_the_last_line_and_the_code_is_the_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan_do(monkeypatch, lambda config: {"gpus": config.gpus, "exit_code": 3})
    assert end_of(monkeypatch, "plan", "--gpus", "5", "--json") == 3
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"gpus": 5, "exit_code": 3}


def test_an_unset_variable_as_work_folder_is_not_the_root_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(monkeypatch, "plan", "--work", "") == 2
    assert "expected a folder as work, found an empty name" in capsys.readouterr().err
