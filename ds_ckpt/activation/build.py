"""From settings to the parts that keep a model's boundaries, and words on what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_ckpt.activation.boundaries import Boundaries
from ds_ckpt.activation.handshake import Group
from ds_ckpt.activation.offload import BoundaryStore, Pool
from ds_ckpt.activation.partition import Partition
from ds_ckpt.activation.policies import Unit
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.memory import HostPool
from ds_ckpt.memory.arena import Arena, HostArena, device_arena
from ds_ckpt.memory.copies import copies_for
from ds_ckpt.telemetry.blocks import BlockProfile


@dataclass(frozen=True)
class Keeping:
    """Where boundaries are kept. The keys of `ds_ckpt.activation`."""

    offload: bool = False
    offload_prefetch: int = 1
    offload_min_bytes: int = 65536
    partition: bool = False
    partition_min_bytes: int = 65536
    contiguous: bool = False
    contiguous_count: int | None = None
    synchronize: bool = False
    profile: bool = False

    @property
    def active(self) -> bool:
        """Whether anything differs from leaving boundaries to autograd."""
        return self.stores or self.synchronize or self.profile

    @property
    def stores(self) -> bool:
        """Whether boundaries are kept in another way than autograd's."""
        return self.offload or self.partition or self.contiguous


def build_boundaries(
    keeping: Keeping,
    model: nn.Module,
    units: Sequence[Unit],
    device: torch.device,
    group: Group | None = None,
) -> Boundaries | None:
    """What stands around the checkpointed calls; None where autograd keeps all by itself.

    Args:
        group: the processes over which boundaries are split, where they are.

    Raises:
        ConfigError: the buffer is to have room for fewer boundaries than the model has.
    """
    if not keeping.active:
        return None
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    copies = copies_for(device)
    store = partition = None
    if keeping.stores:
        count = _checked_count(keeping.contiguous_count, len(units))
        pool, arena = _memory(keeping, count, device)
        store = BoundaryStore(
            device,
            copies,
            pool=pool,
            arena=arena,
            min_bytes=keeping.offload_min_bytes if keeping.offload else 0,
            # a part must be here before it is gathered, which is as far ahead of its use
            prefetch=keeping.offload_prefetch * (2 if keeping.partition else 1),
            owned=[*model.parameters(), *model.buffers()],
        )
    if keeping.partition:
        assert store is not None
        assert group is not None, "whoever switches it on finds the group"
        partition = Partition(
            group,
            store,
            device,
            min_bytes=keeping.partition_min_bytes,
            ahead=keeping.offload_prefetch,
        )
    boundaries = Boundaries(
        model,
        store,
        partition=partition,
        profile=BlockProfile(copies.synchronize) if keeping.profile else None,
        synchronize=copies.synchronize if keeping.synchronize else None,
    )
    boundaries.recomputed_together([[block.name for block in unit.blocks] for unit in units])
    return boundaries


def _memory(keeping: Keeping, count: int, device: torch.device) -> tuple[Pool | None, Arena | None]:
    if not keeping.offload:
        return None, device_arena(count, device) if keeping.contiguous else None
    pool = HostPool(pinned=None if device.type == "cuda" else False)
    return (HostArena(count, pool) if keeping.contiguous else pool), None


def _checked_count(count: int | None, recomputes: int) -> int:
    if count is None or count >= recomputes:
        return count or recomputes
    raise ConfigError(
        Problem(
            where="$.ds_ckpt.activation.contiguous_count",
            found=f"{count} (number_checkpoints in activation_checkpointing is the same)",
            why=f"the policy makes {recomputes} recomputes of this model, and each keeps a "
            "boundary until backward",
            remedy=f"write {recomputes} or more, or remove the key: the count is then inferred",
        )
    )


def describe(
    keeping: Keeping, recomputes: int, device: torch.device, group: Group | None = None
) -> str:
    """What the start line says of it; empty where nothing is on."""
    words = []
    if keeping.partition and group is not None:
        size = len(group.processes)
        words.append(
            f"boundaries split over {size} tensor-parallel processes, 1/{size} of their bytes kept "
            f"by each, {size - 1}/{size} of them received once a step in all-gathers "
            f"{keeping.offload_prefetch} ahead"
        )
    if keeping.offload:
        where = "in pinned host memory" if device.type == "cuda" else "in host memory"
        what = "boundaries' parts" if keeping.partition else "boundaries"
        text = (
            f"{recomputes - 1} of {recomputes} {what} kept {where}, brought back "
            f"{keeping.offload_prefetch} ahead: twice their bytes over the bus a step"
        )
        if device.type == "cpu":
            text += " (a stand-in: on the CPU accelerator both ends are the same memory)"
        words.append(text)
    if keeping.contiguous:
        words.append("boundaries in one buffer" + ("" if keeping.offload else ", one copy each"))
    if keeping.synchronize:
        words.append("the device waited for at every boundary: no overlap")
    if keeping.profile:
        words.append("every block timed")
    return "".join(f", {word}" for word in words)
