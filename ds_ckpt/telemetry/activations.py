"""How much autograd holds between forward and backward, counted tensor by tensor.

Measured where autograd saves: every tensor handed to `saved_tensors_hooks` is seen once, and its
storage is counted once however many tensors share it. Not an estimate from shapes, and not the
allocator's peak (that has optimizer and buffers in it).
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class HeldActivations:
    """Context manager around a forward: afterwards `bytes` is what autograd holds for backward.

    Parameters of `module` are left out: they are weights, and under ZeRO-3 their gathered copies
    come and go. Buffers, inputs and labels count when autograd keeps them. Gradients are what
    they are without it: tensors pass through untouched.

    torch's non-reentrant checkpointing sets hooks of its own inside a block, which hide the
    block's internals from these; the block's tensor arguments are saved outside of them and
    counted: the boundary. What a block is given by keyword (Llama: the rotary tables, shared by
    all layers) is held by a closure and counted only where an operator saves it.

    Enter it around the forward alone: backward recomputes under the same hooks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self.bytes = 0
        """Bytes of unique storages that were saved and still lived when the context was left."""
        self.tensors = 0
        """How many such storages there were."""

    def __enter__(self) -> HeldActivations:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        # Weak references tell apart what is still held from what a dropped graph has freed.
        alive = [size for ref, size in self._storages.values() if not ref.expired()]
        self.bytes, self.tensors = sum(alive), len(alive)
        self._storages.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Asked at every save: ZeRO-3 gives a parameter another storage at each gather.
        if not any(p.untyped_storage()._cdata == storage._cdata for p in self._parameters):
            ref = StorageWeakRef(storage)
            # While the reference lives, its address is not given to another storage.
            self._storages.setdefault(ref.cdata, (ref, storage.nbytes()))
        # A result that its own graph node saves would keep itself alive. A leaf cannot, and
        # ZeRO-3 must find its parameters, not what they pointed to now.
        return tensor if tensor.is_leaf else tensor.detach()


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
