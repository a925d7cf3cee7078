"""`ds-ckpt exec` on real launches of unmodified scripts, on two processes of this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.hosts.backends import Loopback, Prepared
from ds_ckpt.lab.hosts.launcher import LOG, LaunchError, run
from tests.distributed import exec_train

pytestmark = pytest.mark.timeout(400)
SCRIPT = exec_train.__file__
EXEC = [sys.executable, "-m", "ds_ckpt.cli", "exec"]


def launch(folder: Path, section: str, kind: str, words: list[str]) -> str:
    """What `exec` and a launcher say that starts the script; `deepspeed` gets a port."""
    script = [SCRIPT, kind, f"--folder={folder}"]
    if kind == "script":
        (folder / "plain.json").write_text(json.dumps(exec_train.PLAIN))
        script += ["--deepspeed_config", str(folder / "plain.json")]
    prepared = Loopback(2).prepare([*words, *script], folder)
    program = Path(sys.executable).with_name(Path(prepared.command[0]).name)
    command = [*EXEC, "--section", section, "--", str(program), *prepared.command[1:]]
    return run(Prepared(command, prepared.environment), folder, limit_s=300)


def results(folder: Path, kind: str) -> list[list[Any]]:
    return [json.loads((folder / f"{kind}_{i}.json").read_text())["results"] for i in range(2)]


@pytest.mark.slow
def test_a_script_by_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section for those that have none, the script's own, and a wrong one at the end."""
    section = tmp_path / "section.json"
    section.write_text(json.dumps({"ds_ckpt": {"activation": {"policy": "block"}}}))
    (tmp_path / "sitecustomize.py").write_text("print('the own sitecustomize')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(LaunchError, match="exit code"):
        launch(tmp_path, str(section), "script", ["deepspeed"])
    for sessions in results(tmp_path, "script"):
        (by_file, loss), (own, same), (by_object, again) = sessions
        assert "checkpointing block" in by_file
        assert by_object == by_file
        assert "checkpointing mlp" in own
        assert loss == same == again  # checkpointing is lossless
    said = (tmp_path / LOG).read_text()
    assert "the own sitecustomize" in said
    assert "--section is unused" in said
    assert "$.ds_ckpt.activation.policy" in said
    assert "Traceback" not in said
    assert "no process on this node" not in said
