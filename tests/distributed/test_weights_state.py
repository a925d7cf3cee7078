"""The state of resident weights: what every host holds after each step, each load and each end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.engine.tuner import COUNTED_STEPS
from tests.distributed import cases_weights_state as cases
from tests.distributed.models import quantize_section
from tests.distributed.test_weights import FP32, LOSSLESS, ONE, TWO, WHOLE
from tests.distributed.test_weights import pytestmark as pytestmark

HALF = 1 + COUNTED_STEPS
"""Steps of one codec in a comparison of two."""
SLOW = pytest.mark.slow
BLOCK = {"activation": {"policy": "block"}}
FP16 = {
    **FP32,
    # the scale begins too high, and doubles after every step
    "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 1},
}
SMALL_GROUPS = {"stage3_param_persistence_threshold": 400, "sub_group_size": 1000}


def _without(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key != "weights"}


def _same(ours: dict[str, Any], plain: dict[str, Any], *what: str) -> None:
    for key in what:
        assert ours[key] == plain[key], key


@pytest.mark.parametrize(
    ("slots", "kind", "section", "options"),
    [
        (ONE, "llama-tied", {**BLOCK, **LOSSLESS}, {"accumulation": 2, "chunk": 300}),
        (ONE, "llama", LOSSLESS, FP16),
        (ONE, "lora", LOSSLESS, {}),
        (ONE, "plain", WHOLE, FP32),
        (ONE, "odd", LOSSLESS, {"zero": SMALL_GROUPS}),
        (TWO, "odd", LOSSLESS, {"zero": {**SMALL_GROUPS, "zero_hpz_partition_size": 2}}),
        pytest.param(ONE, "llama-tied", LOSSLESS, {"offload_optimizer": True}, marks=SLOW),
        pytest.param(ONE, "mixtral", LOSSLESS, {"reuse": 0}, marks=SLOW),
        pytest.param(TWO, "llama", {**BLOCK, **WHOLE}, {"accumulation": 2}, marks=SLOW),
        pytest.param(TWO, "llama-tied", LOSSLESS, {"accumulation": 2, "chunk": 200}, marks=SLOW),
    ],
)
@pytest.mark.sampled(4)
def test_after_every_step_all_hosts_hold_what_the_owners_have(
    request: pytest.FixtureRequest,
    slots: list[int],
    kind: str,
    section: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Training is DeepSpeed's to the bit, and gathers stay inside a host."""
    pool, steps = request.getfixturevalue(f"world{sum(slots)}"), 5
    plain = pool.run(cases.laws, slots, kind, _without(section), steps, **options)
    ours = pool.run(cases.laws, slots, kind, section, steps, **options)
    for process, baseline in zip(ours, plain, strict=True):
        _same(process, baseline, "losses", "evaluated", "weights", "skipped")
        assert process["stale"] == []
        assert process["crossing"][1:] == [0] * (steps - 1)
        assert sum(baseline["crossing"][1:]) >= steps - 1
        assert [bool(b) for b in process["gathered"]] == [slots == TWO] * steps
        assert "resident on each of 2 nodes" in process["summary"]
        # a step that is skipped sends nothing and changes nothing
        assert [bool(sent) for sent in process["sent"]] == [not s for s in process["skipped"]]
        kept = zip(process["kept"], process["kept"][1:], strict=False)
        assert [a == b for a, b in kept] == [bool(s) for s in process["skipped"][1:]]
        assert (0 < sum(process["skipped"]) < steps - 1) == ("fp16" in options)


@pytest.mark.parametrize(
    "beside",
    [quantize_section(), {**BLOCK, **quantize_section(rules=[])}],
    ids=["4 bits", "block, 4 bits"],
)
@pytest.mark.sampled(1)
def test_beside_checkpointing_and_compression(world2: Any, beside: dict[str, Any]) -> None:
    without = world2.run(cases.laws, ONE, "llama", beside, 4, accumulation=2)
    ours = world2.run(cases.laws, ONE, "llama", {**beside, **LOSSLESS}, 4, accumulation=2)
    for process, expected in zip(ours, without, strict=True):
        _same(process, expected, "losses", "evaluated", "weights")
        assert process["crossing"][1:] == [0] * 3
        assert process["stale"] == []


@pytest.mark.parametrize(
    ("slots", "kind", "persistence"), [(ONE, "shared", 0), (TWO, "llama-tied", 5000)]
)
def test_weights_that_torch_autocast_rounds(
    request: pytest.FixtureRequest, slots: list[int], kind: str, persistence: int
) -> None:
    pool = request.getfixturevalue(f"world{sum(slots)}")
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    options = {**FP32, **autocast, "persistence": persistence}
    plain = pool.run(cases.laws, slots, kind, {}, 4, **options)
    ours = pool.run(cases.laws, slots, kind, WHOLE, 4, **options)
    for process, baseline in zip(ours, plain, strict=True):
        _same(process, baseline, "losses", "evaluated", "weights")


@pytest.mark.slow
def test_codecs_are_compared_by_step_time(world2: Any) -> None:
    """Both take turns; training is the same with any."""
    plain = world2.run(cases.laws, ONE, "llama", {}, 2 * HALF + 2)
    ours = world2.run(cases.laws, ONE, "llama", {"weights": {"resident": True}}, 2 * HALF + 2)
    for process, baseline in zip(ours, plain, strict=True):
        _same(process, baseline, "losses", "evaluated", "weights")
        assert "changes sent lossless or uncompressed" in process["summary"]
        lossless, uncompressed = process["sent"][:HALF], process["sent"][HALF : 2 * HALF]
        assert len(set(uncompressed)) == 1
        assert max(lossless[1:]) < uncompressed[0]


@pytest.mark.slow
def test_two_hundred_steps_are_those_of_deepspeed(world2: Any) -> None:
    """Every loss, past two comparisons of checksums between hosts."""
    section = {"weights": {"resident": True}}
    plain = world2.run(cases.laws, ONE, "llama", {}, 203, accumulation=2, timeout=400)
    ours = world2.run(cases.laws, ONE, "llama", section, 203, accumulation=2, timeout=400)
    for process, baseline in zip(ours, plain, strict=True):
        _same(process, baseline, "losses", "evaluated", "weights")
        assert process["stale"] == []


def test_changes_are_few_bytes(world2: Any) -> None:
    """At a small step most weights stay what they are."""
    whole, changes = (
        world2.run(cases.laws, ONE, "llama", section, 5, lr=1e-5)[0]
        for section in (WHOLE, LOSSLESS)
    )
    assert changes["losses"] == whole["losses"]
    assert 0 < sum(changes["sent"]) < sum(whole["sent"]) / 5


def test_on_one_host_there_is_nothing_to_gain(world2: Any) -> None:
    process = world2.run(cases.laws, [2], "llama", LOSSLESS, 2)[0]
    assert "all ranks share one node" in process["summary"]
    assert process["sent"] == [0, 0]


@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_bytes_between_hosts_are_those_of_what_is_trained(world2: Any, kind: str) -> None:
    """Each owner's part is sent once; uncompressed parts need no exchange of sizes."""
    for process in world2.run(cases.laws, ONE, kind, WHOLE, 3):
        assert process["sent"] == [process["owned"]] * 3


@pytest.mark.parametrize(
    ("slots", "kind", "section", "options"),
    [
        (ONE, "lora", LOSSLESS, {}),
        (ONE, "llama", WHOLE, FP32),
        (TWO, "llama", LOSSLESS, {"offload_optimizer": True}),
    ],
)
@pytest.mark.sampled(2)
def test_weights_that_the_user_writes_reach_every_node(
    request: pytest.FixtureRequest,
    slots: list[int],
    kind: str,
    section: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Plain DeepSpeed is the reference, for each of its ways to write weights."""
    pool = request.getfixturevalue(f"world{sum(slots)}")
    plain = pool.run(cases.written, slots, kind, {}, **options)
    ours = pool.run(cases.written, slots, kind, section, **options)
    for process, baseline in zip(ours, plain, strict=True):
        assert process == baseline
        assert process["stale"] == []
        assert process["evaluated"] != process["before"]


OUTCOME = ("evaluated", "losses", "weights")


def test_a_checkpoint_goes_into_any_run(world2: Any, world4: Any, tmp_path: Path) -> None:
    """With resident weights or without, on as many hosts or others; `zero_to_fp32` and
    `save_16bit_model` write the same."""
    plain = world2.run(cases.straight, ONE, {}, str(tmp_path / "plain"), 2, 4)
    ours = world2.run(cases.straight, ONE, LOSSLESS, str(tmp_path / "ours"), 2, 4)
    assert ours == plain
    for section, saved in ((LOSSLESS, "ours"), (LOSSLESS, "plain"), ({}, "ours")):
        for process, baseline in zip(
            world2.run(cases.resumed, ONE, section, str(tmp_path / saved), 2, 4), plain, strict=True
        ):
            _same(process, baseline, *OUTCOME)
            assert process["stale"] == []
    four = world4.run(cases.straight, TWO, LOSSLESS, str(tmp_path / "four"), 2, 4)
    for process, expected in zip(
        world4.run(cases.resumed, [1] * 4, LOSSLESS, str(tmp_path / "four"), 2, 4),
        four,
        strict=True,
    ):
        _same(process, expected, *OUTCOME)
        assert process["stale"] == []


def test_weights_loaded_into_a_running_engine_reach_every_node(world2: Any, tmp_path: Path) -> None:
    plain = world2.run(cases.loaded, ONE, {}, str(tmp_path / "plain"))
    ours = world2.run(cases.loaded, ONE, LOSSLESS, str(tmp_path / "ours"))
    assert ours == plain
    assert all(process["stale"] == [] for process in ours)


def test_a_load_that_was_refused_half_way_leaves_hosts_with_what_owners_have(
    world2: Any, tmp_path: Path
) -> None:
    plain = world2.run(cases.loaded_in_vain, ONE, {}, str(tmp_path / "plain"))
    ours = world2.run(cases.loaded_in_vain, ONE, LOSSLESS, str(tmp_path / "ours"))
    assert all(process["written"] for process in plain)
    assert ours == plain


def test_the_copy_follows_where_deepspeed_moves_weights(world2: Any, tmp_path: Path) -> None:
    plain = world2.run(cases.moved, ONE, {}, str(tmp_path / "plain"))
    lossless = world2.run(cases.moved, ONE, LOSSLESS, str(tmp_path / "lossless"))
    for process, baseline in zip(lossless, plain, strict=True):
        _same(process, baseline, "losses", "weights")
        assert process["stale"] == []
        assert process["followed"] == "elsewhere"


def test_nothing_is_left_behind(world2: Any) -> None:
    plain = world2.run(cases.laws, ONE, "llama", {}, 5)
    for process, baseline in zip(world2.run(cases.left, ONE, LOSSLESS), plain, strict=True):
        assert process["losses"] == baseline["losses"][:4]
        assert process["weights"] == baseline["weights"][3]
        assert process["stale"] == []
        assert process["ends"] == [{"tensors": 0, "group": False, "grouped": 0}] * 2
        assert not process["replaced"]


def test_a_set_up_that_fails_leaves_nothing(world2: Any) -> None:
    plain = world2.run(cases.laws, ONE, "llama", {}, 5)
    results = world2.run(cases.set_up_that_fails, ONE, LOSSLESS)
    for process, baseline in zip(results, plain, strict=True):
        assert process["message"] == "out of memory"
        assert process["grouped"] == 0
        assert process["groups"] == 0
        assert process["losses"] == baseline["losses"][:1]


def test_shards_of_another_engine_are_divided_anew(world4: Any) -> None:
    """DeepSpeed gives the group of one engine's `zero_hpz_partition_size` to all later ones."""
    assert world4.run(cases.after_another, LOSSLESS) == [[]] * 4
