"""The ways in. All of them end in the same object, a `Session` on DeepSpeed's engine.

`initialize` and `attach` for code that knows of the plugin; `install` for code that does not (the
HF Trainer, accelerate, and any script under `--module ds_ckpt.run`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.config import load_file, parse
from ds_ckpt.engine import ATTRIBUTE, Session, make_heard, trains
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError
from ds_ckpt.exchange.hierarchy import here

log = logging.getLogger("ds_ckpt")
HEAD_START_S = 5.0
"""What the first process of a host has for telling: when another ends, the launcher ends all."""


def session_of(engine: Any) -> Session | None:
    """The session of an engine, None where the plugin is not on it."""
    session: Session | None = vars(engine).get(ATTRIBUTE)
    return session


def tells() -> bool:
    """Whether this process tells what went wrong on every process of its host: the first does."""
    return here().local in (None, 0)


@contextmanager
def _told_once_a_host() -> Iterator[None]:
    """Around reading the configuration, where all processes of a host make the same mistake.

    It is raised on every one; where nobody catches it, the first prints it.
    """
    try:
        yield
    except ConfigError as error:
        if not tells():
            shown, mistake = sys.excepthook, error

            def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
                if value is mistake:
                    time.sleep(HEAD_START_S)
                else:
                    shown(kind, value, trace)

            sys.excepthook = hook
        raise


def attach(engine: Any, *, mpu: Any = None) -> Session:
    """Put the plugin on an engine that exists, as the engine's own configuration says.

    Args:
        mpu: a Megatron-style object whose tensor-parallel group `partition_activations` splits
            checkpointed inputs over; default: `engine.mpu`, which AutoTP sets, and what was given
            to `deepspeed.initialize(mpu=...)`.

    Raises:
        ConfigError: the configuration is wrong; the engine is untouched.
        UnsupportedError: the model or optimizer cannot be served; the engine is untouched.
        ContractError: this DeepSpeed has moved.
    """
    if session_of(engine) is not None:
        raise UnsupportedError(
            Problem(
                where="ds_ckpt.attach(engine)",
                found="an engine that already has a session",
                why="two sessions would compress and checkpoint twice",
                remedy="use ds_ckpt.session_of(engine), or detach() it first",
            )
        )
    with _told_once_a_host():
        config = parse(engine._config._param_dict)
    return Session(engine, config, mpu)


def _raw_config(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | None:
    """The configuration where `deepspeed.initialize` will look for it; None is its business."""
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None or isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path) or not os.path.isfile(source):
        return None  # base64 of DeepSpeed's launcher: parsed by DeepSpeed, checked by attach
    try:
        return load_file(source)
    except ConfigError:
        text = Path(source).read_text(errors="replace")
        if "ds_ckpt" in text or "activation_checkpointing" in text:
            raise
        return None  # hjson without a word of ours: DeepSpeed's alone


def _initialize(stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
    except TypeError:
        return stock(*args, **kwargs)  # DeepSpeed's own error says it best
    with _told_once_a_host():
        raw = _raw_config(given.get("args"), given.get("config"), given.get("config_params"))
        if raw is not None:
            parse(raw)  # every mistake is told before processes meet and memory is taken
    result = stock(*args, **kwargs)
    engine = result[0]
    if session_of(engine) is not None:
        return result  # another library's wrapper has led through ours already
    checked = parse(engine._config._param_dict)
    if not (checked.active or checked.telemetry.enabled):
        return result
    if trains(engine):
        attach(engine)
    elif torch.distributed.get_rank() == 0:
        make_heard()
        log.warning("ds_ckpt: this engine has no optimizer (inference); nothing is switched on")
    return result


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` with the plugin on the engine that it returns.

    Takes and returns exactly what `deepspeed.initialize` does: `(engine, optimizer, dataloader,
    lr_scheduler)`. Without a `ds_ckpt` section and without `activation_checkpointing` in the
    configuration it is plain DeepSpeed.

    Raises:
        ConfigError: every mistake in the configuration at once, before anything is built.
        UnsupportedError, ContractError: see `attach`.
    """
    import deepspeed

    current = deepspeed.initialize
    stock = current.__ds_ckpt_stock__ if _is_ours(current) else current
    return _initialize(stock, args, kwargs)


def _is_ours(function: Any) -> bool:
    """Whether `function` is the wrapper that `install` makes, not one that copied its marks."""
    return getattr(function, "__ds_ckpt_self__", None) is function


def install() -> None:
    """Put the plugin into `deepspeed.initialize`, for code that calls it itself.

    The HF Trainer and accelerate look it up at call time. Idempotent; `uninstall()` takes it back.
    """
    import deepspeed

    stock = deepspeed.initialize
    if _is_ours(stock):
        return

    @functools.wraps(stock)
    def initialize_with_plugin(*args: Any, **kwargs: Any) -> Any:
        return _initialize(stock, args, kwargs)

    initialize_with_plugin.__ds_ckpt_stock__ = stock  # type: ignore[attr-defined]
    initialize_with_plugin.__ds_ckpt_self__ = initialize_with_plugin  # type: ignore[attr-defined]
    deepspeed.initialize = initialize_with_plugin


def uninstall() -> None:
    """Give `deepspeed.initialize` back. Engines that have a session keep it.

    Where another library has wrapped it since, that wrapper stays, and ours inside it.
    """
    import deepspeed

    current = deepspeed.initialize
    if _is_ours(current):
        deepspeed.initialize = current.__ds_ckpt_stock__
    elif hasattr(current, "__ds_ckpt_self__"):
        log.warning("ds_ckpt: deepspeed.initialize was wrapped after install(); nothing is undone")
