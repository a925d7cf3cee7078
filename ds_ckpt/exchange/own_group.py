"""A process group of the exchange's own, so that its collectives may run beside DeepSpeed's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as torch_dist


def twin_of(group: Any) -> Any:
    """A new group of the same processes and backend.

    Every process of the program must call it, and all in the same order.
    """
    ranks = torch_dist.get_process_group_ranks(group)
    return torch_dist.new_group(ranks, backend=torch_dist.get_backend(group))


def discard(group: Any) -> None:
    """Give a group up; nothing happens if the program has done so already.

    Not a collective. Another process that is still in a collective of the group gets an error.
    """
    if torch_dist.is_initialized():
        with contextlib.suppress(ValueError):  # what it raises for a group that is not there
            torch_dist.destroy_process_group(group)
