"""Plans within a memory budget: the cheapest way to treat each block, or an error with remedies.

Bytes of a way are sets of storages, so that what two operators or two blocks share is counted once.
A recompute runs to the last tensor that autograd saves. It leaves out operators whose results were
kept, as `activation.checkpoint` does. A plan is plain values, the same on every rank.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ds_ckpt.activation.blocks import Block
from ds_ckpt.activation.inputs import MIN_BYTES, PREFETCH
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.activation.planning.fake import Forward
from ds_ckpt.activation.planning.solve import Front, Option, Room, least, need
from ds_ckpt.activation.planning.trace import Survey, TracedOperator, survey, trace_fake_step
from ds_ckpt.activation.policies import BudgetOf, Unit
from ds_ckpt.activation.selective import cores, products
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.telemetry.memory import Storage
from ds_ckpt.telemetry.units import GIB, size

_WHERE = "$.ds_ckpt.activation.budget_gib"
AUTO_SHARE = 0.9
"""Share of the free memory that policy "auto" plans for: the rest is for fragmentation."""


@dataclass(frozen=True)
class Candidate:
    """A way to treat a block; `save_ops` is None if it is not recomputed.

    `held` is kept until backward, in host memory if the block `offloads`. `full` exists while the
    block's backward runs: `held`, and the tensors of its largest recomputation. The other fields
    are costs of its recomputations.
    """

    save_ops: tuple[str, ...] | None
    held: frozenset[Storage]
    full: frozenset[Storage]
    flops: int = 0
    moved_bytes: int = 0
    offloads: bool = False

    @property
    def way_name(self) -> str:
        """Name the way."""
        if self.save_ops is None:
            return "offload" if self.offloads else "none"
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
    return [*ways, Candidate(None, held, held, offloads=True)]


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


@dataclass(frozen=True)
class BlockPlan:
    """The plan of one block; `save_ops` is None if it is not recomputed.

    `held_bytes` are on the device between its forward and its backward. `wait_s` is the time in
    which the device waits for copies to and from host memory.
    """

    name: str
    way: str
    save_ops: tuple[str, ...] | None
    held_bytes: int
    offloaded_bytes: int
    recompute_flops: int
    recompute_s: float
    wait_s: float


@dataclass(frozen=True)
class ActivationPlan:
    """A plan for all blocks, the same on every rank.

    Attributes:
        resident: bytes beside activations by what they are (budgets for the accelerator).
        none_bytes: saved activations if nothing were recomputed.
        held_bytes: on the device between forward and backward.
        needed_bytes: the most at once, of the memory that the budget counts.
    """

    of: BudgetOf
    budget_bytes: int
    resident: dict[str, int]
    blocks: tuple[BlockPlan, ...]
    none_bytes: int
    held_bytes: int
    needed_bytes: int
    forward_s: float
    tokens: int
    planning_s: float = 0.0

    @property
    def recompute_s(self) -> float:
        """Add up the blocks."""
        return sum(b.recompute_s for b in self.blocks)

    @property
    def wait_s(self) -> float:
        """Add up the blocks."""
        return sum(b.wait_s for b in self.blocks)

    @property
    def choices(self) -> list[str]:
        """Name the way of each block."""
        return [b.way for b in self.blocks]

    def units(self, model: nn.Module) -> list[Unit]:
        """Make the units for `CheckpointedBlocks`."""
        modules = dict(model.named_modules())
        return [
            Unit((Block(b.name, modules[b.name]),), b.save_ops or (), _WHERE, b.way == "offload")
            for b in self.blocks
            if b.way != "none"
        ]

    def line(self) -> str:
        """Describe the plan on one line."""
        treated = ", ".join(f"{n} x {word}" for word, n in Counter(self.choices).most_common())
        offloaded = sum(b.offloaded_bytes for b in self.blocks)
        away = f", {size(offloaded)} in host memory" if offloaded else ""
        forward_s = self.forward_s or math.inf
        waits = f" and waits {self.wait_s / forward_s:.1%} for copies" if offloaded else ""
        return (
            f"plan for {size(self.budget_bytes)} ({self.of}): {treated}; "
            f"{size(self.held_bytes)} saved of {size(self.none_bytes)} without recompute{away}, "
            f"{size(self.needed_bytes)} needed at most; recomputes "
            f"{self.recompute_s / forward_s:.1%} of a forward{waits}; "
            f"made for {self.tokens} tokens in {self.planning_s:.1f} s"
        )


@dataclass(frozen=True)
class Allowance:
    """A budget; `resident` are bytes beside activations, for budgets of the accelerator.

    With `offload`, inputs from `min_bytes` on go to host memory, and return `prefetch` calls ahead.
    `host_bytes` is the host memory for blocks that are not recomputed; 0: none is offloaded.
    `micro_batch` is for messages; 0 if not known.
    """

    budget_bytes: int
    of: BudgetOf
    resident: Mapping[str, int] = field(default_factory=dict)
    offload: bool = False
    prefetch: int = PREFETCH
    min_bytes: int = MIN_BYTES
    micro_batch: int = 0
    host_bytes: int = 0


class Planner:
    """Plans from one survey, for any number of budgets.

    The last entry of `forward_s`, seconds by block, is what runs outside of blocks.
    """

    def __init__(self, found: Survey, rates: Rates, tokens: int, *, repeated: int = 1) -> None:
        self._found, self._rates, self._tokens = found, rates, tokens
        last = len(found.blocks) - 1
        self._blocks = [*range(last), *[last] * repeated] if found.blocks else []
        self._surveyed = [candidates_of(found, i) for i in range(len(found.blocks))]
        self._candidates = [self._surveyed[i] for i in self._blocks]
        owners: Counter[Storage] = Counter()
        for ways in self._surveyed:
            owners.update(frozenset[Storage]().union(*(way.held for way in ways)))
        self._shared = frozenset(s for s, count in owners.items() if count > 1)
        """Storages that several blocks may hold: rotary tables, masks, an encoder's result."""
        self._seconds = found.forward_s(rates)
        self.forward_s = [*(self._seconds[i] for i in self._blocks), self._seconds[-1]]
        self._known_options: dict[tuple[bool, int, bool], list[list[Option]]] = {}
        self._fronts: dict[tuple[bool, int, bool, int], Front] = {}
        more = sum(b.saved_bytes for b in found.blocks[-1:]) * (repeated - 1)
        self.saved_bytes = found.saved_bytes + more

    @property
    def way_names(self) -> list[str]:
        """Name the ways that every block can have."""
        each = [[way.way_name for way in ways] for ways in self._candidates]
        return [name for name in each[0] if all(name in names for names in each)] if each else []

    def uniform_plan(self, way_name: str, allowance: Allowance) -> ActivationPlan:
        """Treat every block in one way, whether or not it fits."""
        choice = [[way.way_name for way in ways].index(way_name) for ways in self._candidates]
        return self._written(allowance, choice)

    def plan(self, allowance: Allowance) -> ActivationPlan:
        """Return the cheapest plan that fits; UnsupportedError names budgets that would."""
        choice: list[int] | None = [0] * len(self._blocks)
        if self._untreated_bytes(allowance) > allowance.budget_bytes:
            choice = self._best(allowance)
        if choice is None and allowance.host_bytes:  # the host may have been too small
            return self.plan(replace(allowance, host_bytes=0))
        if choice is None:
            raise self._too_small(allowance)
        return self._written(allowance, choice)

    def least(self, allowance: Allowance) -> ActivationPlan:
        """Return the plan that needs the fewest bytes, whether or not it fits."""
        choice = self._best(allowance, fewest=True)
        assert choice is not None
        return self._written(allowance, choice)

    def _best(self, allowance: Allowance, *, fewest: bool = False) -> list[int] | None:
        """Return the cheapest choice, or the one of the fewest bytes.

        Offload keeps tensors of several blocks on the device, see `_room`. Each of their possible
        sizes is solved by itself, with the options that move no more.
        """
        options, found = self._options(allowance), []
        for stays in sorted({option.moved for block in options for option in block}):
            allowed = [
                [i for i, o in enumerate(block) if o.moved <= stays and o.cost < math.inf]
                for block in options
            ]
            rows = [[b[i] for i in indices] for b, indices in zip(options, allowed, strict=True)]
            blocks, room = [rows[n] for n in self._blocks], self._room(allowance, stays)
            key = *_kind(allowance), stays
            if not fewest and key not in self._fronts:
                self._fronts[key] = Front(blocks, room.tail)
            choice = least(blocks, room)[1] if fewest else self._fronts[key].cheapest(room)
            if choice is not None:
                choice = [allowed[n][i] for n, i in zip(self._blocks, choice, strict=True)]
                plan = self._written(allowance, choice)
                cost = plan.needed_bytes if fewest else plan.recompute_s + plan.wait_s
                host_bytes = sum(b.offloaded_bytes for b in plan.blocks if b.way == "offload")
                if host_bytes <= allowance.host_bytes:
                    found.append((cost, choice))
        return min(found)[1] if found else None

    def _untreated_bytes(self, allowance: Allowance) -> int:
        """Return the bytes without recomputation; the search always counts shared storages."""
        return self.saved_bytes + sum(allowance.resident.values())

    def _room(self, allowance: Allowance, stays: int) -> Room:
        """Return the room if every block moves at most `stays` bytes.

        In backward the device has these bytes of the current call and of `prefetch` calls before
        it. In forward it has those of the last two calls.
        """
        found = self._found
        head = found.head_bytes + found.bytes_of(self._shared - found.outside)
        head += (1 + allowance.prefetch) * stays + sum(allowance.resident.values())
        return Room(allowance.budget_bytes, head, found.tail_bytes)

    def _options(self, allowance: Allowance) -> list[list[Option]]:
        key = _kind(allowance)
        if key not in self._known_options:
            self._known_options[key] = [
                [self._option(way, self._seconds[number], allowance) for way in ways]
                for number, ways in enumerate(self._surveyed)
            ]
        return self._known_options[key]

    def _option(self, way: Candidate, forward_s: float, allowance: Allowance) -> Option:
        cost_s, moved = self._rates.seconds(way.flops, way.moved_bytes), 0
        full = self._own_bytes(way.full)
        if way.offloads and not allowance.host_bytes:
            return Option(full, full, math.inf)
        if way.offloads or (allowance.offload and way.save_ops is not None):
            sizes = self._found.sizes
            moved = self._own_bytes({s for s in way.held if sizes[s] >= allowance.min_bytes})
        # the time by which copies outlast the computing beside them: backward takes two products
        # for each of the forward
        copy_s = moved / self._rates.bus_bytes_per_s
        waits_s = max(0.0, copy_s - forward_s) + max(0.0, copy_s - 2 * forward_s - cost_s)
        return Option(self._own_bytes(way.held) - moved, full - moved, cost_s + waits_s, moved)

    def _own_bytes(self, storages: Collection[Storage]) -> int:
        return self._found.bytes_of(frozenset(storages) - self._shared - self._found.outside)

    def _written(self, allowance: Allowance, choice: Sequence[int]) -> ActivationPlan:
        found, surveyed = self._found, self._options(allowance)
        options = [surveyed[number] for number in self._blocks]
        ways = [ways[i] for ways, i in zip(self._candidates, choice, strict=True)]
        chosen = [block[i] for block, i in zip(options, choice, strict=True)]
        last = max((i for i, option in enumerate(chosen) if option.moved), default=-1)
        needed = self._untreated_bytes(allowance)
        if any(choice):
            stays = max(option.moved for option in chosen)
            needed = need(options, choice, self._room(allowance, stays))
        blocks = []
        for i, (number, way, option) in enumerate(zip(self._blocks, ways, chosen, strict=True)):
            away = option.moved if i != last else 0
            name, held = found.blocks[number].name, option.held + option.moved - away
            cost_s = self._rates.seconds(way.flops, way.moved_bytes)
            cost = way.flops, cost_s, max(0.0, option.cost - cost_s)
            blocks.append(BlockPlan(name, way.way_name, way.save_ops, held, away, *cost))
        common = self._shared.intersection(frozenset().union(*(way.held for way in ways)))
        return ActivationPlan(
            allowance.of,
            allowance.budget_bytes,
            dict(allowance.resident),
            tuple(blocks),
            self.saved_bytes,
            found.bytes_of(found.outside | common) + sum(b.held_bytes for b in blocks),
            needed,
            sum(self.forward_s),
            self._tokens,
        )

    def _too_small(self, allowance: Allowance) -> UnsupportedError:
        needed = self.least(allowance).needed_bytes
        remedies = [f"write at least {_up(needed)} GiB"]
        offloaded = self.least(replace(allowance, offload=True)).needed_bytes
        if offloaded < needed:
            remedies.append(f'"offload": true needs {_up(offloaded)} GiB')
        beside = sum(allowance.resident.values())
        room = allowance.budget_bytes - beside
        fits = allowance.micro_batch * room // (needed - beside)
        if fits > 0:
            was = allowance.micro_batch
            remedies.append(f"a micro-batch of {fits} instead of {was} (activations grow with it)")
        words = ", ".join(f"{what} {n / GIB:.3f}" for what, n in allowance.resident.items() if n)
        found = f"{allowance.budget_bytes / GIB:.6g} GiB for {allowance.of}"
        why = f"a batch of {self._tokens} tokens needs {_up(needed)} GiB at least"
        why += f", {beside / GIB:.3f} of them beside activations ({words})" if words else ""
        problem = Problem(_WHERE, found, why, "; or ".join(remedies))
        return UnsupportedError(problem, headline="no plan fits the memory budget")


def _kind(allowance: Allowance) -> tuple[bool, int, bool]:
    """Return what the options depend on."""
    return allowance.offload, allowance.min_bytes, allowance.host_bytes > 0


def _up(nbytes: int) -> str:
    """Format bytes as GiB with five digits, rounded up."""
    value = nbytes / GIB
    digits = max(2, 4 - math.floor(math.log10(value))) if value > 0 else 2
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"


def plan_within(
    allowance: Allowance, forward: Forward, rates: Rates, tokens: int, modules: Sequence[str] | None
) -> ActivationPlan:
    """Measure the model with this batch, and return the cheapest plan that fits.

    A budget for the whole accelerator counts temporaries, too. They are simulated with the plan
    that fits without them and without host memory. Raises UnsupportedError if it cannot be
    measured, or nothing fits.
    """
    planner = Planner(survey(forward, modules), rates, tokens)
    if allowance.of == "accelerator":
        here = replace(allowance, offload=False, host_bytes=0)
        try:
            plan = planner.plan(here)
        except UnsupportedError:
            plan = planner.least(here)
        nbytes = temporary_bytes(forward, plan)
        resident = {**allowance.resident, "gradients of activations and temporaries": nbytes}
        allowance = replace(allowance, resident=resident)
    return planner.plan(allowance)


def temporary_bytes(forward: Forward, plan: ActivationPlan) -> int:
    """Return the bytes of a simulated step's peak that the plan does not count."""
    step = trace_fake_step(forward, plan.units(forward.model))
    counted = plan.needed_bytes - sum(plan.resident.values())
    return max(0, step.peak_bytes - counted)
