"""Memory that ZeRO-3 holds on the accelerator beside activations.

Sizes are read from the engine's tensors: each storage once, on the accelerator only, without what
is offloaded. Gathered weights are a bound. A node's copy of the weights is computed, because hpZ
drops it between steps.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

HOST_COPY = "a node's copy of the weights, this rank's part"


def host_copy_bytes(counts: Iterable[int], processes: int, per_host: int, itemsize: int) -> int:
    """Return a rank's bytes of a node's copy of the weights (resident weights, and hpZ's own).

    `counts` are elements of each parameter, frozen ones included. ZeRO-3 pads each parameter to
    equal shards, one per rank, and the ranks of a node divide them.
    """
    return itemsize * (processes // per_host) * sum(-(-n // processes) for n in counts)


def missing_copy_bytes(parameters: Iterable[Any], ranks: int, per_host: int) -> int:
    """Return a rank's bytes of a node's copy of those weights of which hpZ has none."""
    missing = [p for p in parameters if p.ds_secondary_tensor is None]
    return sum(host_copy_bytes([p.ds_numel], ranks, per_host, p.element_size()) for p in missing)


def stored_weight_bytes(model: nn.Module) -> int:
    """Return the weights that this process stores from forward to backward; gathered ones aside."""
    stored: list[Any] = [getattr(p, "ds_tensor", p) for p in model.parameters()]
    stored += [getattr(p, "ds_secondary_tensor", None) for p in model.parameters()]
    return sum(part.numel() * part.element_size() for part in stored if part is not None)


def transient_bytes(
    released: Sequence[int],
    largest: int,
    trainable: int,
    itemsize: int,
    reuse: int,
    prefetch: int,
    bucket: int,
) -> dict[str, int]:
    """Return the most bytes of weights gathered at a time, and of a reduction's copy.

    ZeRO-3 keeps a weight whose next use is within `stage3_max_reuse_distance` elements of its last
    (`PartitionedParameterCoordinator.__params_to_release`). At the end of the forward that is half
    of the distance, there and back. All arguments but `itemsize` count elements. `released` counts
    each parameter that is not persistent, `largest` the largest block, `trainable` those with
    gradients.
    """
    gathered = min(sum(released), max(reuse // 2, largest) + prefetch)
    return {
        "weights that are gathered for a while, at most": gathered * itemsize,
        "what a reduction sends": min(bucket, trainable) * itemsize,
    }


def resident_bytes(engine: Any, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return bytes by purpose; `blocks` are gathered one at a time."""
    optimizer, device = engine.optimizer, torch.device(engine.device)
    offload = optimizer.parameter_offload
    parameters: list[Any] = list(engine.module.parameters())
    seen: set[int] = set()
    found = {
        "weights, this rank's part": _sum((p.ds_tensor for p in parameters), device, seen),
        "master weights": _sum(optimizer.fp32_partitioned_groups_flat, device, seen),
        "optimizer state": _sum(tree_leaves(dict(optimizer.optimizer.state)), device, seen),
        "gradients, this rank's part": _sum([optimizer.grad_partitions_flat_buffer], device, seen),
        "weights that stay gathered": sum(
            p.ds_numel * p.element_size() for p in offload.persistent_parameters
        ),
    }
    item = max((p.element_size() for p in parameters), default=2)
    whole = {id(p): int(p.ds_numel) for p in parameters}
    block = max((sum(whole[id(p)] for p in b.parameters()) for b in blocks), default=0)
    bucket = int(optimizer.reduce_bucket_size)
    found["reduce bucket"] = len(optimizer.ipg_buckets) * bucket * item
    released = [p.ds_numel for p in parameters if not p.ds_persist]
    trainable = sum(p.ds_numel for p in parameters if p.requires_grad)
    reuse, prefetch = offload._max_reuse_distance_in_numel, offload._prefetch_bucket_sz
    found |= transient_bytes(released, block, trainable, item, reuse, prefetch, bucket)
    if copy := sum(_host_copy(p) for p in parameters if p.ds_tensor.device.type == device.type):
        found[HOST_COPY] = copy
    return found


def _host_copy(param: Any) -> int:
    per_host, hosts = param.ds_secondary_tensor_group_size, param.ds_secondary_tensor_num_of_groups
    if param.ds_zero_param_process_group is None:
        return 0
    return host_copy_bytes([param.ds_numel], hosts * per_host, per_host, param.element_size())


def _sum(tensors: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    own = (t for t in tensors if isinstance(t, Tensor) and t.device.type == device.type)
    found = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in own)}
    new = found.keys() - seen
    seen |= new
    return sum(found[key] for key in new)
