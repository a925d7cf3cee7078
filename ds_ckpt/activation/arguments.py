"""Takes the tensors out of a call, so that something else can keep them until the recompute.

Checkpointing keeps a call's positional tensors where saved-tensor hooks see them; what comes by
keyword, or inside `functools.partial` (Hugging Face's layers), is held by a closure that no hook
sees. `TakenApart` makes a flat list of all of them and puts the call together again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict, UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Place:
    """Stands where tensor number `index` was."""

    index: int


class TakenApart:
    """A call without its tensors.

    Tuples, lists, dicts and their kin (named tuples, model outputs, `UserDict`) and dataclasses are
    looked into; the recompute gets copies of them. Other objects stay as they are, with the tensors
    that they hold. So do parameters: a recompute must be given the parameter itself, since ZeRO-3
    exchanges what it points to.

    Attributes:
        tensors: what was taken out, each object once.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}
        function, args, kwargs = opened(function, tuple(args), dict(kwargs))
        self._own: Call | None = (function, args, kwargs)
        self._call = (function, self._without(args), self._without(kwargs))
        self._seen.clear()

    def _without(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                return value
            index = self._seen.setdefault(id(value), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(value)
            return _Place(index)
        return _each(value, self._without)

    def own(self) -> Call:
        """The call as it was given, once: a block may write into its caller's lists and dicts."""
        assert self._own is not None, "it has been asked for before"
        own, self._own = self._own, None
        return own

    def together(self, tensors: Sequence[Tensor]) -> Call:
        """The call with `tensors` in the places of those that were taken out."""
        put_in = _PutIn(tensors)
        function, args, kwargs = self._call
        return function, put_in(args), put_in(kwargs)

    def release(self) -> list[Tensor]:
        """Hand the tensors out and hold them no longer."""
        tensors, self.tensors = self.tensors, []
        return tensors


class _PutIn:
    """No function that calls itself: such a closure is a cycle, and would hold the tensors of every
    recompute until the garbage collector comes by."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __call__(self, value: Any) -> Any:
        return self._tensors[value.index] if isinstance(value, _Place) else _each(value, self)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a container with every member changed; anything else as it is."""
    if type(value) in (tuple, list):
        return type(value)(change(item) for item in value)
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(item) for item in value))
    if isinstance(value, OrderedDict | UserDict):
        changed = copy.copy(value)  # its class and attributes
        for key, item in value.items():
            changed[key] = change(item)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type | _Place):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(twin, field.name, change(getattr(value, field.name)))
        return twin
    return value


def opened(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The same call with every `functools.partial` around the function taken off."""
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    return function, args, kwargs
