"""Ways to treat one block, with the bytes and the recompute of each, counted in the survey.

Bytes are sets of storages, so that what two operators or two blocks share is counted once. The
recompute runs to the last tensor that autograd saves and no further, and leaves out the operators
whose results were kept, as `activation.checkpoint` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_ckpt.activation.planning.trace import Survey, SurveyedBlock, TracedOperator
from ds_ckpt.activation.selective import cores, products
from ds_ckpt.telemetry.memory import Storage

RECOMPUTES: tuple[tuple[str, ...], ...] = (
    (),
    ("attention",),
    ("qkvo",),
    ("gate",),
    ("attention", "qkvo"),
    ("attention", "gate"),
    ("qkvo", "gate"),
    ("attention", "qkvo", "gate"),
    ("matmuls",),
)
"""Sets of operators whose results a recomputed block keeps, as in `save_ops`."""


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
    block, trace = found.blocks[index], found.trace
    operators = [o for call in block.calls for o in trace.within(call)]
    saved = {trace.saves[n] for call in block.calls for n in range(*call.saves)}
    held = frozenset(saved & trace.held.keys())
    ways: dict[tuple[object, ...], Candidate] = {(): Candidate(None, held, held)}
    for sets in RECOMPUTES:
        if all(any(map(_kept_by(found, block, (name,)), operators)) for name in sets):
            way = _recomputed(found, block, sets)
            ways.setdefault((way.held, way.full, way.flops, way.moved_bytes), way)
    return list(ways.values())


def _kept_by(
    found: Survey, block: SurveyedBlock, sets: Sequence[str]
) -> Callable[[TracedOperator], bool]:
    """Test for an operator's result in one of these sets, as `activation.selective` decides."""
    anywhere: frozenset[object] = frozenset()
    if "matmuls" in sets:
        anywhere |= products() | cores()
    if "attention" in sets:
        anywhere |= cores()
    inside = (
        *(block.attention if "qkvo" in sets else ()),
        *(block.gates if "gate" in sets else ()),
    )
    marked = {
        number
        for number, name in enumerate(found.trace.names)
        if any(name == n or name.startswith(n + ".") for n in inside)
    }
    in_modules = products()

    def kept(operator: TracedOperator) -> bool:
        func = operator.func
        return func in anywhere or (operator.module in marked and func in in_modules)

    return kept


def _recomputed(found: Survey, block: SurveyedBlock, sets: tuple[str, ...]) -> Candidate:
    trace, keeps = found.trace, _kept_by(found, block, sets)
    held, saved, repeated = set[Storage](), list[set[Storage]](), list[TracedOperator]()
    for call in block.calls:
        saves = trace.saves[slice(*call.saves)]
        if not saves:  # a frozen block whose input needs no gradient
            continue
        saved.append(trace.storages(saves))
        kept = list(call.arguments)
        operators = trace.within(call)
        written = {s: number for number, o in enumerate(operators) for s in o.written}
        for number, operator in enumerate(operators):
            if operator.packs == call.saves[1]:
                break  # nothing is saved from here on
            if keeps(operator) and all(written.get(s, -1) <= number for s in operator.results):
                kept += operator.results
            else:
                repeated.append(operator)
        held |= trace.storages(kept)
    largest = max((made - held for made in saved), key=found.bytes_of, default=set())
    return Candidate(
        sets,
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
