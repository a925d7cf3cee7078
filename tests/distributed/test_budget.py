"""Budgets, planned for at the first batch, on real ZeRO-3 engines with two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_budget

SHARES = [0.55, 0.8, 2.0]
"""Budgets, as shares of the memory without recomputation."""


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("bart", "gpt2", "bert", "mixtral", "vit")
        ),
    ],
)
def test_a_budget_is_kept_and_gradients_are_bitwise_those_of_no_checkpointing(
    world2: Any, kind: str
) -> None:
    results = world2.run(cases_budget.budgets, kind, SHARES, timeout=280)
    for found in results:
        assert found["plain"]["plan"] == ""
        for share in SHARES:
            ours = found[share]
            assert ours["equal"], (kind, share)
            assert ours["needed"] <= ours["budget"]
            assert max(ours["held"]) <= ours["budget"]
            assert ours["planned_held"] == pytest.approx(max(ours["held"]), rel=0.03)
            assert ours["none_bytes"] == pytest.approx(max(found["plain"]["held"]), rel=0.03)
            assert ours["left_hooks"] == -1
        assert set(found[2.0]["choices"]) == {"none"}
        assert set(found[0.55]["choices"]) != {"none"}
        assert found[0.55]["planned_held"] < found[0.8]["planned_held"]
        assert found[2.0]["recompute"] == 0
    # one plan for all, to the last digit
    assert all(found[s]["plan"] == results[0][s]["plan"] for found in results for s in SHARES)


def test_offloaded_inputs_are_not_on_the_device(world2: Any) -> None:
    extra = {"offload": True, "offload_min_bytes": 0}
    for found in world2.run(cases_budget.budgets, "llama", [0.6], **extra, timeout=200):
        ours = found[0.6]
        assert ours["equal"]
        # what boundaries keep is counted by the store, the rest where autograd saves it
        device = max(h + d for h, d in zip(ours["held"], ours["on_device"], strict=True))
        assert ours["planned_held"] == pytest.approx(device, rel=0.03)
        assert "in host memory" in " ".join(ours["lines"]) or ours["lines"] == []


def test_a_budget_for_the_whole_accelerator_counts_what_zero_keeps(world2: Any) -> None:
    for found in world2.run(cases_budget.budgets, "llama", [40.0], "accelerator", timeout=200):
        ours = found[40.0]
        assert ours["equal"]
        resident = ours["resident"]
        assert resident["weights, this rank's part"] > 0
        assert resident["optimizer state"] > 0
        assert resident["gradients, this rank's part"] > 0
        assert resident["reduce bucket"] >= 5000 * 4
        assert resident["gradients of activations and temporaries"] > 0
        assert ours["needed"] >= sum(resident.values())
        assert ours["needed"] <= ours["budget"]


def test_one_line_on_one_rank_describes_the_plan(world2: Any) -> None:
    first, second = world2.run(cases_budget.budgets, "llama", SHARES, timeout=280)
    assert second[0.55]["lines"] == []
    line = first[0.55]["lines"][-1]
    assert "plan for" in line
    assert "without recompute" in line
    assert "recomputes" in line
    assert "planned at the first training batch" in first[0.55]["summary"]


def test_a_larger_batch_keeps_the_plan_and_is_reported_once(world2: Any, tmp_path: Path) -> None:
    telemetry = {"enabled": True, "every_n_steps": 100, "path": str(tmp_path / "t.jsonl")}
    steps = [16, 32, 32, 16]
    results = world2.run(
        cases_budget.lengths, {"policy": "auto"}, steps, 16, 0.6, 0, telemetry, timeout=200
    )
    for process, ours in enumerate(results):
        assert ours["equal"]
        assert ours["tokens"] == 32
        assert ours["held"][0] <= ours["budget"]
        assert ours["held"][0] == ours["held"][3] < ours["held"][1] == ours["held"][2]
        (warning,) = [line for line in ours["lines"] if "larger than" in line]
        assert "a batch of 64 tokens is larger than the 32" in warning
        lines = (tmp_path / f"t.{process}.jsonl").read_text().splitlines()
        (plan,) = [r["activation_plan"] for r in map(json.loads, lines) if "activation_plan" in r]
        assert plan["blocks"]
        assert plan["held_bytes"] == ours["planned_held"]
    assert results[0]["plan"] == results[1]["plan"]


def test_the_process_with_the_largest_batch_decides(world2: Any) -> None:
    first, second = world2.run(
        cases_budget.lengths, {"policy": "budget"}, [24, 24], 32, 0.6, 8, timeout=200
    )
    assert first["equal"]
    assert second["equal"]
    assert first["tokens"] == second["tokens"] == 64
    assert first["plan"] == second["plan"]
    assert second["planned_held"] == pytest.approx(second["held"][0], rel=0.03)
    assert first["held"][0] < second["held"][0] <= second["budget"]


def test_an_impossible_budget_is_refused_on_every_rank(world2: Any) -> None:
    section = {"policy": "budget", "budget_gib": 1e-5}
    for words in world2.run(cases_budget.refused, section, timeout=120):
        assert "no plan fits" in words
        assert "budget_gib" in words
        assert "write at least 0.0000" in words
    for words in world2.run(cases_budget.refused, {"policy": "auto", "budget_gib": 2**-17}):
        assert "7.62939e-06 GiB for activations" in words


def test_a_plan_that_fails_on_one_process_fails_on_all(world2: Any) -> None:
    first, second = world2.run(cases_budget.one_cannot_plan, timeout=60)
    assert first == "RuntimeError: the search broke"
    assert "StateError" in second
    assert "the search broke" in second
