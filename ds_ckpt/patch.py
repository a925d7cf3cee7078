"""Attributes set on live objects, each remembered so that it can be taken back exactly.

The only way in which this package changes an object that it does not own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

_ABSENT = object()


class Method:
    """Stands on one object in the place of its own method.

    A deep copy or a pickle of the object has the original: with a plain function there, a copied
    module would go on running the forward, and so the weights, of the one it was copied from.

    Args:
        function: what is called.
        original: what it stands for.
    """

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._function, self._original = function, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_itself, (self._original,))


def _itself(value: Any) -> Any:
    return value


@dataclass(eq=False)
class _Layer:
    """A value set on an attribute, over what was there before."""

    before: Any


@dataclass(eq=False)
class _Stack:
    """All that is set on one attribute of one object, the latest last."""

    target: Any
    name: str
    layers: list[_Layer] = field(default_factory=list)


_stacks: WeakValueDictionary[tuple[int, str], _Stack] = WeakValueDictionary()
"""By object and attribute. Weak: what is dropped without an `undo` must not live on here."""


class Patches:
    """Sets attributes and restores them.

    An attribute that the object had only through its class is deleted again on `undo`, so the
    object's `__dict__` is what it was. Several may set one attribute of an object and be undone in
    any order: the latest that is left stands, and the last one gives back what was there at first.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[_Stack, _Layer]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        stack = _stacks.setdefault((id(target), name), _Stack(target, name))
        layer = _Layer(vars(target).get(name, _ABSENT))
        stack.layers.append(layer)
        self._undo.append((stack, layer))
        setattr(target, name, value)

    def set_method(
        self,
        target: Any,
        name: str,
        function: Callable[..., Any],
        original: Callable[..., Any] | None = None,
    ) -> None:
        """As `set`, with the original for copies of the object: its own method if none is given."""
        self.set(target, name, Method(function, original or getattr(target, name)))

    @property
    def active(self) -> bool:
        """Whether anything is set."""
        return bool(self._undo)

    def undo(self) -> None:
        while self._undo:
            stack, layer = self._undo.pop()
            target, name, before = stack.target, stack.name, layer.before
            index = stack.layers.index(layer)
            del stack.layers[index]
            if index < len(stack.layers):  # another was set on it, and stays
                stack.layers[index].before = before
                continue
            if before is _ABSENT:
                if name in vars(target):
                    delattr(target, name)
            else:
                setattr(target, name, before)
