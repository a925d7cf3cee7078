"""A world of virtual processes inside one: threads that exchange bytes through memory.

For experiments on accuracy with more workers than the machine has processes for, and for tests.
It says nothing about speed. One of them computes at a time: operators on small tensors take longer
where threads fight for the interpreter between each two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
_turn = threading.Lock()


class VirtualWorld:
    """`world` transports that meet at a barrier.

    Args:
        world: number of virtual processes.
        timeout_s: how long one waits for the others, who compute one after the other, before all
            of them raise.
    """

    def __init__(self, world: int, *, timeout_s: float = 300.0) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=timeout_s)
        self.mail: list[tuple[Tensor, Sequence[int]] | None] = [None] * world
        self.summands: list[Tensor | None] = [None] * world
        self.transports = [VirtualTransport(self, p) for p in range(world)]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call `work(process)` in one thread per virtual process; results in their order.

        Raises:
            Exception: the first one that a `work` raised; the others are released, not left
                waiting for it.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(process: int) -> None:
            try:
                with _turn:
                    results[process] = work(process)
            except threading.BrokenBarrierError as error:
                errors.append(error)  # after the error that broke it, if there was one
            except BaseException as error:
                errors.insert(0, error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(p,), daemon=True) for p in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.barrier.reset()
            raise errors[0]
        return [results[p] for p in range(self.world)]

    def meet(self) -> None:
        """Wait for the others, who take their turns meanwhile."""
        _turn.release()
        try:
            self.barrier.wait()
        finally:
            _turn.acquire()


class VirtualTransport:
    """One virtual process's end of a `VirtualWorld`.

    Attributes:
        calls: collectives so far.
        sent_bytes: bytes that left for other processes so far.
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
        """As `Transport.all_to_all`; sizes that do not match are an `AssertionError`."""
        assert sum(input_splits) == input.numel(), "input splits do not cover the input"
        assert sum(output_splits) == output.numel(), "output splits do not cover the output"
        self.calls += 1
        self.sent_bytes += sum(input_splits) - input_splits[self.dp_rank]
        mail = self._group.mail
        mail[self.dp_rank] = (input, input_splits)
        self._group.meet()
        start = 0
        for source, size in enumerate(output_splits):
            posted = mail[source]
            assert posted is not None
            buffer, splits = posted
            assert splits[self.dp_rank] == size, (
                f"process {source} sends {splits[self.dp_rank]} bytes to {self.dp_rank}, "
                f"which expects {size}"
            )
            at = sum(splits[: self.dp_rank])
            output[start : start + size].copy_(buffer[at : at + size])
            start += size
        # Nobody may reuse its input before all have read it.
        self._group.meet()

    def all_reduce(self, tensor: Tensor) -> None:
        """As `Transport.all_reduce`, added up in the order of processes; bytes as a ring's."""
        world = self._group
        self.calls += 1
        self.sent_bytes += (
            2 * (self.world - 1) * tensor.numel() * tensor.element_size() // self.world
        )
        world.summands[self.dp_rank] = tensor.clone()
        world.meet()
        parts = [part for part in world.summands if part is not None]
        assert len({part.shape for part in parts}) == 1, "processes sum tensors of unlike shapes"
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)
        world.meet()
