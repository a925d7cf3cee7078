"""Builds DeepSpeed's own configuration, without ranks or a device, and finds what it refuses."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

import torch
from pydantic import ValidationError

from ds_ckpt.fields import is_auto
from ds_ckpt.patch import patched

Keys = tuple[str, ...]
_TOTAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_BATCH = (_TOTAL, _MICRO, "gradient_accumulation_steps")
_LAST = ("type", "zero_optimization", *_BATCH)
"""Keys that are a cause only if no other key is, in this order."""
_SECTIONS = ("flops_profiler", "comms_logger")  # our rules refuse misspelt names of others


def possible_keys() -> set[str]:
    """Return DeepSpeed's constants, among them the keys of its configuration, and some sections."""
    from deepspeed.runtime import constants

    return {*_SECTIONS, *(value for value in vars(constants).values() if isinstance(value, str))}


def refusals(config: Mapping[str, Any], ranks: int | None) -> Iterator[tuple[Keys, str]]:
    """Yield the refusals of the installed DeepSpeed: the keys down to the value, and its message.

    The value is the first one without which DeepSpeed's messages differ. "auto" counts as filled
    in. `ranks`: data-parallel world size; None: one that agrees with the batch sizes.
    """
    remaining = _without_auto(config)
    if _TOTAL not in remaining and any(is_auto(config.get(key)) for key in _BATCH[:2]):
        remaining.setdefault(_MICRO, 1)
    is_first = True
    while messages := _messages(remaining, ranks):
        keys = _cause(remaining, ranks, messages)
        if keys or is_first:
            yield keys, messages[0]
        if not keys:
            return
        whole = keys[:-1] if keys[-1] == "params" else keys  # the type requires its params
        is_first, remaining = False, _without(remaining, whole)


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: item if key == "params" else _without_auto(item)
            for key, item in value.items()
            if not is_auto(item)
        }
    return value


def _messages(config: Mapping[str, Any], ranks: int | None) -> list[str]:
    """Return DeepSpeed's error messages about a configuration; empty if it accepts it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Config(DeepSpeedConfig):  # type: ignore[misc]
        def _configure_train_batch_size(self) -> None:
            self.world_size = ranks or 1
            total, micro, steps = (self._param_dict.get(key) for key in _BATCH)
            if ranks is None and total and micro and steps:
                self.world_size = total // (micro * steps)
            super()._configure_train_batch_size()

    try:
        _check_engine_rules(Config(copy.deepcopy(config)))
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    except Exception as error:  # values of another shape end in any of them
        return [" ".join(str(error).split()) or type(error).__name__]
    return []


def _check_engine_rules(settings: Any) -> None:
    """Raise ValueError for a setting that the engine refuses, with every model and device."""
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    name, zero, schedule = settings.optimizer_name, settings.zero_config, settings.scheduler_name
    if name and name not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, name):
        raise ValueError(f"{name} is not a supported DeepSpeed optimizer")
    untested = name not in (None, "adam", "adamw", "adagrad", "lion", "muon")
    if zero.stage and untested and not settings.zero_allow_untested_optimizer:
        raise ValueError(f'ZeRO with {name} needs "zero_allow_untested_optimizer": true')
    weights = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = _build(*_optimizer_of(settings), weights)
    places = (lr_schedules, torch.optim.lr_scheduler)
    place = next((place for place in places if schedule and hasattr(place, schedule)), None)
    if schedule and place is None:
        raise ValueError(f"DeepSpeed does not recognize the scheduler {schedule}")
    if schedule:
        optimizer = optimizer or _light(torch.optim.AdamW)(weights)
        with patched(lr_schedules.logger, "disabled", True):  # they warn of their own first rate
            _build(getattr(place, schedule), settings.scheduler_params, optimizer)
    if zero.stage == 3 and zero.reduce_scatter:
        if settings.gradient_predivide_factor != 1.0 or settings.prescale_gradients:
            raise ValueError("ZeRO-3 with reduce_scatter does not scale gradients beforehand")
        if name == "muon":
            raise ValueError("Muon and reduce_scatter cannot be used together")


def _light(kind: Any) -> Any:
    """Return torch's optimizer without the decorator whose import of torch's compiler is slow."""
    add_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    return type(kind.__name__, (kind,), {"add_param_group": add_group})


def _optimizer_of(settings: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class that DeepSpeed makes the optimizer of, and its arguments; None if other."""
    from deepspeed.ops import adagrad, adam, lamb, lion

    name, given = settings.optimizer_name, dict(settings.optimizer_params or {})
    if "max_grad_norm" in given:
        raise ValueError("max_grad_norm is not an optimizer parameter: use gradient_clipping")
    offload = settings.zero_config.offload_optimizer
    on_host = offload is not None and offload.device in ("cpu", "nvme")
    if name in ("adam", "adamw"):
        for key in ("adam_w_mode", "fp32_optimizer_states"):
            given.pop(key, None)
        if given.pop("torch_adam", False):
            return torch.optim.AdamW, given
    kinds = {
        "adam": adam.DeepSpeedCPUAdam if on_host else adam.FusedAdam,
        "adagrad": adagrad.DeepSpeedCPUAdagrad if on_host else torch.optim.Adagrad,
        "lamb": lamb.FusedLamb,
        "lion": lion.DeepSpeedCPULion if on_host else lion.FusedLion,
    }
    kinds["adamw"] = kinds["adam"]
    return kinds.get(name) or getattr(torch.optim, name or "", None), given


def _build(kind: Any, params: Any, first: Any) -> Any:
    """Build an optimizer or schedule; return None, with arguments checked, if it must not be."""
    if kind is None:
        return None
    if kind.__module__.startswith("deepspeed.ops") or any(map(is_auto, (params or {}).values())):
        inspect.signature(kind).bind(first, **params)  # building it would compile an operator
        return None
    return (_light(kind) if issubclass(kind, torch.optim.Optimizer) else kind)(first, **params)


def _cause(config: Any, ranks: int | None, messages: list[str], inside: Keys = ()) -> Keys:
    """Return the keys down to the value without which DeepSpeed's messages differ."""
    section = reduce(getitem, inside, config)
    names = [*section] if isinstance(section, dict) else []
    for key in sorted(names, key=lambda key: _LAST.index(key) if key in _LAST else -1):
        keys = (*inside, key)
        found = _messages(_without(config, keys), ranks)
        if found != messages and not any(" missing " in message for message in found):
            return _cause(config, ranks, messages, keys)
    return inside


def _without(config: Any, keys: Keys) -> Any:
    first, *rest = keys
    inner = {first: _without(config[first], tuple(rest))} if rest else {}
    return {key: value for key, value in config.items() if key != first} | inner
