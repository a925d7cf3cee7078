"""Traces of a model: a forward without memory by block, and a whole step on tensors of any kind.

A survey is one forward of a fake copy (`fake.py`) with the shapes of a real batch, under the memory
tracker. Not seen: a loss that is computed outside of the model's forward, and memory that kernels
use inside.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_ckpt.activation.blocks import (
    Block,
    attention_parts,
    find_blocks,
    gates,
    is_norm,
    mlp_parts,
)
from ds_ckpt.activation.checkpoint import Arguments
from ds_ckpt.activation.install import CheckpointedBlocks, without_empty_caches
from ds_ckpt.activation.planning.costs import Rates, flops_of, launches, moved_bytes
from ds_ckpt.activation.planning.fake import fake_run, unknown_values_refused
from ds_ckpt.activation.policies import Unit
from ds_ckpt.activation.selective import is_view, writes_to
from ds_ckpt.telemetry.memory import (
    MemoryTracker,
    ModuleTracker,
    Operator,
    Phase,
    Place,
    Storage,
    tensors_in,
)

NO_STORAGE = -1
"""Number for a tensor without a storage of its own (sparse), and for a saved weight."""


@dataclass(frozen=True)
class TracedOperator:
    """An operator of the forward.

    Attributes:
        module: number of the innermost module that runs.
        packs: tensors that autograd had saved when it had run, parameters not counted.
        results: storages of the tensors that it returned, in order.
        written: storages that it wrote into.
        flops: of products, convolutions and attention cores.
        moved_bytes: read and written; 0 for views, and where there are flops, which take longer.
    """

    func: Any
    module: int
    packs: int
    results: tuple[Storage, ...]
    written: tuple[Storage, ...]
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        arguments: storages of the tensors that checkpointing the call would keep.
        operators: first, and one behind the last; likewise `saves`.
    """

    module: str
    arguments: set[Storage]
    operators: tuple[int, int]
    saves: tuple[int, int]


class Trace:
    """One forward of a copy: operators, tensors that autograd saved, calls of modules.

    Args:
        module: the copy; its modules' forwards are wrapped.
        watched: names of modules whose calls are noted with their arguments.

    Attributes:
        tracker: to be entered around the forward, with its `saved`.
        names: of modules, by number.
        saves: storages of the tensors that autograd saved, in order.
        sizes: bytes by storage.
        weights: storages of parameters.
    """

    def __init__(self, module: nn.Module, watched: frozenset[str]) -> None:
        self.tracker = MemoryTracker(module, operator=self._ran, noted=self._saved)
        self.names: list[str] = []
        self.operators: list[TracedOperator] = []
        self.saves: list[Storage] = []
        self.calls: list[Call] = []
        self.sizes = self.tracker.storages.bytes
        self._open: list[int] = [0]
        self.weights = frozenset(map(self._storage, module.parameters())) - {NO_STORAGE}
        for number, (name, part) in enumerate(module.named_modules()):
            self.names.append(name)
            if type(part).forward is not nn.Module.forward:
                part.forward = self._wrapped(number, part.forward, name in watched)

    @property
    def held(self) -> dict[Storage, int]:
        """Bytes of the storages that autograd held when the forward had ended, without weights."""
        return self.tracker.saved.held

    def within(self, call: Call) -> list[TracedOperator]:
        """List the operators of a call."""
        return self.operators[slice(*call.operators)]

    def _storage(self, tensor: Tensor) -> Storage:
        number = self.tracker.storages.number(tensor)
        return NO_STORAGE if number is None else number

    def storages(self, numbers: Iterable[Storage]) -> set[Storage]:
        """Return the storages that are neither weights nor missing."""
        return set(numbers) - self.weights - {NO_STORAGE}

    def _saved(self, tensor: Tensor, storage: Storage | None) -> None:
        if not isinstance(tensor, nn.Parameter):
            self.saves.append(NO_STORAGE if storage is None else storage)

    def _ran(self, operator: Operator) -> None:
        written: list[Storage] = []
        for position, name in writes_to(operator.func):
            args, kwargs = operator.args, operator.kwargs
            value = args[position] if position < len(args) else kwargs.get(name)
            written += map(self._storage, tensors_in(value))
        view = not written and is_view(operator.func)
        flops = 0 if view else flops_of(operator)
        self.operators.append(
            TracedOperator(
                operator.func,
                self._open[-1],
                len(self.saves),
                tuple(map(self._storage, operator.made)),
                tuple(s for s in written if s != NO_STORAGE),
                flops,
                0 if view or flops else moved_bytes(operator),
            )
        )

    def _wrapped(
        self, number: int, forward: Callable[..., Any], watched: bool
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self._open.append(number)
            if watched:
                given, named = without_empty_caches(self.names[number], args, kwargs)
                tensors = Arguments(forward, given, named).tensors
                arguments = self.storages(map(self._storage, tensors))
            first, saves = len(self.operators), len(self.saves)
            result = forward(*args, **kwargs)
            self._open.pop()
            if watched:
                operators = (first, len(self.operators))
                name, ends = self.names[number], (saves, len(self.saves))
                self.calls.append(Call(name, arguments, operators, ends))
            return result

        return traced


@dataclass
class SurveyedBlock:
    """A block without checkpointing.

    Attributes:
        attention: names of its attention modules.
        gates: names of its MLPs' first products.
        calls: in order.
        saved_bytes: of storages that autograd saves first inside of it.
    """

    name: str
    attention: tuple[str, ...]
    gates: tuple[str, ...]
    calls: list[Call] = field(default_factory=list)
    saved_bytes: int = 0

    @classmethod
    def of(cls, block: Block) -> SurveyedBlock:
        """Find its parts."""
        gated = {id(m) for m in gates(mlp_parts(block.name, block.module))}
        inside = block.module.named_modules(prefix=block.name)
        return cls(
            block.name,
            tuple(name for name, _ in attention_parts(block.name, block.module)),
            tuple(name for name, module in inside if id(module) in gated),
        )


class Survey:
    """Bytes and work of one forward, by block.

    Every storage belongs to the block, or to the outside, that saved it first.

    Attributes:
        blocks: in the order in which they first run.
        saved_bytes: as `SavedActivations` measures without checkpointing.
        head_bytes: saved outside of blocks before the last block has ended.
        tail_bytes: saved outside of blocks afterwards (final norm, head, loss).
        outside: storages that are saved outside of blocks.
        block_of: by operator, the index of its block; -1 outside of blocks.
    """

    def __init__(self, blocks: Sequence[SurveyedBlock], trace: Trace) -> None:
        self.trace = trace
        for block in blocks:
            block.calls = [call for call in trace.calls if call.module == block.name]
        self.blocks = sorted((b for b in blocks if b.calls), key=lambda b: b.calls[0].operators)
        self.block_of, of_save = [-1] * len(trace.operators), [-1] * len(trace.saves)
        for index, block in enumerate(self.blocks):
            for call in block.calls:
                for numbers, (first, end) in (
                    (self.block_of, call.operators),
                    (of_save, call.saves),
                ):
                    numbers[first:end] = [index] * (end - first)
        last_save = max((n for n, index in enumerate(of_save) if index >= 0), default=-1)
        self.head_bytes = self.tail_bytes = 0
        outside, of_block = set[Storage](), set[Storage]()
        for number, (storage, index) in enumerate(zip(trace.saves, of_save, strict=True)):
            if storage not in trace.held:
                continue
            is_new = not (storage in outside or storage in of_block)
            (outside if index == -1 else of_block).add(storage)
            if is_new and index >= 0:
                self.blocks[index].saved_bytes += trace.sizes[storage]
            elif is_new and number > last_save:
                self.tail_bytes += trace.sizes[storage]
            elif is_new:
                self.head_bytes += trace.sizes[storage]
        self.saved_bytes = self.bytes_of(outside | of_block)
        self.head_bytes += self.bytes_of(outside & of_block)
        self.outside = frozenset(outside)

    def bytes_of(self, storages: Iterable[Storage]) -> int:
        """Add up the sizes of storages."""
        return sum(self.trace.sizes[s] for s in storages)

    def forward_s(self, rates: Rates) -> list[float]:
        """Return seconds by block; the last entry is what runs outside of blocks."""
        found = [0.0] * (len(self.blocks) + 1)
        for operator, block in zip(self.trace.operators, self.block_of, strict=True):
            found[block] += rates.seconds(operator.flops, operator.moved_bytes)
        return found


def survey(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    modules: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> Survey:
    """Run a fake copy of the model once, under the caller's autocast, and count what it saves.

    Args:
        model: in training mode, also partitioned by ZeRO-3, without ds_ckpt's checkpointing on it.
        args: of its forward. Shapes and types count, and the values of small integers.
        kwargs: likewise.
        modules: class names or patterns of the blocks, as in the configuration.
        device: where the parameters are when the model runs; None: where they say they are.

    Raises:
        ConfigError: no blocks are found.
        UnsupportedError: the forward depends on values of tensors, or torch cannot tell the shape
            of an operator's result.
    """
    found = find_blocks(model, modules)
    outermost = [b for b in found if not any(b.name.startswith(f"{o.name}.") for o in found)]
    blocks = [SurveyedBlock.of(block) for block in outermost]
    with fake_run(model, args, kwargs, device) as (twin, fake_args, fake_kwargs):
        # with the hook in place, as in training: transformers then leaves out its cache
        plainly = CheckpointedBlocks(twin, units=[])
        trace = Trace(twin, frozenset(block.name for block in blocks))
        with unknown_values_refused("the forward"):
            with trace.tracker.saved, trace.tracker:
                result = twin(*fake_args, **fake_kwargs)
        del plainly, result
    return Survey(blocks, trace)


@dataclass(frozen=True)
class Work:
    """Operators of one phase of a step.

    Attributes:
        launches: operators that compute (views and allocations are left out): on an accelerator
            each starts at least one kernel.
        flops: of products, convolutions and attention cores.
        moved_bytes: of all arguments and results.
    """

    launches: int = 0
    flops: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.launches + other.launches,
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
        )


class StepTrace(MemoryTracker):
    """Bytes, operators and FLOPs of one forward and backward, by phase, block and part.

    Args:
        model: hooks are put on it, and taken off again.
        blocks: by which bytes and operators are told apart; none: all is outside of blocks.

    Attributes:
        where: the phase, block and part that run.
        work: by place.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block] = ()) -> None:
        self.where = ModuleTracker(
            model,
            {b.name: b.module for b in blocks},
            {b.name: list(_parts_of(b)) for b in blocks},
        )
        super().__init__(
            model, place=lambda: self.where.place, operator=self._ran, noted=self._noted
        )
        self._model = model
        self.work: defaultdict[Place, Work] = defaultdict(Work)
        self._saved_at: dict[Storage, Place] = {}

    def __enter__(self) -> StepTrace:
        self.where.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.where.__exit__(*error)

    def run(self, forward: Callable[[], Any], units: Sequence[Unit] | None) -> StepTrace:
        """Run forward and backward, on tensors of any kind, and count what is alive at once.

        The real checkpointing is on the model. Counted are activations, their gradients,
        temporaries, and the gradient of one weight at a time. Not counted: weights, memory that
        kernels use inside, and fragmentation.

        Args:
            forward: runs the model's forward. Backward begins at the result's `loss`, else at every
                tensor of it that needs a gradient.
            units: recomputed; None: no checkpointing is put on the model.
        """
        put = None
        if units is not None:
            scopes, around = [self.where.recomputing], self.where.around
            put = CheckpointedBlocks(self._model, scopes=scopes, units=units, around=around)
        try:
            with gradients_dropped(self._model), self:
                with self.saved:
                    result = forward()
                loss = getattr(result, "loss", None)
                leaves = tensors_in(loss if isinstance(loss, Tensor) else result)
                roots = [t for t in leaves if t.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        finally:
            if put is not None:
                put.remove()
        return self

    def _ran(self, operator: Operator) -> None:
        if not launches(operator.func):
            return
        self.work[self.where.place] += Work(1, flops_of(operator), moved_bytes(operator))

    def _noted(self, tensor: Tensor, storage: Storage | None) -> None:
        if storage is not None:
            self._saved_at.setdefault(storage, self.where.saving_place)

    def total(self, *phases: Phase) -> Work:
        """Add up the operators of some phases; without any, of the whole step."""
        found = (w for place, w in self.work.items() if not phases or place.phase in phases)
        return sum(found, Work())

    @property
    def held_bytes(self) -> int:
        """Saved activations, as `SavedActivations` counts them."""
        return self.saved.bytes

    def held_by(self) -> Counter[tuple[str, str]]:
        """Saved activations by block and part; a storage counts where it was saved first."""
        found: Counter[tuple[str, str]] = Counter()
        for storage, nbytes in self.saved.held.items():
            place = self._saved_at[storage]
            found[place.block, place.part] += nbytes
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


def simulate(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    units: Sequence[Unit],
    *,
    device: torch.device | None = None,
) -> StepTrace:
    """Trace one step of a fake copy of the model; see `StepTrace.run`.

    Raises:
        UnsupportedError: see `survey`.
    """
    with fake_run(model, args, kwargs, device) as (twin, fake_args, fake_kwargs):
        parts = dict(twin.named_modules())

        def on_twin(block: Block) -> Block:
            return Block(block.name, parts[block.name])

        put = [replace(unit, blocks=tuple(map(on_twin, unit.blocks))) for unit in units]
        with unknown_values_refused("the forward"):
            return StepTrace(twin).run(lambda: twin(*fake_args, **fake_kwargs), put)


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
