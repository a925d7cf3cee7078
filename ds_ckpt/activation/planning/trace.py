"""Traces of a model: a forward without memory by block, and a whole step on tensors of any kind.

A survey runs the forward of a fake copy (`fake.py`) under the memory tracker, with a real batch's
shapes. It does not see a loss that is computed outside of the model's forward, nor memory that
kernels use inside.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ds_ckpt.activation.blocks import Block, attention_parts, find_blocks, is_norm, mlp_parts
from ds_ckpt.activation.inputs import CheckpointedInputsConfig, build_inputs
from ds_ckpt.activation.install import CheckpointedBlocks, without_empty_caches
from ds_ckpt.activation.offload import BlockCall, Copies, InPlaceRef, InputStore, OffloadedRef, Wait
from ds_ckpt.activation.planning.costs import Rates, flops_of, launches, moved_bytes
from ds_ckpt.activation.planning.fake import Forward, fake_run
from ds_ckpt.activation.policies import Unit
from ds_ckpt.activation.selective import is_view, writes_to
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.patch import patched
from ds_ckpt.telemetry.memory import (
    MemoryTracker,
    ModuleTracker,
    Operator,
    SavedActivations,
    Storage,
    tensors_in,
)
from ds_ckpt.telemetry.units import size

Phase = Literal["forward", "recompute", "backward"]
NO_STORAGE = -1
"""Number for a tensor without a storage of its own (sparse)."""


@dataclass(frozen=True)
class TracedOperator:
    """An operator of the forward, with the storages that it returned and wrote into.

    `saves` counts what autograd had saved when it had run. `moved_bytes` is 0 for views, and where
    there are flops, which take longer.
    """

    func: Any
    saves: int
    results: tuple[Storage, ...]
    written: tuple[Storage, ...]
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class BlockForward:
    """A call of a block: what checkpointing would keep; ranges of operators and of saves."""

    arguments: set[Storage]
    operators: tuple[int, int]
    saves: tuple[int, int]


@dataclass
class SurveyedBlock:
    """A block without checkpointing, with the bytes that it is first to save."""

    name: str
    calls: list[BlockForward] = field(default_factory=list)
    saved_bytes: int = 0


class Survey:
    """Bytes and work of one forward of a fake copy, whose blocks' forwards are wrapped.

    Every storage belongs to the block, or to the outside, that saved it first.

    Attributes:
        saves: storages of the tensors that autograd saved, in order.
        blocks: in the order in which they first run.
        held: bytes of the storages that autograd held at the end of the forward, without weights.
        saved_bytes: as `SavedActivations` measures without checkpointing.
        head_bytes: saved outside of blocks before the last block has ended.
        tail_bytes: saved outside of blocks afterwards (final norm, head, loss).
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._tracker = MemoryTracker(module, operator=self._ran, noted=self._saved)
        self.operators: list[TracedOperator] = []
        self.saves: list[Storage] = []
        self.sizes = self._tracker.storages.bytes
        self._weights = set(map(self._storage, module.parameters()))
        self.blocks = [SurveyedBlock(name) for name in names]
        for block in self.blocks:
            part = module.get_submodule(block.name)
            part.forward = self._wrapped(block, part.forward)  # type: ignore[method-assign]
        self.saved_bytes = self.head_bytes = self.tail_bytes = 0
        self.outside: frozenset[Storage] = frozenset()

    def run(self, forward: Callable[[], Any]) -> Survey:
        """Run the forward."""
        with self._tracker.saved, self._tracker:
            result = forward()
        del result
        self.held = self._tracker.saved.held
        self.blocks = [block for block in self.blocks if block.calls]
        self.blocks.sort(key=lambda block: block.calls[0].operators)
        self._count()
        return self

    def activations(self, storages: Iterable[Storage]) -> set[Storage]:
        """Return the storages that are neither weights nor missing."""
        return set(storages) - self._weights - {NO_STORAGE}

    def bytes_of(self, storages: Iterable[Storage]) -> int:
        """Add up the sizes of storages."""
        return sum(self.sizes[s] for s in storages)

    def forward_s(self, rates: Rates) -> list[float]:
        """Return seconds by block; the last entry is what runs outside of blocks."""
        every = [rates.seconds(o.flops, o.moved_bytes) for o in self.operators]
        inside = [
            sum(sum(every[slice(*call.operators)]) for call in block.calls) for block in self.blocks
        ]
        return [*inside, max(0.0, sum(every) - sum(inside))]

    def _storage(self, tensor: Tensor) -> Storage:
        number = self._tracker.storages.number(tensor)
        return NO_STORAGE if number is None else number

    def _saved(self, tensor: Tensor, storage: Storage | None) -> None:
        if not isinstance(tensor, nn.Parameter):
            self.saves.append(NO_STORAGE if storage is None else storage)

    def _ran(self, operator: Operator) -> None:
        written: list[Tensor] = []
        for position, name in writes_to(operator.func):
            args, kwargs = operator.args, operator.kwargs
            written += tensors_in(args[position] if position < len(args) else kwargs.get(name))
        view = not written and is_view(operator.func)
        flops = 0 if view else flops_of(operator)
        self.operators.append(
            TracedOperator(
                operator.func,
                len(self.saves),
                tuple(map(self._storage, operator.made)),
                tuple(map(self._storage, written)),
                flops,
                0 if view or flops else moved_bytes(operator),
            )
        )

    def _wrapped(self, block: SurveyedBlock, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            given, named = without_empty_caches(block.name, args, kwargs)
            arguments = self.activations(map(self._storage, tensors_in((given, named))))
            first, saves = len(self.operators), len(self.saves)
            result = forward(*args, **kwargs)
            operators, ends = (first, len(self.operators)), (saves, len(self.saves))
            block.calls.append(BlockForward(arguments, operators, ends))
            return result

        return traced

    def _count(self) -> None:
        owners: list[SurveyedBlock | None] = [None] * len(self.saves)
        for block in self.blocks:
            for first, end in (call.saves for call in block.calls):
                owners[first:end] = [block] * (end - first)
        ends = [call.saves[1] for block in self.blocks for call in block.calls]
        last_end = max(ends, default=0)
        outside, of_block = set[Storage](), set[Storage]()
        for number, (storage, owner) in enumerate(zip(self.saves, owners, strict=True)):
            if storage not in self.held:
                continue
            size = 0 if storage in outside or storage in of_block else self.sizes[storage]
            if owner is not None:
                of_block.add(storage)
                owner.saved_bytes += size
                continue
            outside.add(storage)
            if number < last_end:
                self.head_bytes += size
            else:
                self.tail_bytes += size
        self.saved_bytes = self.bytes_of(outside | of_block)
        self.head_bytes += self.bytes_of(outside & of_block)
        self.outside = frozenset(outside)


def survey(forward: Forward, modules: Sequence[str] | None = None) -> Survey:
    """Run a fake copy of the model once, under the caller's autocast, and count what it saves.

    The model is in training mode, without our checkpointing, and may be partitioned by ZeRO-3.
    Raises UnsupportedError if the forward depends on values of tensors beyond small integers.
    """
    names = [block.name for block in find_blocks(forward.model, modules)]
    outermost = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    with fake_run(forward) as (copy, fake_args, fake_kwargs):
        # with the hook in place, as in training: transformers then leaves out its cache
        hooks = CheckpointedBlocks(copy, units=[])
        found = Survey(copy, outermost).run(lambda: copy(*fake_args, **fake_kwargs))
        del hooks
    return found


@dataclass(frozen=True)
class Work:
    """Operators of a phase: number, FLOPs, and bytes of their arguments and results."""

    launches: int = 0
    flops: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.launches + other.launches,
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
        )


class _UncountedCopies(Copies):
    """Copies of a traced step: neither they nor host memory count."""

    def __init__(self, saved: SavedActivations) -> None:
        self._saved = saved

    def host_buffer(self, nbytes: int) -> Tensor:
        with patched(self._saved, "is_uncounted", True):
            return super().host_buffer(nbytes)

    def copy(self, source: Tensor, target: Tensor) -> Wait:
        with patched(self._saved, "is_uncounted", True):
            return super().copy(source, target)


class _TracedStore(InputStore):
    """Store of a traced step, whose tensors may be fake; `saved` counts what it keeps."""

    kinds = (Tensor, FakeTensor)

    def __init__(self, saved: SavedActivations, device: torch.device, **settings: Any) -> None:
        super().__init__(device, _UncountedCopies(saved), **settings)
        self._saved = saved

    def pack(self, tensor: Tensor, call: BlockCall) -> OffloadedRef | InPlaceRef:
        self._saved.note(tensor)
        return super().pack(tensor, call)


class StepTrace(MemoryTracker):
    """Operators and FLOPs of one forward and backward, by phase; saved bytes, by block and part.

    `offloaded_bytes` went to host memory, and came back.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block] = ()) -> None:
        self.where = ModuleTracker(
            model, {b.name: b.module for b in blocks}, {b.name: list(_parts_of(b)) for b in blocks}
        )
        super().__init__(model, operator=self._ran, noted=self._noted)
        self._model = model
        self.phase: Phase = "backward"
        self.work: defaultdict[Phase, Work] = defaultdict(Work)
        self._saved_at: dict[Storage, tuple[str, str]] = {}
        self.offloaded_bytes = 0

    def run(
        self,
        forward: Callable[[], Any],
        units: Sequence[Unit] | None,
        inputs: CheckpointedInputsConfig | None = None,
    ) -> StepTrace:
        """Run forward and backward on tensors of any kind, and count what is alive at once.

        That is activations, their gradients, temporaries, and the gradient of one weight at a time.
        Backward begins at the result's `loss`, else at all of its tensors. Offload is that of
        `inputs` and of the units; nothing is split.
        """
        checkpointing = hooks = None
        if units is not None:
            hooks = build_inputs(
                (inputs or CheckpointedInputsConfig()).model_copy(update={"partition": False}),
                self._model,
                units,
                next((p.device for p in self._model.parameters()), torch.device("cpu")),
                make_store=functools.partial(_TracedStore, self.saved),
            )
            scopes = [functools.partial(patched, self, "phase", "recompute")]
            around = hooks.around if hooks else None
            checkpointing = CheckpointedBlocks(
                self._model, scopes=scopes, units=units, around=around
            )
        try:
            with gradients_dropped(self._model), self:
                with self.saved, self.where, patched(self, "phase", "forward"):
                    result = forward()
                loss = getattr(result, "loss", None)
                leaves = tensors_in(loss if isinstance(loss, Tensor) else result)
                roots = [t for t in leaves if t.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        finally:
            if checkpointing is not None:
                checkpointing.remove()
        self.offloaded_bytes = hooks.store.counters.out_bytes.total() if hooks else 0
        return self

    def _ran(self, operator: Operator) -> None:
        if not launches(operator.func):
            return
        self.work[self.phase] += Work(1, flops_of(operator), moved_bytes(operator))

    def _noted(self, tensor: Tensor, storage: Storage | None) -> None:
        if storage is not None:
            self._saved_at.setdefault(storage, self.where.place)

    def held_by(self) -> Counter[tuple[str, str]]:
        """Saved activations by block and part; a storage counts where it was saved first."""
        found: Counter[tuple[str, str]] = Counter()
        for storage, nbytes in self.saved.held.items():
            found[self._saved_at[storage]] += nbytes
        return found


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


def trace_fake_step(
    forward: Forward, units: Sequence[Unit], inputs: CheckpointedInputsConfig | None = None
) -> StepTrace:
    """Trace one step of a fake copy of the model; see `StepTrace.run`."""
    with fake_run(forward) as (copy, fake_args, fake_kwargs):
        parts = {b.name: copy.get_submodule(b.name) for unit in units for b in unit.blocks}
        on_copy = [
            replace(unit, blocks=tuple(Block(b.name, parts[b.name]) for b in unit.blocks))
            for unit in units
        ]
        return StepTrace(copy).run(lambda: copy(*fake_args, **fake_kwargs), on_copy, inputs)


def describe_kept(forward: Forward, units: Sequence[Unit], inputs: CheckpointedInputsConfig) -> str:
    """Return the bytes that a forward keeps for backward, with a policy's units and without."""
    try:
        ours, none = trace_fake_step(forward, units, inputs), trace_fake_step(forward, ())
    except UnsupportedError as error:
        return f"activations: not computed, {error.problems[0].found}"
    words = f" ({size(ours.offloaded_bytes)} in host memory)" if ours.offloaded_bytes else ""
    words += ", before they are split between ranks" if inputs.partition else ""
    kept, without = size(ours.saved.bytes), size(none.saved.bytes)
    return f"activations kept per rank: {kept}{words}; {without} without the policy (computed)"


@contextmanager
def gradients_dropped(model: nn.Module) -> Iterator[None]:
    """Drop weights' gradients as they come, as ZeRO-3 takes them away."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
        yield
