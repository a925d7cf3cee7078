"""Memory of a step: storages that autograd saves, storages that are alive, and the running module.

All accept real, fake and meta tensors and never read values. A storage counts once, however many
tensors share it. Not counted: memory that kernels use inside, and the allocator's fragmentation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import module_tracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ckpt.patch import patched
from ds_ckpt.telemetry.timings import Spans

Storage = int
"""Number of a storage; never used twice."""
OUTSIDE = "(outside blocks)"
NO_WORK = frozenset({torch.ops.prim.device.default})
"""Calls that reach dispatch modes and are not operators."""


def free_on(device: torch.device) -> int:
    """Return the free bytes of the device, those in torch's cache included, or of the node."""
    import psutil

    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def measure_non_torch_bytes(device: torch.device, action: Callable[[], None]) -> int:
    """Return the bytes of a CUDA device that `action` takes beside torch's allocator, else 0.

    For a group's first messages these are NCCL's buffers.
    """
    if device.type != "cuda":
        action()
        return 0

    def outside() -> int:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free) - int(torch.cuda.memory_reserved(device))

    before = outside()
    action()
    return max(outside() - before, 0)


def version_of(tensor: Tensor) -> int:
    """Return the tensor's version counter; 0 for tensors of inference mode, which have none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def in_words(shape: torch.Size, dtype: torch.dtype) -> str:
    """Describe a tensor by shape and dtype."""
    return f"{'x'.join(map(str, shape)) or 'a scalar'} {str(dtype).removeprefix('torch.')}"


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of a structure, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Storages:
    """Numbers storages as they are seen; calls `freed` with the number of each that is freed.

    `bytes` are sizes when last seen, `alive` the numbers that have not been freed.
    """

    def __init__(self, freed: Callable[[Storage], None] = lambda number: None) -> None:
        self.bytes: list[int] = []
        self.alive: set[Storage] = set()
        self._freed = freed
        self._known: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}

    def number(self, tensor: Tensor) -> Storage | None:
        """Return the number of the tensor's storage; None if it has none of its own (sparse)."""
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            number = self._known[key][0]
            self.bytes[number] = storage.nbytes()
            return number
        number = len(self.bytes)

        def freed(_: Any) -> None:
            self._known.pop(key, None)
            self.alive.discard(number)
            self._freed(number)

        # once created, the storage's Python object lives as long as the storage
        self._known[key] = (number, weakref.ref(storage, freed))
        self.alive.add(number)
        self.bytes.append(storage.nbytes())
        return number


def storage_key(tensor: Tensor) -> int | None:
    """Return the address of the tensor's storage; None for sparse tensors."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def unpack_unchanged(kept: tuple[Tensor, int]) -> Tensor:
    """Compare versions, which autograd leaves to the hooks where there are any."""
    tensor, version = kept
    if version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor that backward needs ({in_words(tensor.shape, tensor.dtype)}) has been "
            f"modified by an inplace operation: it is at version {tensor._version}, and was saved "
            f"at {version}. Write x = x + y for x += y."
        )
    return tensor


Noted = Callable[[Tensor, Storage | None], None]
"""Called with a saved tensor and its storage's number (None for weights)."""


class SavedActivations:
    """Context manager around a forward, not its backward: adds up what autograd saves. Cheap.

    Parameters of `module` are left out. Inside a checkpointed block torch's own hooks apply, so
    only the block's tensor arguments count.

    Attributes:
        held: Bytes by number of the saved storages that lived when the context was left.
    """

    def __init__(
        self, module: nn.Module, noted: Noted | None = None, storages: Storages | None = None
    ) -> None:
        self._parameters = list(module.parameters())
        self.storages, self._noted = storages or Storages(), noted
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack_unchanged)
        self._sizes: dict[Storage, int] = {}
        self.is_uncounted = False
        """Operators that run now are not part of the model."""
        self.held: dict[Storage, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes of `held`."""
        return sum(self.held.values())

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self.held = {n: size for n, size in self._sizes.items() if n in self.storages.alive}
        self._sizes.clear()

    def note(self, tensor: Tensor) -> None:
        """Count a saved tensor."""
        number = None if self._is_weight(tensor) else self.storages.number(tensor)
        if number is not None:
            self._sizes.setdefault(number, self.storages.bytes[number])
        if self._noted is not None:
            self._noted(tensor, number)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        self.note(tensor)
        # A result that its own graph node saves would keep itself alive. A leaf cannot, and
        # ZeRO-3 must find its parameters, not their present storage.
        if tensor.is_leaf:
            return tensor, version_of(tensor)
        with patched(self, "is_uncounted", True):
            return tensor.detach(), version_of(tensor)

    def _is_weight(self, tensor: Tensor) -> bool:
        """Compare storages at every save: ZeRO-3 gives a parameter another one at each gather."""
        key = storage_key(tensor)
        if key is None:
            return isinstance(tensor, nn.Parameter)
        return any(storage_key(parameter) == key for parameter in self._parameters)


@dataclass(frozen=True)
class Operator:
    """An operator that ran, with the tensors among its arguments and results."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    given: list[Tensor]
    made: list[Tensor]


class MemoryTracker(TorchDispatchMode):
    """Context manager around forward and backward of a step: live and peak bytes. Slow.

    Storages that no operator has made (weights, inputs) do not count, nor those that are made while
    `counts` returns False. `operator` is called with every operator. `saved` is to be entered
    around the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        counts: Callable[[], bool] = lambda: True,
        operator: Callable[[Operator], None] | None = None,
        noted: Noted | None = None,
    ) -> None:
        super().__init__()
        self.storages = Storages(self._freed)
        self.saved = SavedActivations(model, noted, self.storages)
        self._counts, self._operator = counts, operator
        self._counted: dict[Storage, int] = {}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.saved.is_uncounted or func in NO_WORK:
            return out
        given, made = tensors_in((args, kwargs)), tensors_in(out)
        if self._operator is not None:
            self._operator(Operator(func, args, kwargs, out, given, made))
        for tensor in made:
            number = self.storages.number(tensor)
            if number is not None and number not in self._counted:
                self._count(number, tensor, given)
        return out

    def _count(self, number: Storage, tensor: Tensor, given: Sequence[Tensor]) -> None:
        is_new = storage_key(tensor) not in map(storage_key, given)
        self._counted[number] = self.storages.bytes[number] if is_new and self._counts() else 0
        self.live_bytes += self._counted[number]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, number: Storage) -> None:
        self.live_bytes -= self._counted.pop(number, 0)


def activations_tracker(model: nn.Module, spans: Spans) -> MemoryTracker:
    """Return a tracker of what forward and recomputations allocate outside of collectives."""

    def counts() -> bool:
        inside = spans.open
        if any(kind.startswith("gather_") or kind == "collective" for kind in inside):
            return False
        phases = [kind for kind in inside if kind in ("forward", "recompute", "backward")]
        return bool(phases) and phases[-1] != "backward"

    return MemoryTracker(model, counts=counts)


class ModuleTracker(module_tracker.ModuleTracker):
    """Context manager around a forward that follows the block and the part that run.

    `parts` has name and module of the parts of each block; the first that runs wins.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        parts: Mapping[str, Sequence[tuple[str, nn.Module]]],
    ) -> None:
        super().__init__()
        names = {m: f"{type(model).__name__}.{name}" for name, m in model.named_modules()}
        self._blocks = {
            names[block]: (name, [(part, names[m]) for part, m in parts[name] if m is not block])
            for name, block in blocks.items()
        }

    @property
    def place(self) -> tuple[str, str]:
        """The running block and its part."""
        for running, (block, parts) in self._blocks.items():
            if running in self.parents:
                return block, next((part for part, name in parts if name in self.parents), "other")
        return OUTSIDE, "other"
