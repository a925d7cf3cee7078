"""Counts DeepSpeed's collectives at its backend object.

ZeRO-3's collectives, and this package's, call methods of one object (`deepspeed.comm.comm.cdb`).
Wrapping them counts each collective once. Point-to-point messages and lists of tensors (pipelines,
expert parallelism) are not counted. All sessions share the wrappers; the last one removes them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

from ds_ckpt.errors import ContractError, Problem
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry import Counters, collective_bytes
from ds_ckpt.telemetry.timings import TimedHandle


def _all_to_all(kwargs: dict[str, Any], world: int, me: int) -> list[int]:
    """Return bytes to each member of the group; 0 to this rank."""
    tensor: torch.Tensor = kwargs["input"]
    rows = tensor.shape[0] if tensor.dim() else 1
    row_bytes = tensor.nbytes // max(rows, 1)
    splits = kwargs.get("input_split_sizes") or [rows // world] * world
    return [0 if member == me else int(n) * row_bytes for member, n in enumerate(splits)]


# method of the backend -> (collective, its arguments in order, the payload among them);
# DeepSpeed's decorator hides the signatures
_METHODS: dict[str, tuple[str, str, str]] = {
    "all_gather_into_tensor": ("all_gather", "output_tensor input_tensor group", "input_tensor"),
    "all_gather": ("all_gather", "tensor_list tensor group", "tensor"),
    "reduce_scatter_tensor": (
        "reduce_scatter",
        "output_tensor input_tensor op group",
        "input_tensor",
    ),
    "all_to_all_single": (
        "all_to_all",
        "output input output_split_sizes input_split_sizes group",
        "input",
    ),
    "all_reduce": ("all_reduce", "tensor op group", "tensor"),
    "reduce": ("reduce", "tensor dst op group", "tensor"),
    "broadcast": ("broadcast", "tensor src group", "tensor"),
}

_listeners: list[Counters] = []
_patches = Patches()
_patched_backend: Any = None


def _wrap(method: Callable[..., Any], op: str, arguments: str, payload: str) -> Callable[..., Any]:
    names = arguments.split()

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = _timed(method, args, kwargs)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        group = named.get("group")
        world, me = torch_dist.get_world_size(group), torch_dist.get_rank(group)
        if op == "all_to_all":
            to = _all_to_all(named, world, me)
        else:  # a ring in the order of the group: everything is sent to the next rank
            to = [0] * world
            size = named[payload].nbytes
            to[(me + 1) % world] = collective_bytes(op, size, world, torch_dist.get_backend(group))
        for counters in _listeners:
            far = 0
            if counters.crosses_host is not None:
                members = torch_dist.get_process_group_ranks(group)
                far = sum(n for p, n in zip(members, to, strict=True) if counters.crosses_host(p))
            counters.sent(sum(to), far)
        return result

    return counted


def _timed(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `method`; record the call, and the wait for its handle, if a listener has spans."""
    measuring = [c.spans for c in _listeners if c.spans is not None]
    if not measuring:
        return method(*args, **kwargs)
    # of several engines the one whose hook has called
    spans = next((s for s in measuring if s.open), measuring[0])
    with spans.span("collective"):
        result = method(*args, **kwargs)
    return TimedHandle(result, spans) if hasattr(result, "wait") else result


def listen(counters: Counters) -> None:
    """Start to count into `counters`. DeepSpeed's backend must be initialized."""
    global _patched_backend
    import deepspeed.comm.comm as ds_comm

    if _patched_backend is not ds_comm.cdb:
        missing = [name for name in _METHODS if not callable(getattr(ds_comm.cdb, name, None))]
        if missing:
            found = f"{type(ds_comm.cdb).__name__} without {', '.join(missing)}"
            remedy = (
                "call deepspeed.init_distributed() first, or install a DeepSpeed that ds-ckpt "
                "doctor reports as tested"
            )
            why = "bytes are counted at these methods"
            raise ContractError(Problem("deepspeed.comm.comm.cdb", found, why, remedy))
        _patches.undo()
        for name, (op, arguments, payload) in _METHODS.items():
            wrapped = _wrap(getattr(ds_comm.cdb, name), op, arguments, payload)
            _patches.set(ds_comm.cdb, name, wrapped)
        _patched_backend = ds_comm.cdb
    _listeners.append(counters)


def unlisten(counters: Counters) -> None:
    """Stop counting into `counters`; the last listener restores the backend."""
    global _patched_backend
    _listeners[:] = [c for c in _listeners if c is not counters]
    if not _listeners:
        _patches.undo()
        _patched_backend = None
