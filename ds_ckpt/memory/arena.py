"""One buffer, allocated once, that many tensors are kept in: no fragmentation between them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_ckpt.memory.pool import Event, HostPool

ALIGNMENT_BYTES = 256
"""Parts begin at a multiple, as the allocators of accelerators do."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Gives out parts of one uint8 buffer. Not thread-safe.

    The buffer is allocated at the first request, for `parts` requests of that size. What does not
    fit is counted, and the next time that the arena is empty the buffer is allocated anew, for the
    most that was ever asked for at one time.

    Args:
        parts: how many requests like the first one must fit.
        allocate: gives a flat uint8 tensor of so many bytes.
        release: told of a buffer that has been replaced.
    """

    def __init__(
        self,
        parts: int,
        allocate: Callable[[int], Tensor],
        release: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        self._parts, self._allocate, self._release = parts, allocate, release
        self._buffer: Tensor | None = None
        self._taken: list[tuple[int, int]] = []
        """First byte and size of each part that is out, in order."""
        self._outside = 0
        self._most = 0
        self.refused = 0
        """Requests that did not fit."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._buffer is None else self._buffer.numel()

    @property
    def nbytes_in_use(self) -> int:
        return sum(size for _, size in self._taken)

    def room(self, nbytes: int) -> Tensor | None:
        """uint8 [nbytes] in the buffer, with whatever was there; None where it does not fit."""
        size = _aligned(nbytes)
        if not self._taken:
            self._outside = 0
            self._fit(size)
        assert self._buffer is not None
        start = 0
        for first, taken in self._taken:
            if first - start >= size:
                break
            start = first + taken
        fits = start + size <= self._buffer.numel()
        if fits:
            insort(self._taken, (start, size))
        else:
            self._outside += size
            self.refused += 1
        self._most = max(self._most, self.nbytes_in_use + self._outside)
        return self._buffer[start : start + nbytes] if fits else None

    def _fit(self, size: int) -> None:
        wanted = max(self._most, self._parts * size if self._buffer is None else size)
        if self._buffer is not None and self._buffer.numel() >= wanted:
            return
        if self._buffer is not None:
            self._release(self._buffer)
            self._buffer = None  # before the new one is allocated
        self._buffer = self._allocate(wanted)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the buffer."""
        if self._buffer is None:
            return False
        return 0 <= tensor.data_ptr() - self._buffer.data_ptr() < self._buffer.numel()

    def give_back(self, part: Tensor) -> None:
        """Let another use the part.

        Raises:
            ValueError: it is not one that `room` gave and that is still out.
        """
        assert self._buffer is not None
        start = part.data_ptr() - self._buffer.data_ptr()
        for index, (first, _) in enumerate(self._taken):
            if first == start:
                del self._taken[index]
                return
        raise ValueError(f"no part of this arena begins at byte {start}")

    def close(self) -> None:
        """Let the buffer go; parts that are still out stay valid as long as they are held."""
        if self._buffer is not None:
            self._release(self._buffer)
        self._buffer, self._taken = None, []


def device_arena(parts: int, device: torch.device) -> Arena:
    """An arena in the device's memory."""
    return Arena(parts, lambda n: torch.empty(n, dtype=torch.uint8, device=device))


class HostArena:
    """An arena in one block of a pool, with the pool behind it for what does not fit.

    Events are not kept for the arena's parts: all copies run on one side stream, in order.
    """

    def __init__(self, parts: int, pool: HostPool) -> None:
        self._pool = pool
        self.arena = Arena(parts, lambda n: pool.take((n,), torch.uint8), pool.give_back)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        wanted = torch.Size(shape).numel() * dtype.itemsize
        part = self.arena.room(wanted) if wanted else None
        if part is None:
            return self._pool.take(shape, dtype)
        return part.view(dtype).view(torch.Size(shape))

    def give_back(self, tensor: Tensor, event: Event | None = None) -> None:
        if self.arena.holds(tensor):
            self.arena.give_back(tensor)
        else:
            self._pool.give_back(tensor, event)
