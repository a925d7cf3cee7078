"""Ways to treat one block, with the bytes and the recompute of each, counted in the survey.

A candidate is something that `activation` can run: a list of recomputes (`Unit`) and the operators
that each keeps. Its bytes are sets of storages, so that what two operators or two blocks share is
counted once. The recompute runs to the last tensor that autograd saves and no further, and leaves
out the operators whose results were kept, as `activation.checkpoint` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ds_ckpt.activation.planning.trace import (
    NO_STORAGE,
    Call,
    Survey,
    SurveyedBlock,
    TracedOperator,
)
from ds_ckpt.activation.policies import Groups, policies
from ds_ckpt.activation.selective import cores, products
from ds_ckpt.telemetry.memory import Storage

Keeps = Callable[[TracedOperator], bool]
"""Returns whether an operator's result is kept for the recompute."""

# Ways that the policies propose, and the operators of a set of results.


def _tried(found: Survey, block: SurveyedBlock) -> list[tuple[str, Groups, tuple[str, ...]]]:
    """Name, modules of each recompute, and the sets of results that are kept."""
    operators = [o for call in block.calls for o in found.trace.within(call)]
    ways: list[tuple[str, Groups, tuple[str, ...]]] = []
    for policy in policies():
        for groups, sets in policy.candidates(block.name, block):
            if all(any(map(_kept_by(found, block, (word,)), operators)) for word in sets):
                ways.append((f"{policy.name} {'+'.join(sets)}".rstrip(), groups, sets))
    of = {name: groups for name, groups, _ in ways}
    if "attention" in of and "mlp" in of:
        both = ("attention and mlp", [*of["attention"], *of["mlp"]], ())
        ways.insert([*of].index("mlp") + 1, both)
    return ways


def _kept_by(found: Survey, block: SurveyedBlock, sets: Sequence[str]) -> Keeps:
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


# Bytes and recompute of each way.


@dataclass(frozen=True)
class UnitNames:
    """A `Unit` in names: the modules of one recompute, and the operators whose results it keeps."""

    modules: tuple[str, ...]
    save_ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A way to treat a block.

    Attributes:
        word: its name.
        held: storages that wait for backward.
        kept: those of them that checkpointing keeps for a recompute, which offload can move.
        full: storages at once while the block's backward runs: `held`, and the largest set of
            tensors that one of its recomputes makes again.
        flops: of its recomputes, like `moved_bytes`.
    """

    word: str
    units: tuple[UnitNames, ...]
    held: frozenset[Storage]
    kept: frozenset[Storage]
    full: frozenset[Storage]
    flops: int
    moved_bytes: int


def candidates_of(found: Survey, index: int) -> list[Candidate]:
    """List the ways to treat block `index`; the first is to leave it alone."""
    block = found.blocks[index]
    ways: dict[tuple[object, ...], Candidate] = {}
    for word, groups, sets in _tried(found, block):
        way = _candidate(found, block, word, groups, sets)
        if way is not None:
            ways.setdefault((way.held, way.full, way.flops, way.moved_bytes), way)
    return list(ways.values())


def _candidate(
    found: Survey, block: SurveyedBlock, word: str, groups: Groups, sets: tuple[str, ...]
) -> Candidate | None:
    trace = found.trace
    keeps = _kept_by(found, block, sets)
    held, kept, largest = set[Storage](), set[Storage](), set[Storage]()
    repeated: list[TracedOperator] = []
    recomputes = [
        (c, *_recompute(found, c, keeps)) for g in groups for c in _chains(found, block, g)
    ]
    if groups and not recomputes:
        return None
    inside = [call.saves for calls, *_ in recomputes for call in calls]
    for call in block.calls:
        for number in range(*call.saves):
            plain = not any(first <= number < end for first, end in inside)
            if plain and trace.saves[number] in trace.held:
                held.add(trace.saves[number])
    for _, storages, _, operators in recomputes:
        kept |= storages
        repeated += operators
    for _, _, inner, _ in recomputes:
        largest = max(largest, inner - held - kept, key=found.bytes_of)
    return Candidate(
        word,
        tuple(UnitNames(tuple(group), sets) for group in groups),
        frozenset(held | kept),
        frozenset(kept - held),
        frozenset(held | kept | largest),
        sum(operator.flops for operator in repeated),
        sum(operator.moved_bytes for operator in repeated),
    )


def _chains(found: Survey, block: SurveyedBlock, group: Sequence[str]) -> Iterator[list[Call]]:
    """Yield the calls that one recompute repeats, for each time that the block runs."""
    for outer in block.calls:
        (first, end), inner = outer.operators, []
        for name in group:
            calls = found.calls_of(name)
            inner.append([c for c in calls if first <= c.operators[0] and c.operators[1] <= end])
        for chain in zip(*inner, strict=False):
            yield list(chain)


def _recompute(
    found: Survey, calls: Sequence[Call], keeps: Keeps
) -> tuple[set[Storage], set[Storage], list[TracedOperator]]:
    """Storages that a recompute keeps, storages saved inside, operators that run again."""
    trace = found.trace
    saves = {trace.saves[n] for call in calls for n in range(*call.saves)}
    kept, before, repeated = set[Storage](), set[Storage](), list[TracedOperator]()
    if not saves:  # a frozen block whose input needs no gradient
        return kept, saves, repeated
    for call in calls:
        kept |= set(call.arguments) - before
        before = set(call.results)
        operators = trace.within(call)
        written = {s: number for number, o in enumerate(operators) for s in o.written}
        for number, operator in enumerate(operators):
            results = set(operator.results)
            early = operator.packs < call.saves[1]
            if (
                keeps(operator)
                and (early or len(calls) > 1)
                and not before & results
                and all(written.get(s, -1) <= number for s in results)
            ):
                kept |= results
            elif early or call is not calls[-1]:
                repeated.append(operator)
    none = trace.weights | {NO_STORAGE}
    return kept - none, saves - none, repeated


def shared_by_blocks(candidates: Sequence[Sequence[Candidate]]) -> frozenset[Storage]:
    """Return storages that several blocks may hold: rotary tables, masks, an encoder's result."""
    owners: Counter[Storage] = Counter()
    for ways in candidates:
        owners.update(frozenset[Storage]().union(*(way.held for way in ways)))
    return frozenset(s for s, count in owners.items() if count > 1)
