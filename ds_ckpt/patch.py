"""Attributes set on live objects, each recorded so that it can be restored exactly.

The only way in which this package replaces methods, functions and settings that it does not own.
`zero3` also writes state of DeepSpeed: gradients, weights, their status. Start-up code, which other
environments run without the package, replaces `deepspeed.initialize` itself.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class PatchedMethod:
    """Function in place of an object's method; copies and pickles of it get the original.

    `owner` is the object that has set it. Wrappers of `functools` copy it.
    """

    def __init__(
        self, function: Callable[..., Any], original: Callable[..., Any], owner: object = None
    ) -> None:
        functools.update_wrapper(self, original)
        self._function, self.original, self.owner = function, original, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.original,)


def _identity(value: Any) -> Any:
    return value


class Patches:
    """Sets attributes, and restores them in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        self._undo.append((target, name, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def set_method(
        self,
        target: Any,
        name: str,
        function: Callable[..., Any],
        original: Callable[..., Any] | None = None,
        owner: object = None,
    ) -> None:
        """Set a method. Copies of the object get `original`, by default its own method."""
        self.set(target, name, PatchedMethod(function, original or getattr(target, name), owner))

    @property
    def active(self) -> bool:
        """Return whether any attribute is set."""
        return bool(self._undo)

    def undo(self) -> None:
        """Restore all attributes; one that existed only in the object's class is deleted."""
        while self._undo:
            target, name, before = self._undo.pop()
            if before is not _ABSENT:
                setattr(target, name, before)
            elif name in vars(target):
                delattr(target, name)


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the block."""
    patches = Patches()
    patches.set(target, name, value)
    try:
        yield
    finally:
        patches.undo()
