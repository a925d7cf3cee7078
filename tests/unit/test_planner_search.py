"""The search against brute force, and the equations that it stands on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt.activation.planning.solve import Option, Room, least, need, search


@st.composite
def _options(draw: st.DrawFn, offload: bool = False) -> list[Option]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        held = draw(st.integers(0, 1000))
        moved = draw(st.sampled_from([0, 0, 1, 90, 400])) if offload else 0
        cost = draw(st.floats(0, 100, allow_nan=False))
        found.append(Option(held, held + moved + draw(st.integers(0, 800)), cost, moved))
    return found


_BLOCKS = st.lists(_options() | _options(offload=True), min_size=1, max_size=6)
_ROOMS = st.builds(
    Room,
    budget=st.integers(0, 6000),
    head=st.integers(0, 300),
    tail=st.integers(0, 300),
    peak=st.booleans(),
)


def _exact(blocks: Sequence[Sequence[Option]], room: Room) -> float | None:
    costs = [
        sum(options[i].cost for options, i in zip(blocks, choice, strict=True))
        for choice in itertools.product(*(range(len(options)) for options in blocks))
        if need(blocks, choice, room) <= room.budget
    ]
    return min(costs, default=None)


def _cost(blocks: Sequence[Sequence[Option]], choice: Sequence[int]) -> float:
    return sum(options[i].cost for options, i in zip(blocks, choice, strict=True))


@settings(max_examples=300, deadline=None)
@given(_BLOCKS, _ROOMS)
def test_it_finds_what_trying_everything_finds(blocks: list[list[Option]], room: Room) -> None:
    exact, choice = _exact(blocks, room), search(blocks, room)
    assert (choice is None) == (exact is None)
    if choice is not None and exact is not None:
        assert need(blocks, choice, room) <= room.budget
        assert _cost(blocks, choice) == pytest.approx(exact)


@settings(max_examples=200, deadline=None)
@given(_BLOCKS, _ROOMS, st.integers(40, 200))
def test_a_thinned_front_still_gives_plans_that_fit(
    blocks: list[list[Option]], room: Room, limit: int
) -> None:
    exact, choice = _exact(blocks, room), search(blocks, room, limit=limit)
    if choice is not None:
        assert exact is not None
        assert need(blocks, choice, room) <= room.budget


@settings(max_examples=60, deadline=None)
@given(_options(), st.integers(8, 40), st.floats(0.05, 0.98), st.integers(0, 500))
def test_many_equal_blocks_cost_at_most_two_percent_more_than_the_optimum(
    options: list[Option], count: int, share: float, tail: int
) -> None:
    """Without the peak the order is of no matter: the optimum over counts is exact."""
    room = Room(0, 0, tail, peak=False)
    low = least([options] * count, room)[0]
    high = tail + count * max(o.held for o in options)
    room = Room(round(low + share * (high - low)), 0, tail, peak=False)
    reach: dict[int, float] = {tail: 0.0}  # every sum that can be made, and its cheapest way
    for _ in range(count):
        following: dict[int, float] = {}
        for total, cost in reach.items():
            for option in options:
                key = total + option.held
                if key <= room.budget:
                    following[key] = min(following.get(key, float("inf")), cost + option.cost)
        reach = following
    choice = search([options] * count, room)
    assert choice is not None
    assert _cost([options] * count, choice) <= 1.02 * min(reach.values()) + 1e-9


@settings(max_examples=100, deadline=None)
@given(_BLOCKS, _ROOMS)
def test_the_least_is_the_least(blocks: list[list[Option]], room: Room) -> None:
    bytes_needed, choice = least(blocks, room)
    every = itertools.product(*(range(len(options)) for options in blocks))
    assert bytes_needed == need(blocks, choice, room)
    assert bytes_needed == min(need(blocks, c, room) for c in every)
    assert search(blocks, Room(bytes_needed, room.head, room.tail, room.peak)) is not None
    assert search(blocks, Room(bytes_needed - 1, room.head, room.tail, room.peak)) is None


def test_the_last_block_is_left_alone_where_its_recompute_would_need_as_much() -> None:
    """Backward begins with it: its tensors are there at that moment in any case."""
    blocks = [[Option(10, 10, 0.0), Option(1, 10, 5.0)]] * 4
    room = Room(budget=13)
    assert search(blocks, room) == [1, 1, 1, 0]
    assert need(blocks, [1, 1, 1, 0], room) == 13
    assert need(blocks, [1, 1, 1, 1], room) == 13


def _moved(blocks: Sequence[Sequence[Option]], choice: Sequence[int]) -> list[int]:
    chosen = (options[i].moved for options, i in zip(blocks, choice, strict=True))
    return [moved for moved in chosen if moved]


@settings(max_examples=200, deadline=None)
@given(_BLOCKS, st.integers(0, 300), st.booleans())
def test_the_last_that_moves_something_keeps_it_on_the_device(
    blocks: list[list[Option]], tail: int, peak: bool
) -> None:
    room = Room(0, 0, tail, peak)
    _, choice = least(blocks, room)
    held = tail + sum(options[i].held for options, i in zip(blocks, choice, strict=True))
    held += sum(_moved(blocks, choice)[-1:])
    assert need(blocks, choice, room) >= held
    assert peak or need(blocks, choice, room) == held


def test_what_is_outside_of_blocks_counts() -> None:
    blocks = [[Option(10, 10, 0.0), Option(1, 10, 5.0)]] * 2
    assert search(blocks, Room(budget=20)) == [0, 0]
    assert search(blocks, Room(budget=20, head=1)) == [1, 0]
    assert search(blocks, Room(budget=20, tail=1)) == [1, 0]
    assert search(blocks, Room(budget=20, head=10, tail=3)) is None
