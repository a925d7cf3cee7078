"""Host memory that is taken and given back, and arenas: one buffer, allocated once, that many
tensors are kept in, so that there are no gaps between them.

Where a GPU copies to and from host memory it is page-locked, and comes from torch's own allocator,
which caches blocks and hands none out before the copies from and to it are through. It rounds them
up to a power of two; `pinned_max_round_threshold_mb` in torch's PYTORCH_CUDA_ALLOC_CONF says from
where on it does not. Plain host memory torch does not cache: faulting in fresh pages costs more
than the copies that follow, so blocks are kept here.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")
PAGE_BYTES = 4096


class HostPool:
    """Thread-safe. A tensor that is never given back keeps its block.

    Args:
        pinned: whether blocks are page-locked. None: where CUDA is available. On a machine whose
            accelerator is the CPU a copy needs no pinned memory, and blocks are plain.

    Raises:
        ValueError: `pinned=True` without CUDA.
    """

    def __init__(self, pinned: bool | None = None) -> None:
        if pinned and not torch.cuda.is_available():
            raise ValueError("pinned host memory needs CUDA, which is not available")
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._lock = threading.Lock()
        self._free: OrderedDict[int, list[Tensor]] = OrderedDict()
        """By size; those last whose size was used last."""
        self._peak = self._peak_before = 0
        """Most bytes in use at once, since none were and before that."""
        self._in_use: dict[int, Tensor] = {}
        """Blocks (uint8) by the address of their first byte."""
        self._bytes = 0
        """Of them."""

    @property
    def nbytes_held(self) -> int:
        """Bytes of all blocks, free ones included."""
        with self._lock:
            free = sum(size * len(blocks) for size, blocks in self._free.items())
        return free + self.nbytes_in_use

    @property
    def nbytes_in_use(self) -> int:
        """Bytes of the blocks that are handed out, their rounding included."""
        return self._bytes

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous host tensor with whatever its block held before; give it back when done."""
        wanted = math.prod(shape) * dtype.itemsize
        if wanted == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = block_bytes(wanted)
        with self._lock:
            block = self._free[size].pop() if self._free.get(size) else None
        if block is None:  # outside the lock: pinning takes milliseconds
            block = self._allocate(size)
        with self._lock:
            self._in_use[block.data_ptr()] = block
            self._bytes += block.numel()
            self._peak = max(self._peak, self._bytes)
        return block[:wanted].view(dtype).view(torch.Size(shape))

    def give_back(self, tensor: Tensor) -> None:
        """Let another use the memory of a tensor that `take` gave (itself or a reshaped view).

        Raises:
            ValueError: the tensor is not this pool's, or has been given back before.
        """
        if tensor.numel() == 0:
            return
        with self._lock:
            block = self._in_use.pop(tensor.data_ptr(), None)
            if block is None:
                raise ValueError(
                    f"a tensor of shape {list(tensor.shape)} that this pool has not handed out, or "
                    "that was given back before"
                )
            self._bytes -= block.numel()
            if not block.is_pinned():  # torch waits for the copies of what is pinned, and caches it
                self._free.setdefault(block.numel(), []).append(block)
                self._free.move_to_end(block.numel())
                self._trim()
            if not self._in_use:
                self._peak, self._peak_before = 0, self._peak

    def _trim(self) -> None:
        """Give the system back what is free beyond the most that was in use at once: blocks of
        sizes that have not been asked for the longest."""
        limit = max(self._peak, self._peak_before)
        free = sum(size * len(blocks) for size, blocks in self._free.items())
        while free > limit:
            size, blocks = next(iter(self._free.items()))
            if blocks:
                blocks.pop()
                free -= size
            else:
                del self._free[size]

    def _allocate(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        except RuntimeError as error:
            if not self._pinned:
                raise
            self._pinned = False
            log.warning(
                "ds_ckpt: the system refused to pin %d bytes of host memory (%s); host buffers "
                "stay pageable and copies to them block",
                nbytes,
                error,
            )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def block_bytes(wanted: int) -> int:
    """`wanted` > 0 rounded up to a multiple of an eighth of the power of two below it, in pages:
    tensors of nearly the same size share blocks."""
    octave = 1 << max(0, (wanted - 1).bit_length() - 1)
    step = max(PAGE_BYTES, octave // 8)
    return -(-wanted // step) * step


# one buffer for many tensors


ALIGNMENT_BYTES = 256
"""Parts begin at a multiple, as the allocators of accelerators do."""


class Arena:
    """Gives out parts of one uint8 buffer. Not thread-safe.

    The buffer is allocated at the first request, for `parts` requests of that size. What does not
    fit is counted, and the next time that the arena is empty the buffer is allocated anew, for the
    most that was ever asked for at one time.

    Args:
        parts: how many requests like the first one must fit.
        allocate: gives a flat uint8 tensor of so many bytes.
    """

    def __init__(self, parts: int, allocate: Callable[[int], Tensor]) -> None:
        self._parts, self._allocate = parts, allocate
        self._buffer: Tensor | None = None
        self._taken: list[tuple[int, int]] = []
        """First byte and size of each part that is out, in order."""
        self._outside = self._most = 0
        self.refused = 0
        """Requests that did not fit."""

    @property
    def nbytes_in_use(self) -> int:
        return sum(size for _, size in self._taken)

    def room(self, nbytes: int) -> Tensor | None:
        """uint8 [nbytes] in the buffer, with whatever was there; None where it does not fit."""
        size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
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
        if self._buffer is None or self._buffer.numel() < wanted:
            self._buffer = None  # before the new one is allocated
            self._buffer = self._allocate(wanted)

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


def device_arena(parts: int, device: torch.device) -> Arena:
    """An arena in the device's memory."""
    return Arena(parts, lambda n: torch.empty(n, dtype=torch.uint8, device=device))
