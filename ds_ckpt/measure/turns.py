"""The turns that cells take, and what comes of them. Pure: no process, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_ckpt.measure.records import Memory, StepTime
from ds_ckpt.measure.spec import DENSE, STOCK, Cell, Spec

Memories = Mapping[tuple[object, ...], Memory]
"""By the records' keys."""
MOST_BATCHES = 8
"""Checkpointed cells take at most so many times the batch, however much memory they leave."""


@dataclass(frozen=True)
class Variant:
    """A cell with a batch."""

    cell: Cell
    sequences: int
    equal_memory: bool = False

    def key(self, rate: float | None, round_: int) -> tuple[object, ...]:
        """The key of its turn's record."""
        return ("turn", self.cell.name, rate, self.sequences, self.equal_memory, round_)


def equal_memory(spec: Spec, memories: Memories) -> list[Variant]:
    """Cells of the other policies with the batch whose activations take what `none`'s take."""
    found = []
    sequences = {m.cell: sequences_in(spec, m, memories) for m in memories.values()}
    for policy in spec.policies:
        fits = sequences[Cell(policy, STOCK).name]
        if policy != "none" and fits > min(spec.batches):
            for method in (STOCK, DENSE, *spec.methods):
                found.append(Variant(Cell(policy, method), fits, equal_memory=True))
    return list(dict.fromkeys(found))


def sequences_in(spec: Spec, cell: Memory, memories: Memories) -> int:
    """Sequences with which a cell's peak stays within that of no checkpointing at the usual batch.

    From its peaks with one batch and with two, on the line through them; at least one batch.
    """
    base = min(spec.batches)
    limit = _peak(memories, Cell("none", STOCK).name, base)
    one, two = _peak(memories, cell.cell, base), _peak(memories, cell.cell, 2 * base)
    each = (two - one) / base
    if each <= 0:
        return base
    fits = base + int((limit - one) // each)
    return max(base, min(fits, MOST_BATCHES * base))


def _peak(memories: Memories, cell: str, sequences: int) -> int:
    return memories[("memory", cell, sequences)].peak_bytes


def slowest(processes: Sequence[Sequence[StepTime]]) -> tuple[StepTime, ...]:
    """Of each step the process that took longest: a step is as long as that."""
    return tuple(max(step, key=lambda t: t.step_s) for step in zip(*processes, strict=True))


def median_index(values: Sequence[float]) -> int:
    """Where the value is that is nearest to the middle one."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    return order[len(order) // 2]
