"""Attributes set on live objects, each remembered so that it can be taken back exactly.

The only way in which this package changes an object that it does not own.
"""

from __future__ import annotations

from typing import Any

_ABSENT = object()


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

    def undo(self) -> None:
        while self._undo:
            target, name, before = self._undo.pop()
            if before is _ABSENT:
                if name in vars(target):
                    delattr(target, name)
            else:
                setattr(target, name, before)
