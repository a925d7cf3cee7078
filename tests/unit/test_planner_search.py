"""The search compared with brute force, and the equations that it solves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.activation.planning.solve import Option, Room, least, need, search


@st.composite
def _options(draw: st.DrawFn) -> list[Option]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        held = draw(st.integers(0, 1000))
        cost = draw(st.floats(0, 100, allow_nan=False))
        found.append(Option(held, held + draw(st.integers(0, 800)), cost))
    return found


_BLOCKS = st.lists(_options(), min_size=1, max_size=6)
_ROOMS = st.builds(
    Room, budget=st.integers(0, 6000), head=st.integers(0, 300), tail=st.integers(0, 300)
)


def _choices(blocks: Sequence[Sequence[Option]]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(options)) for options in blocks)))


def _cost(blocks: Sequence[Sequence[Option]], choice: Sequence[int]) -> float:
    return sum(options[i].cost for options, i in zip(blocks, choice, strict=True))


@given(_BLOCKS, _ROOMS)
def test_it_finds_what_trying_everything_finds(blocks: list[list[Option]], room: Room) -> None:
    fitting = [c for c in _choices(blocks) if need(blocks, c, room) <= room.budget]
    exact, choice = min((_cost(blocks, c) for c in fitting), default=None), search(blocks, room)
    assert (choice is None) == (exact is None)
    if choice is not None and exact is not None:
        assert need(blocks, choice, room) <= room.budget
        assert _cost(blocks, choice) == pytest.approx(exact)


@given(_options(), st.integers(8, 40), st.floats(0.05, 0.98))
def test_a_thinned_front_fits_and_costs_little_more(
    options: list[Option], count: int, share: float
) -> None:
    blocks = [options] * count
    low = least(blocks, Room(0))[0]
    high = max(o.full for o in options) + count * max(o.held for o in options)
    room = Room(round(low + share * (high - low)))
    exact, thinned = search(blocks, room, limit=10**6), search(blocks, room, limit=200)
    assert exact is not None
    assert thinned is not None
    assert need(blocks, thinned, room) <= room.budget
    assert _cost(blocks, thinned) <= 1.05 * _cost(blocks, exact) + 1e-9


@given(_BLOCKS, _ROOMS)
def test_the_least_is_the_least(blocks: list[list[Option]], room: Room) -> None:
    bytes_needed, choice = least(blocks, room)
    assert bytes_needed == need(blocks, choice, room)
    assert bytes_needed == min(need(blocks, c, room) for c in _choices(blocks))
    assert search(blocks, Room(bytes_needed, room.head, room.tail)) is not None
    assert search(blocks, Room(bytes_needed - 1, room.head, room.tail)) is None


def test_the_last_block_is_left_alone_where_its_recompute_would_need_as_much() -> None:
    """Backward begins with it: its tensors are there at that moment in any case."""
    blocks = [[Option(10, 10, 0.0), Option(1, 10, 5.0)]] * 4
    room = Room(budget=13)
    assert search(blocks, room) == [1, 1, 1, 0]
    assert need(blocks, [1, 1, 1, 0], room) == need(blocks, [1, 1, 1, 1], room) == 13


def test_memory_outside_of_blocks_counts() -> None:
    blocks = [[Option(10, 10, 0.0), Option(1, 10, 5.0)]] * 2
    assert search(blocks, Room(budget=20)) == [0, 0]
    assert search(blocks, Room(budget=20, head=1)) == [1, 0]
    assert search(blocks, Room(budget=20, tail=1)) == [1, 0]
    assert search(blocks, Room(budget=20, head=10, tail=3)) is None
