"""What a process keeps of one tensor that is split. No policy here: `partition.py` decides."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation.pieces import Kept, Key, Left, Stretch
from ds_ckpt.activation.prefetch import BlockCall
from ds_ckpt.activation.split import whole_of
from ds_ckpt.memory.copies import Ticket


class Shard:
    """This process's part of one stretch of one storage. Lives as long as a graph holds a `Split`.

    Attributes:
        number: of the shard, in this process.
        part: the part's bytes, as the store holds them; of no call.
        part_nbytes: how many they are.
        calls: numbers of the block calls that keep it.
        checksums: by layout of the view that was read.
        joined: the parts of all processes, one behind the other, while they are here (uint8).
        arriving: the gather that fills `joined`, until somebody has waited for it.
    """

    def __init__(self, tensor: Tensor, number: int, part: Kept | Left, part_nbytes: int) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        """While it lives, the storage's address is not given to another."""
        self.stretch = Stretch.of(tensor)
        self.version = int(tensor._version)
        self.number = number
        self.part = copy.copy(part)
        if isinstance(self.part, Kept):
            self.part.call = None
        self.part_nbytes = part_nbytes
        self.calls: set[int] = set()
        self.checksums: dict[tuple[object, ...], Tensor] = {}
        self.joined: Tensor | None = None
        self.arriving: Ticket | None = None

    @property
    def key(self) -> Key:
        return (self.storage.cdata, self.stretch.start, self.stretch.nbytes)

    def wait(self) -> None:
        """What is computed from now on comes after the gather."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None


class Split:
    """What a graph holds in the place of a tensor.

    Attributes:
        shard: None where the tensor is kept whole.
        kept: the part, or the whole tensor, as the store holds it for `call`.
    """

    __slots__ = ("__weakref__", "_dtype", "_offset", "_size", "_stride", "call", "kept", "shard")

    def __init__(
        self, tensor: Tensor, shard: Shard | None, kept: Kept | Left, call: BlockCall
    ) -> None:
        self.shard, self.kept, self.call = shard, kept, call
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

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
        whole = whole_of(shard.joined, shard.stretch.nbytes)
        offset = self._offset - shard.stretch.start // self._dtype.itemsize
        view = torch.empty(0, dtype=self._dtype, device=whole.device)
        return view.set_(whole.untyped_storage(), offset, self._size, self._stride)
