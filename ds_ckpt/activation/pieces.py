"""What is kept of one tensor: a stretch of its storage, on the device, in host memory, or both;
whole, or one part of it where processes share.

No policy here: `offload.py` decides when a piece goes and comes, `partition.py` what is split.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation.snapshot import input_changed
from ds_ckpt.memory.copies import Ticket
from ds_ckpt.telemetry.memory import version_of

ALIGNMENT_BYTES = 64
"""A stretch begins at a multiple: the copy is aligned as the original was, so that kernels which
look at alignment add up in the same order."""
Key = tuple[int, int, int]
ON_DEVICE = ("source", "slot", "fetched")
"""Attributes of a piece that are on the device."""


@dataclass(frozen=True)
class Stretch:
    """Bytes `start` to `start + nbytes` of a storage."""

    start: int
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Stretch:
        """What must be kept for `tensor`: its whole storage, or its part if that is under half."""
        whole = tensor.untyped_storage().nbytes()
        size = tensor.element_size()
        first = int(tensor.storage_offset()) * size
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        end = first + size * (1 + sum((n - 1) * stride for n, stride in pairs))
        if 2 * (end - first) >= whole:
            return cls(0, whole)
        start = first - first % ALIGNMENT_BYTES
        return cls(start, end - start)


def key_of(tensor: Tensor) -> Key:
    """What two tensors have in common that need the same bytes of the same storage."""
    stretch = Stretch.of(tensor)
    return (tensor.untyped_storage()._cdata, stretch.start, stretch.nbytes)


def bytes_of(tensor: Tensor, stretch: Stretch) -> Tensor:
    """uint8 [nbytes]: the stretch of the tensor's storage, for copies."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), stretch.start, (stretch.nbytes,), (1,))


class _OfStorage:
    """A stretch of a storage, as it was when it was kept.

    Attributes:
        calls: numbers of the block calls that keep it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        """While it lives, the storage's address is not given to another."""
        self.stretch = Stretch.of(tensor)
        self.version = int(tensor._version)
        self.calls: set[int] = set()

    @property
    def key(self) -> Key:
        return (self.storage.cdata, self.stretch.start, self.stretch.nbytes)

    @property
    def nbytes(self) -> int:
        return self.stretch.nbytes


class Piece(_OfStorage):
    """One stretch of one storage. Lives as long as a graph holds a `Kept` of it.

    Attributes:
        label: the block that kept it first.
        source: shares memory and version with the original; None once the original is let go.
        slot: the arena's copy (uint8), which stays on the device.
        host: the pool's copy (uint8).
        leaving: the copy to the host, while `source` is held for it.
        fetched: the copy that was brought back (uint8).
        arriving: the copy that fills `fetched`, until somebody has waited for it.
        changed: the original was changed in place before it could be let go.
        asked: autograd's number of the backward that asked for it last.
    """

    def __init__(self, tensor: Tensor, label: str, dead: deque[dict[str, Any]]) -> None:
        super().__init__(tensor)
        self.label = label
        self.source: Tensor | None = tensor.detach()
        self.slot: Tensor | None = None
        self.host: Tensor | None = None
        self.leaving: Ticket | None = None
        self.fetched: Tensor | None = None
        self.arriving: Ticket | None = None
        self.changed = False
        self.asked = -2
        # And not `__del__`: while that runs, weak references still give the piece to other threads,
        # which would use, and account for, what it is about to leave.
        weakref.finalize(self, _bury, vars(self), dead).atexit = False

    @property
    def device_bytes(self) -> int:
        """Bytes of this piece on the device: the original, the arena's copy or the fetched one."""
        return sum(getattr(self, name) is not None for name in ON_DEVICE) * self.nbytes

    @property
    def is_here(self) -> bool:
        """Whether the device has it, or is about to."""
        return self.device_bytes > 0

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether it holds what `tensor`, over the same storage, holds now."""
        return not self.changed and self.version == tensor._version

    def look(self) -> None:
        """Note whether the original has been changed in place."""
        if self.source is not None and self.source._version != self.version:
            self.changed = True


def _bury(piece: dict[str, Any], dead: deque[dict[str, Any]]) -> None:
    """Leave the attributes of a piece that has died, and its `device_bytes`.

    Nothing is locked here: the garbage collector may call this anywhere. Device memory that no copy
    needs is freed at once; the rest, and host memory, when the store looks next.
    """
    on_device = sum(piece[name] is not None for name in ON_DEVICE)
    piece["device_bytes"] = on_device * piece["stretch"].nbytes
    for ticket, end in (("leaving", "source"), ("arriving", "fetched")):
        if piece[ticket] is None:
            piece[end] = None
    dead.append(piece)


class _View:
    """A tensor without its memory."""

    __slots__ = ("__weakref__", "call", "dtype", "offset_bytes", "size", "stride")

    def __init__(self, tensor: Tensor, call: BlockCall) -> None:
        self.call: BlockCall | None = call
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset_bytes = tensor.storage_offset() * tensor.element_size()

    def over(self, memory: Tensor, stretch: Stretch) -> Tensor:
        """The tensor over a copy (uint8) of a stretch of its storage."""
        offset = memory.storage_offset() + self.offset_bytes - stretch.start
        view = torch.empty(0, dtype=self.dtype, device=memory.device)
        offset //= self.dtype.itemsize
        return view.set_(memory.untyped_storage(), offset, self.size, self.stride)


class Kept(_View):
    """What a graph holds in the place of a tensor."""

    __slots__ = ("piece",)

    def __init__(self, tensor: Tensor, piece: Piece, call: BlockCall) -> None:
        super().__init__(tensor, call)
        self.piece = piece

    def view(self) -> Tensor:
        """The tensor over what is on the device now; the piece must be there."""
        piece = self.piece
        if piece.source is not None:
            base = piece.source
            if base.dtype != self.dtype:  # another tensor over the same storage
                base = torch.empty(0, dtype=self.dtype, device=base.device)
                base.set_(piece.source.untyped_storage(), 0, (0,), (1,))
            offset = self.offset_bytes // self.dtype.itemsize
            return base.as_strided(self.size, self.stride, offset)
        copy = piece.slot if piece.slot is not None else piece.fetched
        assert copy is not None, "the piece has not been fetched"
        return self.over(copy, piece.stretch)


class Left:
    """A tensor that is kept as it is, its version, and the block that was given it."""

    __slots__ = ("label", "tensor", "version")

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor, self.label, self.version = tensor, label, version_of(tensor)

    def again(self) -> Tensor:
        """The tensor.

        Raises:
            UnsupportedError: it was changed in place after it had been kept.
        """
        if version_of(self.tensor) != self.version:
            raise input_changed(self.label, "input")
        return self.tensor


class BlockCall:
    """What one recompute runs through: what it keeps goes and comes together.

    One call of one block, or of several that are recomputed together; `blocks` says how many.
    """

    def __init__(self, number: int, label: str) -> None:
        self.number = number
        self.label = label
        self.blocks = 1
        self.pieces: weakref.WeakSet[Piece] = weakref.WeakSet()


# parts of a tensor that processes share


def part_bytes(nbytes: int, parts: int) -> int:
    """Bytes of each of `parts` equal parts: `nbytes / parts`, rounded up."""
    return -(-nbytes // parts)


def part_of(flat: Tensor, parts: int, index: int) -> Tensor:
    """Part `index` of `flat` (uint8 [n]) in memory of its own: uint8 [part_bytes], padded by 0."""
    size = part_bytes(flat.numel(), parts)
    part = flat[index * size : (index + 1) * size]
    if part.numel() == size:
        return part.clone()
    padded = flat.new_zeros(size)
    padded[: part.numel()].copy_(part)
    return padded


class Shard(_OfStorage):
    """This process's part of one stretch of one storage. Lives as long as a graph holds a `Split`.

    Attributes:
        number: of the shard, in this process.
        part: the part's bytes, as the store holds them; of no call.
        part_nbytes: how many they are.
        checksums: by layout of the view that was read.
        joined: the parts of all processes, one behind the other, while they are here (uint8).
        arriving: the gather that fills `joined`, until somebody has waited for it.
    """

    def __init__(self, tensor: Tensor, number: int, part: Kept | Left, part_nbytes: int) -> None:
        super().__init__(tensor)
        self.number = number
        self.part = copy.copy(part)
        if isinstance(self.part, Kept):
            self.part.call = None
        self.part_nbytes = part_nbytes
        self.checksums: dict[tuple[object, ...], Tensor] = {}
        self.joined: Tensor | None = None
        self.arriving: Ticket | None = None

    def wait(self) -> None:
        """What is computed from now on comes after the gather."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None


class Split(_View):
    """What a graph holds in the place of a tensor.

    Attributes:
        shard: None where the tensor is kept whole.
        kept: the part, or the whole tensor, as the store holds it for `call`.
    """

    __slots__ = ("kept", "shard")

    def __init__(
        self, tensor: Tensor, shard: Shard | None, kept: Kept | Left, call: BlockCall
    ) -> None:
        super().__init__(tensor, call)
        self.shard, self.kept = shard, kept

    def new_bytes(self, seen: set[int]) -> int:
        """Bytes that it takes besides those whose numbers are in `seen`, to which its own goes."""
        if self.shard is not None:
            number, nbytes = -self.shard.number, self.shard.part_nbytes
        elif isinstance(self.kept, Left):
            storage = self.kept.tensor.untyped_storage()
            number, nbytes = storage._cdata, storage.nbytes()
        else:
            number, nbytes = self.kept.piece.storage.cdata, self.kept.piece.nbytes
        new = 0 if number in seen else nbytes
        seen.add(number)
        return new

    def view(self) -> Tensor:
        """The tensor over what has been gathered, which must be here."""
        shard = self.shard
        assert shard is not None
        assert shard.joined is not None, "the shard has not been gathered"
        return self.over(shard.joined, shard.stretch)
