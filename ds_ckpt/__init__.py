"""ds_ckpt: activation checkpointing and gradient compression for DeepSpeed ZeRO-3.

The public names are loaded on first use: importing the package touches no accelerator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_ckpt.engine.entry import attach, initialize, install, session_of, uninstall
    from ds_ckpt.engine.session import Session
    from ds_ckpt.errors import (
        ConfigError,
        ContractError,
        DsCkptError,
        Problem,
        StateError,
        UnsupportedError,
    )

__version__ = "0.1.0"

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
    if name not in __all__:
        raise AttributeError(f"module 'ds_ckpt' has no attribute {name!r}")
    home = "engine.session" if name == "Session" else "errors"
    home = "engine.entry" if name[0].islower() else home
    return getattr(importlib.import_module(f"ds_ckpt.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
