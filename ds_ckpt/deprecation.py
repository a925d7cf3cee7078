"""Former names of the Python API, which warn for one release."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def _warn(former: str, instead: str) -> None:
    message = f"{former} is deprecated, and removed in the next release: use {instead}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def former_names(module: str, names: Mapping[str, tuple[Any, str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module: values, and their replacements, by former name."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value, instead = names[name]
        _warn(f"{module}.{name}", instead)
        return value

    return get


class FormerAttribute:
    """Attribute of a class by its former name; `path` leads to its value, `default` without one.

    `of` is the name of such an object in messages.
    """

    def __init__(self, path: str, of: str = "session", *, default: Any = None) -> None:
        self._path, self._of, self._default = path, of, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        _warn(f"{self._of}.{self._name}", f"{self._of}.{self._path}")
        for name in self._path.split("."):
            instance = getattr(instance, name, None)
        return self._default if instance is None else instance
