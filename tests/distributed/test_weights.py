"""Resident weights on real ZeRO-3 engines, on ranks that act as several nodes."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.engine.tuner import COUNTED_STEPS
from ds_ckpt.zero3 import compatibility
from tests.distributed import cases_weights as cases

WHOLE = {"weights": {"resident": True, "deltas": "none"}}
LOSSLESS = {"weights": {"resident": True, "deltas": "lossless"}}
PLACED = {"resident": "auto", "deltas": "none"}
ONE, TWO = [1, 1], [2, 2]
FP32 = {"bf16": {"enabled": False}}
pytestmark = pytest.mark.skipif(
    not compatibility.serves_resident_weights(metadata.version("deepspeed")),
    reason=f"refused before DeepSpeed {compatibility.RESIDENT_SINCE}",
)


@pytest.mark.parametrize(
    ("slots", "resident_s", "hpz"),
    [
        (ONE, 2.0, 1),
        pytest.param(ONE, 0.5, 1, marks=pytest.mark.slow),
        pytest.param(TWO, 2.0, 2, marks=pytest.mark.slow),
    ],
    ids=["DeepSpeed is quicker", "resident is quicker", "hpZ is quicker"],
)
def test_weights_are_where_they_make_steps_shorter(
    world2: Any, world4: Any, tmp_path: Path, slots: list[int], resident_s: float, hpz: int
) -> None:
    """The comparison changes no bit, all ranks agree, and a load compares anew."""
    world, section = world4 if slots == TWO else world2, {"weights": {**PLACED}}
    plain = world.run(cases.placed, slots, {}, "", 0.0)
    ours = world.run(cases.placed, slots, section, str(tmp_path), resident_s, hpz)
    resident = resident_s < 1
    for process, baseline in zip(ours, plain, strict=True):
        assert process["losses"] == baseline["losses"]
        assert process["weights"] == baseline["weights"]
        block = 1 + COUNTED_STEPS
        assert process["places"] == [True] * block + [False] * block + [resident] * 2
        assert process["choice"] == ("uncompressed" if resident else "deepspeed")
        assert bool(process["kept"]) == resident
        assert process["placed after a load"]
        assert process["wrong"] == 0


@pytest.mark.parametrize("kind", ["llama", "lora"])  # lora: of a frozen weight
def test_a_copy_that_went_wrong_is_found_and_healed(world2: Any, kind: str) -> None:
    for rank, process in enumerate(world2.run(cases.healed, ONE, kind, LOSSLESS)):
        assert process["found"] == [True, False, True]
        assert process["wrong"] == (rank == 0)
        assert process["healed"] == 0


def test_a_model_that_deepspeed_divides_while_it_is_built(world2: Any) -> None:
    ours = world2.run(cases.built_by_zero_init, ONE, LOSSLESS)
    assert ours == world2.run(cases.built_by_zero_init, ONE, {})


@pytest.mark.parametrize(
    ("slots", "kind", "first", "second", "end", "options"),
    [
        (ONE, "llama", LOSSLESS, LOSSLESS, "destroy", {}),
        (ONE, "plain", WHOLE, {}, "", FP32),
        (ONE, "plain", WHOLE, WHOLE, "detach", {**FP32, "reuse": 0}),
        (TWO, "plain", {}, WHOLE, "", FP32),
    ],
)
@pytest.mark.sampled(2)
def test_two_models_divided_together_are_each_their_own(
    request: pytest.FixtureRequest,
    slots: list[int],
    kind: str,
    first: Any,
    second: Any,
    end: str,
    options: dict[str, Any],
) -> None:
    pool = request.getfixturevalue(f"world{sum(slots)}")
    ours = pool.run(cases.of_one_zero_init, slots, kind, [first, second], end, **options)
    assert ours == pool.run(cases.of_one_zero_init, slots, kind, [{}, {}], end, **options)


@pytest.mark.parametrize(
    ("a", "b", "order", "written"), [(LOSSLESS, {}, "ba", "a"), (WHOLE, WHOLE, "ab", "b")]
)
@pytest.mark.sampled(1)
def test_weights_of_two_models_are_written_together(
    world2: Any, a: Any, b: Any, order: str, written: str
) -> None:
    """A program that moves a teacher's weights does this."""
    ours = world2.run(cases.gathered_together, ONE, {"a": a, "b": b}, order, written, timeout=90)
    plain = world2.run(cases.gathered_together, ONE, {"a": {}, "b": {}}, order, written)
    assert ours == plain


@pytest.mark.parametrize(
    ("slots", "kind", "section", "options"),
    [
        (TWO, "lora", LOSSLESS, {}),
        pytest.param(TWO, "plain", WHOLE, FP32, marks=pytest.mark.slow),
        (TWO, "llama", {}, {"hpz": 2}),
        pytest.param(TWO, "llama", LOSSLESS, {"hpz": 2}, marks=pytest.mark.slow),
        ([1] * 4, "plain", WHOLE, FP32),
        (TWO, "llama", {}, {}),
    ],
    ids=["frozen", "fp32", "hpz alone", "hpz", "4 hosts", "no copy"],
)
@pytest.mark.sampled(2)
def test_a_budget_counts_what_a_host_keeps(
    world4: Any, slots: list[int], kind: str, section: Any, options: dict[str, Any]
) -> None:
    copies = bool(section or options)
    for process in world4.run(cases.budgeted, slots, kind, section, 1.0, **options):
        expected = process["formula"] if copies else 0
        assert process["kept"] == process["planned"] == process["counted"] == expected
        assert process["hook"] == (expected if section else None)
        assert 1 <= process["formula"] * slots[0] / process["whole"] < 1.1  # padding


def test_a_copy_that_one_process_has_no_room_for_is_made_by_none(world2: Any) -> None:
    for words in world2.run(cases.without_room, ONE, LOSSLESS):
        assert "$.ds_ckpt.weights.resident" in words
        assert "more than are free" in words


def test_unsupported_settings_are_refused(world2: Any, world4: Any) -> None:
    for message in world2.run(cases.refused, ONE, LOSSLESS, 2):
        assert "$.zero_optimization.zero_hpz_partition_size" in message
        assert "write 1, or remove that key" in message
    for message in world2.run(cases.refused, ONE, LOSSLESS, **FP32):
        assert "torch.float32" in message
    for message in world4.run(cases.refused, [1, 3], LOSSLESS):
        assert "$.ds_ckpt.weights.resident" in message
        assert "unequal numbers of ranks (1, 3)" in message
