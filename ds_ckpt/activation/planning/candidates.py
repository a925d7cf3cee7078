"""Ways to treat one block, with the bytes and the recompute of each, counted in the survey.

Bytes are sets of storages, so that what two operators or two blocks share is counted once. The
recompute runs to the last tensor that autograd saves and no further, and leaves out the operators
whose results were kept, as `activation.checkpoint` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_ckpt.activation.planning.trace import Survey, TracedOperator
from ds_ckpt.activation.selective import cores, products
from ds_ckpt.telemetry.memory import Storage


@dataclass(frozen=True)
class Candidate:
    """A way to treat a block.

    Attributes:
        save_ops: operator results that the recompute keeps; None: the block is not recomputed.
        held: storages that wait for backward.
        full: storages at once while the block's backward runs: `held`, and the tensors that its
            largest recompute makes again.
        flops: of its recomputes, like `moved_bytes`.
    """

    save_ops: tuple[str, ...] | None
    held: frozenset[Storage]
    full: frozenset[Storage]
    flops: int = 0
    moved_bytes: int = 0

    @property
    def word(self) -> str:
        """Name the way."""
        if self.save_ops is None:
            return "none"
        return f"selective {'+'.join(self.save_ops)}" if self.save_ops else "block"


def candidates_of(found: Survey, index: int) -> list[Candidate]:
    """List the ways to treat block `index`; the first is to leave it alone."""
    calls = found.blocks[index].calls
    saved = {found.saves[n] for call in calls for n in range(*call.saves)}
    held = frozenset(saved & found.held.keys())
    ways = [Candidate(None, held, held), _recomputed(found, index, (), frozenset())]
    for name, kept in (("attention", cores()), ("matmuls", products() | cores())):
        way = _recomputed(found, index, (name,), kept)
        if all(way.held != other.held for other in ways):
            ways.append(way)
    return ways


def _recomputed(
    found: Survey, index: int, save_ops: tuple[str, ...], keeps: frozenset[Any]
) -> Candidate:
    held, saved, repeated = set[Storage](), list[set[Storage]](), list[TracedOperator]()
    for call in found.blocks[index].calls:
        saves = found.saves[slice(*call.saves)]
        if not saves:  # a frozen block whose input needs no gradient
            continue
        saved.append(found.activations(saves))
        kept = list(call.arguments)
        operators = found.operators[slice(*call.operators)]
        written = {s: number for number, o in enumerate(operators) for s in o.written}
        for number, operator in enumerate(operators):
            if operator.saves == call.saves[1]:
                break  # nothing is saved from here on
            is_last = all(written.get(s, -1) <= number for s in operator.results)
            if operator.func in keeps and is_last:
                kept += operator.results
            else:
                repeated.append(operator)
        held |= found.activations(kept)
    largest = max((made - held for made in saved), key=found.bytes_of, default=set())
    return Candidate(
        save_ops,
        frozenset(held),
        frozenset(held | largest),
        sum(operator.flops for operator in repeated),
        sum(operator.moved_bytes for operator in repeated),
    )


def shared_by_blocks(candidates: Sequence[Sequence[Candidate]]) -> frozenset[Storage]:
    """Return storages that several blocks may hold: rotary tables, masks, an encoder's result."""
    owners: Counter[Storage] = Counter()
    for ways in candidates:
        owners.update(frozenset[Storage]().union(*(way.held for way in ways)))
    return frozenset(s for s, count in owners.items() if count > 1)
