"""The launched path of a comparison: processes that never begin or stop coming on are ended."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from ds_ckpt.hosts.launcher import LaunchError
from ds_ckpt.validation import processes
from ds_ckpt.validation.processes import run_processes

SILENT = """
import json, os, sys, time
print("pid", os.getpid(), flush=True)
events, lines, pause_s = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
for line in lines:
    time.sleep(pause_s)
    with open(events, "a") as file:
        file.write(json.dumps(line) + "\\n")
if sys.argv[4] == "hang":
    time.sleep(600)
"""
BEGUN: dict[str, Any] = {"kind": "begun"}
PROGRESS: dict[str, Any] = {"kind": "progress", "seed": 0, "name": "dense", "done": 10, "loss": 1.0}


def launch(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[dict[str, Any]],
    *,
    start_s: float = 60.0,
    silent_s: float = 60.0,
    pause_s: float = 0.0,
    end: str = "hang",
) -> list[int]:
    """Steps that were told of, from processes that write `lines` and no more."""
    arguments = [str(folder / "events.jsonl"), json.dumps(lines), str(pause_s), end]
    command = [sys.executable, "-c", SILENT, *arguments]
    monkeypatch.setattr(processes, "deepspeed_command", lambda *_, **__: command)
    monkeypatch.setattr(processes, "_job", lambda *_: {})
    monkeypatch.setattr(processes, "_START_S", start_s)
    monkeypatch.setattr(processes, "_SILENT_S", silent_s)
    plan, told = MagicMock(), list[int]()
    run_processes(plan, MagicMock(), folder, lambda _name, done, *_: told.append(done))
    return told


def gone(folder: Path) -> bool:
    pid = int((folder / "training.log").read_text().split()[1])
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_processes_that_never_begin_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(tmp_path, monkeypatch, [], start_s=3.0)
    assert time.monotonic() - began_s < 30
    words = str(caught.value)
    assert "to begin" in words
    assert "3 s" in words
    assert str(tmp_path / "training.log") in words
    assert gone(tmp_path)


def test_processes_that_stop_coming_on_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(tmp_path, monkeypatch, [BEGUN, PROGRESS], silent_s=2.0)
    assert time.monotonic() - began_s < 30
    words = str(caught.value)
    assert "next event" in words
    assert "2 s" in words
    assert "the same command" in words
    assert gone(tmp_path)


def test_every_event_gives_time_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = launch(
        tmp_path, monkeypatch, [BEGUN, *([PROGRESS] * 4)], silent_s=4.0, pause_s=1.2, end="well"
    )
    assert told == [10] * 4
