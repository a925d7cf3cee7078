"""Key-value caches: a recompute would append every key a second time.

transformers takes them away from its checkpointed layers. Here the same holds for parts of layers
and for plain modules, but a cache that holds something already (a prefix) is refused: without it
the forward would be another.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError

log = logging.getLogger("ds_ckpt")
_said: set[str] = set()


def _is_cache(value: Any) -> bool:
    if isinstance(value, Tensor) or not hasattr(value, "get_seq_length"):
        return False
    names = {base.__name__ for base in type(value).__mro__}
    return "Cache" in names or hasattr(value, "update")


def without_empty_caches(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with None for every empty cache.

    Raises UnsupportedError for a cache that holds something.
    """
    return (
        tuple(_without(name, value) for value in args),
        {key: _without(name, value) for key, value in kwargs.items()},
    )


def _without(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str) or not _is_cache(value):
        return value
    if value.get_seq_length() > 0:
        raise UnsupportedError(
            Problem(
                where=name,
                found=f"{type(value).__name__} with {value.get_seq_length()} positions",
                why="the recompute would append this block's keys and values a second time, and "
                "without the cache the forward would be another",
                remedy="train without a prefix in the cache, or leave the block out of "
                "checkpointing",
            )
        )
    kind = type(value).__name__
    if kind not in _said:
        _said.add(kind)
        log.warning(
            "ds_ckpt: %s is left out in training: checkpointed blocks must not fill a cache "
            "(model.config.use_cache = False says so beforehand)",
            kind,
        )
    return None
