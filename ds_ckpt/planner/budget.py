"""From a survey and a budget to a plan, or to words on what would fit."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.planner.candidates import Candidate, candidates_of, shared_by_blocks
from ds_ckpt.planner.costs import Rates
from ds_ckpt.planner.plan import GIB, ActivationPlan, BlockPlan, BudgetOf
from ds_ckpt.planner.recording import Storage
from ds_ckpt.planner.search import Option, Room, least, need, search
from ds_ckpt.planner.survey import Survey

_WHERE = "$.ds_ckpt.activation.budget_gib"


@dataclass(frozen=True)
class Allowance:
    """What may be used.

    Attributes:
        resident: bytes beside activations by what they are, for budgets of the accelerator.
        offload: what checkpointing keeps goes to host memory (tensors of `min_bytes` and more),
            and comes back `prefetch` recomputes ahead.
        micro_batch: sequences in a micro-batch, for messages; 0: not known.
        capacity_bytes: of the device, for messages; 0: not known.
    """

    budget_bytes: int
    of: BudgetOf
    resident: Mapping[str, int] = field(default_factory=dict)
    offload: bool = False
    prefetch: int = 1
    min_bytes: int = 65536
    micro_batch: int = 0
    capacity_bytes: int = 0


@dataclass(frozen=True)
class _Way:
    """One candidate in numbers."""

    candidate: Candidate
    option: Option
    moved_bytes: int


def _away(chosen: Sequence[_Way]) -> list[int]:
    """Bytes of each block in host memory: what the last recompute keeps stays where it is."""
    moved = [way.moved_bytes for way in chosen]
    last = max((i for i, n in enumerate(moved) if n), default=None)
    return [0 if i == last else n for i, n in enumerate(moved)]


class Planner:
    """The numbers of one survey, for as many budgets as are asked for.

    Args:
        tokens: what the batch is called in messages.
    """

    def __init__(self, found: Survey, rates: Rates, tokens: int) -> None:
        self._found, self._rates, self._tokens = found, rates, tokens
        self._candidates = [candidates_of(found, i) for i in range(len(found.blocks))]
        self._shared = shared_by_blocks(self._candidates)
        sizes = found.record.sizes
        self._extra = sum(sizes[s] for s in self._shared - found.outside)
        self._forward_s = [0.0] * (len(found.blocks) + 1)
        """By block; the last entry is what runs outside of blocks."""
        for operator in found.operators:
            moved = 0 if operator.flops else operator.moved_bytes
            self._forward_s[operator.block] += rates.seconds(operator.flops, moved)

    def _sum(self, storages: frozenset[Storage]) -> int:
        sizes = self._found.record.sizes
        return sum(sizes[s] for s in storages - self._shared - self._found.outside)

    def _ways(self, allowance: Allowance) -> list[list[_Way]]:
        return [
            [self._way(c, i, allowance) for c in ways] for i, ways in enumerate(self._candidates)
        ]

    def _way(self, candidate: Candidate, index: int, allowance: Allowance) -> _Way:
        held, full = self._sum(candidate.held), self._sum(candidate.full)
        cost_s = self._rates.seconds(candidate.flops, candidate.moved_bytes)
        moved = 0
        if allowance.offload:
            sizes = self._found.record.sizes
            large = (s for s in candidate.kept if sizes[s] >= allowance.min_bytes)
            moved = self._sum(frozenset(large))
            cost_s += self._waiting_s(moved, index, cost_s)
            # those of the recomputes before it are on their way back meanwhile
            full += allowance.prefetch * moved
        return _Way(candidate, Option(held - moved, full, cost_s, moved), moved)

    def _waiting_s(self, moved_bytes: int, index: int, recompute_s: float) -> float:
        """What a block's copies take longer than the computing that they run beside."""
        copy_s = moved_bytes / self._rates.bus_bytes_per_s
        forward_s = self._forward_s[index]
        out_s = max(0.0, copy_s - forward_s)
        back_s = max(0.0, copy_s - 2 * forward_s - recompute_s)  # backward: two products for one
        return out_s + back_s

    def _room(self, allowance: Allowance) -> Room:
        found = self._found
        return Room(
            allowance.budget_bytes,
            found.head_bytes + self._extra + sum(allowance.resident.values()),
            found.tail_bytes,
            peak=allowance.of != "saved",
        )

    @property
    def saved_bytes(self) -> int:
        """Held if nothing were recomputed."""
        return self._found.saved_bytes

    def plan(self, allowance: Allowance) -> ActivationPlan:
        """The cheapest plan that fits.

        Raises:
            UnsupportedError: none does; the words say what would.
        """
        start_s = time.perf_counter()
        ways, room = self._ways(allowance), self._room(allowance)
        choice: list[int] | None = [0] * len(ways)
        if self._none(allowance) > allowance.budget_bytes:
            choice = search([[way.option for way in block] for block in ways], room)
        if choice is None:
            raise self.too_small(allowance)
        return self._written(allowance, ways, choice, room, start_s)

    def _none(self, allowance: Allowance) -> int:
        """Needed where nothing is recomputed: the search counts what blocks may share as held."""
        return self._found.saved_bytes + sum(allowance.resident.values())

    def least(self, allowance: Allowance) -> ActivationPlan:
        """The plan that needs the fewest bytes, whether or not it fits."""
        start_s = time.perf_counter()
        ways, room = self._ways(allowance), self._room(allowance)
        _, choice = least([[way.option for way in block] for block in ways], room)
        return self._written(allowance, ways, choice, room, start_s)

    def _written(
        self,
        allowance: Allowance,
        ways: Sequence[Sequence[_Way]],
        choice: Sequence[int],
        room: Room,
        start_s: float,
    ) -> ActivationPlan:
        chosen = [block[i] for block, i in zip(ways, choice, strict=True)]
        needed = need([[way.option for way in block] for block in ways], choice, room)
        if not any(choice):
            needed = self._none(allowance)
        away = _away(chosen)
        return ActivationPlan(
            allowance.of,
            allowance.budget_bytes,
            dict(allowance.resident),
            tuple(
                BlockPlan(
                    block.name,
                    way.candidate.word,
                    way.candidate.units,
                    way.option.held + way.moved_bytes - moved,
                    moved,
                    way.option.full,
                    way.candidate.flops,
                    way.option.cost,
                )
                for block, way, moved in zip(self._found.blocks, chosen, away, strict=True)
            ),
            self._found.saved_bytes,
            self._held(chosen) - sum(away),
            needed,
            self._found.flops,
            sum(self._forward_s),
            self._rates,
            self._tokens,
            time.perf_counter() - start_s,
        )

    def _held(self, chosen: Sequence[_Way]) -> int:
        """What is held when the forward has ended, host memory included, each storage once."""
        held = self._found.outside.union(*(way.candidate.held for way in chosen))
        sizes = self._found.record.sizes
        return sum(sizes[s] for s in held)

    def too_small(self, allowance: Allowance) -> UnsupportedError:
        """Words on a budget that nothing fits, with what would."""

        def fewest(changed: Allowance) -> int:
            options = [[way.option for way in block] for block in self._ways(changed)]
            return least(options, self._room(changed))[0]

        now = fewest(allowance)
        remedies = [f"write at least {_up(now)} GiB"]
        if allowance.capacity_bytes and now > allowance.capacity_bytes:
            remedies = []  # more than there is
        if not allowance.offload:
            moved = fewest(replace(allowance, offload=True))
            if moved < now:
                enough = "fits" if moved <= allowance.budget_bytes else "is still too much"
                remedies.append(
                    f'"offload": true keeps boundaries in host memory: {_up(moved)} GiB, {enough}'
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
        if room > 0 and per > 0:
            remedies.append(
                f"sequences of at most {room / per:.0%} of this batch's {self._tokens} tokens"
            )
        words = ", ".join(f"{what} {n / GIB:.3f}" for what, n in allowance.resident.items())
        beside = f"; beside activations there are {fixed / GIB:.3f} GiB ({words})" if fixed else ""
        return UnsupportedError(
            Problem(
                where=_WHERE,
                found=f"{allowance.budget_bytes / GIB:.6g} GiB for {allowance.of}",
                why=f"with everything recomputed that can be, this model and batch of "
                f"{self._tokens} tokens need {_up(now)} GiB, where nothing recomputed holds "
                f"{self._found.saved_bytes / GIB:.6g} GiB{beside}",
                remedy="; or ".join(remedies or ["use more processes, or offload what is beside"]),
            ),
            headline="no plan fits the memory budget",
        )


def _up(nbytes: int) -> str:
    """GiB with five digits, rounded up so that what is written is enough."""
    value = nbytes / GIB
    digits = max(2, 4 - math.floor(math.log10(value))) if value > 0 else 2
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"
