"""`ds-ckpt hosts` and `ds-ckpt probe` where nothing is started: rates, refusals, sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.cli.common import parse_rate
from ds_ckpt.lab.hosts import sets
from ds_ckpt.lab.hosts.backends import environment

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No set of anybody else's is seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_rates() -> None:
    texts = {"200mbit": 200.0, "1.5Gbit": 1500.0, "500kbit": 0.5, "unlimited": None}
    assert {text: parse_rate(text) for text in texts} == texts
    for text in ("200", "fast", "0mbit", "-1gbit", "nanmbit", "infgbit", ""):
        with pytest.raises(typer.BadParameter, match="write 200mbit"):
            parse_rate(text)


def _owned_by(folder: Path, pid: int, started: float) -> None:
    (folder / "owner.json").write_text(json.dumps([pid, started]))


def test_sets_left_behind_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set whose owner's pid is now another process's is left behind, too."""
    alive, dead, fresh, old = (sets.new_set() for _ in range(4))
    assert alive.stat().st_mode & 0o077 == 0
    _owned_by(dead, os.getpid(), 1.0)
    for folder in (fresh, old):
        (folder / "owner.json").unlink()
    os.utime(old, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert sets.take_down() == ([], [])  # another user's
    result = run(app, ["hosts", "down"])
    assert result.output.startswith(f"taken down: {', '.join(sorted([dead.name, old.name]))}\n")
    assert f"left alone, their owner runs: {alive.name}" in result.output
    assert [one.exists() for one in (alive, dead, fresh, old)] == [True, False, True, False]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as owner:
        _owned_by(alive, owner.pid, psutil.Process(owner.pid).create_time())
        assert run(app, ["hosts", "down", "--all"]).output == f"taken down: {alive.name}\n"


def test_the_environment_of_every_process_survives_pdsh() -> None:
    """pdsh's remote shell splits at blanks and strips quotes."""
    for name, value in environment("eth0").items():
        assert not set(value) & set(" '\"$;\n"), name
