"""`ds-ckpt`: exit codes, JSON output, and that validating stays light."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ds_ckpt.cli import EXAMPLES, app
from ds_ckpt.config import json_schema, load_file, parse
from ds_ckpt.lab import doctor

PRESETS = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
run = CliRunner().invoke


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_of_help_is_a_command(name: str) -> None:
    words = shlex.split(EXAMPLES[name].removeprefix("sudo "))
    command: Any = typer.main.get_command(app)
    given = words[1:]
    assert words[0] == "ds-ckpt"
    for part in name.split():
        command, given = command.commands[part], given[1:]
    command.make_context(name, list(given))
    shown = run(app, [*name.split(), "--help"], terminal_width=200)
    assert EXAMPLES[name] in " ".join(shown.output.split())


def test_every_command_has_an_example() -> None:
    def names(group: Any, before: str = "") -> set[str]:
        found = set[str]()
        for name, command in group.commands.items():
            inner = hasattr(command, "commands")
            found |= names(command, f"{name} ") if inner else {before + name}
        return found

    assert names(typer.main.get_command(app)) == set(EXAMPLES)


def test_version() -> None:
    result = run(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("ds-ckpt ")


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_validate_says_what_would_be_active(preset: Path) -> None:
    result = run(app, ["validate", str(preset)])
    assert result.exit_code == 0
    assert result.output.startswith("OK")
    first, *verdicts = result.output.splitlines()
    assert preset.name in first
    # one line, and below it what may be lost
    lossy = parse(load_file(preset)).compression.lossy
    assert bool(verdicts) == lossy
    assert not lossy or "plus is worse" in verdicts[0]
    assert all(line.startswith("      ") for line in verdicts)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad[red].json"
    section = {"activation": {"policy": "blok"}, "compression": {"methd": "topk"}}
    path.write_text(json.dumps({"ds_ckpt": section}))
    return path


def test_validate_tells_all_problems_of_all_files(bad: Path) -> None:
    result = run(app, ["validate", str(PRESETS[0]), str(bad), "none.json"])
    assert result.exit_code == 1
    assert str(bad) in result.output  # brackets are not markup
    assert "$.ds_ckpt.activation.policy" in result.output
    assert "$.ds_ckpt.compression.methd" in result.output
    assert "none.json" in result.output
    assert result.output.count("remedy:") == 3


def test_validate_as_json(bad: Path) -> None:
    result = run(app, ["validate", "--json", str(PRESETS[0]), str(bad)])
    assert result.exit_code == 1
    good, refused = json.loads(result.stdout)
    assert good["ok"]
    assert good["summary"]
    assert not refused["ok"]
    assert [p["where"] for p in refused["problems"]] == [
        "$.ds_ckpt.activation.policy",
        "$.ds_ckpt.compression.methd",
    ]
    assert all(p["why"] and p["remedy"] for p in refused["problems"])


def test_schema(tmp_path: Path) -> None:
    assert json.loads(run(app, ["schema"]).stdout) == json_schema()
    path = tmp_path / "s.json"
    assert run(app, ["schema", "--output", str(path)]).exit_code == 0
    assert json.loads(path.read_text()) == json_schema()
    assert run(app, ["schema", "--output", str(tmp_path)]).exit_code == 1


def test_validate_loads_no_deepspeed() -> None:
    program = (
        "import sys\nfrom ds_ckpt.cli import app\n"
        f"app(['validate', {str(PRESETS[0])!r}], standalone_mode=False)\n"
        "heavy = 'deepspeed transformers psutil'.split()\n"
        "sys.exit(' '.join(m for m in heavy if m in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_doctor_reports_every_group_as_json() -> None:
    command = [sys.executable, "-c", "from ds_ckpt.cli import app; app()", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True)
    findings = json.loads(done.stdout)  # nothing else on stdout
    groups = {f["group"] for f in findings}
    assert {"versions", "accelerator", "hooks into DeepSpeed", "launchers", "memory"} <= groups
    assert done.returncode == any(f["status"] == "broken" for f in findings)
    for finding in findings:
        assert finding["detail"]
        assert finding["remedy"] or finding["status"] == "ok"


@pytest.mark.parametrize(
    ("package", "version", "status", "words"),
    [
        ("torch", "2.13.0", "ok", "2.13.0"),
        ("torch", "99.0", "warning", "tried with"),
        ("torch", "2.7.1", "broken", "saved tensors"),
        ("transformers", "4.40.0", "warning", "tried with"),
    ],
)
def test_doctor_tells_a_version_that_was_not_tried(
    package: str, version: str, status: str, words: str
) -> None:
    finding = doctor._version(package, version)
    assert finding.status == status
    assert words in finding.detail
    assert finding.remedy or status == "ok"


def test_doctor_exit_code_follows_a_broken_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Finding("hooks into DeepSpeed", "step", "broken", "not there", "install 0.19.8")
    monkeypatch.setattr(doctor, "examine", lambda: [broken])
    result = run(app, ["doctor"])
    assert result.exit_code == 1
    assert "not there" in result.output
    missing = doctor.Finding("launchers", "pdsh", "missing", "not on the PATH", "install it")
    monkeypatch.setattr(doctor, "examine", lambda: [missing])
    assert run(app, ["doctor"]).exit_code == 0


def test_doctor_survives_a_check_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ds_ckpt.zero3", None)
    (finding,) = doctor._hooks()
    assert finding.status == "broken"
    assert finding.remedy


def test_doctor_survives_programs_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert {f.status for f in doctor._programs()} == {"missing"}
    assert doctor._run("no-such-program") is None
