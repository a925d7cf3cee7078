"""A damaged checkpoint is refused on every process, before anything of it is applied (law 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_damage as cases
from tests.distributed.cases_precision import on
from tests.distributed.models import topk_section

SECTION = {
    **topk_section(
        method="powersgd", powersgd={"rank": 2}, error_feedback={"dtype": "int8"}, min_numel=16
    ),
    "weights": {"resident": True, "deltas": "lossless"},
}
FOUND = {"a byte": "checksum", "NaN": "NaN or infinity in", "missing": "_00001_of_00002"}


@pytest.mark.timeout(300)
def test_a_damaged_checkpoint_is_refused_everywhere_and_changes_nothing(
    world2: Any, tmp_path: Path
) -> None:
    """Residuals and factors; training continues to the bit, and another tag loads."""
    for process in world2.run(cases.refused, str(tmp_path), SECTION, timeout=240):
        assert process["changed"] == []
        assert process["smooth"] == process["ill"]
        assert process["ill loaded"] == {"optimizer": True, "state": True}
        assert len(process["messages"]) == len(FOUND)
        for damage, words in process["messages"].items():
            assert FOUND[damage] in words, damage
            assert "ds_ckpt_residuals_0000" in words


FP16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}


@pytest.mark.parametrize(
    ("section", "options", "warns"),
    [
        (topk_section(), {}, True),
        ({"activation": {"policy": "block"}}, {"bf16": {"enabled": True}}, True),
        (topk_section(), {"fp16": {"enabled": True, "loss_scale": 8.0}}, True),
        (topk_section(), {"fp16": FP16}, False),  # which looks for its scale
    ],
    ids=["fp32", "bf16, nothing compressed", "fp16, fixed scale", "fp16, dynamic scale"],
)
@pytest.mark.sampled(2)
def test_a_run_that_skips_every_step_warns_once(
    world2: Any, section: dict[str, Any], options: dict[str, Any], warns: bool
) -> None:
    one, other = world2.run(on, [2], cases.skipping, section, **options)
    assert one["skipped"] == other["skipped"] == 12
    assert len(one["messages"]) == warns
    assert other["messages"] == []
