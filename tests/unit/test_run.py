"""`python -m ds_ckpt.run`: arguments reach the script; errors are one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import pytest

from ds_ckpt import run, uninstall


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    uninstall()


def test_the_launcher_argument_goes_on_to_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:], __name__)\nimport beside\n")
    (tmp_path / "beside.py").write_text("")
    original = deepspeed.initialize
    run.main(["--local_rank=1", str(script), "--deepspeed_config", "c.json"])
    assert deepspeed.initialize is not original
    expected = "['--local_rank=1', '--deepspeed_config', 'c.json'] __main__"
    assert expected in capsys.readouterr().out


def test_a_module_of_a_package_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(
        "import sys\nprint(sys.argv, __name__, __package__)\n"
    )
    monkeypatch.chdir(tmp_path)
    run.main(["--local_rank=1", "-m", "pkg.train", "-m", "x"])
    path = str(tmp_path / "pkg" / "train.py")
    assert f"{[path, '--local_rank=1', '-m', 'x']} __main__ pkg" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--local_rank=0"], ["nowhere.py"]])
def test_a_missing_script_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage: deepspeed"):
        run.main(argv)


def test_a_wrong_configuration_ends_with_the_message(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from ds_ckpt.config import parse\nparse({'ds_ckpt': {'activaton': {}}})\n")
    with pytest.raises(SystemExit, match=r"\$.ds_ckpt.activaton"):
        run.main([str(script)])
