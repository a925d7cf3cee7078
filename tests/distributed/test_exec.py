"""`ds-ckpt exec` on real launches of unmodified scripts, on two processes of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt import environment
from ds_ckpt.lab.hosts.backends import Loopback, Prepared, free_port
from ds_ckpt.lab.hosts.launcher import LOG, LaunchError, supervise
from tests.distributed import exec_train

pytestmark = pytest.mark.timeout(400)
SCRIPT = exec_train.__file__
EXEC = [sys.executable, "-m", "ds_ckpt.cli", "exec"]
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=2"]
HOSTFILE = Path(__file__).parents[2] / "hostfiles" / "one_machine"
ONE_MACHINE = HOSTFILE.read_text().partition(": ")[2].partition(" --module")[0].split()
ONE_MACHINE[ONE_MACHINE.index("--hostfile") + 1] = str(HOSTFILE)
BLOCK = {"activation": {"policy": "block", "modules": ["Block"]}}
LAYER = {"activation": {"policy": "block"}}
HF = {
    **exec_train.PLAIN,
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}
YAML = Path(__file__).with_name("trl_zero3.yaml")


def launch(folder, kind, words, section=None, config=None, backend=None) -> str:
    """Return the output of `exec` and the launcher of a script; `deepspeed` gets a port."""
    script = [SCRIPT, kind, f"--folder={folder}"]
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
        script += ["--deepspeed_config", str(folder / "config.json")]
    given: list[str] = []
    if section is not None:
        (folder / "section.json").write_text(json.dumps({"ds_ckpt": section}))
        given = ["--section", str(folder / "section.json")]
    program = str(Path(sys.executable).with_name(words[0]))
    prepared = (backend or Loopback(2)).prepare([program, *words[1:], *script], folder)
    command = [*EXEC, *given, "--", *prepared.command]
    return supervise(Prepared(command, prepared.environment), folder, limit_s=300)


def results(folder: Path, kind: str) -> list[list[Any]]:
    return [json.loads((folder / f"{kind}_{i}.json").read_text())["results"] for i in range(2)]


@pytest.mark.parametrize(
    "words", [TORCHRUN, pytest.param(ONE_MACHINE, marks=pytest.mark.slow)], ids=lambda w: w[0]
)
def test_plugin_is_active_under_launcher(words, tmp_path, monkeypatch) -> None:
    """A section for those that have none, the script's own, and a wrong one at the end.

    The hostfile of one machine is used as its first line says, where ssh fails.
    """
    (tmp_path / "ssh").write_text("#!/bin/sh\necho asked >ssh.log; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "sitecustomize.py").write_text("print('the own sitecustomize')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(LaunchError, match="exit code"):
        launch(tmp_path, "script", words, BLOCK, exec_train.PLAIN)
    for sessions in results(tmp_path, "script"):
        (by_file, loss), (own, same), (by_object, again) = sessions
        assert "checkpointing block" in by_file
        assert by_object == by_file
        assert "checkpointing segments" in own
        assert loss == same == again  # checkpointing is lossless
    said = (tmp_path / LOG).read_text()
    assert "the own sitecustomize" in said
    assert "--section is unused" in said
    assert "$.ds_ckpt.activation.policy" in said
    assert "no process on this node" not in said
    if words is ONE_MACHINE:  # torchrun shows where it raises its own error
        assert "Traceback" not in said
        assert not (tmp_path / "ssh.log").exists()


@pytest.mark.slow
def test_python_alone_with_the_variables_of_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "section.json").write_text(json.dumps(BLOCK))
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables = {**os.environ, **one, "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    command = [*EXEC, "--section", str(tmp_path / "section.json"), "--", sys.executable, SCRIPT]
    command += ["script", f"--folder={tmp_path}", "--deepspeed_config", "config.json"]
    (tmp_path / "config.json").write_text(json.dumps(exec_train.PLAIN))
    ran = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert "$.ds_ckpt.activation.policy" in ran.stderr  # the wrong one, at the script's end
    ((by_file, _), (own, _), _) = json.loads((tmp_path / "script_0.json").read_text())["results"]
    assert "checkpointing block" in by_file
    assert "checkpointing segments" in own


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "section"])
def test_trainer_starts_with_auto_and_with_section(way: str, tmp_path: Path) -> None:
    """torchrun starts it with a section in the file, deepspeed without one."""
    if way == "auto":
        launch(tmp_path, "trainer", TORCHRUN, config={**HF, "ds_ckpt": "auto"})
    else:
        launch(tmp_path, "trainer", ["deepspeed"], LAYER, HF)
    for ((session, _),) in results(tmp_path, "trainer"):
        assert "checkpointing block" in session
        assert ("3-bit values" in session) == (way == "auto")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["section", "auto"])
def test_accelerate_launch(way: str, tmp_path: Path) -> None:
    """The settings are a YAML file of trl, or DeepSpeed's own file."""
    words = ["accelerate", "launch", "--num_processes=2", f"--main_process_port={free_port()}"]
    if way == "section":
        launch(tmp_path, "accelerate", [*words, f"--config_file={YAML}"], LAYER)
    else:
        (tmp_path / "zero3.json").write_text(json.dumps({**exec_train.PLAIN, "ds_ckpt": "auto"}))
        words += ["--use_deepspeed", f"--deepspeed_config_file={tmp_path}/zero3.json"]
        words += ["--num_machines=1", "--dynamo_backend=no"]
        launch(tmp_path, "accelerate", words)
    for ((session, _),) in results(tmp_path, "accelerate"):
        assert "checkpointing block" in session
        assert ("3-bit values" in session) == (way == "auto")


@pytest.mark.slow  # in one process each, without a launcher: test_session
def test_a_rank_without_the_plugin_is_named_on_every_other(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(environment.WAIT_VARIABLE, "5")
    bare = f'test "$RANK" != 1 || unset PYTHONPATH; exec {sys.executable} "$@"'
    words = ["torchrun", "--standalone", "--nproc_per_node=3", "--no_python", "sh", "-c", bare, "-"]
    with pytest.raises(LaunchError):
        launch(tmp_path, "script", words, BLOCK, exec_train.PLAIN)
    said = (tmp_path / LOG).read_text()
    assert said.count("no answer from ds_ckpt within 5 s on rank 1") == 2
