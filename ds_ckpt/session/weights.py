"""What `weights.resident` sets up: who keeps what on which host, and how changes travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.compression import lossless
from ds_ckpt.config.weights import WeightsConfig
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.hierarchy import discard, hosts_of
from ds_ckpt.session.refusals import refuse_model_parallel
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.device import free_on
from ds_ckpt.telemetry.units import size
from ds_ckpt.zero3.resident import OFFLOADED, host_copy_bytes, resident_bytes
from ds_ckpt.zero3.run_on_all import run_on_all_or_raise
from ds_ckpt.zero3.weights import Hosts, WeightsHook

WHERE = "$.ds_ckpt.weights"
OFF = f"or set {WHERE}.resident to false"


class Whole:
    """The new weights as they are."""

    needs_old = False

    def encode(self, old: Tensor, new: Tensor) -> Tensor:
        return new.clone().view(torch.uint8)

    def decode_(self, weights: Tensor, payload: Tensor) -> None:
        weights.view(torch.uint8).copy_(payload)


class Lossless:
    """What changed, in units of the last place."""

    needs_old = True

    def encode(self, old: Tensor, new: Tensor) -> Tensor:
        return lossless.encode(old, new)

    def decode_(self, weights: Tensor, payload: Tensor) -> None:
        lossless.decode_(weights, payload)


@dataclass(frozen=True)
class Resident:
    """What came of `weights.resident`.

    Attributes:
        hook: None where there is nothing to gain.
        summary: the clause for the line at the start.
        inside: the process group of this process's host, which goes with the hook.
    """

    hook: WeightsHook | None
    summary: str
    inside: Any = None

    def detach(self) -> None:
        """DeepSpeed gathers between hosts again."""
        if self.hook is not None:
            self.hook.detach()
            discard(self.inside)


def keep_resident(engine: Any, config: WeightsConfig, counters: Counters) -> Resident:
    """Collective: every process of the program calls it.

    Raises:
        UnsupportedError: the hosts, the model or DeepSpeed's settings do not allow it.
    """
    from deepspeed import comm

    optimizer = engine.optimizer
    refuse_model_parallel(engine, f"{WHERE}.resident to false")
    hosts = hosts_of(optimizer.dp_process_group, least=1)
    if hosts == "all processes share one host":
        return Resident(None, "weights: nothing to keep, as all processes share one host")
    if isinstance(hosts, str):
        why = "a copy is divided among the processes of a host, equally many on each"
        raise _refusal("resident", "true", f"{hosts}; {why}", "give every host the same slots")
    local = len(hosts[0])
    if hosts != tuple(tuple(range(h * local, (h + 1) * local)) for h in range(len(hosts))):
        why = f"processes of one host do not follow each other: {hosts}"
        raise _refusal("resident", "true", why, "order the hostfile's lines host by host")
    partition = int(engine.zero_hpz_partition_size())
    if partition not in (0, 1, local):
        raise UnsupportedError(
            Problem(
                "$.zero_optimization.zero_hpz_partition_size",
                str(partition),
                f"resident weights are divided among the {local} processes of a host",
                f"write {local} or remove the key, {OFF}",
            )
        )
    dtype = optimizer.fp16_partitioned_groups_flat[0].dtype
    sixteen = dtype in (torch.bfloat16, torch.float16)
    if config.deltas == "lossless" and not sixteen:
        why = f"weights are gathered as {dtype}, and lossless changes are of 16-bit weights"
        remedy = 'write "none" or "auto", or set $.bf16.enabled to true'
        raise _refusal("deltas", '"lossless"', why, remedy)
    as_changes = config.deltas != "none" and sixteen
    run_on_all_or_raise(
        lambda: _refuse_too_large(engine, len(hosts), local),
        optimizer.dp_process_group,
        what="keep its part of a copy of the weights",
    )
    # every process makes every group, in the same order
    inside = [comm.new_group(list(members)) for members in hosts]
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    hook = WeightsHook(
        optimizer,
        list(engine.module.parameters()),
        Hosts(len(hosts), local, rank, inside[rank // local]),
        comm.all_to_all_single,
        Lossless() if as_changes else Whole(),
        counters,
    )
    how = "what changed, losslessly" if as_changes else "whole"
    return Resident(
        hook,
        f"weights resident on each of {len(hosts)} hosts ({hook.nbytes / 1e6:.4g} MB a process), "
        f"sent between hosts once a step, {how}",
        inside[rank // local],
    )


def _refuse_too_large(engine: Any, hosts: int, local: int) -> None:
    """A gather that runs out of memory on one process would leave the others waiting in it."""
    device = torch.device(engine.device)
    alone = device.type != "cpu"  # else the processes of a host share its memory
    missing = [p for p in engine.module.parameters() if p.ds_secondary_tensor is None]  # not hpZ's
    needed = (1 if alone else local) * sum(
        host_copy_bytes([p.ds_numel], hosts * local, local, p.element_size()) for p in missing
    )
    free = free_on(device)
    if needed <= free:
        return
    remedies = [f"free {size(needed - free)}"]
    if alone:
        remedies.append(f"use {-(-local * needed // max(free, 1))} processes a host or more")
        kept = resident_bytes(engine, [])
        offloaded = sum(kept[what] for what in OFFLOADED)
        enough = "enough" if needed <= free + offloaded else "too little alone"
        remedies.append(
            'set $.zero_optimization.offload_optimizer to {"device": "cpu"}, which frees '
            f"{size(offloaded)}, {enough}"
        )
    whose = "this process's device" if alone else f"the memory of a host of {local} processes"
    why = f"the copy takes {size(needed)} of {whose}, where {size(free)} are free"
    raise _refusal("resident", "true", why, "; or ".join(remedies))


def _refusal(key: str, found: str, why: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(Problem(f"{WHERE}.{key}", found, why, f"{remedy}, {OFF}"))
