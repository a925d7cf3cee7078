"""`ds-ckpt`: help, exit codes, JSON output."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ds_ckpt.cli import EXAMPLES, app, main
from ds_ckpt.cli.common import parse_rate
from ds_ckpt.config import json_schema, load_file, parse
from ds_ckpt.lab import doctor
from ds_ckpt.lab.hosts.backends import environment, free_port

GOLDEN = Path(__file__).with_name("golden")
ROOT = Path(__file__).parents[2]
PRESETS, EXAMPLE = sorted((ROOT / "ds_configs").glob("*.json")), ROOT / "examples/train.json"
run = CliRunner().invoke


def names(group: Any, before: str = "") -> set[str]:
    found = set[str]()
    for name, command in group.commands.items():
        inner = hasattr(command, "commands")
        found |= names(command, f"{name} ") if inner else {before + name}
    return found


def test_every_command_has_an_example_that_can_be_typed() -> None:
    group: Any = typer.main.get_command(app)
    assert names(group) == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        program, *given = shlex.split(example)
        command = group
        assert program == "ds-ckpt"
        for part in name.split():
            command, given = command.commands[part], given[1:]
        command.make_context(name, given)
        shown = run(app, [*name.split(), "--help"], terminal_width=200)
        assert example in " ".join(shown.output.split())


def test_validate_prints_what_is_active_and_its_verdicts() -> None:
    for preset in PRESETS:
        result = run(app, ["validate", str(preset)])
        assert result.exit_code == 0
        first, *lines = result.stdout.splitlines()
        verdicts = [line for line in lines if "at start: " not in line]
        assert first.startswith(f"OK    {preset}: ")
        lossy = parse(load_file(preset)).compression.lossy
        assert bool(verdicts) == lossy
        assert not lossy or "plus is worse" in verdicts[0]
        assert max(map(len, verdicts), default=0) <= 100
    shown = run(app, ["validate", str(EXAMPLE)]).stdout
    assert "accuracy validated with warm-up 100, not 10; plus is worse:\n        equiv" in shown
    assert json.loads(run(app, ["validate", "--json", str(EXAMPLE)]).stdout)[0]["accuracy"] == []


def test_validate_reports_the_problems_of_all_files(tmp_path: Path) -> None:
    bad = tmp_path / "bad[red].json"
    section = {"activation": {"policy": "blok"}, "compression": {"methd": "topk"}}
    bad.write_text(json.dumps({"ds_ckpt": section, "train_batch_size": 4}))
    paths = ["$.ds_ckpt.activation.policy", "$.ds_ckpt.compression.methd"]
    result = run(app, ["validate", str(PRESETS[0]), str(bad), "none.json"])
    assert result.exit_code == 1
    # brackets are not markup
    assert all(word in result.output for word in (str(bad), "none.json", *paths))
    assert result.output.count("remedy:") == 3
    result = run(app, ["validate", "--json", str(PRESETS[0]), str(bad)])
    good, refused = json.loads(result.stdout)
    assert (good["ok"], bool(good["summary"]), refused["ok"]) == (True, True, False)
    assert [p["where"] for p in refused["problems"]] == paths
    assert all(p["why"] and p["remedy"] for p in refused["problems"])


def test_schema(tmp_path: Path) -> None:
    assert json.loads(run(app, ["schema"]).stdout) == json_schema()
    path = tmp_path / "s.json"
    assert run(app, ["schema", "--output", str(path)]).exit_code == 0
    assert json.loads(path.read_text()) == json_schema()


def test_a_failure_to_write_is_one_message_of_every_command() -> None:
    """All are added by `_add`; files on a full disk are in the table below."""

    numbers = [errno.ECHILD]

    def fails() -> None:
        raise OSError(numbers[0], os.strerror(numbers[0]), "some/file")

    main._add(group := typer.Typer(), "schema", fails)
    assert isinstance(run(group, []).exception, ChildProcessError)  # a defect
    for numbers[0], remedy in ((errno.ENOSPC, "free some"), (errno.EROFS, "name a place")):
        for name in EXAMPLES:
            main._add(group := typer.Typer(), name, fails)
            result = run(group, [])
            assert result.exit_code == 1
            assert re.search(f"some/file: found (.|\n)*fix: {remedy}", result.output)


REFUSED = (GOLDEN / "refused_commands.txt").read_text().splitlines()
"""Rows: `arguments -> exit code: words that are printed | others`."""


@pytest.mark.parametrize("row", REFUSED)
def test_commands_that_cannot_work_are_refused_with_words(row, tmp_path, monkeypatch) -> None:
    """An error that is ours has a remedy, and nothing is begun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    Path("hosts").write_text("node slots=2\n")
    Path("wrong.json").write_text('{"ds_ckpt": {"activation": {"polcy": "block"}}}')
    shutil.copy(next(p for p in PRESETS if p.stem == "zero3_4bit"), "four.json")
    Path("mine").mkdir()
    Path("mine", "file").touch()
    Path("full").symlink_to("/dev/full")
    arguments, _, expected = row.partition(" -> ")
    code, _, words = expected.partition(": ")
    found = run(app, shlex.split(arguments), terminal_width=200)
    shown = " ".join(found.output.replace("│", " ").split())
    assert found.exit_code == int(code), shown
    assert all(word in shown for word in words.split(" | ")), shown
    assert ("fix:" in shown) == (code != "2")
    assert "Traceback" not in shown
    assert not Path("run").exists()


def test_doctor_reports_every_group_as_json() -> None:
    command = [sys.executable, "-m", "ds_ckpt.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True)
    findings = json.loads(done.stdout)  # nothing else on stdout
    groups = {f["group"] for f in findings}
    assert {"versions", "accelerator", "hooks into DeepSpeed", "launchers", "memory"} <= groups
    assert done.returncode == any(f["status"] == "broken" for f in findings)
    assert all(f["detail"] and (f["remedy"] or f["status"] == "ok") for f in findings)


@pytest.mark.parametrize(("status", "code"), [("broken", 1), ("missing", 0)])
def test_doctor_fails_only_for_a_broken_hook(monkeypatch, status, code) -> None:
    finding = doctor.Finding("hooks", "step", status, "not there", "install 0.19.8")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    result = run(app, ["doctor"])
    assert result.exit_code == code
    assert "not there" in result.output


def test_doctor_survives_checks_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ds_ckpt.zero3", None)
    monkeypatch.setenv("PATH", "")
    (finding,) = doctor._hooks()
    assert finding.status == "broken"
    assert finding.remedy
    assert {f.status for f in doctor._programs()} == {"missing"}


def test_rates() -> None:
    texts = {"200mbit": 200.0, "1.5Gbit": 1500.0, "500kbit": 0.5, "unlimited": None}
    assert {text: parse_rate(text) for text in texts} == texts
    for text in ("200", "fast", "0mbit", "-1gbit", "nanmbit", "infgbit", ""):
        with pytest.raises(typer.BadParameter, match="write 200mbit"):
            parse_rate(text)


def test_the_environment_of_every_process_survives_pdsh() -> None:
    """pdsh's remote shell splits at blanks and strips quotes."""
    for name, value in environment("eth0").items():
        assert not set(value) & set(" '\"$;\n"), name


SSH = """#!{python}
import os, sys
node, command = sys.argv[-2:]
if change := os.environ.get("ON_" + node):
    old, new = change.split("=>")
    assert old in command, (old, command)
    command = command.replace(old, new)
os.execvp("sh", ["sh", "-c", command])
"""


@pytest.mark.parametrize("row", (GOLDEN / "nodes.txt").read_text().splitlines())
def test_nodes_of_a_hostfile_are_checked(tmp_path, monkeypatch, row) -> None:
    """Over an `ssh` that runs the command here; rows: what changes on node b, what is printed."""
    changes, _, said = row.partition(" :: ")
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "ssh").write_text(SSH.format(python=sys.executable))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ON_a", "/dev/nvidia=>/dev/no")
    monkeypatch.setenv("ON_b", changes or "/dev/nvidia=>/dev/no")
    monkeypatch.setenv("DS_ACCELERATOR", "" if re.search("slots|GPUs 2", said) else "cpu")
    port = str(free_port())
    result = run(app, ["hosts", "check", "--hostfile", str(tmp_path / "hosts"), "--port", port])
    assert result.exit_code == ("found" in said), result.output
    assert re.search(said, result.output), result.output
    assert "a: found" not in result.output
