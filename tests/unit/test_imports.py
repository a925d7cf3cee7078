"""What importing costs, which way imports point, and which names are public."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ds_ckpt

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
"""Frozen: a name that is added, renamed or taken away changes what users may rely on."""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    result = _python(
        "import json, sys, ds_ckpt; dir(ds_ckpt); "
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stdout))
    assert not loaded & {"torch", "deepspeed", "transformers", "accelerate", "peft", "pydantic"}


def test_using_every_public_name_starts_no_accelerator_and_no_transformers() -> None:
    result = _python(
        "import sys, ds_ckpt; [getattr(ds_ckpt, n) for n in ds_ckpt.__all__]; import torch; "
        "assert not torch.cuda.is_initialized(); assert 'transformers' not in sys.modules"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["ds_ckpt.config", "ds_ckpt.compression", "ds_ckpt.cli"])
def test_what_needs_no_deepspeed_loads_none(module: str) -> None:
    result = _python(f"import sys, {module}; assert 'deepspeed' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_the_public_names_are_these() -> None:
    assert ds_ckpt.__all__ == PUBLIC
    assert set(dir(ds_ckpt)) == {*PUBLIC, "__version__"}
    for name in PUBLIC:
        value = getattr(ds_ckpt, name)
        assert value.__name__ == name
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        importlib.import_module("ds_ckpt").initialise  # noqa: B018


def test_imports_point_down_the_rooms() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(tool)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
