"""A step that does not end leaves nothing: neither twice-applied gradients nor lost residuals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_abandoned as cases
from tests.distributed.models import topk_section

SECTIONS: dict[str, dict[str, Any]] = {
    "topk": topk_section(topk={"density": 0.05}, min_numel=16),
    "powersgd": topk_section(
        method="powersgd", powersgd={"rank": 2}, min_numel=16, error_feedback={"dtype": "int8"}
    ),
}


@pytest.mark.parametrize(
    ("method", "accumulation", "options"),
    [("topk", 1, {}), ("powersgd", 2, {}), ("topk", 2, {"bucket": 10**6})],
)
@pytest.mark.sampled(1)
def test_a_backward_that_raised_and_is_tried_again_leaves_no_trace(
    world2: Any, method: str, accumulation: int, options: dict[str, int]
) -> None:
    for result in world2.run(cases.tried_again, SECTIONS[method], accumulation, **options):
        assert result["raised"]
        assert result["interrupted"] == result["smooth"]


@pytest.mark.parametrize(("method", "bucket"), [("topk", 0), ("powersgd", 2)])
def test_a_failed_exchange_raises_and_leaves_no_trace(
    world2: Any, method: str, bucket: int
) -> None:
    for result in world2.run(cases.failing_exchange, SECTIONS[method], bucket):
        assert result["message"] == "no link to host1"
        assert result["kept"]
        assert result["failing"] == result["smooth"]


@pytest.mark.parametrize(("method", "what"), [("topk", "nan"), ("powersgd", "interrupted")])
@pytest.mark.sampled(1)
def test_a_checkpoint_loaded_amid_a_step_is_all_there_is(
    world2: Any, tmp_path: Path, method: str, what: str
) -> None:
    section = SECTIONS[method]
    for result in world2.run(cases.loaded_after, str(tmp_path), section, what):
        assert result.get("raised", True)
        assert result["new"]["skipped"] == 0
        for key in ("losses", "weights", "state"):
            assert result["amid"][key] == result["new"][key]


def test_an_interrupted_save_leaves_no_state_beside_an_earlier_saves_files(
    world2: Any, tmp_path: Path
) -> None:
    for result in world2.run(cases.interrupted_save, str(tmp_path), SECTIONS["topk"]):
        assert result == {"steps": 1, "residuals": 0}


def test_a_refused_engine_leaves_no_process_group(world2: Any) -> None:
    section = topk_section(exchange={"levels": 2})
    for message, left in world2.run(cases.refused_group, section):
        assert "levels" in message
        assert left == 0
