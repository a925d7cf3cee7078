"""Key-value caches: a recompute would append every key a second time.

transformers takes them away from its checkpointed layers. In training the same holds for parts of
layers and for plain modules, but a cache that holds something already (a prefix) is refused:
without it the forward would be another. In evaluation mode a block that gets a cache fills it, and
is not checkpointed.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ds_ckpt.errors import Problem, UnsupportedError

log = logging.getLogger("ds_ckpt")
_said: set[str] = set()


def _is_cache(value: Any) -> bool:
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return False
    if not hasattr(value, "get_seq_length"):
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


def holds_cache(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the arguments is a cache: in evaluation whoever gives it wants it filled."""
    if not any(map(_is_cache, (*args, *kwargs.values()))):
        return False
    if "evaluation" not in _said:
        _said.add("evaluation")
        log.warning(
            "ds_ckpt: %s gets a cache in evaluation mode while gradients are on: blocks are not "
            "checkpointed then (use_cache=False, or torch.no_grad)",
            name,
        )
    return True


def _without(name: str, value: Any) -> Any:
    if not _is_cache(value):
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
