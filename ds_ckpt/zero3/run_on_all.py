"""Agreement on failures: no rank waits in a collective after another has raised."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from ds_ckpt.errors import Problem, StateError

_T = TypeVar("_T")


def run_on_all_or_raise(action: Callable[[], _T], *, what: str) -> _T:
    """Run `action` on every rank of the program; if it fails on one, all raise.

    `action` must not call a collective. `what` names it for the ranks on which it succeeded: they
    raise StateError with the message of one that failed.
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
    torch_dist.all_reduce(failed)
    if not failed.item():
        return result[0]
    messages: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(messages, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    rank, message = next((r, text) for r, text in enumerate(messages) if text is not None)
    found = f"{int(failed.item())} of them could not {what}; rank {rank}:\n{message}"
    why, remedy = "all ranks do it, or none", "follow that error's remedy"
    raise StateError(Problem("the other ranks", found, why, remedy))
