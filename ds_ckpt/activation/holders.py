"""Looks into what can be changed and is no tensor: lists, dicts, sets, objects, modules.

A look is a shallow copy, compared by identity, which can be put back into the same object. Nothing
here knows of blocks; `state.py` decides what is looked at and when.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import logging
import sys
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

log = logging.getLogger("ds_ckpt")
ITEMS = (list, dict, set, deque)
_LEAVES = (Tensor, nn.Module, types.FunctionType, types.MethodType, type, enum.Enum)
_MODULES_OWN = frozenset(vars(nn.Module())) | {
    "forward",  # set by whoever patches it
    "_original_parameters",  # the rest is DeepSpeed's bookkeeping, in step with its own hooks
    "_external_params",
    "pre_bwd_fn",
    "post_bwd_fn",
}
MOST = 1000
"""Objects looked into in one call; whoever hands a whole data set to a block gets a warning."""
Look = dict[Any, Any] | list[Any]


@functools.cache
def _kind(cls: Any) -> Literal["leaf", "items", "object"]:
    if issubclass(cls, ITEMS):
        return "items"
    root = cls.__module__.partition(".")[0]
    if issubclass(cls, types.SimpleNamespace):
        return "object"
    foreign = root in ("torch", "numpy") or root in sys.stdlib_module_names
    if issubclass(cls, _LEAVES) or foreign:
        return "leaf"
    return "object"


def _kind_of(value: object) -> Literal["leaf", "items", "object"]:
    cls: Any = type(value)
    return _kind(cls)


def _slots_of(value: object) -> tuple[str, ...]:
    cls: Any = type(value)
    return _slots(cls)


@functools.cache
def _slots(cls: Any) -> tuple[str, ...]:
    found = (base.__dict__.get("__slots__", ()) for base in cls.__mro__)
    names = itertools.chain.from_iterable((s,) if isinstance(s, str) else s for s in found)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def look(holder: Any) -> Look:
    """What a list, dict, set, deque, module or object holds now."""
    if isinstance(holder, nn.Module):
        return {
            name: value
            for name, value in vars(holder).items()
            if name not in _MODULES_OWN and not name.startswith(("ds_", "applied_"))
        }
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, ITEMS):
        return list(holder)
    slots = {n: getattr(holder, n) for n in _slots_of(holder) if hasattr(holder, n)}
    return {**getattr(holder, "__dict__", {}), **slots}


def members(one: Look) -> Iterable[Any]:
    return one.values() if isinstance(one, dict) else one


def same(one: Look, other: Look) -> bool:
    """The same objects in the same places."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    return all(a is b for a, b in zip(one, other, strict=True))


def put_back(holder: Any, noted: Look) -> None:
    """Make `holder` hold what it held at the look; what is the same is not touched."""
    now = look(holder)
    if same(now, noted):
        return
    if isinstance(holder, ITEMS):
        holder.clear()
        if isinstance(holder, list | deque):
            holder.extend(noted)
        else:
            holder.update(noted)
        return
    assert isinstance(noted, dict)
    assert isinstance(now, dict)
    attributes = getattr(holder, "__dict__", {})
    for name in now.keys() - noted.keys():
        if name in attributes:
            del attributes[name]
        else:
            object.__delattr__(holder, name)
    for name, value in noted.items():
        if name in now and now[name] is value:
            continue
        if name in _slots_of(holder):
            object.__setattr__(holder, name, value)
        else:
            attributes[name] = value


class Found:
    """What can be reached from some values.

    Args:
        values: where to start.
        taken_apart: the values are arguments of which `TakenApart` copies the containers it knows;
            those are gone through and do not count themselves.

    Attributes:
        holders: what can be changed.
        generators: random states of their own.
        iterators: what can be run through once.
    """

    def __init__(self, values: Iterable[Any], *, taken_apart: bool) -> None:
        self.holders: list[Any] = []
        self.generators: list[torch.Generator] = []
        self.iterators: list[Any] = []
        self._seen: set[int] = set()
        for value in values:
            self._visit(value, copied=taken_apart)

    def _visit(self, value: Any, *, copied: bool) -> None:
        if value is None or isinstance(value, Tensor | bool | int | float | str):
            return
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, tuple):
            for item in value:
                self._visit(item, copied=copied)
        elif copied and _is_copied(value):
            for item in members(look(value)):
                self._visit(item, copied=True)
        elif _kind_of(value) != "leaf":
            if id(value) in self._seen:
                return
            if len(self._seen) == MOST:
                log.warning("ds_ckpt: the %s of a block call is not looked through", type(value))
            self._seen.add(id(value))
            if len(self._seen) > MOST:
                return
            if isinstance(value, Iterator):
                self.iterators.append(value)
            self.holders.append(value)
            for item in members(look(value)):
                self._visit(item, copied=False)
        elif isinstance(value, Iterator):
            self.iterators.append(value)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors that can be reached from some values: in containers, in objects, in what those hold.

    Modules are not entered. No more than `MOST` holders are looked into.
    """
    tensors: list[Tensor] = []
    seen: set[int] = set()
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            left += value
        elif value is None or isinstance(value, bool | int | float | str):
            continue
        elif id(value) not in seen and len(seen) < MOST and _kind_of(value) != "leaf":
            seen.add(id(value))
            left += members(look(value))
    return tensors


def _is_copied(value: Any) -> bool:
    """A container that `arguments.TakenApart` copies."""
    if type(value) in (list, dict) or isinstance(value, OrderedDict | UserDict):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
