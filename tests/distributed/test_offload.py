"""Offload under ZeRO-3: every boundary but the kept one goes and comes, gradients bit-equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import cases_offload
from tests.distributed.models import equal

OFFLOAD = {"offload": True, "offload_min_bytes": 0}


@pytest.mark.parametrize(
    "kind", ["llama", "t5", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "bert"))]
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
        assert moved["late"] == moved["in_vain"] == 0
        assert kept["on_device"] == [kept["layers"]] * 2
        # the decoder of T5 uses the encoder's result to the end
        assert moved["on_device"] == [1] * 2
        assert moved["left_on_host"] == moved["left_on_device"] == 0
        assert "3 of 4 checkpointed inputs" in moved["summary"] or kind == "t5"


def test_deepspeeds_own_keys_do_what_they_say(world2: Any) -> None:
    section = {
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
    }
    plain = world2.run(cases_offload.steps, "llama", {})
    sections = {
        "activation_checkpointing": section,
        "ds_ckpt": {"activation": {"offload_min_bytes": 0}},
    }
    ours = world2.run(cases_offload.steps, "llama", sections)
    for none, all_on in zip(plain, ours, strict=True):
        assert equal(none["gradients"], all_on["gradients"])
        assert sum(all_on["out"].values()) == 6
        assert all_on["profiled"] == [f"model.layers.{i}" for i in range(4)]
    sections["ds_ckpt"]["telemetry"] = {"every_n_steps": 2}
    for dp_rank, told in enumerate(world2.run(cases_offload.steps, "llama", sections)):
        assert told["profiled"] == []  # counted anew from the table on
        table = [line.split() for line in told["lines"]]
        rows = [words for words in table if words and words[0].startswith("model.layers.")]
        assert [words[0] for words in rows] == (all_on["profiled"] if dp_rank == 0 else [])
        assert all(words[1] == words[4] == "1.0" for words in rows)
    section["number_checkpoints"] = 3
    for words in world2.run(cases_offload.refused, {"activation_checkpointing": section}):
        assert "contiguous_count: found 3" in words
        assert "makes 4 recomputes" in words
