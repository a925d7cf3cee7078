"""`ds-ckpt exec`: start-up code, section, exit codes, locks. Launches: tests/distributed."""

import argparse
import ast
import base64
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt import environment
from ds_ckpt.config import AUTO, load_file, parse
from ds_ckpt.engine import entry
from ds_ckpt.errors import ConfigError
from ds_ckpt.lab import doctor

EXEC = [sys.executable, "-m", "ds_ckpt.cli", "exec"]
STOCK = "def initialize(*args, **kwargs): return 'stock'\n"
ROOT, GOLDEN = Path(__file__).resolve().parents[2], Path(__file__).with_name("golden")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a package deepspeed that does nothing."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text(STOCK)
    return tmp_path


def python(program: str, path: str) -> str:
    """Return the output of a Python that `exec` starts with this PYTHONPATH."""
    env = environment.with_plugin(
        {"PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": path}, None, Path("/nowhere/reached")
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, cwd=path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


IS_WRAPPED = "import deepspeed\nprint(hasattr(deepspeed.initialize, '__ds_ckpt__'))"


def test_initialize_is_wrapped_however_it_is_imported(folder: Path) -> None:
    name = "from deepspeed import initialize\nprint(hasattr(initialize, '__ds_ckpt__'))"
    late = "import sys, deepspeed\nprint('ds_ckpt.engine' not in sys.modules)"
    for program in (IS_WRAPPED, name, late):
        assert python(program, str(folder)) == "True\n"


def test_the_next_sitecustomize_runs_and_the_path_is_as_without(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("print('theirs'); mine = 1\n")
    program = "import os, sys, sitecustomize\nprint(sitecustomize.mine)\n"
    program += "print([p for p in sys.path if 'startup' in p])\n"
    program += "print('startup' in os.environ['PYTHONPATH'])\n"
    assert python(program + IS_WRAPPED, str(folder)) == "theirs\n1\n[]\nTrue\nTrue\n"


def test_an_environment_without_ds_ckpt_gets_plain_deepspeed(folder: Path) -> None:
    (folder / "ds_ckpt.py").write_text("raise ModuleNotFoundError('none', name='ds_ckpt')\n")
    said = python("import deepspeed\nprint(deepspeed.initialize())", str(folder))
    assert said.startswith("stock\n")
    assert "ds_ckpt is not installed" in said


OBSERVED = """
import os, sys
sys.path = [p for p in sys.path if not os.path.exists(p + "/sitecustomize.py")]  # the system's
sys.modules.pop("sitecustomize", None)
file, source, seen, known = sys.argv[1], open(sys.argv[1]).read(), [], set(sys.modules)
sys.modules["sitecustomize"] = sys
sys.addaudithook(lambda event, given: seen.append(f"{event} {given[0]}"))
exec(compile(source, file, "exec"), {"__name__": "sitecustomize", "__file__": file})
quiet = ("object.", "compile", "exec", "os.listdir")  # of this program, and of any import
print([line for line in seen if not line.startswith(quiet)], sys.modules.keys() - known)
"""


def test_other_processes_load_nothing(folder: Path) -> None:
    """The start-up code opens no file, and looks for one module: the next sitecustomize."""
    program = "import sys; print(*{'ds_ckpt', 'torch', 'deepspeed'} & sys.modules.keys(), '.')"
    assert python(program, str(folder)).split() == ["."]
    file = environment.STARTUP / "sitecustomize.py"
    command = [sys.executable, "-I", "-c", OBSERVED, str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "['import sitecustomize'] {'sitecustomize'}\n"
    ast.parse(file.read_text(), feature_version=(3, 10))
    assert [p.name for p in environment.STARTUP.glob("*.py")] == ["sitecustomize.py"]


def command(*words: str, cwd: Any = None, **more: str) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "env": {**os.environ, **more}, "cwd": cwd}
    return subprocess.run([*EXEC, *words], timeout=60, **options)


def test_exit_codes_and_the_last_line() -> None:
    done = command("--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "no process on this node called deepspeed.initialize" in done.stderr
    assert "failed before that call, with exit status 7" in done.stderr
    assert "own sitecustomize.py in front" in command("--", "true").stderr
    done = command("--", "sh", "-c", 'touch "$PYTHON_DS_CKPT_REACHED"; kill -9 $$')
    assert done.returncode == 128 + 9
    assert not done.stderr
    assert command("no_such_command").returncode == 127


@pytest.mark.parametrize("row", (GOLDEN / "refused_exec.txt").read_text().splitlines())
def test_what_is_wrong_is_refused_before_anything_starts(tmp_path, row) -> None:
    """Rows: `arguments => words of the refusal`."""
    words, _, refusal = row.partition(" => ")
    (tmp_path / "s.json").write_text(text := '{"activation": {"policy": "blok"}}')
    (tmp_path / "bad.json").write_text(f'{{"ds_ckpt": {text}}}')
    for name in ("deepspeed", "accelerate", "torchrun"):
        (tmp_path / name).write_text("#!/bin/sh\ntouch ran\n")
        (tmp_path / name).chmod(0o755)
    done = command(*words.split(), cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == bool(refusal), done.stderr
    assert refusal in done.stderr
    assert "Traceback" not in done.stderr
    assert ("no file none.json; the script" in done.stderr) == ("config none.json" in words)
    assert (tmp_path / "ran").exists() != bool(refusal)


def test_variables_of_an_earlier_run_are_warned_of(tmp_path: Path) -> None:
    file, left = tmp_path / "deepspeed_env", f"{environment.REACHED_FILE_VARIABLE}=/tmp/x\n"
    for line, is_warned in (("PATH=/bin\n", False), (left, True)):
        file.write_text(line)
        said = command("--", "true", DS_ENV_FILE=str(file)).stderr
        assert said.count(f"{file} has variables of an earlier run") == is_warned


def test_signals_are_passed_on() -> None:
    wait = "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done"
    with subprocess.Popen([*EXEC, "--", "sh", "-c", wait], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "up\n"
        it.send_signal(signal.SIGTERM)
        assert it.wait(20) == 5


PLAIN = {"zero_optimization": {"stage": 3}}
SECTION = {"activation": {"policy": "block", "modules": ['a "b", c']}}


def stock(args: Any = None, config: Any = None, config_params: Any = None) -> Any:
    """Stands in for `deepspeed.initialize`."""


@pytest.mark.parametrize("way", ["config", "config_params", "args", "file", "comments", "base64"])
def test_the_section_reaches_every_configuration(way, monkeypatch, tmp_path) -> None:
    variables = environment.with_plugin({}, SECTION, Path("x"))
    assert all(name.startswith("PYTHON") for name in variables)
    assert not set("\"' ,;$") & set(variables[environment.SECTION_VARIABLE])
    monkeypatch.setenv(environment.SECTION_VARIABLE, variables[environment.SECTION_VARIABLE])
    file = tmp_path / "c.json"
    file.write_text("# a comment\n" * (way == "comments") + json.dumps(PLAIN))
    sources = {"args": str(file), "file": str(file), "comments": str(file)}
    sources["base64"] = base64.urlsafe_b64encode(json.dumps(PLAIN).encode()).decode()
    source = sources.get(way, dict(PLAIN))
    args = argparse.Namespace(deepspeed_config=source if way == "args" else None)
    given: dict[str, Any] = {"args": args}
    if way != "args":
        given["config_params" if way == "config_params" else "config"] = source
    found = entry._with_section(given)
    assert found == given["config"] == {**PLAIN, "ds_ckpt": SECTION}
    assert given["args"].deepspeed_config is None
    assert args.deepspeed_config == (source if way == "args" else None)
    assert way not in ("config", "config_params") or source == PLAIN


def test_a_configuration_with_a_section_keeps_it_and_says_so(monkeypatch, caplog) -> None:
    variables = environment.with_plugin({}, SECTION, Path("x"))
    monkeypatch.setenv(environment.SECTION_VARIABLE, variables[environment.SECTION_VARIABLE])
    given = {"config": {**PLAIN, "ds_ckpt": {}}}
    assert entry._with_section(given) == given["config"] == {**PLAIN, "ds_ckpt": {}}
    assert "--section is unused" in caplog.text


def test_auto_is_a_section_without_what_deepspeeds_settings_rule_out(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**PLAIN, "ds_ckpt": "auto"}))
    whole = parse({**PLAIN, "ds_ckpt": "auto"})
    assert whole == parse({**PLAIN, "ds_ckpt": AUTO}) == parse(load_file(file))
    assert whole.compression.exchange.autotune
    assert whole.weights.resident == "auto"
    below = parse({"zero_optimization": {"stage": 2}, "ds_ckpt": "auto"})
    assert below == parse({"ds_ckpt": {"activation": {"policy": "block"}}})
    muon = parse({**PLAIN, "optimizer": {"type": "Muon"}, "ds_ckpt": "auto"})
    assert (muon.compression.method, muon.weights.resident) == ("none", "auto")
    with pytest.raises(ConfigError):
        parse({**PLAIN, "ds_ckpt": "block"})


EVERY_AUTO = {
    "activation": {"policy": "auto"},
    "compression": {
        "method": "quantize",
        "error_feedback": {"dtype": "auto"},
        "exchange": {"when": "auto", "levels": "auto"},
    },
    "weights": {"resident": "auto", "deltas": "auto"},
}


@pytest.mark.parametrize("section", [EVERY_AUTO, "auto"], ids=["keys", "whole"])
def test_accelerate_leaves_the_section_alone(section: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataclasses = pytest.importorskip("accelerate.utils.dataclasses")
    import ds_ckpt

    kind = dataclasses.DeepSpeedPlugin
    monkeypatch.setattr(kind, "fill_match", kind.fill_match)  # restored
    config = {**PLAIN, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0}
    plugin = kind(hf_ds_config={**config, "ds_ckpt": section})
    ds_ckpt.install()
    try:
        plugin.deepspeed_config_process(must_match=False, train_micro_batch_size_per_gpu=2)
    finally:
        ds_ckpt.uninstall()
    assert plugin.deepspeed_config["ds_ckpt"] == section
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 2
    parse(plugin.deepspeed_config)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path = tmp_path / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def test_a_lock_without_a_process_is_removed_with_a_line(lock, monkeypatch, caplog) -> None:
    with lock.open():
        environment.clear_stale_locks(0.0)  # a compiler has it open
        assert lock.exists()
    (finding,) = doctor._stale_locks()
    assert f"rm {lock}" in finding.remedy
    environment.clear_stale_locks()  # a peer's may be this young
    monkeypatch.setenv("LOCAL_RANK", "1")
    environment.clear_stale_locks(0.0)
    assert lock.exists()
    monkeypatch.delenv("LOCAL_RANK")
    os.utime(lock, (time.time() - 100,) * 2)
    environment.clear_stale_locks()
    assert not lock.exists()
    assert f"removed {lock}" in caplog.text


def test_exec_removes_a_lock_before_the_command(lock: Path) -> None:
    done = command("--", "test", "!", "-e", str(lock), TORCH_EXTENSIONS_DIR=str(lock.parents[1]))
    assert done.returncode == 0
    assert f"removed {lock}" in done.stderr


def test_a_lock_on_a_shared_file_system_has_to_be_old(lock, monkeypatch) -> None:
    monkeypatch.setattr(environment, "_LOCAL_TYPES", ())
    for age_s, stale in ((100, []), (4000, [lock])):
        os.utime(lock, (time.time() - age_s,) * 2)
        assert list(environment.stale_locks()) == stale


def test_compiling_is_reported(lock, monkeypatch, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="ds_ckpt")
    monkeypatch.setattr(environment, "_REPORT_AFTER", 1)
    with environment.reported_compiling():
        time.sleep(1.3)
        lock.unlink()
        time.sleep(1.1)
    assert "compiling deepspeed_shm_comm" in caplog.text
    assert "compiled deepspeed_shm_comm in 1 s" in caplog.text
