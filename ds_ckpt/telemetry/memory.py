"""The memory tracker: every storage that a step makes or saves for backward, until it is freed.

Three parts, on real, fake and meta tensors alike; values are never touched:

- `SavedActivations`: what autograd holds between forward and backward. Hooks alone, so cheap enough
  for training.
- `MemoryTracker`: a dispatch mode that sees every operator; what is alive at once, and the peak.
- `ModuleTracker`: hooks that say where a step is (phase, block, part), for whoever tells bytes and
  operators apart by that.

A storage counts once however many tensors share it, and is told from others by a number that is
never given again. Not seen: what kernels use inside, and the allocator's fragmentation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ckpt.telemetry.timings import Spans

Storage = int
"""A storage's number."""
Phase = Literal["forward", "recompute", "backward"]
OUTSIDE = "(outside blocks)"
NO_WORK = frozenset({torch.ops.prim.device.default})
"""Calls that reach dispatch modes and are not operators."""


def version_of(tensor: Tensor) -> int:
    """0 where none is counted: what comes from inference mode cannot be changed in training."""
    return 0 if tensor.is_inference() else int(tensor._version)


def in_words(shape: torch.Size, dtype: torch.dtype) -> str:
    """Describe a tensor."""
    return f"{'x'.join(map(str, shape)) or 'a scalar'} {str(dtype).removeprefix('torch.')}"


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a structure, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Storages:
    """Numbers storages as they are seen.

    Args:
        freed: told each storage's number when it is freed.

    Attributes:
        bytes: by number, as they were when the storage was seen last: some operators resize.
    """

    def __init__(self, freed: Callable[[Storage], None] = lambda number: None) -> None:
        self.bytes: list[int] = []
        self._freed = freed
        self._known: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}
        self._alive: set[Storage] = set()

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
            self._alive.discard(number)
            self._freed(number)

        # the storage's Python object lives as long as the storage itself once it was asked for
        self._known[key] = (number, weakref.ref(storage, freed))
        self._alive.add(number)
        self.bytes.append(storage.nbytes())
        return number

    def alive(self, number: Storage) -> bool:
        """Return True if the storage has not been freed."""
        return number in self._alive

    def forget(self) -> None:
        """Follow none of them any longer."""
        self._known.clear()


def _unpack(kept: tuple[Tensor, int]) -> Tensor:
    """Autograd compares no versions where hooks are set, so it is done here."""
    tensor, version = kept
    if version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor that backward needs ({in_words(tensor.shape, tensor.dtype)}) has been "
            f"modified by an inplace operation: it is at version {tensor._version}, and was saved "
            f"at {version}. Write x = x + y for x += y."
        )
    return tensor


class SavedActivations:
    """Context manager around a forward: afterwards `bytes` is what autograd holds for backward.

    Parameters of `module` are left out: they are weights, and under ZeRO-3 their gathered copies
    come and go. Buffers, inputs and labels count when autograd keeps them. Gradients are what
    they are without it: tensors pass through untouched.

    torch's non-reentrant checkpointing sets hooks of its own inside a block, which hide the
    block's internals from these; the block's tensor arguments are saved outside of them and
    counted. What a block is given by keyword (Llama: the rotary tables, shared by all layers) is
    held by a closure and counted only where an operator saves it.

    Enter it around the forward alone: backward recomputes under the same hooks.

    Args:
        noted: called with every tensor that is saved, and its number among `storages` (None for
            weights).

    Attributes:
        bytes: of unique storages that were saved and still lived when the context was left.
        held: their bytes when they were saved first, by number.
    """

    def __init__(
        self,
        module: nn.Module,
        noted: Callable[[Tensor, Storage | None], None] | None = None,
        storages: Storages | None = None,
    ) -> None:
        self._parameters = list(module.parameters())
        self._own = storages is None
        self.storages = storages or Storages()
        self._noted = noted
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._sizes: dict[Storage, int] = {}
        self.packing = False
        """True while an operator runs that is not part of the model."""
        self.bytes = 0
        self.held: dict[Storage, int] = {}

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        # what a dropped graph has freed is held no more
        self.held = {n: size for n, size in self._sizes.items() if self.storages.alive(n)}
        self.bytes = sum(self.held.values())
        self._sizes.clear()
        if self._own:
            self.storages.forget()

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        number = None if self._is_weight(tensor) else self.storages.number(tensor)
        if number is not None:
            self._sizes.setdefault(number, self.storages.bytes[number])
        if self._noted is not None:
            self._noted(tensor, number)
        # A result that its own graph node saves would keep itself alive. A leaf cannot, and
        # ZeRO-3 must find its parameters, not what they pointed to now.
        if tensor.is_leaf:
            return tensor, version_of(tensor)
        self.packing = True
        try:
            return tensor.detach(), version_of(tensor)  # they share it
        finally:
            self.packing = False

    def _is_weight(self, tensor: Tensor) -> bool:
        """Asked at every save: ZeRO-3 gives a parameter another storage at each gather."""
        if tensor.layout != torch.strided:
            return isinstance(tensor, nn.Parameter)
        own = tensor.untyped_storage()._cdata
        return any(p.untyped_storage()._cdata == own for p in self._parameters)


@dataclass(frozen=True)
class Operator:
    """One operator that ran: what it is, what it was given, what it returned."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    given: list[Tensor]
    made: list[Tensor]


class MemoryTracker(TorchDispatchMode):
    """Context manager around forward and backward of one step. Slow: operators pass through Python.

    Args:
        model: for `saved`.
        weights: tensors that do not count while all others do, whoever made them. None: whatever
            an operator is given that none of those seen here made (weights, inputs) does not count.
        counts: whether what is made now counts.
        place: asked where the step is at each new peak.
        operator: told of every operator.
        noted: see `SavedActivations`.

    Attributes:
        saved: to be entered around the forward.
        live_bytes: of what counts, now.
        peak_bytes, peak_place: the most of it at once, and where that was first.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Sequence[Tensor] | None = None,
        counts: Callable[[], bool] = lambda: True,
        place: Callable[[], Any] = lambda: None,
        operator: Callable[[Operator], None] | None = None,
        noted: Callable[[Tensor, Storage | None], None] | None = None,
    ) -> None:
        super().__init__()
        self.storages = Storages(self._freed)
        self.saved = SavedActivations(model, noted, self.storages)
        self._counts, self._place, self._operator = counts, place, operator
        self._counted: dict[Storage, int] = {}
        self._inputs_count = weights is not None
        for tensor in weights or ():
            number = self.storages.number(tensor)
            if number is not None:
                self._counted[number] = 0
        self.live_bytes = self.peak_bytes = 0
        self.peak_place: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.saved.packing or func in NO_WORK:
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
        own = tensor.untyped_storage()._cdata
        new = self._inputs_count or not any(
            t.layout == torch.strided and t.untyped_storage()._cdata == own for t in given
        )
        size = self.storages.bytes[number] if new and self._counts() else 0
        self._counted[number] = size
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_place = self.live_bytes, self._place()

    def _freed(self, number: Storage) -> None:
        self.live_bytes -= self._counted.pop(number, 0)


def activations_tracker(model: nn.Module, spans: Spans) -> MemoryTracker:
    """Counts activations alone, in a step whose spans are recorded.

    An activation is what an operator allocates in the forward or in a recompute. Weights that are
    gathered there are none (they are allocated inside a `gather_*` span), and neither are gradients
    (allocated in backward, outside a recompute). So the peak has in it what autograd holds, what
    one recompute brings back, and the temporaries of the operator that runs.
    """

    def counts() -> bool:
        inside = spans.open
        if any(kind.startswith("gather_") or kind == "collective" for kind in inside):
            return False
        phases = (k for k in reversed(inside) if k in ("forward", "recompute", "backward"))
        return next(phases, "backward") != "backward"

    return MemoryTracker(model, counts=counts)


@dataclass(frozen=True)
class Place:
    """Position in a step."""

    phase: Phase
    block: str
    part: str = "other"


class ModuleTracker:
    """Context manager around one forward and backward: `place` says where it is.

    Hooks on modules tell which block and part runs, hooks on the blocks' inputs and outputs whose
    backward goes on, and the scope `recomputing` tells recomputes from the forward. They are taken
    off again.

    Args:
        blocks: by name.
        parts: of each block: what a part is, and its module. The first that names a module wins.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        parts: Mapping[str, Sequence[tuple[str, nn.Module]]],
    ) -> None:
        self._blocks, self._parts = blocks, parts
        self._stack: list[tuple[str, str]] = []
        """(block, part) of the modules that run, outermost first."""
        self._backward_of = OUTSIDE
        """The block whose backward goes on."""
        self._phase: Phase = "forward"
        self._exits = ExitStack()
        self._calls: list[list[Place]] = []

    @property
    def place(self) -> Place:
        """Return the current position."""
        if self._stack:
            return Place(self._phase, *self._stack[-1])
        return Place(self._phase, OUTSIDE if self._phase == "forward" else self._backward_of)

    def backward(self) -> None:
        """Say that the forward is over."""
        self._phase = "backward"

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """The scope around every recompute: it is left by an exception (early stop)."""
        phase, depth = self._phase, len(self._stack)
        self._phase = "recompute"
        try:
            yield
        finally:
            self._phase = phase
            del self._stack[depth:]

    def around(
        self,
        label: str,
        checkpointed: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Around every checkpointed call: what is saved in it is kept for a recompute."""
        self._calls.append([])
        try:
            return checkpointed(function, *args, **kwargs)
        finally:
            self._calls.pop()

    def saver(self) -> Callable[[], Place]:
        """Tells, once the forward is over, whose a tensor is that autograd saves now.

        What a checkpointed call keeps belongs to the block that runs in it first.
        """
        place = self.place
        if not self._calls:
            return lambda: place
        call = self._calls[-1]
        if self._stack:
            return lambda: Place("forward", place.block, "checkpointed")
        return lambda: Place("forward", call[0].block if call else OUTSIDE, "checkpointed")

    def __enter__(self) -> ModuleTracker:
        for name, block in self._blocks.items():
            self._mark(block, name, "other")
            inner = {id(block)}
            for part, module in self._parts[name]:
                if id(module) not in inner:
                    self._mark(module, name, part)
                    inner.add(id(module))
            self._follow_backward(name, block)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()

    def _mark(self, module: nn.Module, block: str, part: str) -> None:
        def enter(*_: Any) -> None:
            self._stack.append((block, part))
            if self._calls:
                self._calls[-1].append(self.place)

        def leave(*_: Any) -> None:
            if self._stack:  # an early stop may have cut it already
                self._stack.pop()

        self._until_exit(module.register_forward_pre_hook(enter))
        self._until_exit(module.register_forward_hook(leave, always_call=True))

    def _follow_backward(self, name: str, block: nn.Module) -> None:
        """Gradients of a block's outputs begin its backward, those of its inputs end it."""

        def begins(_: Tensor) -> None:
            self._backward_of = name

        def ends(_: Tensor) -> None:
            if self._backward_of == name:  # the block before may have begun on the same tensor
                self._backward_of = OUTSIDE

        def watch(tensors: Any, hook: Callable[[Tensor], None]) -> None:
            if self._phase == "forward":
                for tensor in tensors_in(tensors):
                    if tensor.requires_grad:
                        tensor.register_hook(hook)

        self._until_exit(
            block.register_forward_pre_hook(
                lambda _, args, kwargs: watch((args, kwargs), ends), with_kwargs=True
            )
        )
        self._until_exit(block.register_forward_hook(lambda _, args, out: watch(out, begins)))

    def _until_exit(self, handle: Any) -> None:
        self._exits.callback(handle.remove)
