"""Measures a model's forward without its memory: what each block and operator saves and costs.

One forward of a fake copy (`fake_copy.py`) with the shapes of a real batch. The numbers are not
estimates from a formula: the same modules run, autograd saves what it would save, and storages are
counted as `HeldActivations` counts them. What is not seen: a loss that is computed outside of the
model's forward, and memory that kernels use inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ds_ckpt.activation.blocks import (
    Block,
    Part,
    attention_parts,
    find_blocks,
    gates,
    is_norm,
    mlp_parts,
)
from ds_ckpt.activation.install import CheckpointedBlocks
from ds_ckpt.planner.fake_run import fake_run, told_in_words
from ds_ckpt.planner.recording import Event, Recorder, Run, Storage

PartName = Literal["attention", "mlp", "norm", "other"]


@dataclass(frozen=True)
class OperatorRecord:
    """One operator of the forward.

    Attributes:
        module: full name of the innermost module that runs it; "" is the model itself.
        block: index into `Survey.blocks`; -1 outside of blocks.
        flops: of products, convolutions and attention cores.
        moved_bytes: read and written; 0 for views.
        output_bytes: of new storages.
        saved_bytes: of storages that autograd saves first because of it.
    """

    operator: str
    module: str
    part: PartName
    block: int
    flops: int
    moved_bytes: int
    output_bytes: int
    saved_bytes: int
    view: bool


@dataclass(frozen=True)
class BlockRecord:
    """One block without checkpointing.

    Attributes:
        saved_bytes: of storages that autograd saves first inside of it.
        boundary_bytes: of its tensor arguments, each storage once: what policy "block" keeps.
    """

    name: str
    class_name: str
    calls: int
    saved_bytes: int
    boundary_bytes: int
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Parts:
    """The parts of one block, by names of modules."""

    attention: tuple[str, ...]
    mlps: tuple[tuple[str, ...], ...]
    gates: tuple[str, ...]


@dataclass(frozen=True)
class Survey:
    """What one forward saves and costs.

    Attributes:
        blocks: in the order in which they first run.
        operators: in the order in which they ran.
        saved_bytes: what `HeldActivations` measures without checkpointing.
        head_bytes, tail_bytes: of them outside of blocks: saved before the last block has ended,
            and afterwards (final norm, head, loss).
        output_bytes: storages of the model's result.
        record, parts, first_saves: for `candidates.py`.
    """

    blocks: tuple[BlockRecord, ...]
    operators: tuple[OperatorRecord, ...]
    saved_bytes: int
    head_bytes: int
    tail_bytes: int
    output_bytes: int
    flops: int
    moved_bytes: int
    record: Recorder = field(repr=False)
    parts: tuple[Parts, ...] = field(repr=False)
    outside: frozenset[Storage] = field(repr=False)
    """Storages that are saved outside of blocks."""

    @property
    def outside_bytes(self) -> int:
        return self.head_bytes + self.tail_bytes

    def runs_of(self, name: str) -> list[Run]:
        """The calls of a module, in order."""
        return [r for r in self.record.runs if self.record.names[r.module] == name]


def survey(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    modules: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> Survey:
    """Run a fake copy of the model once, under the caller's autocast, and tell what it saved.

    Args:
        model: in training mode, also partitioned by ZeRO-3, without ds_ckpt's checkpointing on it.
        args, kwargs: of its forward. Shapes and types count, and the values of small integers.
        modules: class names or patterns of the blocks, as in the configuration.
        device: where the parameters are when the model runs; None: where they say they are.

    Raises:
        ConfigError: no blocks are found.
        UnsupportedError: the forward depends on values of tensors, or torch cannot tell the shape
            of an operator's result.
    """
    blocks = outermost(find_blocks(model, modules))
    parts = tuple(_parts_of(b) for b in blocks)
    names = {b.name for b in blocks}
    for part in parts:
        names |= {*part.attention, *(n for chain in part.mlps for n in chain)}
    with fake_run(model, args, kwargs, device) as (twin, fake_args, fake_kwargs):
        # with its hook in place, as in training: transformers then leaves out its cache
        plainly = CheckpointedBlocks(twin, units=[])
        recorder = Recorder(twin, [m for n, m in twin.named_modules() if n in names])
        with told_in_words(recorder), recorder:
            result = twin(*fake_args, **fake_kwargs)
        recorder.finish()
        found = _survey(blocks, parts, recorder, result)
        del plainly, result
    return found


def outermost(blocks: Sequence[Block]) -> list[Block]:
    """Those that are not inside another one."""
    names = {b.name for b in blocks}

    def inside(name: str) -> bool:
        pieces = name.split(".")
        return any(".".join(pieces[:i]) in names for i in range(1, len(pieces)))

    return [b for b in blocks if not inside(b.name)]


def _parts_of(block: Block) -> Parts:
    def names(parts: Sequence[Part]) -> tuple[str, ...]:
        return tuple(name for name, _ in parts)

    mlps = mlp_parts(block.name, block.module)
    found = {id(m) for m in gates(mlps)}
    inside = block.module.named_modules(prefix=block.name)
    return Parts(
        names(attention_parts(block.name, block.module)),
        tuple(names(chain) for chain in mlps),
        tuple(n for n, m in inside if id(m) in found),
    )


def _survey(
    blocks: Sequence[Block], parts: Sequence[Parts], record: Recorder, result: Any
) -> Survey:
    by_name = {b.name: b for b in blocks}
    calls: dict[str, list[Run]] = {b.name: [] for b in blocks}
    for run in record.runs:
        name = record.names[run.module]
        if name in calls:
            calls[name].append(run)
    order = sorted((b for b in by_name if calls[b]), key=lambda n: calls[n][0].events)
    block_of_event = [-1] * len(record.events)
    block_of_save = [-1] * len(record.saves)
    for index, name in enumerate(order):
        for run in calls[name]:
            block_of_event[slice(*run.events)] = [index] * (run.events[1] - run.events[0])
            block_of_save[slice(*run.saves)] = [index] * (run.saves[1] - run.saves[0])
    last_save = max((r.saves[1] for name in order for r in calls[name]), default=0)
    operators = [0] * len(record.events)
    saved, seen = [0] * len(order), set[Storage]()
    head = tail = 0
    outside = set()
    for number, save in enumerate(record.saves):
        storage, block = save.storage, block_of_save[number]
        if not record.alive(storage):
            continue
        if block == -1:
            outside.add(storage)
        if storage in seen:
            continue
        seen.add(storage)
        size = record.sizes[storage]
        operators[_owner(record.events, save.event, storage)] += size
        if block >= 0:
            saved[block] += size
        elif number < last_save:
            head += size
        else:
            tail += size
    by_index = {b.name: p for b, p in zip(blocks, parts, strict=True)}
    labels = [_part(name, record, by_index) for name in record.names]
    norms = [is_norm(class_name) for class_name in record.classes]
    records = tuple(
        OperatorRecord(
            str(e.func),
            record.names[e.module],
            "norm" if norms[e.module] else labels[e.module],
            block_of_event[i],
            e.flops,
            e.moved_bytes,
            e.output_bytes,
            operators[i],
            e.view,
        )
        for i, e in enumerate(record.events)
    )
    return Survey(
        tuple(
            BlockRecord(
                name,
                type(by_name[name].module).__name__,
                len(calls[name]),
                saved[i],
                sum(record.sizes[s] for s in {s for r in calls[name] for s in r.arguments}),
                sum(r.flops for r in records if r.block == i),
                sum(r.moved_bytes for r in records if r.block == i),
            )
            for i, name in enumerate(order)
        ),
        records,
        sum(saved) + head + tail,
        head,
        tail,
        sum(record.sizes[s] for s in set(record.storages(result))),
        sum(r.flops for r in records),
        sum(r.moved_bytes for r in records),
        record,
        tuple(by_index[name] for name in order),
        frozenset(outside),
    )


def _part(name: str, record: Recorder, parts: Mapping[str, Parts]) -> PartName:
    for part in parts.values():
        if any(_within(name, n) for n in part.attention):
            return "attention"
        if any(_within(name, n) for chain in part.mlps for n in chain):
            return "mlp"
    return "other"


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


_SAVES_ITS_RESULT = {
    "_softmax", "_log_softmax", "exp", "sigmoid", "tanh", "relu", "rsqrt", "sqrt", "reciprocal",
    "native_layer_norm", "native_dropout", "native_batch_norm", "native_group_norm", "var_mean",
    "_fused_rms_norm", "max_pool2d_with_indices", "sort", "topk", "norm", "linalg_vector_norm",
}  # fmt: skip


def _owner(events: Sequence[Event], position: int, storage: Storage) -> int:
    """The operator that a save at `position` belongs to: autograd saves arguments before an
    operator runs and results after it."""
    if position:
        before = events[position - 1]
        name = before.func._schema.name.split("::")[-1]
        if storage in before.results and (name in _SAVES_ITS_RESULT or "attention" in name):
            return position - 1
    for index in range(position, min(position + 4, len(events))):
        if storage in events[index].given and not events[index].view:
            return index
    for index in range(position - 1, max(position - 7, -1), -1):
        if storage in events[index].given or storage in events[index].results:
            return index
    return min(position, len(events) - 1)
