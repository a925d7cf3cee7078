"""Virtual ranks inside one process: threads that exchange bytes through memory.

One rank computes at a time: small operators slow down if threads compete for the interpreter.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from ds_ckpt.exchange.transport import Lengths

T = TypeVar("T")
_computing = threading.Lock()


class VirtualWorld:
    """`world` transports that meet at a barrier, for at most `timeout_s`."""

    def __init__(self, world: int, *, timeout_s: float = 300.0) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=timeout_s)
        self.posted: list[Any] = [None] * world
        self.transports = [VirtualTransport(self, rank) for rank in range(world)]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call `work(rank)` in one thread per rank and return the results in rank order.

        Raises the first exception that a `work` raised; the other ranks are released.
        """

        def body(rank: int) -> T:
            try:
                with _computing:
                    return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(body, rank) for rank in range(self.world)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self.barrier.reset()
            # a broken barrier is another rank's error
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [future.result() for future in futures]

    def synchronize(self) -> None:
        """Wait for the other ranks, which compute meanwhile."""
        _computing.release()
        try:
            self.barrier.wait()
        finally:
            _computing.acquire()


class VirtualTransport:
    """Transport of one rank; it counts collectives and bytes sent to other ranks."""

    def __init__(self, group: VirtualWorld, dp_rank: int) -> None:
        self._group, self.world, self.dp_rank = group, group.world, dp_rank
        self.calls = self.sent_bytes = 0

    def all_to_all(self, output: Tensor, input: Tensor, received: Lengths, sent: Lengths) -> None:
        """Implement `Transport.all_to_all`. Raises AssertionError if sizes do not match."""
        assert sum(sent) == input.numel(), "sizes do not cover the input"
        assert sum(received) == output.numel(), "sizes do not cover the output"
        self.sent_bytes += sum(sent) - sent[self.dp_rank]
        start = 0
        posted = self._post((input, sent))
        for (buffer, splits), size in zip(posted, received, strict=True):
            assert splits[self.dp_rank] == size, f"{splits[self.dp_rank]} bytes, not {size}, came"
            at = sum(splits[: self.dp_rank])
            output[start : start + size].copy_(buffer[at : at + size])
            start += size
        self._group.synchronize()  # no rank may reuse its input before all have read it

    def all_reduce(self, tensor: Tensor) -> None:
        """Implement `Transport.all_reduce`: sum in rank order, bytes counted as in a ring."""
        self.sent_bytes += 2 * (self.world - 1) * tensor.nbytes // self.world
        first, *others = self._post(tensor.clone())
        assert all(part.shape == first.shape for part in others), "ranks sum different shapes"
        tensor.copy_(first)
        for part in others:
            tensor.add_(part)
        self._group.synchronize()

    def _post(self, content: Any) -> list[Any]:
        """Hand content to the other ranks and return that of all."""
        self.calls += 1
        self._group.posted[self.dp_rank] = content
        self._group.synchronize()
        return self._group.posted
