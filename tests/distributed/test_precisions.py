"""Laws 4 and 5 with real engines in bf16 and fp16, with offloaded parameters, over two levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases_compression, cases_resume
from tests.distributed.cases_precision import on, preallocated
from tests.distributed.models import quantize_section, topk_section

# Hysteresis: the first overflow leaves the scale, so that a run without it computes the same.
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 3}
BF16 = {"enabled": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": BF16},
    "fp16": {"fp16": FP16, "clip": 0.5},
    "fp16, offloaded": {"fp16": FP16, "offload_param": True, "offload_optimizer": True},
    "parameters offloaded": {"offload_param": True, "offload_optimizer": True, "clip": 0.5},
}
EVERYTHING = topk_section(
    method="powersgd",
    powersgd={"rank": 2},
    rules=[
        {"match": "*embed*", "method": "topk", "topk": {"density": 0.1}},
        {"match": "*down_proj*", "method": "quantize", "quantize": {"bits": 2}},
        {
            "match": "*o_proj*",
            "method": "entropy_coded",
            "entropy_coded": {"metric": "energy"},  # "steps" is measured again after a load
        },
    ],
    error_feedback={"dtype": "int8", "device": "cpu"},
)
"""Every method in one model, residuals rounded and on the host."""
SECTIONS = {
    "topk": topk_section(topk={"density": 0.05}),
    "3 bits": quantize_section(quantize={"bits": 3}),
    "everything": EVERYTHING,
}
WHERE = (1, 1, "model.layers.1.mlp.down_proj.weight")


@pytest.mark.parametrize(
    ("options", "section", "value"),
    [
        ("bf16", "topk", "inf"),
        ("fp16", "3 bits", "nan"),
        ("fp16, offloaded", "everything", "inf"),
        ("parameters offloaded", "3 bits", "inf"),
    ],
)
@pytest.mark.sampled(2)
def test_non_finite_passes_through(world2: Any, options: str, section: str, value: str) -> None:
    given = (SECTIONS[section], float(value), WHERE, 2)
    results = world2.run(on, [2], cases_compression.poisoned, *given, **OPTIONS[options])
    _passed_through(results)
    assert all(process["skips"] == 1 for process in results)


@pytest.mark.slow
def test_non_finite_passes_through_two_levels(world4: Any) -> None:
    given = EVERYTHING, float("nan"), (3, *WHERE[1:]), 2
    results = world4.run(on, [2, 2], cases_compression.poisoned, *given, **OPTIONS["fp16"])
    _passed_through(results)


def _passed_through(results: list[dict[str, Any]]) -> None:
    for process in results:
        assert process["skipped"]
        assert process["held"] > 3
        assert process["equal"]
        assert process["losses"] == process["expected"]


@pytest.mark.parametrize(
    ("world", "slots", "options"),
    [
        ("world2", [2], "bf16"),
        ("world2", [2], "fp16, offloaded"),
        ("world4", [2, 2], "parameters offloaded"),
    ],
)
@pytest.mark.sampled(1)
def test_resume_is_bit_exact(
    request: pytest.FixtureRequest, tmp_path: Path, world: str, slots: list[int], options: str
) -> None:
    pool, folder = request.getfixturevalue(world), str(tmp_path)
    given = {"accumulation": 2, **OPTIONS[options]}
    whole = pool.run(on, slots, cases_resume.train, EVERYTHING, 6, 3, folder, **given)
    assert pool.run(on, slots, cases_resume.resume, folder, EVERYTHING, 3, 6, **given) == whole
    assert whole[0]["factors"] > 3


@pytest.mark.parametrize("options", ["bf16", "fp16", "parameters offloaded"])
@pytest.mark.sampled(2)
def test_it_trains_as_plain_deepspeed_does(world2: Any, options: str) -> None:
    """8 bits are as good as everything; an update of the wrong scale, or none, would show."""
    given = {"lr": 3e-4, **OPTIONS[options]}
    baseline = world2.run(on, [2], cases_compression.run, "llama", {}, 12, **given)
    section = quantize_section(quantize={"bits": 8})
    ours = world2.run(on, [2], cases_compression.run, "llama", section, 12, **given)
    for expected, got in zip(baseline, ours, strict=True):
        assert got["residuals"]
        assert got["skipped"] == expected["skipped"] == 0
        gaps = [abs(a - b) for a, b in zip(expected["losses"], got["losses"], strict=True)]
        assert max(gaps) < 5e-3


@pytest.mark.parametrize(
    ("how", "words"), [("least scale", "already at minimum"), ("early", "no memory")]
)
def test_a_step_that_ends_in_an_exception_leaves_nothing(world2: Any, how: str, words: str) -> None:
    for process in world2.run(on, [2], cases_compression.step_broken_off, how):
        assert words in process["message"]
        assert process["with"][1]
        assert process["with"][2] == 0
        assert process["with"] == process["without"]


@pytest.mark.parametrize(
    ("slots", "section", "accumulation"),
    [([1, 1], "everything", 1), pytest.param([2, 2], "3 bits", 2, marks=pytest.mark.slow)],
)
def test_an_exchange_that_is_preallocated_at_attach_changes_no_bit(
    request: pytest.FixtureRequest, slots: list[int], section: str, accumulation: int
) -> None:
    pool = request.getfixturevalue(f"world{sum(slots)}")
    resident = {**SECTIONS[section], "weights": {"resident": True, "deltas": "none"}}
    given = slots, cases_compression.run, "llama", resident, 3
    for ours, plain in zip(
        *(pool.run(case, *given, accumulation=accumulation) for case in (preallocated, on)),
        strict=True,
    ):
        assert ours["residuals"].keys() == plain["residuals"].keys() != set()
        for name, residual in plain["residuals"].items():
            assert residual.equal(ours["residuals"][name])
        for key in ("losses", "weights", "skipped"):
            assert ours[key] == plain[key]
