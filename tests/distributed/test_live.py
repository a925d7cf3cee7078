"""Where the time of a live run goes: the step log's fields and line, and ranges of profilers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_live as cases
from tests.distributed.cases_precision import on


@pytest.mark.parametrize(
    ("warmup_steps", "how", "weights"),
    [(0, "estimated", "weights"), pytest.param(4, "measured", "gather", marks=pytest.mark.slow)],
)
def test_the_parts_of_a_live_step(
    world2: Any, tmp_path: Path, warmup_steps: int, how: str, weights: str
) -> None:
    """Resident weights arrive as changes, others by gathers."""
    case = (cases.live, str(tmp_path), warmup_steps, weights == "weights", 6)
    results = world2.run(on, [1, 1], *case)
    for result in results:
        assert [record["step"] for record in result["records"]] == [2, 4, 6]
        for record in result["records"]:
            exposed = record["exposed_s"]
            assert min(record["recompute_s"], exposed["exchange"], exposed[weights]) > 0
            assert record["recompute_s"] + sum(exposed.values()) < record["step_time_s"]
            is_compressed = record["step"] > warmup_steps
            assert list(record.get("recompute_paid_share", ())) == [how] * is_compressed
        ranges, blocks, parameters = result["ranges"], 3, 30
        assert ranges["ds_ckpt/forward"] == 1
        assert ranges["ds_ckpt/recompute"] == blocks
        assert ranges["ds_ckpt/offload"] == 2 * (blocks - 1)
        assert ranges["ds_ckpt/gather"] > parameters
        assert ranges["ds_ckpt/exchange"] > 0
        assert ("ds_ckpt/weights" in ranges) == (weights == "weights")
    first, second = results
    assert second["lines"] == []
    assert len(first["lines"]) == 3
    for part in ("recomputation", "exposed exchange", f"exposed {weights}", "MB sent"):
        assert part in first["lines"][-1]
    assert f"of the recomputation ({how})" in first["lines"][-1]


def test_without_telemetry_nothing_is_timed(world2: Any) -> None:
    assert world2.run(cases.untimed) == [True, True]
