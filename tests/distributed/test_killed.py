"""What ends a run from outside: a clear end in a stated time on all others, a resume to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.killing import ENDS_S, ROOM, meet, smooth

CHEAPEST = "killed in mid-exchange"
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes a link down or mounts: needs root")


def _marks(fault: str) -> list[Any]:
    slow = [] if fault == CHEAPEST else [pytest.mark.slow]
    return slow + [NEEDS_ROOT] * (fault in ROOM or "link" in fault)


@pytest.fixture(scope="module")
def without(world2: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return smooth(world2, tmp_path_factory.mktemp("smooth") / "checkpoint")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [pytest.param(name, marks=_marks(name)) for name in ENDS_S])
def test_all_end_in_time_and_go_on_from_the_last_save(
    world2: Any, tmp_path: Path, without: Any, fault: str
) -> None:
    ending = meet(fault, world2, tmp_path, without)
    assert ending.equal
    if fault == "link down for 5 s":
        assert ending.ended_s is None
        return
    assert ending.ended_s is not None
    assert 0 < ending.ended_s < ENDS_S[fault]
    assert ending.said
    assert 0 <= ending.lost <= 2
