"""What a process keeps, against DeepSpeed's rules worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_ckpt.errors import ConfigError
from ds_ckpt.lab.estimate.memory import Parameters, estimate
from ds_ckpt.lab.estimate.profile import blocks_of
from tests.unit.estimate_models import Mixer, Stack

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
    assert states.temporary_bytes == (4 + 2) * shard  # 16 bits in one piece, then in 32
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
    gradients_32_bits = plain.optimizer_bytes // 3  # beside AdamW's 12 bytes, for good
    assert moved.host_bytes == kept + gradients_32_bits
    assert moved.resident_bytes == plain.resident_bytes - kept


def test_what_types_change() -> None:
    plain, _ = _estimate({})
    shard = plain.optimizer_bytes // 12
    wide, _ = _estimate({}, data_types={"grad_accum_dtype": "fp32"})
    assert wide.gradients_bytes == 2 * plain.gradients_bytes
    for key in ("bf16", "bfloat16"):
        section = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        narrow, _ = _estimate({}, **{key: {"enabled": True, **section}})
        assert narrow.optimizer_bytes == 6 * shard
        assert narrow.temporary_bytes == 2 * shard


def test_the_optimizers_step_may_be_the_peak() -> None:
    states, _ = _estimate({})
    shard = states.optimizer_bytes // 12
    assert states.temporary_bytes == (4 + 2) * shard
    kept = states.parameters_bytes + states.gradients_bytes + states.optimizer_bytes
    assert states.step_bytes == kept + states.reduce_bucket_bytes + states.temporary_bytes


RESIDENT = {"ds_ckpt": {"weights": {"resident": True}}}
HPZ = {"zero_hpz_partition_size": 2}


def _divided(zero: dict[str, Any], world: int, hosts: int | None, **rest: Any) -> Any:
    config = {"zero_optimization": {"stage": 3, **zero}, "optimizer": {"type": "SGD"}, **rest}
    return estimate(SIZES, config, world, hosts)


@pytest.mark.parametrize(
    ("zero", "rest", "world", "hosts", "copies", "known", "words"),
    [
        ({}, RESIDENT, 8, 2, 2, 2, ""),
        ({}, RESIDENT, 8, 8, 8, 8, ""),
        ({}, RESIDENT, 8, None, 8, None, "hosts: not known (--hosts)"),
        ({}, RESIDENT, 8, 1, 0, 1, "all ranks share one host"),
        ({}, RESIDENT, 1, None, 0, 1, "all ranks share one host"),
        (HPZ, RESIDENT, 8, None, 4, 4, "hosts: 4, as zero_hpz_partition_size is 2"),
        (HPZ, {}, 8, None, 4, 4, "hosts: 4, as zero_hpz_partition_size is 2"),
        (HPZ, {}, 8, 2, 4, 2, ""),
        ({"zero_hpz_partition_size": 16}, {}, 8, 1, 1, 1, ""),  # DeepSpeed takes the world
        ({}, {}, 8, 2, 0, 2, ""),
    ],
)
def test_a_hosts_copy_is_whole_shards_of_all_weights(
    zero: Any, rest: Any, world: int, hosts: int | None, copies: int, known: Any, words: str
) -> None:
    states, notes = _divided(zero, world, hosts, **rest)
    shards = 125_001 + 63 + 250_000  # of 8, frozen ones included
    assert states.host_copy_bytes == 2 * copies * shards
    assert states.hosts == known
    assert words in "".join(notes)
    assert len(notes) == bool(words)
    plain, _ = _divided({}, world, None)
    assert states.resident_bytes == plain.resident_bytes + states.host_copy_bytes
    assert states.parameters_bytes == plain.parameters_bytes


def test_hpz_beside_offloaded_weights_is_in_host_memory() -> None:
    offload = {"offload_param": {"device": "cpu"}}
    states, _ = _divided({**HPZ, **offload}, 4, 2)
    plain, _ = _divided(offload, 4, 2)
    assert states.host_copy_bytes == 0
    assert states.host_bytes == plain.host_bytes + 2 * 2 * (250_001 + 125 + 500_000)


@pytest.mark.parametrize(
    ("zero", "rest", "hosts", "where", "words"),
    [
        ({}, {}, 3, "--hosts", "8 ranks are divided"),
        ({"zero_hpz_partition_size": 3}, {}, None, "zero_hpz", "8 ranks are divided"),
        (HPZ, RESIDENT, 2, "zero_hpz", "a host's ranks"),
    ],
)
def test_processes_that_cannot_be_divided_so(
    zero: Any, rest: Any, hosts: int | None, where: str, words: str
) -> None:
    with pytest.raises(ConfigError, match="the ranks cannot be divided so") as caught:
        _divided(zero, 8, hosts, **rest)
    (problem,) = caught.value.problems
    assert where in problem.where
    assert words in problem.why


def test_a_second_bucket_is_there_where_it_is_asked_for() -> None:
    """DeepSpeed's `overlap_comm` is off below stage 3 where nothing is said."""

    def bucket(**said: Any) -> int:
        found = _estimate({"stage": 2, "reduce_bucket_size": 4000, **said})[0].reduce_bucket_bytes
        return int(found) // (2 * 4000)

    assert (bucket(), bucket(overlap_comm=False), bucket(overlap_comm=True)) == (1, 1, 2)


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


QUANTIZED: dict[str, Any] = {"method": "quantize"}


@pytest.mark.parametrize(
    ("section", "steps", "hosts", "entry_bytes", "on_host"),
    [
        (QUANTIZED, 1, None, 8, False),
        (QUANTIZED, 1, 2, 4, False),  # the two processes of a host divide them
        ({**QUANTIZED, "exchange": {"levels": 1}}, 1, 2, 8, False),
        ({**QUANTIZED, "error_feedback": {"dtype": "bf16", "device": "cpu"}}, 1, None, 4, True),
        ({**QUANTIZED, "error_feedback": {"enabled": False}}, 1, None, 0, False),
        ({"method": "none"}, 8, None, 0, False),
        ({"method": "dense"}, 8, None, 0, False),
    ],
)
def test_residuals_are_of_what_is_compressed(
    section: Any, steps: int, hosts: int | None, entry_bytes: int, on_host: bool
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(10, 10))
    file = {
        "zero_optimization": {"stage": 3},
        "gradient_accumulation_steps": steps,
        "ds_ckpt": {"compression": section},
    }
    states, _ = estimate(Parameters.of(model, []), file, 4, hosts)
    plain, _ = estimate(Parameters.of(model, []), {**file, "ds_ckpt": {}}, 4, hosts)
    found = 1_000_000 * entry_bytes
    assert states.residual_bytes == (0 if on_host else found)
    assert states.host_bytes == (found if on_host else 0)
    assert states.resident_bytes == plain.resident_bytes + states.residual_bytes


def test_earlier_micro_steps_of_all_wait_in_residuals() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(10, 10))
    section = {"method": "dense", "exchange": {"when": "accumulation_boundary"}}
    file = {"gradient_accumulation_steps": 2, "ds_ckpt": {"compression": section}}
    states, _ = estimate(Parameters.of(model, []), file, 4)
    assert states.residual_bytes == 4 * sum(p.numel() for p in model.parameters())
