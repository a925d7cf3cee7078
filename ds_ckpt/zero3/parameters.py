"""Reads DeepSpeed's bookkeeping of an engine: configuration, groups, trained parameters."""

from collections.abc import Iterable
from typing import Any

import torch

from ds_ckpt.zero3.compatibility import same_ranks, shard_group


def configuration(engine: Any) -> Any:
    """Return the JSON object with which the engine was built."""
    return engine._config._param_dict


def has_zero3_optimizer(engine: Any) -> bool:
    """Return whether the engine's optimizer is DeepSpeed's of ZeRO-3."""
    return hasattr(engine.optimizer, "parameter_offload")


def own_group(engine: Any) -> Any:
    """Return the process group over which the optimizer reduces and shards."""
    return engine.optimizer.dp_process_group


def is_of_own_group(engine: Any, parameter: Any) -> bool:
    """Return whether the optimizer's own process group shards a parameter."""
    return same_ranks(shard_group(engine.optimizer, parameter), own_group(engine))


def model_slice(engine: Any) -> str:
    """Return number and count of this rank's tensor-parallel slice; empty without slices."""
    slices = engine.mp_world_size
    return f"mp{engine.optimizer.model_parallel_rank:02d}of{slices:02d}" if slices > 1 else ""


def reduction_stream(engine: Any) -> Any:
    """Return the stream on which DeepSpeed reduces; None without an accelerator."""
    return getattr(engine.optimizer, "reduce_and_partition_stream", None)


def gathered_dtype(engine: Any) -> Any:
    """Return the type in which weights are gathered."""
    return engine.optimizer.fp16_partitioned_groups_flat[0].dtype


def trained(engine: Any) -> list[tuple[str, Any]]:
    """Return name and parameter of all that DeepSpeed's optimizer steps, frozen now or not."""
    stepped = {p.ds_id for group in engine.optimizer.fp16_groups for p in group}
    return [(n, p) for n, p in engine.module.named_parameters() if p.ds_id in stepped]


def exchanged(engine: Any) -> list[tuple[str, Any]]:
    """Return the trained parameters that the optimizer's own process group shards.

    DeepSpeed reduces the others: replicated ones that `zero.Init` made before AutoTP.
    """
    return [(n, p) for n, p in trained(engine) if is_of_own_group(engine, p)]


def names_by_id(named: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Return names by DeepSpeed's number of the parameter."""
    return {p.ds_id: name for name, p in named}


def shapes_of(engine: Any, named: Any = None) -> list[tuple[str, torch.Size, int]]:
    """Return name, full shape and bytes an element, as sent; `named` is `exchanged` by default."""
    sent_as = engine.optimizer.get_param_comm_dtype  # communication_data_type, or autocast's
    named = exchanged(engine) if named is None else named
    return [(n, p.ds_shape, sent_as(p).itemsize) for n, p in named]


def largest_bucket(engine: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Return the bucket with the most entries if gradients arrive in the reverse of their order."""
    limit = int(engine.optimizer.reduce_bucket_size)
    buckets: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]]
    filled, sent_as = 0, engine.optimizer.get_param_comm_dtype
    for name, param in reversed(exchanged(engine)):
        if filled and filled + param.ds_numel > limit:  # DeepSpeed reduces what it has before
            buckets.append([])
            filled = 0
        buckets[-1].append((name, param.ds_shape, sent_as(param)))
        filled += param.ds_numel
    return max(buckets, key=lambda bucket: sum(shape.numel() for _, shape, _ in bucket))
