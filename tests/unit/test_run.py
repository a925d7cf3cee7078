"""`python -m ds_ckpt.run`: arguments reach the script, and a missing script is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ds_ckpt
from ds_ckpt import run
from ds_ckpt.engine import entry
from ds_ckpt.errors import ConfigError
from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.hosts.launcher import LaunchError, deepspeed


def test_the_launcher_argument_goes_on_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, deepspeed\nprint(sys.argv[1:], __name__)\nimport beside\n")
    (tmp_path / "beside.py").write_text("import deepspeed\n")
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    import deepspeed

    from ds_ckpt import uninstall

    try:
        run.main(["--local_rank=1", str(script), "--deepspeed_config", "c.json"])
        assert hasattr(deepspeed.initialize, "__ds_ckpt_stock__")
    finally:
        uninstall()
    expected = "['--local_rank=1', '--deepspeed_config', 'c.json'] __main__"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--local_rank=0"], ["nowhere.py"]])
def test_a_missing_script_is_told(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage: deepspeed"):
        run.main(argv)


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "HEAD_START_S", 0.0)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


WRONG = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": {"polcy": "block"}}}


@pytest.mark.parametrize(("local_rank", "tells"), [("0", True), ("1", False)])
def test_a_mistake_in_a_plain_script_is_told_once_a_host(
    local_rank: str,
    tells: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is raised on every process; where nobody catches it, the first prints it."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(ConfigError) as caught:
        ds_ckpt.initialize(model=None, config=WRONG)
    sys.excepthook(ConfigError, caught.value, None)
    assert ("$.ds_ckpt.activation" in capsys.readouterr().err) == tells
    sys.excepthook(ValueError, ValueError("another"), None)
    assert "another" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_of_a_plain_script_tell_a_mistake_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"import ds_ckpt\nds_ckpt.initialize(model=None, config={WRONG!r})\n"
    )
    with pytest.raises(LaunchError):
        deepspeed(Loopback(2), ["train.py"], tmp_path)
    said = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert said.count("$.ds_ckpt.activation.polcy") == 1, said


@pytest.mark.parametrize(("local_rank", "said"), [("0", "$.ds_ckpt.activation"), ("1", "")])
def test_a_mistake_in_the_file_is_told_once_a_host(
    local_rank: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from ds_ckpt.config import parse\nparse({'ds_ckpt': {'activation': {'polcy': 'block'}}})\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    from ds_ckpt import uninstall

    try:
        with pytest.raises(SystemExit) as ended:
            run.main([str(script)])
    finally:
        uninstall()
    assert said in str(ended.value.code)
    assert (ended.value.code == 1) == (not said)
