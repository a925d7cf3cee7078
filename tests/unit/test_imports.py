"""Imports: their cost, their direction, and the public names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ds_ckpt
from ds_ckpt import Session, compression

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [
    "ConfigError",
    "ContractError",
    "DsCkptError",
    "Problem",
    "Session",
    "StateError",
    "UnsupportedError",
    "attach",
    "initialize",
    "install",
    "session_of",
    "uninstall",
]
"""Frozen: a name that is added, renamed or removed changes what users may rely on."""
USE_ALL = "import ds_ckpt; [getattr(ds_ckpt, n) for n in ds_ckpt.__all__]"
VALIDATE = (
    "from ds_ckpt.cli import app; "
    "app(['validate', 'ds_configs/zero3_3bit.json'], standalone_mode=False)"
)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import ds_ckpt; dir(ds_ckpt)", "torch deepspeed transformers accelerate peft pydantic"),
        (f"{USE_ALL}; import torch; assert not torch.cuda.is_initialized()", "transformers"),
        ("import ds_ckpt.config", "deepspeed transformers typer"),
        ("import ds_ckpt.compression", "deepspeed"),
        (VALIDATE, "transformers"),
    ],
)
@pytest.mark.sampled(2)
def test_imports_are_light(code: str, heavy: str) -> None:
    check = f"sys.exit(' '.join({{*{heavy.split()}}} & {{*sys.modules}}) or None)"
    command = [sys.executable, "-c", f"import sys; {code}; {check}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_former_names_of_compression_warn() -> None:
    with pytest.warns(DeprecationWarning, match="use Removed"):
        assert compression.Gone is compression.Removed
    with pytest.warns(DeprecationWarning, match=r"use Tensor\.add_"):
        add_scaled = compression.add_scaled
    into = torch.ones(3)
    add_scaled(into, torch.ones(3), 2.0)
    assert into.tolist() == [3.0] * 3
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        _ = compression.gone


def test_former_names_of_a_session_warn() -> None:
    session = Session.__new__(Session)
    session.exchange = SimpleNamespace(assignment="all", feedback=SimpleNamespace(nbytes=8))
    for name, value in (("plan", "all"), ("residual_bytes", 8)):
        with pytest.warns(DeprecationWarning, match=r"use session\.exchange"):
            assert getattr(session, name) == value


def test_the_public_names_are_these() -> None:
    assert ds_ckpt.__all__ == PUBLIC
    assert set(dir(ds_ckpt)) == {*PUBLIC, "__version__"}
    for name in PUBLIC:
        value = getattr(ds_ckpt, name)
        assert value.__name__ == name
        assert inspect.getdoc(value), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = ds_ckpt.initialise


def test_imports_point_down_the_rooms() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(tool)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
