"""Which option each block takes, so that all fits and the least is recomputed. Pure numbers.

Backward frees blocks in the reverse of the order in which they ran. When it is at block i, what the
blocks before i hold is there, and what block i needs for its own backward (its saved tensors, made
again or not). With `held` and `full` of the chosen options that needs

    need_i = max(full_i, held_i + need_{i+1}),   need_n = tail,   head + need_0 <= budget

where head is saved outside of blocks before the last one has ended and tail afterwards. Without
`peak` it is the sum alone: need_i = held_i + need_{i+1}, what waits between forward and backward.

need_i grows with need_{i+1}, so of two ways to treat the blocks from i on, one that needs no less
and costs no less is never better: only the Pareto front has to be carried from the last block to
the first. That is exact while the front has at most `limit` points. Beyond it, of points that need
nearly the same (within 1 in `limit` of the front's range) the cheapest stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LIMIT = 4096
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Option:
    """One way to treat a block.

    Attributes:
        held: bytes that wait for backward.
        full: bytes that are there at once during the block's backward; at least `held`.
        cost: of recomputing, in any unit.
    """

    held: int
    full: int
    cost: float


@dataclass(frozen=True)
class Room:
    """What is to fit.

    Attributes:
        head, tail: bytes that are held whatever is chosen.
        peak: count what a recompute makes again, not only what waits for it.
    """

    budget: int
    head: int = 0
    tail: int = 0
    peak: bool = True


def need(blocks: Sequence[Sequence[Option]], choice: Sequence[int], room: Room) -> int:
    """Bytes that a choice needs."""
    total = room.tail
    for options, index in zip(reversed(blocks), reversed(choice), strict=True):
        option = options[index]
        total += option.held
        if room.peak:
            total = max(option.full, total)
    return room.head + total


def least(blocks: Sequence[Sequence[Option]], room: Room) -> tuple[int, list[int]]:
    """The fewest bytes that any choice needs, and the choice."""
    total, choice = room.tail, []
    for options in reversed(blocks):
        needs = [max(o.full, o.held + total) if room.peak else o.held + total for o in options]
        best = min(range(len(options)), key=lambda i: (needs[i], options[i].cost))
        choice.append(best)
        total = needs[best]
    return room.head + total, choice[::-1]


def search(
    blocks: Sequence[Sequence[Option]], room: Room, *, limit: int = LIMIT
) -> list[int] | None:
    """The index of each block's option: the cheapest choice that fits, None where nothing does.

    Args:
        blocks: in the order in which they run, each with at least one option.
    """
    floor = np.cumsum([0, *(min(o.held for o in options) for options in blocks)])
    needs: _Ints = np.array([room.tail], dtype=np.int64)
    costs: _Floats = np.zeros(1)
    back: list[tuple[_Ints, _Ints]] = []
    for number in range(len(blocks) - 1, -1, -1):
        options = blocks[number]
        held = np.array([o.held for o in options], dtype=np.int64)
        total = held[:, None] + needs[None, :]
        if room.peak:
            full = np.array([o.full for o in options], dtype=np.int64)
            total = np.maximum(total, full[:, None])
        cost = np.array([o.cost for o in options])[:, None] + costs[None, :]
        chosen, parent = np.divmod(np.arange(total.size), len(needs))
        flat, price = total.ravel(), cost.ravel()
        fits = np.flatnonzero(flat + int(floor[number]) + room.head <= room.budget)
        if not len(fits):
            return None
        front = fits[_front(flat[fits], price[fits], limit)]
        needs, costs = flat[front], price[front]
        back.append((chosen[front], parent[front]))
    choice, at = [], int(np.argmin(costs))
    for chosen, parent in reversed(back):
        choice.append(int(chosen[at]))
        at = int(parent[at])
    return _improved(blocks, choice, room)


def _front(needs: _Ints, costs: _Floats, limit: int) -> _Ints:
    """Indices of the points that no other beats, by rising need and falling cost."""
    order = np.lexsort((costs, needs))
    sorted_costs = costs[order]
    best = np.minimum.accumulate(sorted_costs)
    first = np.ones(len(order), dtype=bool)
    first[1:] = sorted_costs[1:] < best[:-1]
    front = order[first]
    if len(front) <= limit:
        return front
    values = needs[front]
    width = max(1, int(values[-1] - values[0]) // limit)
    bins = (values - values[0]) // width
    last = np.ones(len(front), dtype=bool)
    last[:-1] = bins[1:] != bins[:-1]  # the cheapest of each bin
    last[0] = True
    return front[last]


def _improved(blocks: Sequence[Sequence[Option]], choice: list[int], room: Room) -> list[int]:
    """Single steps that still fit, the best first: what thinning the front may have missed."""
    while True:
        steps = [
            (options[j].cost - options[choice[i]].cost, i, j)
            for i, options in enumerate(blocks)
            for j in range(len(options))
            if options[j].cost < options[choice[i]].cost
        ]
        for _, i, j in sorted(steps):
            changed = [*choice[:i], j, *choice[i + 1 :]]
            if need(blocks, changed, room) <= room.budget:
                choice = changed
                break
        else:
            return choice
