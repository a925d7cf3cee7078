"""Every way in, on real engines, with the HF Trainer and accelerate among them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import cases_session as cases
from tests.distributed.models import equal, topk_section

SECTION: dict[str, Any] = {"activation_checkpointing": {"partition_activations": False}}
OURS = {"ds_ckpt": {"activation": {"policy": "block"}}}
BOTH = {"ds_ckpt": {"activation": {"policy": "block"}, **topk_section(topk={"density": 0.05})}}


@pytest.mark.parametrize("sections", [SECTION, OURS], ids=["deepspeed-section", "our-section"])
def test_activation_bytes_fall_and_gradients_stay(world2: Any, sections: dict[str, Any]) -> None:
    plain = world2.run(cases.held_bytes, "llama", {})
    baseline = world2.run(cases.held_bytes, "llama", sections, False)
    ours = world2.run(cases.held_bytes, "llama", sections)
    for without, deepspeed_alone, with_us in zip(plain, baseline, ours, strict=True):
        assert deepspeed_alone["held"] == without["held"]
        assert with_us["held"] < without["held"] / 2
        assert equal(without["gradients"], with_us["gradients"])
        assert with_us["loss"] == without["loss"]


def test_all_ways_in_end_in_the_same_session(world2: Any) -> None:
    ways = ["initialize", "attach", "install", "file"]
    results = [world2.run(cases.ways_in, way, BOTH)[0] for way in ways]
    assert results[0]["session"] == "Session"
    assert len(results[0]["blocks"]) == 3
    assert results[0]["method"] == "topk"
    assert all(r == results[0] for r in results)
    assert "3 blocks (LlamaDecoderLayer)" in results[0]["summary"]
    assert "Top-K" in results[0]["summary"]


@pytest.mark.parametrize("way", ["initialize", "install"])
def test_without_our_sections_it_is_plain_deepspeed(world2: Any, way: str) -> None:
    baseline = world2.run(cases.ways_in, "stock", {})
    for plain, result in zip(baseline, world2.run(cases.ways_in, way, {}), strict=True):
        assert result["session"] is None
        assert result["losses"] == plain["losses"]


def test_modules_that_match_nothing_are_refused_with_the_candidates(world2: Any) -> None:
    wrong = {"ds_ckpt": {"activation": {"policy": "block", "modules": ["PlainBlok"]}}}
    for result in world2.run(cases.refused, wrong, "plain"):
        assert "PlainBlok" in result["message"]
        assert "PlainBlock" in result["message"]
        assert result["untouched"]
    for result in world2.run(cases.refused, OURS, "plain"):
        assert '"modules": ["PlainBlock"]' in result["message"]


def test_a_wrong_configuration_is_refused_before_anything_is_built(world2: Any) -> None:
    wrong = {"ds_ckpt": {"compression": {"method": "topkk"}}}
    for result in world2.run(cases.refused, wrong):
        assert "$.ds_ckpt.compression.method" in result["message"]
        assert result["untouched"]


@pytest.mark.parametrize("part", ["_gather", "_gradient", "_blocks"])
def test_an_error_of_one_part_leaves_no_other_part_attached(world2: Any, part: str) -> None:
    for result in world2.run(cases.part_that_raises, part):
        assert result["message"] == "the other process has gone"
        assert result["restored"]
        assert not result["left"]
        assert not result["listening"]
        assert not result["session"]


def test_a_rank_without_the_plugin_is_named_before_anything_waits(world2: Any) -> None:
    first, second = world2.run(cases.unlike_ranks, "stock")
    assert "no answer from ds_ckpt within 0.5 s on rank 1" in first["message"]
    assert not second["message"]
    assert first["seconds"] < 20


@pytest.mark.parametrize(
    ("rank_1", "other"),
    [
        ("none", "plain DeepSpeed"),
        ("other", "checkpointing mlp"),
        ("wire", "wire format 99, checkpointing block"),
    ],
)
def test_ranks_with_other_settings_are_named_on_all(world2: Any, rank_1: str, other: str) -> None:
    for result in world2.run(cases.unlike_ranks, rank_1):
        assert "checkpointing block on rank 0" in result["message"]
        assert f"{other} on rank 1" in result["message"]


def test_a_section_without_effect_is_said_by_one_rank(world2: Any) -> None:
    first, second = world2.run(cases.idle_section)
    assert first == ["ds_ckpt: the ds_ckpt section switches nothing on: plain DeepSpeed"]
    assert second == []


def test_an_engine_for_evaluation_alone_is_left_to_deepspeed(world2: Any) -> None:
    results = world2.run(cases.inference, "install")
    for result in results:
        assert result["session"] is None
        assert result["loss"] > 0
    line = "ds_ckpt: this engine has no optimizer (inference): plain DeepSpeed"
    assert [line in result["said"] for result in results] == [True, False]
    for result in world2.run(cases.inference, "attach"):
        assert "engine.optimizer" in result["message"]
        assert result["loss"] > 0
