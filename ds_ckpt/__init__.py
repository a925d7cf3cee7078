"""ds_ckpt: activation checkpointing and gradient compression for DeepSpeed ZeRO-3.

The public names, nothing else. They are loaded on first use, so that importing the package costs
nothing and touches no accelerator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_ckpt.entry import attach, initialize, install, session_of, uninstall
    from ds_ckpt.errors import (
        ConfigError,
        ContractError,
        DsCkptError,
        Problem,
        StateError,
        UnsupportedError,
    )
    from ds_ckpt.session import Session

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "errors",
    "ContractError": "errors",
    "DsCkptError": "errors",
    "Problem": "errors",
    "StateError": "errors",
    "UnsupportedError": "errors",
    "Session": "session",
    "attach": "entry",
    "initialize": "entry",
    "install": "entry",
    "session_of": "entry",
    "uninstall": "entry",
}

__all__ = [
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ds_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ds_ckpt.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
