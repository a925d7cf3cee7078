"""What can be done with one block, what each way holds and recomputes: counted in the survey.

A candidate is something that `activation` can run: a list of recomputes (`Unit`) and the operators
that each keeps. Its bytes are sets of storages, so that what two operators or two blocks share is
counted once. The recompute runs to the last tensor that autograd saves and no further, and leaves
out the operators whose results were kept, as `activation.checkpoint` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ds_ckpt.activation.policies import Groups, policies
from ds_ckpt.activation.selective import cores, products
from ds_ckpt.planner.survey import (
    NO_STORAGE,
    Call,
    Survey,
    SurveyedBlock,
    Trace,
    TracedOperator,
)
from ds_ckpt.telemetry.memory import Storage

Keeps = Callable[[TracedOperator], bool]
"""Whether an operator's result is kept for the recompute."""

# What the policies try on a block, and which operators a set of results means.


def _tried(found: Survey, block: SurveyedBlock) -> list[tuple[str, Groups, tuple[str, ...]]]:
    """Name, modules of each recompute, and the sets of results that are kept."""
    operators = [o for call in block.calls for o in found.trace.within(call)]
    ways: list[tuple[str, Groups, tuple[str, ...]]] = []
    for policy in policies():
        for groups, sets in policy.candidates(block.name, block):
            if all(any(map(_kept_by(found.trace, block, (word,)), operators)) for word in sets):
                ways.append((f"{policy.name} {'+'.join(sets)}".rstrip(), groups, sets))
    of = {name: groups for name, groups, _ in ways}
    if "attention" in of and "mlp" in of:
        both = ("attention and mlp", [*of["attention"], *of["mlp"]], ())
        ways.insert([*of].index("mlp") + 1, both)
    return ways


def _kept_by(trace: Trace, block: SurveyedBlock, sets: Sequence[str]) -> Keeps:
    """Whether an operator's result is in one of these sets, as `activation.selective` decides."""
    anywhere: frozenset[object] = frozenset()
    if "matmuls" in sets:
        anywhere |= products() | cores()
    if "attention" in sets:
        anywhere |= cores()
    inside = {
        *(block.attention if "qkvo" in sets else ()),
        *(block.gates if "gate" in sets else ()),
    }
    marked = {
        number
        for number, name in enumerate(trace.names)
        if any(name == n or name.startswith(n + ".") for n in inside)
    }
    in_modules = products()

    def kept(operator: TracedOperator) -> bool:
        func = operator.func
        return func in anywhere or (operator.module in marked and func in in_modules)

    return kept


# What each way holds and repeats.


@dataclass(frozen=True)
class UnitNames:
    """A `Unit` in names: the modules of one recompute, and the operators whose results it keeps."""

    modules: tuple[str, ...]
    save_ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One way to treat one block.

    Attributes:
        word: for people.
        held: storages that wait for backward.
        kept: those of them that checkpointing keeps for a recompute, which offload can move.
        full: what is there at once while the block's backward runs: what is held, and the largest
            set of tensors that one of its recomputes makes again.
        flops, moved_bytes: of its recomputes.
    """

    word: str
    units: tuple[UnitNames, ...]
    held: frozenset[Storage]
    kept: frozenset[Storage]
    full: frozenset[Storage]
    flops: int
    moved_bytes: int

    @property
    def numbers(self) -> tuple[object, ...]:
        """What tells it from others."""
        return self.held, self.full, self.flops, self.moved_bytes


@dataclass(frozen=True)
class _Recompute:
    """Storages that it keeps, storages that are saved inside, operators that run again."""

    kept: frozenset[Storage]
    inner: frozenset[Storage]
    repeated: tuple[TracedOperator, ...]


def candidates_of(found: Survey, index: int) -> list[Candidate]:
    """The ways to treat block `index`; the first is to leave it alone."""
    block = found.blocks[index]
    ways: dict[tuple[object, ...], Candidate] = {}
    for word, groups, sets in _tried(found, block):
        keeps = _kept_by(found.trace, block, sets) if sets else None
        candidate = _candidate(found, block, word, groups, sets, keeps)
        if candidate is not None:
            ways.setdefault(candidate.numbers, candidate)
    return list(ways.values())


def _candidate(
    found: Survey,
    block: SurveyedBlock,
    word: str,
    groups: Sequence[Sequence[str]],
    sets: tuple[str, ...],
    keeps: Keeps | None,
) -> Candidate | None:
    trace = found.trace
    recomputes = []
    inside: list[tuple[int, int]] = []
    for group in groups:
        for calls in _chains(found, block, group):
            recomputes.append(_recompute(trace, calls, keeps))
            inside += [call.saves for call in calls]
    if groups and not recomputes:
        return None
    saves = [n for call in block.calls for n in range(*call.saves)]
    plain = [n for n in saves if not any(first <= n < end for first, end in inside)]
    held = frozenset(s for n in plain if trace.alive(s := trace.saves[n]))
    kept = frozenset[Storage]().union(*(r.kept for r in recomputes))
    largest = max(
        (r.inner for r in recomputes),
        key=lambda inner: found.bytes_of(inner - held - kept),
        default=frozenset[Storage](),
    )
    repeated = [operator for r in recomputes for operator in r.repeated]
    return Candidate(
        word,
        tuple(UnitNames(tuple(group), sets) for group in groups),
        held | kept,
        kept - held,
        held | kept | largest,
        sum(operator.flops for operator in repeated),
        sum(operator.moved_bytes for operator in repeated),
    )


def _chains(found: Survey, block: SurveyedBlock, group: Sequence[str]) -> Iterator[list[Call]]:
    """The calls that one recompute repeats, for each time that the block runs."""
    for outer in block.calls:
        (first, end), inner = outer.operators, []
        for name in group:
            calls = found.calls_of(name)
            inner.append([c for c in calls if first <= c.operators[0] and c.operators[1] <= end])
        for chain in zip(*inner, strict=False):
            yield list(chain)


def _recompute(trace: Trace, calls: Sequence[Call], keeps: Keeps | None) -> _Recompute:
    saves = [trace.saves[n] for call in calls for n in range(*call.saves)]
    if not saves:  # a frozen block whose input needs no gradient
        return _Recompute(frozenset(), frozenset(), ())
    kept: set[Storage] = set()
    repeated: list[TracedOperator] = []
    before: set[Storage] = set()
    for number, call in enumerate(calls):
        last = number == len(calls) - 1
        kept |= set(call.arguments) - before
        before = set(call.results)
        for operator, results in _results(trace, call, keeps, whole=not last or number > 0):
            if results is not None:
                kept |= results
            elif operator.packs < call.saves[1] or not last:
                repeated.append(operator)
    none = trace.weights | {NO_STORAGE}
    return _Recompute(frozenset(kept) - none, frozenset(saves) - none, tuple(repeated))


def _results(
    trace: Trace, call: Call, keeps: Keeps | None, *, whole: bool
) -> Iterator[tuple[TracedOperator, set[Storage] | None]]:
    """Every operator of a call with the storages that are kept of it; None: it runs again."""
    operators = trace.within(call)
    written: dict[Storage, int] = {}
    for number, operator in enumerate(operators):
        written.update(dict.fromkeys(operator.written, number))
    outside = set(call.results)
    for number, operator in enumerate(operators):
        results = set(operator.results)
        is_kept = (
            keeps is not None
            and keeps(operator)
            and (whole or operator.packs < call.saves[1])
            and not outside & results
            and all(written.get(s, -1) <= number for s in results)
        )
        yield operator, results - {NO_STORAGE} if is_kept else None


def shared_by_blocks(candidates: Sequence[Sequence[Candidate]]) -> frozenset[Storage]:
    """Storages that several blocks may hold: rotary tables, masks, an encoder's result."""
    owners: Counter[Storage] = Counter()
    for ways in candidates:
        owners.update(frozenset[Storage]().union(*(way.held for way in ways)))
    return frozenset(s for s, count in owners.items() if count > 1)
