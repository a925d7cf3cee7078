"""What a process keeps, against DeepSpeed's rules worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_ckpt.profile.policies import blocks_of
from ds_ckpt.profile.states import Parameters, estimate
from tests.unit.profile_models import Mixer, Stack

SIZES = Parameters(
    counts=(1_000_001, 500, 2_000_000),
    trainable=(1_000_001, 500),
    largest_block=1_500_000,
    itemsize=2,
    hidden=100,
)


def _estimate(zero: dict[str, Any], world: int = 2, **rest: Any) -> Any:
    return estimate(SIZES, {"zero_optimization": {"stage": 3, **zero}, **rest}, world)


def test_zero3_shards_round_up_and_keep_32_bits_of_weights() -> None:
    adam = {"type": "AdamW"}
    states, notes = _estimate({"reduce_bucket_size": 4000}, optimizer=adam)
    shard = 500_001 + 250
    assert states.parameters_bytes == 2 * (shard + 1_000_000)
    assert states.gradients_bytes == 2 * shard
    assert states.optimizer_bytes == (4 + 8) * shard
    assert states.reduce_bucket_bytes == 2 * 4000
    assert states.communication_bytes == 2 * (4000 + 4000)
    assert states.temporary_bytes == 4 * shard
    assert notes == ()
    assert not states.assumed


def test_weights_for_reuse_prefetch_and_small_ones_are_gathered() -> None:
    limits = {
        "stage3_max_reuse_distance": 200_000,
        "stage3_prefetch_bucket_size": 50_000,
        "stage3_param_persistence_threshold": 1000,
    }
    states, _ = _estimate(limits)
    assert states.gathered_bytes == 2 * (1_500_000 + 50_000 + 500)
    everything, _ = _estimate({})
    assert everything.gathered_bytes == 2 * 3_000_501


def test_auto_is_what_transformers_fills_in() -> None:
    states, _ = _estimate({"reduce_bucket_size": "auto"})
    assert states.reduce_bucket_bytes == 2 * 100 * 100


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [
        ({"type": "SGD"}, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 4),
        ({"type": "Lion"}, 4),
    ],
)
def test_the_optimizers_own_state(optimizer: dict[str, Any], size: int) -> None:
    states, notes = _estimate({}, world=1, optimizer=optimizer)
    assert states.optimizer_bytes == (4 + size) * 1_000_501
    assert notes == ()


def test_what_is_not_known_is_said() -> None:
    assert "AdamW is assumed" in _estimate({})[1][0]
    assert "Prodigy is not known" in _estimate({}, optimizer={"type": "Prodigy"})[1][0]


def test_offload_moves_states_to_the_host() -> None:
    plain, _ = _estimate({})
    moved, _ = _estimate(
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    )
    assert (moved.optimizer_bytes, moved.gradients_bytes, moved.parameters_bytes) == (0, 0, 0)
    kept = plain.optimizer_bytes + plain.gradients_bytes + plain.parameters_bytes
    assert moved.host_bytes == kept
    assert moved.resident_bytes == plain.resident_bytes - kept


def test_below_stage_3_weights_are_whole() -> None:
    states, _ = _estimate({"stage": 2})
    assert states.parameters_bytes == 2 * sum(SIZES.counts)
    assert states.gathered_bytes == 0
    assert states.gradients_bytes == 2 * 500_251
    whole, _ = _estimate({"stage": 0})
    assert whole.optimizer_bytes == 12 * 1_000_501


def test_without_a_file_it_is_said_that_all_is_assumed() -> None:
    states, notes = estimate(SIZES, None, 4)
    assert (states.assumed, states.zero_stage, states.optimizer) == (True, 3, "AdamW")
    assert notes == ()


def test_sizes_come_from_the_model() -> None:
    model = Stack(3)
    model.head = nn.Linear(8, 4, dtype=torch.bfloat16)
    model.head.weight.requires_grad_(False)
    blocks, modules = blocks_of(model, None)
    found = Parameters.of(model, blocks)
    block = sum(p.numel() for p in Mixer().parameters())
    assert list(modules or ()) == ["Mixer"]
    assert found.largest_block == block
    assert sum(found.counts) == 3 * block + 36
    assert sum(found.trainable) == 3 * block + 4
    assert found.itemsize == 4
