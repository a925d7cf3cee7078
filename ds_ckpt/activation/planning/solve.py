"""Choose the cheapest option of each block within a budget. Pure numbers.

At block i, backward needs what the blocks before i hold, and what block i itself needs. With `head`
(saved outside of blocks before the last one has ended) and `tail` that is

    need_i = max(full_i, held_i + need_{i+1}),   need_n = tail,   head + need_0 <= budget

A choice for the blocks from i on that needs and costs no less than another is never better. So only
the Pareto front is carried from the last block to the first. Beyond `limit` points, the cheapest of
nearly equal needs stays.
"""

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

    `held` bytes wait for backward on the device, and `full` are there during the block's backward.
    `moved` bytes wait in host memory; the caller counts them.
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


class Front:
    """Pareto front of choices by bytes needed and cost, for any budget."""

    def __init__(self, blocks: Sequence[Sequence[Option]], tail: int, limit: int = LIMIT) -> None:
        arrays = {  # most blocks share one list
            key: (
                np.array([[o.held] for o in options], dtype=np.int64),
                np.array([[o.full] for o in options], dtype=np.int64),
                np.array([[o.cost] for o in options]),
            )
            for key, options in {id(options): options for options in blocks}.items()
        }
        self._needs: _Ints = np.array([tail], dtype=np.int64)
        costs: _Floats = np.zeros(1)
        self._back: list[tuple[_Ints, _Ints]] = []
        for options in reversed(blocks):
            held, full, added = arrays[id(options)]
            total = np.maximum(full, held + self._needs).ravel()
            cost = (added + costs).ravel()
            front = _front(total, cost, limit)
            self._back.append((front // len(self._needs), front % len(self._needs)))
            self._needs, costs = total[front], cost[front]

    def cheapest(self, room: Room) -> list[int] | None:
        """Return the index of each block's option: the cheapest choice that fits, or None."""
        at = int(np.searchsorted(self._needs, room.budget - room.head, side="right")) - 1
        if at < 0:
            return None
        choice = list[int]()
        for chosen, parent in reversed(self._back):
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
