"""Law 7: the counters are compared with the interface's own."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.distributed import cases_counters as cases


@pytest.mark.parametrize(
    ("op", "world"),
    [
        *((op, "world4") for op in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")),
        ("reduce_scatter", "world2"),
    ],
)
@pytest.mark.sampled(3)
def test_counted_bytes_are_those_at_the_interface(
    request: pytest.FixtureRequest, world: str, op: str
) -> None:
    result = request.getfixturevalue(world).run(cases.collective, op, 2_000_000, 3)
    if not result[0]["isolated"]:
        reason = "needs root: in the common network other programs' bytes are counted too"
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    assert all(r["calls"] == 3 for r in result)
    ratio = result[0]["interface"] / result[0]["counted"]
    assert ratio == pytest.approx(1.0, abs=0.03)


def test_listeners_share_one_wrapping_and_leave_nothing(world2: Any) -> None:
    assert all(left == [] for left in world2.run(cases.nothing_left_after))


def test_nothing_is_counted_that_stays_in_a_process(world2: Any) -> None:
    assert world2.run(cases.group_of_one) == [0, 0]


def test_bytes_to_other_hosts_are_counted_apart(world4: Any) -> None:
    """Two hosts of two: of a ring the last of each host sends out, of an all-to-all everybody."""
    everyone = world4.run(cases.far_bytes, 2)
    for rank, found in enumerate(everyone):
        for op in ("all_gather", "all_reduce"):
            sent, far = found[op]
            assert sent > 0
            assert far == (sent if rank in (1, 3) else 0), (op, rank)
        assert found["all_to_all"] == (3 * 400, 2 * 400)
