"""Entry points. All of them create a `Session` on DeepSpeed's engine.

`initialize` and `attach` are for code that imports the plugin; `install` is for code that does not
(the HF Trainer, accelerate, and any script under `--module ds_ckpt.run`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.config import load_file, parse
from ds_ckpt.engine import (
    ATTRIBUTE,
    Session,
    end_earlier_sessions,
    ensure_log_handler,
    has_optimizer,
)
from ds_ckpt.errors import Problem, UnsupportedError

log = logging.getLogger("ds_ckpt")
_wrapper: Any = None
"""Replacement of `deepspeed.initialize` by the last `install`."""


def session_of(engine: Any) -> Session | None:
    """Return the session of an engine, or None if the plugin is not attached."""
    session: Session | None = vars(engine).get(ATTRIBUTE)
    return session


def attach(engine: Any, *, mpu: Any = None) -> Session:
    """Attach the plugin to an existing engine, configured by the engine's own JSON.

    Args:
        engine: DeepSpeed's engine.
        mpu: A Megatron-style object whose tensor-parallel group `partition_activations` uses.
            Default: `engine.mpu`, set by AutoTP or by `deepspeed.initialize(mpu=...)`.

    Raises:
        ConfigError, UnsupportedError, ContractError: The configuration, the model or the DeepSpeed
            version is not supported; the engine is unchanged.
    """
    if session_of(engine) is not None:
        why = "two sessions would compress and checkpoint twice"
        remedy = "use ds_ckpt.session_of(engine), or detach() it first"
        found = "an engine that already has a session"
        raise UnsupportedError(Problem("ds_ckpt.attach(engine)", found, why, remedy))
    config = parse(engine._config._param_dict)
    end_earlier_sessions(engine)
    return Session(engine, config, mpu)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call `deepspeed.initialize`, and attach the plugin to the engine that it returns.

    Without a `ds_ckpt` or `activation_checkpointing` section it is plain DeepSpeed. Raises
    ConfigError with every mistake at once, before anything is built; else see `attach`.
    """
    import deepspeed

    current = deepspeed.initialize
    return _initialize(current.__wrapped__ if current is _wrapper else current, args, kwargs)


def install() -> None:
    """Attach the plugin in every later call of `deepspeed.initialize`.

    The HF Trainer and accelerate look it up at call time. Idempotent; undone by `uninstall()`.
    """
    global _wrapper
    import deepspeed

    stock = deepspeed.initialize
    if stock is _wrapper:
        return

    @functools.wraps(stock)
    def initialize_with_plugin(*args: Any, **kwargs: Any) -> Any:
        return _initialize(stock, args, kwargs)

    _wrapper = deepspeed.initialize = initialize_with_plugin


def uninstall() -> None:
    """Restore `deepspeed.initialize`, unless another library has wrapped it since."""
    import deepspeed

    if deepspeed.initialize is _wrapper:
        deepspeed.initialize = _wrapper.__wrapped__


def _initialize(stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
    except TypeError:
        return stock(*args, **kwargs)  # raises DeepSpeed's own error
    raw = _raw_config(given.get("args"), given.get("config"), given.get("config_params"))
    if raw is not None:
        parse(raw)  # errors come before ranks connect and memory is allocated
    result = stock(*args, **kwargs)
    engine = result[0]
    if session_of(engine) is not None:
        return result  # another library's wrapper has called ours already
    checked = parse(engine._config._param_dict)
    if has_optimizer(engine):
        end_earlier_sessions(engine)
    if not (checked.active or checked.telemetry.enabled):
        return result
    if has_optimizer(engine):
        attach(engine)
    elif torch.distributed.get_rank() == 0:
        ensure_log_handler()
        log.warning("ds_ckpt: this engine has no optimizer (inference); nothing is switched on")
    return result


def _raw_config(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | None:
    """Return the configuration that DeepSpeed will read; None leaves it to DeepSpeed."""
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None or isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path) or not os.path.isfile(source):
        return None  # base64 of DeepSpeed's launcher
    text = Path(source).read_text(errors="replace")
    has_section = "ds_ckpt" in text or "activation_checkpointing" in text
    return load_file(source) if has_section else None
