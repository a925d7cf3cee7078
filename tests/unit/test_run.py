"""`python -m ds_ckpt.run`: arguments reach the script; errors are one message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_ckpt import run


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
        assert hasattr(deepspeed.initialize, "__wrapped__")
    finally:
        uninstall()
    expected = "['--local_rank=1', '--deepspeed_config', 'c.json'] __main__"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--local_rank=0"], ["nowhere.py"]])
def test_a_missing_script_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage: deepspeed"):
        run.main(argv)


def test_a_wrong_configuration_ends_with_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from ds_ckpt.config import parse\nparse({'ds_ckpt': {'activation': {'polcy': 'block'}}})\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["x"])
    from ds_ckpt import uninstall

    try:
        with pytest.raises(SystemExit, match=r"\$.ds_ckpt.activation"):
            run.main([str(script)])
    finally:
        uninstall()
