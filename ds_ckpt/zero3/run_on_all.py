"""One process's failure is everybody's: no process waits in a collective where another stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from ds_ckpt.errors import Problem, StateError

_T = TypeVar("_T")


def run_on_all_or_raise(action: Callable[[], _T], group: Any, *, what: str) -> _T:
    """Run `action` on every process of the group; where it fails on one, all raise.

    Args:
        action: must not call a collective itself.
        what: the action in words, for those processes on which it went well.

    Raises:
        Exception: this process's own failure.
        StateError: another process failed; with what it said.
    """
    from deepspeed.accelerator import get_accelerator

    result: list[_T] = []
    failure: Exception | None = None
    try:
        result.append(action())
    except Exception as error:
        failure = error
    device = torch.device(get_accelerator().current_device_name())
    failed = torch.tensor([int(failure is not None)], dtype=torch.int64, device=device)
    torch_dist.all_reduce(failed, group=group)
    if not failed.item():
        return result[0]
    told: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(told, None if failure is None else str(failure), group=group)
    if failure is not None:
        raise failure
    process, said = next((p, words) for p, words in enumerate(told) if words is not None)
    raise StateError(
        Problem(
            where="the other processes of the data-parallel group",
            found=f"{int(failed.item())} of them could not {what}; process {process} said:\n{said}",
            why="it is done on all processes or on none",
            remedy="do what that error says",
        )
    )
