"""`ds-ckpt hosts` and `ds-ckpt probe` where nothing is started: rates, refusals, sets."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.cli.common import parse_rate
from ds_ckpt.lab.hosts import sets
from ds_ckpt.lab.hosts.backends import environment

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No set of anybody else's is seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "rate_mbit"),
    [("200mbit", 200.0), ("1.5Gbit", 1500.0), ("500kbit", 0.5), ("unlimited", None)],
)
def test_rates(text: str, rate_mbit: float | None) -> None:
    assert parse_rate(text) == rate_mbit


@pytest.mark.parametrize("text", ["200", "fast", "0mbit", "-1gbit", "nanmbit", "infgbit", ""])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write 200mbit"):
        parse_rate(text)


@pytest.mark.parametrize("command", [["hosts", "run", "--", "true"], ["probe"]])
def test_without_root_it_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run(app, command)
    assert result.exit_code == 1
    assert "need root" in result.output
    assert "fix: run as root" in result.output
    assert "Traceback" not in result.output


def test_a_probe_of_machines_shapes_nothing(tmp_path: Path) -> None:
    result = run(app, ["probe", "--hostfile", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.output.replace("│", " ").split())
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    result = run(app, ["probe", "--hostfile", str(tmp_path / "hosts"), "--rate=1gbit", "--hosts=3"])
    assert result.exit_code == 2
    assert "--hosts, --rate would change nothing" in result.output


def test_a_launcher_that_is_none_is_refused() -> None:
    result = run(app, ["hosts", "run", "--launcher", "slurm", "--", "true"])
    assert result.exit_code == 2
    assert "'slurm' is not one of 'pdsh', 'openmpi'" in " ".join(
        result.output.replace("│", " ").split()
    )


def test_sets_are_listed_and_those_left_behind_are_cleared() -> None:
    assert run(app, ["hosts", "list"]).output == "no hosts are up\n"
    alive, dead = sets.new_folder(), sets.new_folder()
    me = sets.ProcessId.of(os.getpid())
    gone = sets.ProcessId(me.pid, me.started - 1)  # my pid, of somebody before me
    sets.HostSet(alive, me, (), 2, 200.0).write()
    sets.HostSet(dead, gone, (gone,), 3, None).write()
    rows = {row["name"]: row for row in json.loads(run(app, ["hosts", "list", "--json"]).output)}
    assert rows[alive.name]["owner_runs"]
    assert not rows[dead.name]["owner_runs"]
    assert rows[dead.name]["processes"] == []
    result = run(app, ["hosts", "down"])
    assert result.output.startswith(f"taken down: {dead.name}\n")
    assert f"left alone, their owner runs: {alive.name}" in result.output
    assert (alive.exists(), dead.exists()) == (True, False)
    assert run(app, ["hosts", "down", "--all"]).output == f"taken down: {alive.name}\n"
    assert run(app, ["hosts", "down", "set_none"]).exit_code == 1


def test_a_folder_without_a_record_is_left_to_its_maker_for_a_minute() -> None:
    fresh, old = sets.new_folder(), sets.new_folder()
    (old / "record.json").write_text("{")
    os.utime(old, (0, 0))
    assert sets.take_down() == ([old.name], [])
    assert fresh.exists()


def test_what_somebody_else_has_put_there_is_not_looked_into(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = sets.new_folder()
    assert mine.stat().st_mode & 0o077 == 0
    me = sets.ProcessId.of(os.getpid())
    sets.HostSet(mine, me, (), 2, None).write()
    assert [one.name for one in sets.all_sets()] == [mine.name]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sets.all_sets() == []


def test_what_every_process_needs_survives_pdsh() -> None:
    """pdsh's remote shell splits at blanks and strips quotes."""
    for name, value in environment("eth0").items():
        assert not set(value) & set(" '\"$;\n"), name
