"""State that survives the processes: other worlds, universal checkpoints (law 5)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_resume as cases
from tests.distributed.models import topk_section
from tests.distributed.universal import convert

INT8_ON_HOST = {"dtype": "int8", "device": "cpu"}
SECTIONS = {
    "topk bf16": topk_section(topk={"density": 0.05}, error_feedback={"dtype": "bf16"}),
    "powersgd int8 on host": topk_section(
        method="powersgd", powersgd={"rank": 2}, error_feedback=INT8_ON_HOST
    ),
    "1 bit after 4 bits": topk_section(method="entropy_coded", warmup_steps=4, warmup_bits=4),
    "powersgd by turns": topk_section(
        method="powersgd", powersgd={"rank": 2}, error_feedback={"dtype": "bf16"}
    ),
}

OFTEN = ("topk bf16", "powersgd int8 on host")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in SECTIONS],
)
def test_every_kind_of_state_resumes_to_the_bit(world2: Any, tmp_path: Path, name: str) -> None:
    section = SECTIONS[name]
    whole = world2.run(cases.train, section, 6, 3, str(tmp_path))
    assert world2.run(cases.resume, str(tmp_path), section, 3, 6) == whole


@pytest.mark.slow
def test_universal_checkpoints_work_with_compression_on(
    world2: Any, world4: Any, tmp_path: Path
) -> None:
    """They are DeepSpeed's way to another world; residuals come along, without a hand copy."""
    section = SECTIONS["powersgd by turns"]
    saved = world2.run(cases.save, str(tmp_path), section, 3)
    universal = convert(tmp_path, "global_step3")
    shutil.rmtree(tmp_path / "global_step3")
    more = world4.run(cases.load_universal, str(tmp_path), section, str(tmp_path / "on four"))
    convert(tmp_path / "on four", "global_step3")
    fewer = world2.run(cases.load_universal, str(tmp_path / "on four"), section)
    for path in universal.glob("ds_ckpt_residuals_*"):
        path.unlink()
    without = world2.run(cases.load_universal, str(tmp_path), section)
    for process in (*more, *fewer, *without):
        assert process["steps"] == 3
        assert process["residuals after"] > 3
        assert all(loss == loss for loss in process["losses"])
    words = "holds no residuals; they start at 0"
    for process in without:
        assert process["unsent"] == {}
        assert sum(words in line for line in process["messages"]) == 1
    for process in (*more, *fewer):
        assert not any(words in line for line in process["messages"])
        assert process["unsent"].keys() == saved[0]["unsent"].keys()
        for name, total in saved[0]["unsent"].items():
            assert total.abs().max() > 0
            gap = (process["unsent"][name] - total).abs().max()
            assert gap <= 1e-6 * total.abs().max()
    assert [p["weights"] for p in without] == [p["weights"] for p in saved]
