"""Attributes set on live objects, each remembered so that it can be taken back exactly.

The only way in which this package changes an object that it does not own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

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


class Patches:
    """Sets attributes and restores them in reverse order.

    An attribute that the object had only through its class is deleted again on `undo`, so the
    object's `__dict__` is what it was.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        before = vars(target).get(name, _ABSENT)
        self._undo.append((target, name, before))
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
            target, name, before = self._undo.pop()
            if before is _ABSENT:
                if name in vars(target):
                    delattr(target, name)
            else:
                setattr(target, name, before)
