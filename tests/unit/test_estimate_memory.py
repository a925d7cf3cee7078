"""Memory of a rank, compared with DeepSpeed's rules worked out by hand."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from ds_ckpt.errors import ConfigError
from ds_ckpt.exchange.assignment import AssignedTensor, Assignment
from ds_ckpt.lab.estimate.memory_model import Parameters, estimate
from ds_ckpt.lab.estimate.profile import blocks_of
from tests.unit.estimate_models import Mixer, Stack
from tests.unit.test_config_problems import config_of

COUNTS: Any = {"counts": (1_000_001, 500, 2_000_000), "trainable": (1_000_001, 500)}
SIZES = Parameters(**COUNTS, largest_block=1_500_000, itemsize=2, hidden=100)
SHARD = 500_001 + 250
IN_16_BITS = "enabled=true {0}.bf16_master_weights_and_grads=true {0}.bf16_optimizer_states=true"
HALF = {"temporary_bytes": 2 * SHARD}
FEW_GATHERED = """z.stage3_max_reuse_distance=200000 z.stage3_prefetch_bucket_size=50000
z.stage3_param_persistence_threshold=1000"""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", {"parameters_bytes": 2 * (SHARD + 1_000_000), "gradients_bytes": 2 * SHARD}),
        ("", {"optimizer_bytes": (4 + 8) * SHARD, "gathered_bytes": 2 * 3_000_501}),
        # 16 bits in one piece, then in 32
        ("", {"temporary_bytes": (4 + 2) * SHARD}),
        # a gradient larger than the bucket is sent by itself
        (
            "z.reduce_bucket_size=4000",
            {"reduce_bucket_bytes": 8000, "communication_bytes": 8000 + 2 * 1_000_001},
        ),
        # as transformers fills it in
        ('z.reduce_bucket_size="auto"', {"reduce_bucket_bytes": 2 * 100 * 100}),
        (FEW_GATHERED, {"gathered_bytes": 2 * (1_500_000 + 50_000 + 500)}),
        ("optimizer.type=SGD", {"optimizer_bytes": 4 * SHARD}),
        ("optimizer.type=SGD optimizer.params.momentum=0.9", {"optimizer_bytes": 8 * SHARD}),
        ("optimizer.type=Lion", {"optimizer_bytes": (4 + 4) * SHARD}),
        ("data_types.grad_accum_dtype=fp32", {"gradients_bytes": 4 * SHARD}),
        *(
            (f"{name}.{IN_16_BITS}".format(name), {"optimizer_bytes": 6 * SHARD, **HALF})
            for name in ("bf16", "bfloat16")
        ),
        # below stage 3 weights are whole
        ("z.stage=2", {"parameters_bytes": 2 * 3_000_501, "gathered_bytes": 0}),
        ("z.stage=2", {"gradients_bytes": 2 * SHARD}),
        ("z.stage=0", {"optimizer_bytes": 12 * 1_000_501}),
        # and a second bucket exists only on request
        ("z.stage=2 z.reduce_bucket_size=4000", {"reduce_bucket_bytes": 8000}),
        ("z.stage=2 z.reduce_bucket_size=4000 z.overlap_comm=true", {"reduce_bucket_bytes": 16000}),
    ],
)
def test_bytes_follow_deepspeeds_rules(keys: str, expected: dict[str, int]) -> None:
    states, notes = estimate(SIZES, config_of(f"optimizer.type=AdamW {keys}"), 2)
    assert {name: getattr(states, name) for name in expected} == expected
    assert notes == ()
    kept = states.parameters_bytes + states.gradients_bytes + states.optimizer_bytes
    assert states.step_bytes == kept + states.reduce_bucket_bytes + states.temporary_bytes


def test_assumptions_are_noted() -> None:
    states, notes = estimate(SIZES, None, 4)
    assert (states.assumed, states.zero_stage, states.optimizer) == (True, 3, "AdamW")
    assert notes == ()
    for optimizer, words in ((None, "AdamW"), ({"type": "Prodigy"}, "Prodigy is not known")):
        states, notes = estimate(SIZES, {"zero_optimization": {}, "optimizer": optimizer}, 4)
        assert words in notes[0]
        assert not states.assumed


def test_offload_moves_states_to_the_host() -> None:
    def of(**zero: Any) -> Any:
        file = {"zero_optimization": {"stage": 3, **zero}, "optimizer": {"type": "AdamW"}}
        return estimate(SIZES, file, 2)[0]

    plain, cpu = of(), {"device": "cpu"}
    moved = of(offload_optimizer=cpu, offload_param=cpu)
    assert (moved.optimizer_bytes, moved.gradients_bytes, moved.parameters_bytes) == (0, 0, 0)
    kept = plain.optimizer_bytes + plain.gradients_bytes + plain.parameters_bytes
    assert moved.host_bytes == kept + 4 * SHARD  # gradients in 32 bits
    assert moved.resident_bytes == plain.resident_bytes - kept


PEER, NETWORK = 470_000_000, 512 << 20
RESIDENT = {"ds_ckpt": {"weights": {"resident": True}}}
HPZ = {"zero_hpz_partition_size": 2}


def _divided(zero: dict[str, Any], world: int, hosts: int | None, **rest: Any) -> Any:
    config = {"zero_optimization": {"stage": 3, **zero}, "optimizer": {"type": "SGD"}, **rest}
    return estimate(SIZES, config, world, hosts)


@pytest.mark.parametrize(
    ("zero", "rest", "world", "hosts", "copies", "known"),
    [
        ({}, RESIDENT, 8, 2, 2, 2),
        ({}, RESIDENT, 8, 8, 8, 8),
        ({}, RESIDENT, 8, None, 8, None),
        ({}, RESIDENT, 8, 1, 0, 1),
        ({}, RESIDENT, 1, None, 0, 1),
        (HPZ, RESIDENT, 8, None, 4, 4),
        (HPZ, {}, 8, None, 4, 4),
        (HPZ, {}, 8, 2, 4, 2),
        ({"zero_hpz_partition_size": 16}, {}, 8, 1, 1, 1),  # DeepSpeed takes the world
        ({}, {}, 8, 2, 0, 2),
    ],
)
def test_a_hosts_copy_is_whole_shards_of_weights(zero, rest, world, hosts, copies, known) -> None:
    states, notes = _divided(zero, world, hosts, **rest)
    shards = 125_001 + 63 + 250_000  # of 8, frozen ones included
    assert states.host_copy_bytes == 2 * copies * shards
    assert states.hosts == known
    assert ("hosts: not known (--hosts)" in "".join(notes)) == (known is None)
    plain, _ = _divided({}, world, None)
    more = states.host_copy_bytes + states.nccl_bytes
    assert states.resident_bytes == plain.resident_bytes + more
    # a node of several ranks: replicas of two owners, one of them on another node
    peers = PEER if known in (2, 4) else 0
    assert states.nccl_bytes == (NETWORK + peers if rest and copies else 0)
    assert states.parameters_bytes == plain.parameters_bytes


def test_hpz_beside_offloaded_weights_is_in_host_memory() -> None:
    offload = {"offload_param": {"device": "cpu"}}
    states, _ = _divided({**HPZ, **offload}, 4, 2)
    plain, _ = _divided(offload, 4, 2)
    assert states.host_copy_bytes == 0
    assert states.host_bytes == plain.host_bytes + 2 * 2 * (250_001 + 125 + 500_000)


@pytest.mark.parametrize(
    ("zero", "rest", "hosts"),
    [({}, {}, 3), ({"zero_hpz_partition_size": 3}, {}, None), (HPZ, RESIDENT, 2)],
)
def test_ranks_that_cannot_be_divided_are_refused(zero: Any, rest: Any, hosts: int | None) -> None:
    with pytest.raises(ConfigError, match="8 ranks are divided among nodes"):
        _divided(zero, 8, hosts, **rest)


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
AT_BOUNDARY = {"method": "dense", "exchange": {"when": "accumulation_boundary"}}


@pytest.mark.parametrize(
    ("section", "steps", "hosts", "entry_bytes", "on_host"),
    [
        (QUANTIZED, 1, None, 8, False),
        (QUANTIZED, 1, 2, 4, False),  # the two ranks of a host divide them
        ({**QUANTIZED, "exchange": {"levels": 1}}, 1, 2, 8, False),
        ({**QUANTIZED, "error_feedback": {"dtype": "bf16", "device": "cpu"}}, 1, None, 4, True),
        ({**QUANTIZED, "error_feedback": {"enabled": False}}, 1, None, 0, False),
        ({"method": "none"}, 8, None, 0, False),
        ({"method": "dense"}, 8, None, 0, False),
        (AT_BOUNDARY, 2, None, 4, False),  # earlier micro-steps of all wait in residuals
    ],
)
def test_residuals_are_of_compressed_weights(section, steps, hosts, entry_bytes, on_host) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(10, 10))
    file: dict[str, Any] = {"gradient_accumulation_steps": steps, "zero_optimization": {"stage": 3}}
    file |= {"ds_ckpt": {"compression": section}}
    states, _ = estimate(Parameters.of(model, []), file, 4, hosts)
    plain, _ = estimate(Parameters.of(model, []), {**file, "ds_ckpt": {}}, 4, hosts)
    found = (1_000_000 + 1110 * (section is AT_BOUNDARY)) * entry_bytes
    assert states.residual_bytes == (0 if on_host else found)
    assert states.host_bytes == (found if on_host else 0)
    more = states.residual_bytes + states.nccl_bytes
    more += states.communication_bytes - plain.communication_bytes
    assert states.resident_bytes == plain.resident_bytes + more


@pytest.mark.parametrize(
    ("local", "in_place", "expected"),
    [
        # 8,000 entries in 16 bits, of which 6,000 are exchanged at a time: packets of a quarter of
        # their bytes both ways, and this rank's part and its sum
        (1, True, 0.75 * (2 * 4_000 + 8 * 8_000 / 2)),
        (1, False, 0.75 * (2 * 4_000 + 8 * 8_000 / 2 + 4 * 8_000)),
        # two levels: half goes to the other rank of the node, each has half of the sum
        (2, True, 0.75 * (2 * 8_000 + 2 * 4_000 / 2 + 4 * 8_000 / 2 + 8 * 8_000 / 4)),
    ],
)
def test_a_bucket_takes_packets_and_sums(local: int, in_place: bool, expected: float) -> None:
    one = AssignedTensor("a", (1000,), "a quarter", 2_000, 500)
    assignment = Assignment((one,) * 8)
    assert assignment.buffer_bytes(6_000, 2, local, in_place=in_place) == expected
    assert assignment.buffer_bytes(10**9, 2, local, in_place=in_place) == expected / 0.75


@pytest.mark.parametrize(
    ("section", "world", "hosts", "expected"),
    [
        (QUANTIZED, 8, 1, 7 * PEER),
        (QUANTIZED, 32, 4, 7 * PEER + NETWORK),  # two groups: of the node, between nodes
        ({**QUANTIZED, "exchange": {"levels": 1}}, 32, 4, 7 * PEER + NETWORK),
        (QUANTIZED, 4, None, NETWORK),
        (QUANTIZED, 1, 1, 0),
        ({"method": "none"}, 32, 4, 0),
    ],
)
def test_nccls_buffers_are_of_peers_on_the_node_and_of_groups_over_nodes(
    section: Any, world: int, hosts: int | None, expected: int
) -> None:
    file = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}}
    states, _ = estimate(SIZES, file, world, hosts)
    assert states.nccl_bytes == expected


@pytest.mark.parametrize(
    ("method", "feedback", "gib", "expected"),
    [
        ("quantize", {}, 4, 8.0),
        ("quantize", {}, 8, 2.0625),
        ("quantize", {"dtype": "fp32"}, 8, 8.0),
        ("quantize", {"enabled": False}, 8, 4.0),
        ("dense", {}, 8, 4.0),  # sums of micro-steps: nothing would send what int8 leaves out
    ],
)
def test_residuals_of_many_entries_are_int8_by_default(method, feedback, gib, expected) -> None:
    """2^29 entries a rank, or 2^30: an fp32 residual and its copy for rollback would take 8 GiB."""
    section = {"method": method, "exchange": {"when": "accumulation_boundary"}}
    section |= {"error_feedback": feedback} if feedback else {}
    file = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}}
    file["gradient_accumulation_steps"] = 2
    shape = torch.Size([gib << 13, 1 << 14])
    parameters = dataclasses.replace(SIZES, shapes=[("w", shape)])
    states, _ = estimate(parameters, file, 2, None)
    assert states.residual_bytes == expected * shape.numel()
