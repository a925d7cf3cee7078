"""A short soak is flat, and finds what grows. `benchmarks/soak.py` has the long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_soak


@pytest.mark.parametrize("leaks", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.slow
def test_growth_is_found_and_nothing_else(world2: Any, tmp_path: Path, leaks: bool) -> None:
    found = world2.run(cases_soak.short, str(tmp_path), 40, leaks=leaks)
    for grown in found:
        # processor time is for long runs: a process that shares a core with others is uneven
        names = {line.partition(":")[0] for line in grown} - {"processor time of a step"}
        assert names == ({"resident memory", "handles", "threads"} if leaks else set())
    assert len(list(tmp_path.glob("step*"))) == 2  # the others are gone
