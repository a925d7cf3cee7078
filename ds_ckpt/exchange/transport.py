"""What carries an exchange's bytes: the protocol, and `torch.distributed` behind it.

`virtual` has a transport between threads of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as torch_dist
from torch import Tensor


class Transport(Protocol):
    """One process's end of a group that exchanges bytes and sums."""

    @property
    def world(self) -> int:
        """Number of processes in the group."""
        ...

    @property
    def dp_rank(self) -> int:
        """This process's index in the group."""
        ...

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> None:
        """Send consecutive pieces of `input`, one to each process; fill `output` likewise.

        Args:
            output: uint8 [sum(output_splits)], filled in the order of sources.
            input: uint8 [sum(input_splits)], cut in the order of destinations.
            output_splits: bytes from each process.
            input_splits: bytes for each process.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place; the same bits everywhere.

        Args:
            tensor: fp32 of any shape, contiguous.
        """
        ...


class TorchTransport:
    """A process group.

    Args:
        group: the process group; None is the default group.
        all_to_all_single: `torch.distributed`'s function, or one of the same leading arguments
            that counts around it.
        all_reduce: likewise.
    """

    def __init__(
        self,
        group: Any = None,
        all_to_all_single: Callable[..., Any] = torch_dist.all_to_all_single,
        all_reduce: Callable[..., Any] = torch_dist.all_reduce,
    ) -> None:
        self._group = group
        self._all_to_all_single = all_to_all_single
        self._all_reduce = all_reduce
        self.world: int = torch_dist.get_world_size(group)
        self.dp_rank: int = torch_dist.get_rank(group)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> None:
        self._all_to_all_single(
            output, input, list(output_splits), list(input_splits), group=self._group
        )

    def all_reduce(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, group=self._group)
