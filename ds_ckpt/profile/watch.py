"""One forward and backward under observation: what is saved, launched and alive, and where.

Works on fake and on real tensors alike. A dispatch mode sees every operator, hooks on modules say
which block and which part of it runs, hooks on the blocks' inputs and outputs say whose backward
goes on, and a scope around recomputes tells them from the forward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation import Block
from ds_ckpt.activation.blocks import attention_parts, is_norm, mlp_parts
from ds_ckpt.planner.work import flops_of, moved_bytes
from ds_ckpt.profile.operators import launches, stored_attention
from ds_ckpt.profile.records import OUTSIDE, Kind, Peak, Work


@dataclass(frozen=True)
class Place:
    """Where a step is."""

    kind: Kind
    block: str
    part: str = "other"


class Watch(TorchDispatchMode):
    """Context manager around one forward and backward of `model`.

    Args:
        model: nothing of it is changed but for hooks, which are taken off again.
        blocks: what bytes and operators are told apart by.

    Attributes:
        work: launches, FLOPs and bytes by place.
        peak: the most bytes alive at once of tensors made inside.
        by_operator: launches of each operator.
        score_sizes: numbers of elements of attention weights that were stored.
        avoided_bytes: of those that attention cores did not store.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        super().__init__()
        self._model, self._blocks = model, blocks
        self._stack: list[tuple[str, str]] = []
        """(block, part) of the modules that run, outermost first."""
        self._backward = OUTSIDE
        """The block whose backward goes on."""
        self._kind: Kind = "forward"
        self._exits = ExitStack()
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._calls: list[list[Place]] = []
        self.live_bytes = 0
        self.peak = Peak(0, "forward", OUTSIDE)
        self.work: dict[tuple[Kind, str, str], Work] = {}
        self.by_operator: Counter[str] = Counter()
        self.score_sizes: set[int] = set()
        self.avoided_bytes = 0

    # where the step is

    @property
    def place(self) -> Place:
        if self._stack:
            return Place(self._kind, *self._stack[-1])
        block = OUTSIDE if self._kind == "forward" else self._backward
        return Place(self._kind, block)

    def backward(self) -> None:
        """Say that the forward is over."""
        self._kind = "backward"

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """The scope around every recompute: it is left by an exception (early stop)."""
        kind, depth = self._kind, len(self._stack)
        self._kind = "recompute"
        try:
            yield
        finally:
            self._kind = kind
            del self._stack[depth:]

    def around(
        self,
        checkpointed: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Around every checkpointed call: what reaches the hooks in it is kept for a recompute."""
        self._calls.append([])
        try:
            return checkpointed(function, *args, **kwargs)
        finally:
            self._calls.pop()

    def __enter__(self) -> Watch:
        for block in self._blocks:
            self._mark(block.module, block.name, "other")
            inner = {id(block.module)}
            for name, part in _parts_of(block):
                if id(part) not in inner:
                    self._mark(part, block.name, name)
                    inner.add(id(part))
            self._follow_backward(block)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._exits.close()
        self._alive.clear()

    def _mark(self, module: nn.Module, block: str, part: str) -> None:
        def enter(*_: Any) -> None:
            self._stack.append((block, part))
            if self._calls:
                self._calls[-1].append(self.place)

        def leave(*_: Any) -> None:
            if self._stack:  # an early stop may have cut it already
                self._stack.pop()

        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ):
            self._exits.callback(handle.remove)

    def _follow_backward(self, block: Block) -> None:
        """Gradients of a block's outputs begin its backward, those of its inputs end it."""

        def begins(_: Tensor) -> None:
            self._backward = block.name

        def ends(_: Tensor) -> None:
            if self._backward == block.name:  # the block before may have begun on the same tensor
                self._backward = OUTSIDE

        def watch(tensors: Any, hook: Callable[[Tensor], None]) -> None:
            if self._kind == "forward":
                for tensor in _tensors(tensors):
                    if tensor.requires_grad:
                        tensor.register_hook(hook)

        for handle in (
            block.module.register_forward_pre_hook(
                lambda _, args, kwargs: watch((args, kwargs), ends), with_kwargs=True
            ),
            block.module.register_forward_hook(lambda _, args, output: watch(output, begins)),
        ):
            self._exits.callback(handle.remove)

    # what it does there

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        out = func(*args, **kwargs)
        made = _tensors(out)
        place = self.place
        if launches(func):
            key = (place.kind, place.block, place.part)
            before = self.work.get(key, Work())
            self.work[key] = Work(
                before.launches + 1,
                before.flops + flops_of(func, args, kwargs, out),
                before.moved_bytes + moved_bytes(given, made),
            )
            self.by_operator[str(func)] += 1
            if place.kind == "forward" and place.block != OUTSIDE:
                stored, avoided = stored_attention(func, args, out)
                self.avoided_bytes += avoided
                if stored:
                    self.score_sizes.add(stored)
        before_it = {t.untyped_storage()._cdata for t in given if t.layout == torch.strided}
        for tensor in made:
            if tensor.layout == torch.strided:
                self._made(tensor, place, before_it)
        return out

    def _made(self, tensor: Tensor, place: Place, before_it: set[int]) -> None:
        """Note its storage; a view of what was there (of a weight) makes none."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in before_it:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self.live_bytes -= size

        # the storage's Python object lives as long as the storage itself once it was asked for
        self._alive[key] = (weakref.ref(storage, freed), size)
        self.live_bytes += size
        if self.live_bytes > self.peak.live_bytes:
            self.peak = Peak(self.live_bytes, place.kind, place.block)

    def total(self, kind: Kind) -> Work:
        """All operators of a phase."""
        found = [work for (k, _, _), work in self.work.items() if k == kind]
        return Work(
            sum(w.launches for w in found),
            sum(w.flops for w in found),
            sum(w.moved_bytes for w in found),
        )

    def kept_by(self) -> tuple[Place, list[Place] | None]:
        """Whose a tensor is that autograd saves now, and the call whose first block will tell."""
        if not self._calls:
            return self.place, None
        call = self._calls[-1]
        if self._stack:
            block, _ = self._stack[-1]
            return Place("forward", block, "boundary"), None
        return Place("forward", OUTSIDE, "boundary"), call


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _parts_of(block: Block) -> Iterator[tuple[str, nn.Module]]:
    """Attention, MLP and norms of a block; a norm inside attention is a norm."""
    for name, module in block.module.named_modules():
        if name and is_norm(type(module).__name__):
            yield "norm", module
    for _, module in attention_parts(block.name, block.module):
        yield "attention", module
    for chain in mlp_parts(block.name, block.module):
        for _, module in chain:
            yield "mlp", module
