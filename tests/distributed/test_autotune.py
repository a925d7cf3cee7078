"""The autotuner and the telemetry of compression on real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.engine.tuner import COUNTED_STEPS
from tests.distributed import cases_autotune as cases
from tests.distributed.cases_precision import on
from tests.distributed.models import quantize_section


@pytest.mark.parametrize("slow", ["ours", "other"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.sampled(2)
def test_the_shorter_step_is_chosen_by_all_ranks(
    world2: Any, tmp_path: Path, slow: str, accumulation: int
) -> None:
    """An accumulated step that is exchanged once is compared with an uncompressed one."""
    options = {"accumulation": accumulation} if accumulation > 1 else {}
    other = "uncompressed" if accumulation > 1 else "deepspeed"
    results = world2.run(cases.tuned, slow, str(tmp_path), process=1, **options)
    for result in results:
        assert result["candidates"] == ("compressed", other)
        assert result["choice"] == (other if slow == "ours" else "compressed")
        assert result["compresses"] is (slow == "other")
        assert (result["unsent"] == 0) is (slow == "ours")
        assert result["after a load"] == (None, "compressed")
        if other == "deepspeed":
            assert result["compared"] == COUNTED_STEPS
            assert result["kept"] == (2 if slow == "ours" else 0)
        else:
            assert result["compared"] == result["kept"] == 0


@pytest.mark.slow
def test_no_residual_is_left_in_bf16_over_two_levels_when_deepspeed_takes_over(
    world4: Any, tmp_path: Path
) -> None:
    results = world4.run(
        on, [2, 2], cases.tuned, "ours", str(tmp_path), process=3, bf16={"enabled": True}
    )
    for result in results:
        assert result["levels"] == 2
        assert result["choice"] == "deepspeed"
        assert result["kept"] == 2
        assert result["unsent"] == 0


def test_monitors_and_the_step_log_get_the_records(world2: Any, tmp_path: Path) -> None:
    first, other = world2.run(cases.monitored, str(tmp_path), quantize_section())
    text = " ".join(first["files"])
    for name in ("compression_error", "residual_norm", "sent_bytes_reduce", "exchange_s_wire"):
        assert name in text, first["files"]
    for outcome in (first, other):
        plan, *records = outcome["records"]
        assert plan == json.loads(json.dumps({"plan": outcome["plan"]}))
        assert {t["name"]: tuple(t["shape"]) for t in plan["plan"]} == outcome["parameters"]
        assert [record["step"] for record in records] == [2, 4]
        # one method; residuals are 0 at the own shard, so they belong to other ranks
        (norm,) = records[-1]["residual_norm"].values()
        assert norm == pytest.approx(outcome["residuals"] / outcome["norm"], rel=1e-4)
        assert all(0 < error < 1 for error in records[-1]["compression_error"].values())
    assert "4-bit values in blocks of 64" in first["summary"]
