"""Choose the cheapest option of each block within a budget. Pure numbers.

When backward is at block i, it needs what the blocks before i hold, and what block i needs for its
own backward. With `head` (saved outside of blocks before the last one has ended) and `tail` that is

    need_i = max(full_i, held_i + need_{i+1}),   need_n = tail,   head + need_0 <= budget

If one choice for the blocks from i on needs no less and costs no less than another, it is never
better: only the Pareto front is carried from the last block to the first. Beyond `limit` points,
the cheapest of nearly equal needs stays.
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
    """An option for a block.

    `held` bytes wait for backward on the device, `full` are there during the block's backward, and
    `moved` wait in host memory, which the caller counts.
    """

    held: int
    full: int
    cost: float
    moved: int = 0


@dataclass(frozen=True)
class Room:
    """Memory that a choice must fit into; `head` and `tail` are held whatever is chosen."""

    budget: int
    head: int = 0
    tail: int = 0


def need(blocks: Sequence[Sequence[Option]], choice: Sequence[int], room: Room) -> int:
    """Return the bytes that a choice needs."""
    total = room.tail
    for options, index in zip(reversed(blocks), reversed(choice), strict=True):
        total = _before(options[index], total)
    return room.head + total


def _before(option: Option, total: int) -> int:
    """Return the bytes needed from a block on, from the same behind it."""
    return max(option.full, option.held + total)


def least(blocks: Sequence[Sequence[Option]], room: Room) -> tuple[int, list[int]]:
    """Return the fewest bytes that any choice needs, and the choice."""
    total, choice = room.tail, list[int]()
    for options in reversed(blocks):
        found = [(_before(option, total), option.cost, i) for i, option in enumerate(options)]
        total, _, index = min(found)
        choice.append(index)
    return room.head + total, choice[::-1]


def search(
    blocks: Sequence[Sequence[Option]], room: Room, *, limit: int = LIMIT
) -> list[int] | None:
    """Return the index of each block's option: the cheapest choice that fits, or None."""
    floor = np.cumsum([0, *(min(o.held for o in options) for options in blocks)])
    needs: _Ints = np.array([room.tail], dtype=np.int64)
    costs: _Floats = np.zeros(1)
    back: list[tuple[_Ints, _Ints]] = []
    for number in range(len(blocks) - 1, -1, -1):
        options = blocks[number]
        held = np.array([o.held for o in options], dtype=np.int64)
        full = np.array([o.full for o in options], dtype=np.int64)
        total = np.maximum(full[:, None], held[:, None] + needs[None, :]).ravel()
        cost = (np.array([o.cost for o in options])[:, None] + costs[None, :]).ravel()
        fits = np.flatnonzero(total + int(floor[number]) + room.head <= room.budget)
        if not len(fits):
            return None
        front = fits[_front(total[fits], cost[fits], limit)]
        back.append((front // len(needs), front % len(needs)))
        needs, costs = total[front], cost[front]
    choice, at = [], int(np.argmin(costs))
    for chosen, parent in reversed(back):
        choice.append(int(chosen[at]))
        at = int(parent[at])
    return choice


def _front(needs: _Ints, costs: _Floats, limit: int) -> _Ints:
    """Return indices of the points that no other beats, by rising need and falling cost."""
    order = np.lexsort((costs, needs))
    best = np.minimum.accumulate(costs[order])
    front = order[np.flatnonzero(np.diff(best, prepend=np.inf) < 0)]
    if len(front) <= limit:
        return front
    values = needs[front]
    width = max(1, int(values[-1] - values[0]) // limit)
    bins = (values - values[0]) // width
    last = np.flatnonzero(np.diff(bins, append=bins[-1] + 1))  # the cheapest of each bin
    return front[np.union1d(0, last)]
