"""Partitioned checkpoints with AutoTP and with a Megatron-style mpu, under ZeRO-3.

Bytes are exactly 1/t, gradients bit-equal to the same run without checkpointing, and every group
whose processes do not hold the same is refused in all of them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.distributed import cases_partition as cases
from tests.distributed.models import equal

HIDDEN = 2 * 12 * 32 * 4
"""Bytes of one boundary of the models here: 2 sequences of 12 tokens, width 32, fp32."""


def _sections(**own: Any) -> dict[str, Any]:
    return {
        "activation_checkpointing": {"partition_activations": True},
        "ds_ckpt": {"activation": {"partition_min_bytes": HIDDEN, **own}},
    }


def _check(world: Any, kind: str, size: int, sections: dict[str, Any], **how: Any) -> list[Any]:
    plain = world.run(cases.auto, kind, size, {}, timeout=240, **how)
    ours = world.run(cases.auto, kind, size, sections, timeout=240, **how)
    for none, split in zip(plain, ours, strict=True):
        assert split["losses"] == none["losses"]
        assert equal(split["gradients"], none["gradients"])
        assert split["alive"] == [0, 0]  # whole, none of the boundaries is anywhere
        assert split["left_over"] == (0, 0)
    return list(ours)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "neox"])
def test_autotp_with_two_processes(world2: Any, kind: str) -> None:
    for split in _check(world2, kind, 2, _sections()):
        assert split["whole"] == [3 * HIDDEN] * 2
        boundaries = [k for k in split["kept"][0] if "." in k]
        assert split["kept"] == [dict.fromkeys(boundaries, HIDDEN // 2)] * 2
        assert len(boundaries) == 3
        # the parts of 3 checkpointed inputs, and the rank-consistency check's 3 numbers
        assert split["sent"] == 3 * HIDDEN // 2 + 24
        assert split["late"] == 1
        assert re.search("inputs.* split over the tensor-parallel group", split["summary"])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_autotp_with_four_processes(world4: Any, size: int) -> None:
    for split in _check(world4, "llama", size, _sections()):
        assert split["kept"] == [{f"model.layers.{i}": HIDDEN // size for i in range(3)}] * 2
        assert split["sent"] == (size - 1) * (3 * HIDDEN // size + 24)


def test_autotp_with_offload_and_everything_split(world2: Any) -> None:
    own = {"partition_min_bytes": 0, "offload_min_bytes": 0}
    sections = _sections(**own)
    sections["activation_checkpointing"] |= {"cpu_checkpointing": True}
    for split in _check(world2, "llama", 2, sections):
        # two of three boundaries go out and come back, in each of the two steps
        assert split["out"] == 2 * 2
        assert split["kept"][0]["model.layers.1"] == HIDDEN // 2
        assert split["kept"][0]["model.layers.0"] > HIDDEN // 2  # with the rotary tables


def test_two_forwards_before_a_backward(world2: Any) -> None:
    _check(world2, "llama", 2, _sections(partition_min_bytes=0), twice=True)


def test_dropout_is_replayed_where_the_group_draws_the_same(world2: Any) -> None:
    for split in _check(world2, "neox", 2, _sections(), dropout=0.2):
        assert split["kept"][0]
    without = world2.run(cases.auto, "neox", 2, {}, timeout=240)
    assert without[0]["losses"] != split["losses"]


def test_dropout_that_differs_over_the_group_is_found(world2: Any) -> None:
    words = world2.run(cases.different_seeds, "neox", 0.2, timeout=240)
    for word in words:
        assert "other values on some of the ranks 0, 1" in word
        assert "equal seeds for dropout" in word
    assert words[0] == words[1]
    # without dropout seeds change nothing
    assert world2.run(cases.different_seeds, "neox", 0.0, timeout=240) == ["", ""]


@pytest.mark.parametrize(
    ("world", "way", "dropout"),
    [("world2", "initialize", 0.3), ("world2", "old", 0.0), ("world4", "attach", 0.3)],
)
def test_a_megatron_style_mpu(
    request: pytest.FixtureRequest, world: str, way: str, dropout: float
) -> None:
    pool = request.getfixturevalue(world)
    own = {"modules": ["ParallelBlock"], "partition_min_bytes": 2 * 5 * 16 * 4}
    none = {"ds_ckpt": {"activation": {"policy": "none"}}}
    plain = pool.run(cases.megatron, 2, none, dropout=dropout)
    ours = pool.run(cases.megatron, 2, _sections(**own), way=way, dropout=dropout)
    for one, split in zip(plain, ours, strict=True):
        assert one["loss"] == split["loss"]
        assert equal(one["gradients"], split["gradients"])
        assert split["kept"] == {f"blocks.{i}": 2 * 5 * 16 * 4 // 2 for i in range(3)}
    if pool.world == 4:  # two replicas of other data
        assert ours[0]["loss"] == ours[1]["loss"] != ours[2]["loss"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("none", ["no tensor-parallel group", "data-parallel", "autotp_size"]),
        ("one", ["one rank in the tensor-parallel group"]),
    ],
)
def test_groups_that_hold_other_tensors_are_refused(
    world2: Any, how: str, words: list[str]
) -> None:
    messages = world2.run(cases.refused, how)
    assert len(messages) == 2
    for text in messages:
        assert "$.ds_ckpt.activation.partition:" in text
        assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("world", "what"), [("world2", "data"), ("world2", "length"), ("world4", "blocks")]
)
def test_data_parallel_processes_in_disguise_are_found(
    request: pytest.FixtureRequest, world: str, what: str
) -> None:
    messages = request.getfixturevalue(world).run(cases.disguised, what, timeout=60)
    for text in messages:
        assert "checkpointed inputs cannot be split over this group" in text
        assert "on some of the ranks 0, 1" in text
