"""Entry points. All of them create a `Session` on DeepSpeed's engine.

`initialize` and `attach` are for code that imports the plugin. `install` is for code that does not:
the HF Trainer, accelerate, and scripts under `ds-ckpt exec` or `--module ds_ckpt.run`.
"""

import base64
import contextlib
import copy
import inspect
import itertools
import json
import os
import runpy
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_ckpt import __version__, environment
from ds_ckpt.compression import wire
from ds_ckpt.config import PluginConfig, load_file, parse
from ds_ckpt.engine.session import (
    ATTRIBUTE,
    Session,
    end_earlier_sessions,
    ensure_log_handler,
    has_optimizer,
)
from ds_ckpt.errors import ConfigError, Problem, UnsupportedError, log
from ds_ckpt.zero3.parameters import configuration

WAIT_S = 120.0
"""Seconds that a rank waits for the others' settings before it attaches."""
_IDLE_WAIT_S = 5.0
"""Seconds that a rank with nothing to attach waits for them."""
_comparisons = itertools.count()
"""Numbers of the comparisons of settings, for their keys in torch's store."""


def session_of(engine: Any) -> Session | None:
    """Return the session of an engine, or None if the plugin is not attached."""
    session: Session | None = vars(engine).get(ATTRIBUTE)
    return session


def attach(engine: Any, *, mpu: Any = None) -> Session:
    """Attach the plugin to an existing engine, configured by the engine's own JSON. Collective.

    Args:
        engine: DeepSpeed's engine.
        mpu: A Megatron-style object whose tensor-parallel group `partition_activations` uses.
            Default: `engine.mpu`, set by AutoTP or by `deepspeed.initialize(mpu=...)`.

    Raises:
        ConfigError, UnsupportedError, ContractError: The configuration, the model or the DeepSpeed
            version is not supported, or not all ranks attach. The engine is unchanged.
    """
    if session_of(engine) is not None:
        why = "two sessions would compress and checkpoint twice"
        remedy = "use ds_ckpt.session_of(engine), or detach() it first"
        found = "an engine that already has a session"
        raise UnsupportedError(Problem("ds_ckpt.attach(engine)", found, why, remedy))
    given = {"optimizer": engine.client_optimizer, "lr_scheduler": engine.client_lr_scheduler}
    return _attach(engine, parse(configuration(engine), given=given), mpu)


def _attach(engine: Any, config: PluginConfig, mpu: Any = None) -> Session:
    versions = f"ds_ckpt {__version__}, wire format {wire.VERSION}"
    _require_same_settings(f"{versions}, {config.summary()}")
    end_earlier_sessions(engine)
    return Session(engine, config, mpu)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call `deepspeed.initialize`, and attach the plugin to the engine that it returns.

    Without a `ds_ckpt` or `activation_checkpointing` section it is plain DeepSpeed. Raises
    ConfigError with every mistake at once, before anything is built; else see `attach`.
    """
    import deepspeed

    return initialize_installed(_stock(deepspeed.initialize), args, kwargs)


def install() -> None:
    """Attach the plugin in every later call of `deepspeed.initialize`.

    The HF Trainer and accelerate look it up at call time. Idempotent; undone by `uninstall()`.
    """
    import deepspeed  # noqa: F401

    startup = environment.STARTUP / "sitecustomize.py"
    runpy.run_path(str(startup), run_name="ds_ckpt.startup")["install"]()


def uninstall() -> None:
    """Restore `deepspeed.initialize`, unless another library has wrapped it since."""
    import deepspeed

    deepspeed.initialize = _stock(deepspeed.initialize)


def _stock(function: Any) -> Any:
    is_ours = getattr(function, "__ds_ckpt__", None) is function
    return function.__wrapped__ if is_ours else function


def initialize_installed(stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace `deepspeed.initialize`; called by the start-up code."""
    try:
        return _initialize(stock, args, kwargs)
    except (ConfigError, UnsupportedError) as error:
        if environment.REACHED_FILE_VARIABLE not in os.environ:
            raise
        raise SystemExit(str(error)) from None  # under `ds-ckpt exec`


def _initialize(stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        bound = inspect.signature(stock).bind(*args, **kwargs)
    except TypeError:
        return stock(*args, **kwargs)  # raises DeepSpeed's own error
    is_exec = environment.REACHED_FILE_VARIABLE in os.environ
    if is_exec:
        with contextlib.suppress(OSError):  # on another node
            Path(os.environ[environment.REACHED_FILE_VARIABLE]).touch()
    environment.clear_stale_locks()
    raw = _with_section(bound.arguments)
    # errors come before ranks connect and memory is allocated
    config = None if raw is None else parse(raw, given=bound.arguments)
    is_silent = is_exec or os.environ.get("LOCAL_RANK", "0") != "0"
    with contextlib.nullcontext() if is_silent else environment.reported_compiling():
        result = stock(*bound.args, **bound.kwargs)
    engine = result[0]
    if session_of(engine) is not None:
        return result  # another library's wrapper has called ours already
    raw = configuration(engine)
    config = config or parse(raw)
    if not has_optimizer(engine):
        why = "this engine has no optimizer (inference)"
    elif config.active or config.telemetry.enabled:
        _attach(engine, config)
        return result
    else:
        end_earlier_sessions(engine)
        has_section = raw.get("ds_ckpt") is not None
        why = f"the ds_ckpt section {'switches nothing on' if has_section else 'is missing'}"
    _require_same_settings("")
    if dist.get_rank() == 0:
        ensure_log_handler()
        log.warning("ds_ckpt: %s: plain DeepSpeed", why)
    return result


def _require_same_settings(summary: str) -> None:
    """Raise UnsupportedError on ranks that attach if another has no plugin or other settings.

    Attaching is collective: without this check, ranks would wait forever for one that does not
    attach. A rank with nothing to attach has no summary. It waits briefly, and raises only if
    another one attaches.
    """
    number, world = next(_comparisons), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    if world == 1 or store is None:  # MPI's process groups have none
        return
    limit_s = float(os.environ.get(environment.WAIT_VARIABLE, WAIT_S)) if summary else _IDLE_WAIT_S
    keys = [f"ds_ckpt/{number}/{peer}" for peer in range(world)]
    store.set(keys[dist.get_rank()], summary or "plain DeepSpeed")
    try:
        store.wait(keys, timedelta(seconds=limit_s))
        if len(set(store.multi_get(keys))) == 1:
            return
    except dist.DistError:
        if not summary:
            return
    ranks: dict[str, list[str]] = {}
    for peer, key in enumerate(keys):
        found = (
            store.get(key).decode()
            if store.check([key])
            else f"no answer from ds_ckpt within {limit_s:g} s"
        )
        ranks.setdefault(found, []).append(str(peer))
    time.sleep(min(2.0, limit_s))  # store and launch end with the first rank that raises
    found = "; ".join(f"{found} on rank {', '.join(ranks[found][:8])}" for found in ranks)
    why = f"the {world} ranks exchange gradients, weights and plans"
    remedy = "use one configuration, and the same version of ds_ckpt on every rank, "
    remedy += f"with {environment.STARTUP} on PYTHONPATH"
    headline = "ds_ckpt is not active alike on all ranks"
    raise UnsupportedError(Problem("ranks", found, why, remedy), headline=headline)


def _with_section(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the configuration that DeepSpeed will read; None leaves it to DeepSpeed.

    The section of `ds-ckpt exec --section` is added to one that has none, in `given`.
    """
    encoded, args = os.environ.get(environment.SECTION_VARIABLE), given.get("args")
    key = next((k for k in ("config", "config_params") if given.get(k) is not None), "args")
    source = getattr(args, "deepspeed_config", None) if key == "args" else given[key]
    config = read_source(source)
    if encoded is None or config is None:
        return config
    if config.get("ds_ckpt") is not None:
        if os.environ.get("RANK", "0") == "0":
            log.warning("ds_ckpt: the configuration has a section of its own; --section is unused")
        return config
    config["ds_ckpt"] = json.loads(base64.urlsafe_b64decode(encoded))
    if key == "args":
        given["args"] = copy.copy(args)  # DeepSpeed refuses a configuration in two places
        given["args"].deepspeed_config = None
    given["config"], given["config_params"] = config, None
    return config


def read_source(source: Any) -> dict[str, Any] | None:
    """Read an object, a file or base64 as DeepSpeed does; None if it cannot be read."""
    if source is None or isinstance(source, Mapping):
        return None if source is None else dict(source)
    from ds_ckpt.zero3.compatibility import parse_hjson

    is_file = os.path.isfile(source)
    text = Path(source).read_bytes() if is_file else b""
    if b"ds_ckpt" in text or b"activation_checkpointing" in text:
        return load_file(source)
    with contextlib.suppress(TypeError, ValueError):
        text = text if is_file else base64.urlsafe_b64decode(source)
        return parse_hjson(text.decode())
    return None
