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

from ds_ckpt.activation.policies import policies
from ds_ckpt.activation.selective import cores, products
from ds_ckpt.planner.recording import Event, Recorder, Run, Storage
from ds_ckpt.planner.survey import Survey


@dataclass(frozen=True)
class UnitWords:
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
    units: tuple[UnitWords, ...]
    held: frozenset[Storage]
    kept: frozenset[Storage]
    full: frozenset[Storage]
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class _Recompute:
    kept: frozenset[Storage]
    inner: frozenset[Storage]
    events: tuple[Event, ...]


def candidates_of(found: Survey, index: int) -> list[Candidate]:
    """The ways to treat block `index`; the first is to leave it alone."""
    block, parts = found.blocks[index], found.parts[index]
    runs = found.runs_of(block.name)
    ways: list[tuple[str, Sequence[Sequence[str]], tuple[str, ...]]] = []
    for policy in policies():
        for groups, words in policy.candidates(block.name, parts):
            if all(_hits(found, index, word) for word in words):
                ways.append((f"{policy.name} {'+'.join(words)}".rstrip(), groups, words))
    of = {name: groups for name, groups, _ in ways}
    if "attention" in of and "mlp" in of:
        both = ("attention and mlp", [*of["attention"], *of["mlp"]], ())
        ways.insert([name for name, _, _ in ways].index("mlp") + 1, both)
    result: list[Candidate] = []
    for word, groups, words in ways:
        candidate = _candidate(found, index, runs, word, groups, words)
        if candidate is not None and not any(_same(candidate, other) for other in result):
            result.append(candidate)
    return result


def _same(a: Candidate, b: Candidate) -> bool:
    return (a.held, a.full, a.flops, a.moved_bytes) == (b.held, b.full, b.flops, b.moved_bytes)


def _hits(found: Survey, index: int, word: str) -> bool:
    wants = chosen_by(found, index, (word,))
    runs = found.runs_of(found.blocks[index].name)
    return any(wants(e) for r in runs for e in found.record.events[slice(*r.events)])


def chosen_by(found: Survey, index: int, words: Sequence[str]) -> Callable[[Event], bool]:
    """Whether an operator's result is kept under these sets, as `activation.selective` decides."""
    always: frozenset[object] = frozenset()
    for word in words:
        if word == "matmuls":
            always |= products() | cores()
        elif word == "attention":
            always |= cores()
    inside: set[str] = set()
    if "qkvo" in words:
        inside |= set(found.parts[index].attention)
    if "gate" in words:
        inside |= set(found.parts[index].gates)
    names = found.record.names
    marked = {
        number
        for number, name in enumerate(names)
        if any(name == n or name.startswith(n + ".") for n in inside)
    }
    in_modules = products()

    def wants(event: Event) -> bool:
        return event.func in always or (event.module in marked and event.func in in_modules)

    return wants


def _candidate(
    found: Survey,
    index: int,
    runs: Sequence[Run],
    word: str,
    groups: Sequence[Sequence[str]],
    words: tuple[str, ...],
) -> Candidate | None:
    record = found.record
    wants = chosen_by(found, index, words) if words else None
    recomputes = []
    inside: list[tuple[int, int]] = []
    for group in groups:
        for calls in _chains(found, runs, group):
            recomputes.append(_recompute(record, calls, wants))
            inside += [call.saves for call in calls]
    if groups and not recomputes:
        return None
    saves = [n for run in runs for n in range(*run.saves)]
    plain = [n for n in saves if not any(first <= n < end for first, end in inside)]
    held = frozenset(s for n in plain if record.alive(s := record.saves[n].storage))
    kept = frozenset[Storage]().union(*(r.kept for r in recomputes))
    largest = max(
        (r.inner for r in recomputes),
        key=lambda inner: sum(record.sizes[s] for s in inner - held - kept),
        default=frozenset[Storage](),
    )
    events = [e for r in recomputes for e in r.events]
    return Candidate(
        word,
        tuple(UnitWords(tuple(group), words) for group in groups),
        held | kept,
        kept - held,
        held | kept | largest,
        sum(e.flops for e in events),
        sum(e.moved_bytes for e in events),
    )


def _chains(found: Survey, runs: Sequence[Run], group: Sequence[str]) -> Iterator[list[Run]]:
    """The calls that one recompute repeats, for each time that the block runs."""
    for block in runs:
        inner = [[r for r in found.runs_of(name) if _inside(r, block)] for name in group]
        for calls in zip(*inner, strict=False):
            yield list(calls)


def _inside(run: Run, outer: Run) -> bool:
    return outer.events[0] <= run.events[0] and run.events[1] <= outer.events[1]


def _recompute(
    record: Recorder, calls: Sequence[Run], wants: Callable[[Event], bool] | None
) -> _Recompute:
    saves = [record.saves[n].storage for call in calls for n in range(*call.saves)]
    if not saves:  # a frozen block whose input needs no gradient
        return _Recompute(frozenset(), frozenset(), ())
    kept: set[Storage] = set()
    events: list[Event] = []
    before: set[Storage] = set()
    for number, call in enumerate(calls):
        last = number == len(calls) - 1
        kept |= set(call.arguments) - before
        before = set(call.results)
        for event, results in _results(record, call, wants, whole=not last or number > 0):
            if results is not None:
                kept |= set(results)
            elif event.packs < call.saves[1] or not last:
                events.append(event)
    inner = frozenset(s for s in saves if s != -1 and s not in record.parameters)
    return _Recompute(
        frozenset(s for s in kept if s not in record.parameters), inner, tuple(events)
    )


def _results(
    record: Recorder, call: Run, wants: Callable[[Event], bool] | None, *, whole: bool
) -> Iterator[tuple[Event, tuple[Storage, ...] | None]]:
    """Every operator of a call with the storages that are kept of it; None: it runs again."""
    events = record.events[slice(*call.events)]
    written: dict[Storage, int] = {}
    for number, event in enumerate(events):
        written.update(dict.fromkeys(event.written, number))
    outside = set(call.results)
    for number, event in enumerate(events):
        keeps = (
            wants is not None
            and wants(event)
            and (whole or event.packs < call.saves[1])
            and not outside & set(event.results)
            and all(written.get(s, -1) <= number for s in event.results)
        )
        yield event, tuple(s for s in event.results if s != -1) if keeps else None


def shared_by_blocks(candidates: Sequence[Sequence[Candidate]]) -> frozenset[Storage]:
    """Storages that several blocks may hold: rotary tables, masks, an encoder's result."""
    owners: Counter[Storage] = Counter()
    for ways in candidates:
        owners.update(frozenset[Storage]().union(*(way.held for way in ways)))
    return frozenset(s for s, count in owners.items() if count > 1)
