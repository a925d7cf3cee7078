"""Memory that a rank keeps beside activations: weights, gradients, optimizer, buffers.

The sizes follow from parameters and settings, as in DeepSpeed 0.19 (its `runtime/zero/stage3.py`).
A rank keeps shards of `ceil(numel / world)`, and 32-bit master weights beside the optimizer's own
state. It also keeps one reduce bucket in full, and gathered weights as in `zero3.resident`. NCCL's
buffers are counted for the plugin's groups, as others have reported them. Fragmentation is not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_ckpt.activation import Block
from ds_ckpt.config import parse
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.config.paths import BF16, is_auto, lookup
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.exchange.method_rules import ExchangeSettings, embeddings_of
from ds_ckpt.zero3.resident import host_copy_bytes, transient_bytes

_STATE_BYTES = {**dict.fromkeys(("adam", "adamw", "fusedadam", "lamb"), 8), "sgd": 0}
_STATE_BYTES |= dict.fromkeys(("adagrad", "lion", "muon"), 4)
"""32-bit bytes an element of the optimizer's own state; SGD's momentum is added."""
_NCCL_PEER_BYTES = 470_000_000
"""Bytes per peer on the node: 3.28 GB for an all-to-all with 7 of them (H100, NCCL issue 1685)."""
_NCCL_NETWORK_BYTES = 512 << 20
"""Bytes per group on several nodes, whatever their number (NCCL issue 2363)."""
ZERO_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed's own, in elements."""


@dataclass(frozen=True)
class Parameters:
    """Sizes of a model's parameters, in elements; shapes of the trainable ones, by name."""

    counts: tuple[int, ...]
    trainable: tuple[int, ...]
    largest_block: int
    itemsize: int
    hidden: int | None = None
    shapes: tuple[tuple[str, torch.Size], ...] = ()
    embeddings: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[Block]) -> Parameters:
        """Read a model that is not partitioned."""
        parameters = list(model.parameters())
        in_blocks = {id(p) for b in blocks for p in b.module.parameters()}
        gathered = [sum(p.numel() for p in b.module.parameters()) for b in blocks]
        gathered += [p.numel() for p in parameters if id(p) not in in_blocks]
        return cls(
            counts=tuple(p.numel() for p in parameters),
            trainable=tuple(p.numel() for p in parameters if p.requires_grad),
            largest_block=max(gathered, default=0),
            itemsize=max((p.element_size() for p in parameters), default=4),
            hidden=getattr(getattr(model, "config", None), "hidden_size", None),
            shapes=tuple((n, p.shape) for n, p in model.named_parameters() if p.requires_grad),
            embeddings=embeddings_of(model),
        )


@dataclass(frozen=True)
class States:
    """Bytes that one rank keeps beside activations.

    Attributes:
        communication_bytes: the reduce bucket, and what its reduction copies and sends.
        trainable_bytes: gradients of one rank before they are sharded.
        temporary_bytes: 32-bit gradients in the optimizer's step, and the piece they are cast from.
        host_bytes: in host memory; not part of the other fields.
        host_copy_bytes: this rank's part of its node's copy of the weights.
    """

    world: int
    zero_stage: int
    assumed: bool
    parameters_count: int
    parameters_bytes: int
    gathered_bytes: int
    gradients_bytes: int
    optimizer: str
    optimizer_bytes: int
    communication_bytes: int
    reduce_bucket_bytes: int
    trainable_bytes: int
    temporary_bytes: int
    host_bytes: int
    hosts: int | None = None
    host_copy_bytes: int = 0
    residual_bytes: int = 0
    nccl_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes on the accelerator during forward and backward."""
        kept = self.parameters_bytes + self.host_copy_bytes + self.gathered_bytes
        kept += self.gradients_bytes + self.optimizer_bytes + self.residual_bytes
        return kept + self.communication_bytes + self.nccl_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes on the accelerator in the optimizer's step, without gathered weights."""
        copied = self.communication_bytes - self.reduce_bucket_bytes
        return self.resident_bytes - self.gathered_bytes - copied + self.temporary_bytes


def estimate(
    parameters: Parameters, config: Mapping[str, Any] | None, world: int, hosts: int | None = None
) -> tuple[States, tuple[str, ...]]:
    """Return the states, and the assumptions where the configuration (DeepSpeed's JSON) is silent.

    Without one ZeRO stage 3 and AdamW are assumed. Raises ConfigError if the ranks cannot be
    divided.
    """
    notes: list[str] = []
    zero = lookup(config, ("zero_optimization",)) or {}
    stage = 3 if config is None else _whole(zero.get("stage"), 0)
    item = parameters.itemsize
    total, trainable = sum(parameters.counts), sum(parameters.trainable)
    shard = sum(math.ceil(n / world) for n in parameters.trainable)
    full_shard = sum(math.ceil(n / world) for n in parameters.counts)
    bucket, prefetch, threshold, reuse, group = (
        _elements(key, zero, parameters.hidden) for key in ZERO_DEFAULTS
    )
    released = [n for n in parameters.counts if n > threshold]
    sizes = (released, parameters.largest_block, trainable, item, reuse, prefetch)
    # a gradient larger than the bucket is sent by itself
    gathered, sent = transient_bytes(*sizes, max(bucket, *parameters.trainable, 0)).values()
    if stage == 3:
        gathered += item * (total - sum(released))
        kept_bytes = item * full_shard
    else:
        gathered, kept_bytes, group = 0, item * total, trainable

    sharded = shard if stage >= 1 else trainable
    name, state_bytes = _optimizer(config, notes)
    master_bytes = 2 if _halved(config, "master_weights_and_grads") else 4
    if _halved(config, "optimizer_states"):
        state_bytes //= 2
    optimizer_bytes = sharded * (master_bytes + state_bytes)
    wide = lookup(config, ("data_types", "grad_accum_dtype")) in ("fp32", "float32", "float")
    gradients_bytes = (4 if wide else item) * (shard if stage >= 2 else trainable)
    bucket_bytes = communication = 0
    if world > 1 or stage == 3:
        buffers = 2 if stage < 3 and zero.get("overlap_comm") is True else 1
        bucket_bytes = item * bucket * buffers * (zero.get("contiguous_gradients") is not False)
        communication = bucket_bytes + sent
    joined = item if item < master_bytes else 0  # gradients in one piece, then in 32 bits
    step_bytes = (master_bytes + joined) * min(sharded, group)

    hosts, per_host = _hosts(config if stage == 3 else None, world, hosts, notes)
    copy_bytes = host_copy_bytes(parameters.counts, world, per_host, item) if per_host else 0
    residual_bytes, on_host, buffers, nccl = _exchange(parameters, config, (world, hosts, bucket))
    if copy_bytes and lookup(config, ("ds_ckpt", "weights", "resident")):
        # a rank has a replica of one owner per node; some of these are on its own node
        nccl += _nccl_bytes(world // per_host, min(world // per_host, per_host))

    host = residual_bytes * on_host
    if lookup(zero, ("offload_optimizer", "device")) in ("cpu", "nvme"):
        # with gradients in 32 bits beside those that are sent
        host += gradients_bytes + optimizer_bytes + master_bytes * sharded
        optimizer_bytes = gradients_bytes = step_bytes = 0
    if stage == 3 and lookup(zero, ("offload_param", "device")) in ("cpu", "nvme"):
        host += kept_bytes + copy_bytes
        kept_bytes = copy_bytes = 0
    states = States(
        world=world,
        zero_stage=stage,
        assumed=config is None,
        parameters_count=total,
        parameters_bytes=kept_bytes,
        gathered_bytes=gathered,
        gradients_bytes=gradients_bytes,
        optimizer=name,
        optimizer_bytes=optimizer_bytes,
        communication_bytes=communication + buffers,
        reduce_bucket_bytes=bucket_bytes,
        trainable_bytes=item * trainable,
        temporary_bytes=step_bytes,
        host_bytes=host,
        hosts=hosts,
        host_copy_bytes=copy_bytes,
        residual_bytes=residual_bytes * (not on_host),
        nccl_bytes=nccl,
    )
    return states, tuple(notes)


def _hosts(
    config: Mapping[str, Any] | None, world: int, hosts: int | None, notes: list[str]
) -> tuple[int | None, int]:
    """Nodes, if known, and the ranks that divide a node's copy of the weights; 0: there is none."""
    resident = lookup(config, ("ds_ckpt", "weights", "resident")) in (True, "auto")
    hpz = _whole(lookup(config, ("zero_optimization", "zero_hpz_partition_size")), 1)
    hpz = max(1, min(hpz, world))
    if hosts is None and (world == 1 or hpz > 1):
        hosts = world // hpz
    per_host = world // hosts if hosts else 1
    if world % (hosts or 1) or world % hpz or (resident and hpz not in (1, per_host)):
        why = f"{world} ranks are divided among nodes, and weights among a node's ranks"
        found = f"{hosts} nodes, zero_hpz_partition_size {hpz}"
        problem = Problem("--hosts", found, why, "write divisors of --world that agree")
        raise ConfigError(problem, headline="the ranks cannot be divided so")
    if resident and hosts is None:
        notes.append("hosts: not known (--hosts); one rank per node is counted, which is the most")
    if resident and hosts != 1:
        return hosts, per_host
    return hosts, hpz if hpz > 1 else 0


class ExchangeMemory(NamedTuple):
    """Bytes that one rank takes to exchange gradients; `on_host`: residuals in host memory."""

    residuals: int = 0
    on_host: bool = False
    buffers: int = 0
    nccl: int = 0


def _exchange(
    parameters: Parameters, config: Mapping[str, Any] | None, sizes: tuple[int, int | None, int]
) -> ExchangeMemory:
    section = lookup(config, ("ds_ckpt", "compression"))
    if not section or section.get("method") in (None, "none") or sizes[0] == 1:
        return ExchangeMemory()
    file = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}}
    settings = exchange_settings(parse(file).compression)
    accumulation = _whole(lookup(config, ("gradient_accumulation_steps",)), 1)
    assignment = assigned(parameters, settings, *sizes[:2])
    return exchange_memory(assignment, settings, accumulation, *sizes)


def dividing_ranks(settings: ExchangeSettings, world: int, hosts: int | None) -> int:
    """Return the ranks of a node that divide gradients and residuals; 1 with one level."""
    return world // hosts if settings.levels != 1 and hosts and 1 < hosts < world else 1


def assigned(
    parameters: Parameters, settings: ExchangeSettings, world: int, hosts: int | None
) -> Assignment:
    """Assign compressors to the trainable parameters."""
    local = dividing_ranks(settings, world, hosts)
    shapes = ((name, shape, parameters.itemsize) for name, shape in parameters.shapes)
    choose = settings.choose(parameters.embeddings, local)
    return Assignment.of(choose, shapes, world // local, local)


def exchange_memory(
    assignment: Assignment,
    settings: ExchangeSettings,
    accumulation: int,
    world: int,
    hosts: int | None,
    bucket: int,
) -> ExchangeMemory:
    """Return the bytes of residuals and their rollback copy, of exchanging a bucket, and NCCL's."""
    defers = settings.defers_exchange(accumulation)
    local, nodes = dividing_ranks(settings, world, hosts), hosts or world
    kept = assignment.residual_numels(defers=defers)
    elements = sum(kept)
    if local > 1:
        elements = sum(math.ceil(n / world) * (world // local) for n in kept)
    feedback = settings.residuals(0, defers=defers, entries=sum(kept) // local)
    groups = [(nodes, 1), (1, local)] if local > 1 else [(nodes, world // nodes)]
    buffers = assignment.buffer_bytes(
        *(bucket, world // local, local), in_place=feedback is not None and feedback.adds_in_place
    )
    sent = ExchangeMemory(buffers=buffers, nccl=sum(starmap(_nccl_bytes, groups)))
    if feedback is None:
        return sent
    residuals = round(feedback.entry_bytes * elements)
    return sent._replace(residuals=residuals, on_host=feedback.on_host)


def _nccl_bytes(hosts: int, local: int) -> int:
    """Return what NCCL takes for an all-to-all of `local` ranks on each of `hosts` nodes."""
    return _NCCL_PEER_BYTES * (local - 1) + _NCCL_NETWORK_BYTES * (hosts > 1)


def _elements(key: str, zero: Mapping[str, Any], hidden: int | None) -> int:
    """A setting that counts elements, by DeepSpeed's key; "auto" as transformers fills it in."""
    value = zero.get(key, zero.get(key.removeprefix("stage3_")))
    if is_auto(value) and hidden is not None:
        filled_in = {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
        return filled_in.get(key, ZERO_DEFAULTS[key])
    return _whole(value, ZERO_DEFAULTS[key])


def _whole(value: Any, default: int) -> int:
    return int(value) if type(value) in (int, float) else default


def _optimizer(config: Mapping[str, Any] | None, notes: list[str]) -> tuple[str, int]:
    kind = lookup(config, ("optimizer", "type"))
    name = kind if isinstance(kind, str) and not is_auto(kind) else "AdamW"
    if config is not None and (name != kind or name.lower() not in _STATE_BYTES):
        notes.append(f"optimizer: the state of {kind or 'none'} is not known; counted as AdamW's")
    momentum = name.lower() == "sgd" and lookup(config, ("optimizer", "params", "momentum"))
    return name, 4 if momentum else _STATE_BYTES.get(name.lower(), 8)


def _halved(config: Mapping[str, Any] | None, what: str) -> bool:
    """Return whether this is kept in 16 bits instead of 32."""
    places = [("fp16", f"fp16_{what}"), *((key, f"bf16_{what}") for key in BF16)]
    return any(lookup(config, place) is True for place in places)
