"""Choice of an option for each block, so that all fits and the least is recomputed. Pure numbers.

Backward frees blocks in the reverse of the order in which they ran. When it is at block i, what the
blocks before i hold is there, and what block i needs for its own backward (its saved tensors, made
again or not). With `held` and `full` of the chosen options that needs

    need_i = max(full_i, held_i + need_{i+1}),   need_n = tail,   head + need_0 <= budget

where head is saved outside of blocks before the last one has ended and tail afterwards. Without
`peak` it is the sum alone: need_i = held_i + need_{i+1}, what waits between forward and backward.
Of what offload moves away, the last block to move something keeps its own: its held_i is more by
that.

need_i grows with need_{i+1}, so of two ways to treat the blocks from i on, one that needs no less
and costs no less is never better: only the Pareto front has to be carried from the last block to
the first, one for the ways that move something and one for those that do not yet. That is exact
while a front has at most `limit` points. Beyond it, of points that need nearly the same (within 1
in `limit` of the front's range) the cheapest stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LIMIT = 4096
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Option:
    """An option for a block.

    Attributes:
        held: bytes that wait for backward on the device, without `moved`.
        full: bytes at once during the block's backward; at least `held` + `moved`.
        cost: of recomputing, in any unit.
        moved: bytes that wait elsewhere if a later block moves something too, else on the device.
    """

    held: int
    full: int
    cost: float
    moved: int = 0


@dataclass(frozen=True)
class Room:
    """Memory that a choice must fit into.

    Attributes:
        head: bytes that are held whatever is chosen, like `tail`.
        peak: count what a recompute makes again, not only what waits for it.
    """

    budget: int
    head: int = 0
    tail: int = 0
    peak: bool = True


def need(blocks: Sequence[Sequence[Option]], choice: Sequence[int], room: Room) -> int:
    """Return the bytes that a choice needs."""
    total, moving = room.tail, False
    for options, index in zip(reversed(blocks), reversed(choice), strict=True):
        total, moving = _before(options[index], total, moving, room)
    return room.head + total


def _before(option: Option, total: int, moving: bool, room: Room) -> tuple[int, bool]:
    """Bytes needed from a block on, and whether anything is moved, from the same behind it."""
    total += option.held + (0 if moving else option.moved)
    return max(option.full, total) if room.peak else total, moving or option.moved > 0


def least(blocks: Sequence[Sequence[Option]], room: Room) -> tuple[int, list[int]]:
    """Return the fewest bytes that any choice needs, and the choice."""
    ways: dict[bool, tuple[int, float, list[int]]] = {False: (room.tail, 0.0, [])}
    for options in reversed(blocks):
        found: dict[bool, tuple[int, float, list[int]]] = {}
        for moving, (total, cost, choice) in ways.items():
            for index, option in enumerate(options):
                needed, moves = _before(option, total, moving, room)
                way = (needed, cost + option.cost, [*choice, index])
                if moves not in found or way[:2] < found[moves][:2]:
                    found[moves] = way
        ways = found
    total, _, choice = min(ways.values(), key=lambda way: way[:2])
    return room.head + total, choice[::-1]


def search(
    blocks: Sequence[Sequence[Option]], room: Room, *, limit: int = LIMIT
) -> list[int] | None:
    """Return the index of each block's option: the cheapest choice that fits, or None.

    Args:
        blocks: in the order in which they run, each with at least one option.
        room: to fit into.
        limit: points of a front beyond which it is thinned out.
    """
    floor = np.cumsum([0, *(min(o.held for o in options) for options in blocks)])
    needs: _Ints = np.array([room.tail], dtype=np.int64)
    costs: _Floats = np.zeros(1)
    moving: _Bools = np.zeros(1, dtype=bool)
    back: list[tuple[_Ints, _Ints]] = []
    for number in range(len(blocks) - 1, -1, -1):
        options = blocks[number]
        held = np.array([o.held for o in options], dtype=np.int64)
        moved = np.array([o.moved for o in options], dtype=np.int64)
        total = held[:, None] + needs[None, :] + np.where(moving[None, :], 0, moved[:, None])
        if room.peak:
            full = np.array([o.full for o in options], dtype=np.int64)
            total = np.maximum(total, full[:, None])
        cost = np.array([o.cost for o in options])[:, None] + costs[None, :]
        chosen, parent = np.divmod(np.arange(total.size), len(needs))
        flat, price = total.ravel(), cost.ravel()
        moves = ((moved[:, None] > 0) | moving[None, :]).ravel()
        fits = np.flatnonzero(flat + int(floor[number]) + room.head <= room.budget)
        if not len(fits):
            return None
        kinds = [kind for kind in (fits[~moves[fits]], fits[moves[fits]]) if len(kind)]
        front = np.concatenate([kind[_front(flat[kind], price[kind], limit)] for kind in kinds])
        needs, costs, moving = flat[front], price[front], moves[front]
        back.append((chosen[front], parent[front]))
    choice, at = [], int(np.argmin(costs))
    for chosen, parent in reversed(back):
        choice.append(int(chosen[at]))
        at = int(parent[at])
    return choice


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
