"""Virtual ranks inside one process: threads that exchange bytes through memory.

They train with more workers than the machine has cores, and test exchanges without launching
processes. Speed is not imitated. One rank computes at a time: operators on small tensors slow down
if threads compete for the interpreter between each two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
_computing = threading.Lock()


class VirtualWorld:
    """`world` transports that meet at a barrier.

    Args:
        world: number of virtual ranks.
        timeout_s: longest wait of one rank for the others, after which all of them raise.
    """

    def __init__(self, world: int, *, timeout_s: float = 300.0) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=timeout_s)
        self.mail: list[tuple[Tensor, Sequence[int]] | None] = [None] * world
        self.summands: list[Tensor | None] = [None] * world
        self.transports = [VirtualTransport(self, rank) for rank in range(world)]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call `work(rank)` in one thread per rank and return the results in rank order.

        Raises:
            Exception: the first exception that a `work` raised; the other ranks are released.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                with _computing:
                    results[rank] = work(rank)
            except threading.BrokenBarrierError as error:
                errors.append(error)  # after the error that broke the barrier, if any
            except BaseException as error:
                errors.insert(0, error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.barrier.reset()
            raise errors[0]
        return [results[rank] for rank in range(self.world)]

    def synchronize(self) -> None:
        """Wait for the other ranks, which compute meanwhile."""
        _computing.release()
        try:
            self.barrier.wait()
        finally:
            _computing.acquire()


class VirtualTransport:
    """Transport of one rank of a `VirtualWorld`.

    Attributes:
        calls: number of collectives so far.
        sent_bytes: bytes sent to other ranks so far.
    """

    def __init__(self, group: VirtualWorld, dp_rank: int) -> None:
        self._group = group
        self.world = group.world
        self.dp_rank = dp_rank
        self.calls = 0
        self.sent_bytes = 0

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> None:
        """Implement `Transport.all_to_all`. Raises AssertionError if sizes do not match."""
        assert sum(input_splits) == input.numel(), "input splits do not cover the input"
        assert sum(output_splits) == output.numel(), "output splits do not cover the output"
        self.calls += 1
        self.sent_bytes += sum(input_splits) - input_splits[self.dp_rank]
        mail = self._group.mail
        mail[self.dp_rank] = (input, input_splits)
        self._group.synchronize()
        start = 0
        for source, size in enumerate(output_splits):
            posted = mail[source]
            assert posted is not None
            buffer, splits = posted
            assert splits[self.dp_rank] == size, (
                f"rank {source} sends {splits[self.dp_rank]} bytes to {self.dp_rank}, "
                f"which expects {size}"
            )
            at = sum(splits[: self.dp_rank])
            output[start : start + size].copy_(buffer[at : at + size])
            start += size
        self._group.synchronize()  # no rank may reuse its input before all have read it

    def all_reduce(self, tensor: Tensor) -> None:
        """Implement `Transport.all_reduce`: sum in rank order, bytes counted as in a ring."""
        group = self._group
        self.calls += 1
        self.sent_bytes += (
            2 * (self.world - 1) * tensor.numel() * tensor.element_size() // self.world
        )
        group.summands[self.dp_rank] = tensor.clone()
        group.synchronize()
        parts = [part for part in group.summands if part is not None]
        assert len({part.shape for part in parts}) == 1, "ranks sum tensors of different shapes"
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)
        group.synchronize()
