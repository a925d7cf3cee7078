"""Offload under ZeRO-3: every boundary but the kept one goes and comes, gradients bit-equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import cases_offload
from tests.distributed.models import equal

OFFLOAD = {"offload": True, "offload_min_bytes": 0}


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("t5", "gpt2", "bert"))]
)
def test_every_boundary_but_the_kept_one_leaves_and_returns(world2: Any, kind: str) -> None:
    plain = world2.run(cases_offload.steps, kind, {})
    blocks = world2.run(cases_offload.steps, kind, {"ds_ckpt": {"activation": {"policy": "block"}}})
    ours = world2.run(
        cases_offload.steps, kind, {"ds_ckpt": {"activation": {"policy": "block", **OFFLOAD}}}
    )
    for none, kept, moved in zip(plain, blocks, ours, strict=True):
        # T5's position bias adds its gradients up in another order under any checkpointing
        reference = kept if kind == "t5" else none
        assert moved["losses"] == reference["losses"]
        assert equal(moved["gradients"], reference["gradients"])
        # DeepSpeed's own offload moves none of them under ZeRO-3
        assert sum(moved["out"].values()) >= 2 * (moved["layers"] - 1)
        assert len(moved["out"]) >= moved["layers"] - 1
        assert moved["out"] == moved["back"]
        assert moved["late"] == 0
        assert kept["on_device"] == [kept["layers"]] * 2
        # the decoder of T5 uses the encoder's result to the end
        assert moved["on_device"] == [1] * 2
        assert moved["left_on_host"] == moved["left_on_device"] == 0
        assert "inputs in host memory, 1 ahead" in moved["summary"]


@pytest.mark.parametrize("kind", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_all_that_blocks_save_leaves_but_no_weight(world2: Any, kind: str) -> None:
    plain = world2.run(cases_offload.steps, kind, {})
    sections = {"ds_ckpt": {"activation": {"policy": "offload", "offload_min_bytes": 0}}}
    for none, ours in zip(plain, world2.run(cases_offload.steps, kind, sections), strict=True):
        assert ours["losses"] == none["losses"]
        assert equal(ours["gradients"], none["gradients"])
        assert ours["bytes"] == none["saved"], "activations, each once, and nothing else"
        assert sum(ours["out"].values()) - 2 * 2 == sum(ours["back"].values()), "shared: cos, sin"
        assert ours["late"] == ours["left_on_host"] == ours["left_on_device"] == 0
        assert ours["gathers"] <= 2 * 2, "of a weight, in two steps"
        assert "saved tensors in host memory" in ours["summary"]


def test_nothing_large_enough_is_said_once(world2: Any) -> None:
    sections = {"ds_ckpt": {"activation": {"policy": "block", "offload": True}}}
    first, _ = world2.run(cases_offload.steps, "llama", sections)
    assert "inputs from 64.0 KiB on in host memory, 1 ahead" in first["summary"]
    (line,) = [line for line in first["lines"] if "nothing went to host memory" in line]
    assert "64.0 KiB" in line


def test_deepspeeds_own_key_does_what_it_says(world2: Any) -> None:
    plain = world2.run(cases_offload.steps, "llama", {})
    sections = {
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4},
        "ds_ckpt": {"activation": {"offload_min_bytes": 0}},
    }
    for none, ours in zip(plain, world2.run(cases_offload.steps, "llama", sections), strict=True):
        assert equal(none["gradients"], ours["gradients"])
        assert sum(ours["out"].values()) == 6
