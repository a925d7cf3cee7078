"""Plans within a memory budget: the cheapest way to treat each block, or an error with remedies.

A plan is plain values, the same on every rank: the units of each block, their bytes and costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn

from ds_ckpt.activation.blocks import Block
from ds_ckpt.activation.planning.candidates import (
    Candidate,
    UnitNames,
    candidates_of,
    shared_by_blocks,
)
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.activation.planning.solve import Option, Room, least, need, search
from ds_ckpt.activation.planning.trace import Survey, simulate, survey
from ds_ckpt.activation.policies import Unit
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.telemetry.memory import Storage
from ds_ckpt.telemetry.units import GIB, MIB, columns, size

_WHERE = "$.ds_ckpt.activation.budget_gib"
AUTO_SHARE = 0.9
"""Share of the memory that policy "auto" plans for: the rest is for fragmentation."""
BudgetOf = Literal["saved", "activations", "accelerator"]
_OF = {
    "saved": "saved between forward and backward",
    "activations": "activations with the recompute's own peak",
    "accelerator": "the whole accelerator",
}


@dataclass(frozen=True)
class BlockPlan:
    """The plan of one block.

    Attributes:
        word: name of its way.
        held_bytes: on the device between its forward and its backward.
        offloaded_bytes: in host memory meanwhile.
        full_bytes: on the device while its backward runs.
        recompute_s: by the device's rates, waiting for copies included.
    """

    name: str
    word: str
    units: tuple[UnitNames, ...]
    held_bytes: int
    offloaded_bytes: int
    full_bytes: int
    recompute_flops: int
    recompute_s: float


@dataclass(frozen=True)
class ActivationPlan:
    """A plan for all blocks, the same on every rank.

    Attributes:
        of: memory that the budget counts.
        budget_bytes: as given.
        resident: bytes beside activations by what they are (budgets for the accelerator).
        none_bytes: saved activations if nothing were recomputed.
        held_bytes: on the device between forward and backward.
        needed_bytes: the most at once, of the memory that the budget counts.
        forward_flops: of one forward, like `forward_s`.
        tokens: elements of the batch's largest integer tensor, else of its largest tensor.
        planning_s: wall time of measuring and searching; the caller sets it.
    """

    of: BudgetOf
    budget_bytes: int
    resident: dict[str, int]
    blocks: tuple[BlockPlan, ...]
    none_bytes: int
    held_bytes: int
    needed_bytes: int
    forward_flops: int
    forward_s: float
    rates: Rates
    tokens: int
    planning_s: float = 0.0

    @property
    def recompute_flops(self) -> int:
        """Add up the blocks."""
        return sum(b.recompute_flops for b in self.blocks)

    @property
    def recompute_s(self) -> float:
        """Add up the blocks."""
        return sum(b.recompute_s for b in self.blocks)

    @property
    def recompute_share(self) -> float:
        """Recompute over a forward's time."""
        return self.recompute_s / self.forward_s if self.forward_s else 0.0

    @property
    def choices(self) -> list[str]:
        """Name the way of each block."""
        return [b.word for b in self.blocks]

    def units(self, model: nn.Module) -> list[Unit]:
        """Make the units for `CheckpointedBlocks`."""
        modules = dict(model.named_modules())
        return [
            Unit(
                tuple(Block(name, modules[name]) for name in unit.modules),
                unit.save_ops,
                _WHERE,
            )
            for block in self.blocks
            for unit in block.units
        ]

    def line(self) -> str:
        """Describe the plan on one line."""
        counts = Counter(self.choices)
        treated = ", ".join(f"{n} x {word}" for word, n in counts.most_common())
        offloaded = sum(b.offloaded_bytes for b in self.blocks)
        away = f", {size(offloaded)} in host memory" if offloaded else ""
        share = self.recompute_flops / self.forward_flops if self.forward_flops else 0.0
        return (
            f"plan for {size(self.budget_bytes)} ({_OF[self.of]}): {treated}; "
            f"{size(self.held_bytes)} saved of {size(self.none_bytes)} without recompute{away}, "
            f"{size(self.needed_bytes)} needed at most; recomputes {share:.1%} of a forward's "
            f"products, {self.recompute_share:.1%} of its time; "
            f"made for {self.tokens} tokens in {self.planning_s:.1f} s"
        )

    def table(self) -> str:
        """List the blocks, with one line for neighbours that are treated alike."""
        head = ("blocks", "policy", "saved MiB", "in backward MiB", "recompute GFLOP", "ms")
        rows = [head]
        for word, neighbours in groupby(self.blocks, key=lambda block: block.word):
            group = list(neighbours)
            first, last = group[0].name, group[-1].name
            rows.append(
                (
                    first if first == last else f"{first} to {last}",
                    word,
                    f"{sum(b.held_bytes for b in group) / MIB:.1f}",
                    f"{max(b.full_bytes for b in group) / MIB:.1f}",
                    f"{sum(b.recompute_flops for b in group) / 1e9:.2f}",
                    f"{1e3 * sum(b.recompute_s for b in group):.3f}",
                )
            )
        outside = self.held_bytes - sum(b.held_bytes for b in self.blocks)
        for what, nbytes in {"outside of blocks": outside, **self.resident}.items():
            rows.append((what, "", f"{nbytes / MIB:.1f}", "", "", ""))
        return columns(rows, left=2)


@dataclass(frozen=True)
class Allowance:
    """A budget.

    Attributes:
        resident: bytes beside activations by what they are, for budgets of the accelerator.
        optional: parts of `resident` that a model trains without, and the settings that drop them.
        offload: checkpointed inputs go to host memory (tensors of `min_bytes` and more), and come
            back `prefetch` recomputes ahead.
        micro_batch: sequences in a micro-batch, for messages; 0: not known.
        capacity_bytes: of the device, for messages; 0: not known.
        aim: share of the budget to plan for, if that can be reached.
    """

    budget_bytes: int
    of: BudgetOf
    resident: Mapping[str, int] = field(default_factory=dict)
    offload: bool = False
    prefetch: int = 1
    min_bytes: int = 65536
    micro_batch: int = 0
    capacity_bytes: int = 0
    optional: Mapping[str, str] = field(default_factory=dict)
    aim: float = 1.0

    @property
    def aim_bytes(self) -> int:
        """Bytes to plan for."""
        return int(self.budget_bytes * self.aim)


class Planner:
    """Plans from one survey, for any number of budgets.

    Args:
        found: the survey.
        rates: of the device.
        tokens: of the batch, for messages.
        repeated: times that the model has the last block, which the survey has once.
    """

    def __init__(self, found: Survey, rates: Rates, tokens: int, *, repeated: int = 1) -> None:
        self._found, self._rates, self._tokens = found, rates, tokens
        last = len(found.blocks) - 1
        self._blocks = [*range(last), *[last] * repeated] if found.blocks else []
        surveyed = [candidates_of(found, i) for i in range(len(found.blocks))]
        self._surveyed = surveyed
        self._candidates = [surveyed[i] for i in self._blocks]
        self._shared = shared_by_blocks(surveyed)
        seconds = found.forward_s(rates)
        self._forward_s = [*(seconds[i] for i in self._blocks), seconds[-1]]
        more = sum(b.saved_bytes for b in found.blocks[-1:]) * (repeated - 1)
        self.saved_bytes = found.saved_bytes + more
        """Saved activations if nothing were recomputed."""
        work = sum(
            o.flops for b in found.blocks[-1:] for c in b.calls for o in found.trace.within(c)
        )
        self._flops = found.flops + work * (repeated - 1)

    @property
    def forward_s(self) -> list[float]:
        """Seconds by block; the last entry is what runs outside of them."""
        return self._forward_s

    @property
    def words(self) -> list[str]:
        """Name the ways that every block can have."""
        each = [[way.word for way in ways] for ways in self._candidates]
        return [word for word in each[0] if all(word in words for words in each)] if each else []

    def all_alike(self, word: str, allowance: Allowance) -> ActivationPlan:
        """Treat every block in one way, whether or not it fits."""
        options = self._options(allowance)
        choice = [[way.word for way in ways].index(word) for ways in self._candidates]
        return self._written(allowance, options, choice, self._room(allowance))

    def plan(self, allowance: Allowance) -> ActivationPlan:
        """Return the cheapest plan that fits.

        Raises:
            UnsupportedError: none does; the error names what would.
        """
        options, room = self._options(allowance), self._room(allowance)
        choice: list[int] | None = [0] * len(options)
        if self._untreated_bytes(allowance) > allowance.aim_bytes:
            choice = search(options, room)
        if choice is None:
            needed, choice = least(options, room)
            if needed > allowance.budget_bytes:
                raise self.too_small(allowance)
        return self._written(allowance, options, choice, room)

    def least(self, allowance: Allowance) -> ActivationPlan:
        """Return the plan that needs the fewest bytes, whether or not it fits."""
        options, room = self._options(allowance), self._room(allowance)
        return self._written(allowance, options, least(options, room)[1], room)

    def _untreated_bytes(self, allowance: Allowance) -> int:
        """Bytes needed without recompute: the search counts shared storages as always held."""
        return self.saved_bytes + sum(allowance.resident.values())

    def _room(self, allowance: Allowance) -> Room:
        found = self._found
        shared = found.bytes_of(self._shared - found.outside)
        return Room(
            allowance.aim_bytes,
            found.head_bytes + shared + sum(allowance.resident.values()),
            found.tail_bytes,
            peak=allowance.of != "saved",
        )

    def _options(self, allowance: Allowance) -> list[list[Option]]:
        """The candidates of every block in numbers."""
        forward_s = dict(zip(self._blocks, self._forward_s, strict=False))
        surveyed = [
            [self._option(candidate, forward_s[number], allowance) for candidate in candidates]
            for number, candidates in enumerate(self._surveyed)
        ]
        return [surveyed[number] for number in self._blocks]

    def _option(self, candidate: Candidate, forward_s: float, allowance: Allowance) -> Option:
        held, full = self._own_bytes(candidate.held), self._own_bytes(candidate.full)
        cost_s = self._rates.seconds(candidate.flops, candidate.moved_bytes)
        moved = 0
        if allowance.offload:
            sizes = self._found.trace.sizes
            large = (s for s in candidate.kept if sizes[s] >= allowance.min_bytes)
            moved = self._own_bytes(frozenset(large))
            # the time by which copies outlast the computing beside them
            copy_s = moved / self._rates.bus_bytes_per_s
            out_s = max(0.0, copy_s - forward_s)
            back_s = max(0.0, copy_s - 2 * forward_s - cost_s)  # backward: two products for one
            cost_s += out_s + back_s
            # inputs of the recomputes before it are coming back meanwhile
            full += allowance.prefetch * moved
        return Option(held - moved, full, cost_s, moved)

    def _own_bytes(self, storages: frozenset[Storage]) -> int:
        return self._found.bytes_of(storages - self._shared - self._found.outside)

    def _written(
        self,
        allowance: Allowance,
        options: Sequence[Sequence[Option]],
        choice: Sequence[int],
        room: Room,
    ) -> ActivationPlan:
        found = self._found
        blocks = [found.blocks[i] for i in self._blocks]
        ways = [block[i] for block, i in zip(self._candidates, choice, strict=True)]
        chosen = [block[i] for block, i in zip(options, choice, strict=True)]
        # in host memory; the last recompute's inputs stay on the device
        away = [option.moved for option in chosen]
        last = max((i for i, n in enumerate(away) if n), default=None)
        if last is not None:
            away[last] = 0
        needed = need(options, choice, room) if any(choice) else self._untreated_bytes(allowance)
        common = self._shared.intersection(frozenset().union(*(way.held for way in ways)))
        held = found.bytes_of(found.outside | common) + sum(o.held + o.moved for o in chosen)
        return ActivationPlan(
            allowance.of,
            allowance.budget_bytes,
            dict(allowance.resident),
            tuple(
                BlockPlan(
                    block.name,
                    way.word,
                    way.units,
                    option.held + option.moved - moved,
                    moved,
                    option.full,
                    way.flops,
                    option.cost,
                )
                for block, way, option, moved in zip(blocks, ways, chosen, away, strict=True)
            ),
            self.saved_bytes,
            held - sum(away),
            needed,
            self._flops,
            sum(self._forward_s),
            self._rates,
            self._tokens,
        )

    def too_small(self, allowance: Allowance) -> UnsupportedError:
        """Make the error for a budget that nothing fits, with remedies."""

        def fewest(changed: Allowance) -> int:
            return least(self._options(changed), self._room(changed))[0]

        def compare(nbytes: int) -> str:
            fits = nbytes <= allowance.budget_bytes
            return f"{_up(nbytes)} GiB, {'fits' if fits else 'is still too much'}"

        now = fewest(allowance)
        remedies = [f"write at least {_up(now)} GiB"]
        if allowance.capacity_bytes and now > allowance.capacity_bytes:
            remedies = []  # more than there is
        if not allowance.offload:
            moved = fewest(replace(allowance, offload=True))
            if moved < now:
                remedies.append(
                    f'"offload": true keeps checkpointed inputs in host memory: {compare(moved)}'
                )
        for what, setting in allowance.optional.items():
            if spared := allowance.resident.get(what):
                remedies.append(
                    f"without {what}, {_up(spared)} GiB ({setting}): {compare(now - spared)}"
                )
        fixed = sum(allowance.resident.values())
        room, per = allowance.budget_bytes - fixed, now - fixed
        if room > 0 and allowance.micro_batch > 1 and per > 0:
            fits = allowance.micro_batch * room // per
            if fits:
                remedies.append(
                    f"a micro-batch of {fits} instead of {allowance.micro_batch} (activations "
                    "grow with it)"
                )
        if room > 0 and per > 0 and (share := 100 * room // per):
            remedies.append(f"sequences of at most {share}% of this batch's {self._tokens} tokens")
        words = ", ".join(f"{what} {n / GIB:.3f}" for what, n in allowance.resident.items())
        beside = f"; beside activations there are {fixed / GIB:.3f} GiB ({words})" if fixed else ""
        return UnsupportedError(
            Problem(
                where=_WHERE,
                found=f"{allowance.budget_bytes / GIB:.6g} GiB for {allowance.of}",
                why=f"with everything recomputed that can be, this model and batch of "
                f"{self._tokens} tokens need {_up(now)} GiB, where nothing recomputed saves "
                f"{self.saved_bytes / GIB:.6g} GiB{beside}",
                remedy="; or ".join(remedies or ["use more processes, or offload what is beside"]),
            ),
            headline="no plan fits the memory budget",
        )


def _up(nbytes: int) -> str:
    """GiB with five digits, rounded up so that what is written is enough."""
    value = nbytes / GIB
    digits = max(2, 4 - math.floor(math.log10(value))) if value > 0 else 2
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"


def plan_within(
    allowance: Allowance,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rates: Rates,
    tokens: int,
    modules: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> ActivationPlan:
    """Measure the model with this batch, and return the cheapest plan that fits.

    A budget for the whole accelerator counts temporaries, too. They are simulated with the plan
    that fits without them.

    Args:
        allowance: the budget.
        model: see `survey`, like `args`, `kwargs`, `modules` and `device`.
        args: of its forward.
        kwargs: of its forward.
        rates: of the device.
        tokens: of the batch, for messages.
        modules: class names or patterns of the blocks.
        device: where the parameters are when the model runs.

    Raises:
        UnsupportedError: the model cannot be measured, or nothing fits.
    """
    planner = Planner(survey(model, args, kwargs, modules=modules, device=device), rates, tokens)
    if allowance.of == "accelerator":
        try:
            plan = planner.plan(allowance)
        except UnsupportedError:
            plan = planner.least(allowance)
        nbytes = temporary_bytes(model, args, kwargs, plan, device=device)
        resident = {**allowance.resident, "gradients of activations and temporaries": nbytes}
        allowance = replace(allowance, resident=resident)
    return planner.plan(allowance)


def temporary_bytes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plan: ActivationPlan,
    *,
    device: torch.device | None = None,
) -> int:
    """Bytes of a step's peak that the plan does not count, from a simulated step."""
    step = simulate(model, args, kwargs, plan.units(model), device=device)
    counted = plan.needed_bytes - sum(plan.resident.values())
    offloaded = sum(b.offloaded_bytes for b in plan.blocks)  # simulated as if it stayed
    return max(0, step.peak_bytes - counted - offloaded)
