"""Resident weights on real ZeRO-3 engines, on processes that are told to be several hosts."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.engine.tuner import COUNTED_STEPS
from ds_ckpt.zero3 import compatibility
from ds_ckpt.zero3.resident import HOST_COPY
from tests.distributed import cases_weights as cases
from tests.distributed.models import quantize_section

WHOLE = {"weights": {"resident": True, "deltas": "none"}}
LOSSLESS = {"weights": {"resident": True, "deltas": "lossless"}}
PLACED = {"resident": "auto", "deltas": "none"}
AUTO = {"weights": {"resident": True}}
BLOCK = {"activation": {"policy": "block"}}
ONE, TWO = [1, 1], [2, 2]
FP32 = {"bf16": {"enabled": False}}
pytestmark = pytest.mark.skipif(
    not compatibility.serves_resident_weights(metadata.version("deepspeed")),
    reason=f"refused before DeepSpeed {compatibility.RESIDENT_SINCE}",
)


def same(ours: list[Any], plain: list[Any]) -> None:
    for mine, expected in zip(ours, plain, strict=True):
        for what in ("losses", "evaluated", "weights", "skipped"):
            assert mine[what] == expected[what], what


@pytest.mark.parametrize(
    ("kind", "section", "options"),
    [
        ("llama", WHOLE, {}),
        ("llama", LOSSLESS, {"accumulation": 3}),
        ("llama-tied", LOSSLESS, {"offload_optimizer": True}),
        ("lora", LOSSLESS, {}),
        ("plain", WHOLE, FP32),
        ("llama", LOSSLESS, {"accumulation": 2, "chunk": 300}),
        ("mixtral", LOSSLESS, {"reuse": 0}),
    ],
)
def test_training_is_that_of_deepspeed_and_nothing_is_gathered(
    world2: Any, kind: str, section: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = world2.run(cases.run, ONE, kind, {}, 5, **options)
    ours = world2.run(cases.run, ONE, kind, section, 5, **options)
    same(ours, plain)
    for process, stock in zip(ours, plain, strict=True):
        assert stock["crossing"]
        assert process["crossing"] == []
        assert process["wrong"] == 0
        assert process["gathered"] == 0
        assert process["sent"] > 0


@pytest.mark.parametrize("section", [WHOLE, LOSSLESS], ids=["whole", "lossless"])
def test_with_several_processes_a_host_gathers_stay_inside(
    world4: Any, section: dict[str, Any]
) -> None:
    plain = world4.run(cases.run, TWO, "llama-tied", {}, 4, accumulation=2)
    ours = world4.run(cases.run, TWO, "llama-tied", section, 4, accumulation=2, chunk=200)
    same(ours, plain)
    for process in ours:
        assert process["crossing"] == []
        assert process["wrong"] == 0
        assert process["gathered"] > 0
        assert "resident on each of 2 nodes" in process["summary"]


@pytest.mark.parametrize(
    "beside",
    [BLOCK, quantize_section(), {**BLOCK, **quantize_section(rules=[])}],
    ids=["block", "4 bits", "both"],
)
def test_beside_checkpointing_and_compression(world2: Any, beside: dict[str, Any]) -> None:
    without = world2.run(cases.run, ONE, "llama", beside, 4, accumulation=2)
    ours = world2.run(cases.run, ONE, "llama", {**beside, **LOSSLESS}, 4, accumulation=2)
    same(ours, without)
    assert all(process["crossing"] == [] and process["wrong"] == 0 for process in ours)


def test_codecs_are_compared_by_step_time(world2: Any) -> None:
    """Both take turns; training is the same with any."""
    steps = 2 * (1 + COUNTED_STEPS) + 2
    plain = world2.run(cases.run, ONE, "llama", {}, steps)
    ours = world2.run(cases.run, ONE, "llama", AUTO, steps)
    same(ours, plain)
    for process in ours:
        assert "lossless or uncompressed, if it shortens the step" in process["summary"]
        assert process["choice"] in ("uncompressed", None), "no link is slow here"


@pytest.mark.parametrize(
    ("slots", "resident_s", "hpz"),
    [(ONE, 0.5, 1), (ONE, 2.0, 1), pytest.param(TWO, 2.0, 2, marks=pytest.mark.slow)],
    ids=["resident is quicker", "DeepSpeed is quicker", "hpZ is quicker"],
)
def test_weights_are_where_they_make_steps_shorter(
    world2: Any, world4: Any, tmp_path: Path, slots: list[int], resident_s: float, hpz: int
) -> None:
    """The comparison changes no bit, all ranks agree, and a load compares anew."""
    world, section = world4 if slots == TWO else world2, {"weights": {**PLACED}}
    plain = world.run(cases.placed, slots, {}, "", 0.0)
    ours = world.run(cases.placed, slots, section, str(tmp_path), resident_s, hpz)
    resident = resident_s < 1
    for process, stock in zip(ours, plain, strict=True):
        assert process["losses"] == stock["losses"]
        assert process["weights"] == stock["weights"]
        block = 1 + COUNTED_STEPS
        assert process["places"] == [True] * block + [False] * block + [resident] * 2
        assert process["choice"] == ("uncompressed" if resident else "deepspeed")
        assert bool(process["kept"]) == resident
        assert process["placed after a load"]
        assert process["wrong"] == 0


@pytest.mark.slow
def test_two_hundred_steps_are_those_of_deepspeed(world2: Any) -> None:
    """Every loss, past two comparisons of checksums between hosts."""
    plain = world2.run(cases.run, ONE, "llama", {}, 203, accumulation=2, timeout=400)
    ours = world2.run(cases.run, ONE, "llama", AUTO, 203, accumulation=2, timeout=400)
    same(ours, plain)
    assert all(len(process["losses"]) == 203 * 2 for process in ours)
    assert all(process["wrong"] == 0 for process in ours)


def test_changes_are_few_bytes(world2: Any) -> None:
    """At a small step most weights stay what they are."""
    whole, changes = (
        world2.run(cases.run, ONE, "llama", section, 5, lr=1e-5)[0] for section in (WHOLE, LOSSLESS)
    )
    assert changes["losses"] == whole["losses"]
    assert 0 < changes["sent"] < whole["sent"] / 5


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
    ("kind", "first", "second", "end", "options"),
    [
        ("llama", WHOLE, WHOLE, "destroy", {}),
        ("llama", LOSSLESS, LOSSLESS, "destroy", {}),
        ("plain", WHOLE, {}, "", FP32),
        ("plain", {}, WHOLE, "", FP32),
        ("plain", WHOLE, WHOLE, "detach", {**FP32, "reuse": 0}),
    ],
)
def test_two_models_divided_together_are_each_their_own(
    world2: Any, kind: str, first: Any, second: Any, end: str, options: dict[str, Any]
) -> None:
    ours = world2.run(cases.of_one_zero_init, ONE, kind, [first, second], end, **options)
    assert ours == world2.run(cases.of_one_zero_init, ONE, kind, [{}, {}], end, **options)


def test_two_models_divided_together_on_hosts_of_two(world4: Any) -> None:
    ours = world4.run(cases.of_one_zero_init, TWO, "plain", [{}, WHOLE], "", **FP32)
    assert ours == world4.run(cases.of_one_zero_init, TWO, "plain", [{}, {}], "", **FP32)


@pytest.mark.parametrize(
    ("a", "b", "order", "written"),
    [
        (LOSSLESS, {}, "ba", "a"),
        (WHOLE, {}, "ab", "b"),
        (LOSSLESS, LOSSLESS, "ba", "a"),
        (WHOLE, WHOLE, "ab", "b"),
    ],
)
def test_weights_of_two_models_are_written_together(
    world2: Any, a: Any, b: Any, order: str, written: str
) -> None:
    """As who moves a teacher does."""
    ours = world2.run(cases.gathered_together, ONE, {"a": a, "b": b}, order, written, timeout=90)
    plain = world2.run(cases.gathered_together, ONE, {"a": {}, "b": {}}, order, written)
    assert ours == plain


@pytest.mark.parametrize(
    ("slots", "kind", "persistence"),
    [(ONE, "shared", 0), (ONE, "llama-tied", 5000), (TWO, "llama-tied", 5000)],
)
def test_weights_that_torch_autocast_rounds(
    world2: Any, world4: Any, slots: list[int], kind: str, persistence: int
) -> None:
    world = world4 if slots == TWO else world2
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    options = {**FP32, **autocast, "persistence": persistence}
    ours = world.run(cases.run, slots, kind, WHOLE, 4, **options)
    same(ours, world.run(cases.run, slots, kind, {}, 4, **options))


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
def test_a_budget_counts_what_a_host_keeps(
    world4: Any, slots: list[int], kind: str, section: Any, options: dict[str, Any]
) -> None:
    copies = bool(section or options)
    for process in world4.run(cases.budgeted, slots, kind, section, 1.0, **options):
        expected = process["formula"] if copies else 0
        assert process["kept"] == process["planned"] == process["counted"] == expected
        assert process["hook"] == (expected if section else None)
        assert 1 <= process["formula"] * slots[0] / process["whole"] < 1.1  # padding


def test_a_budget_that_nothing_fits_says_what_resident_weights_take(world4: Any) -> None:
    for process in world4.run(cases.budgeted, TWO, "llama", LOSSLESS, 1e-4):
        words = process["refusal"]
        copy = re.search(rf"without {HOST_COPY}, (.*) GiB \((.*)\): (.*) GiB, is still", words)
        assert copy is not None, words
        assert float(copy[1]) * 2**30 == pytest.approx(process["kept"], rel=0.01)
        assert copy[2] == '"weights": {"resident": false}, "zero_hpz_partition_size": 1'
        least = re.search(r"write at least (.*?) GiB", words)
        assert least is not None, words
        freed = (float(least[1]) - float(copy[3])) * 2**30
        assert freed == pytest.approx(process["kept"], rel=0.01)


def test_a_copy_that_one_process_has_no_room_for_is_made_by_none(world2: Any) -> None:
    first, second = world2.run(cases.without_room, ONE, LOSSLESS)
    assert "1 of them could not keep its part of a copy of the weights" in first
    assert "$.ds_ckpt.weights.resident" in second
    assert "0.0010 KiB are free" in second


def test_on_one_host_there_is_nothing_to_gain(world2: Any) -> None:
    process = world2.run(cases.run, [2], "llama", LOSSLESS, 2)[0]
    assert "all ranks share one node" in process["summary"]
    assert process["sent"] == 0


def test_what_cannot_be_served_is_refused(world2: Any, world4: Any) -> None:
    for message in world2.run(cases.refused, ONE, LOSSLESS, 2):
        assert "$.zero_optimization.zero_hpz_partition_size" in message
        assert "write 1 or remove the key" in message
    for message in world2.run(cases.refused, ONE, LOSSLESS, **FP32):
        assert "torch.float32" in message
    for message in world4.run(cases.refused, [1, 3], LOSSLESS):
        assert "$.ds_ckpt.weights.resident" in message
        assert "unequal numbers of ranks (1, 3)" in message
