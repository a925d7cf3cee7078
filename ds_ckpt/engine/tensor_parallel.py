"""Finds the tensor-parallel group of an engine. Refuses groups that hold different activations.

DeepSpeed's AutoTP puts its groups into `engine.mpu`; Megatron's `mpu` is passed to
`deepspeed.initialize(mpu=...)` or to `attach`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_ckpt.activation.offload import Ticket
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.telemetry import Counters, Purpose

_WHERE = "$.activation_checkpointing.partition_activations ($.ds_ckpt.activation.partition)"
_OFF = "set partition_activations to false"
_TENSOR = ("get_tensor_model_parallel_group", "get_model_parallel_group")
_SEQUENCE = ("get_sequence_parallel_group", "_get_sequence_parallel_group")
_SUPPORTED = (
    'tensor parallelism ("tensor_parallel": {"autotp_size": 2}, or a Megatron-style mpu passed to '
    "initialize or attach)"
)


class _Gathering(Ticket):
    """An all-gather in flight; keeps its input until it has ended."""

    def __init__(self, work: Any, part: Tensor) -> None:
        self._work, self._part = work, part

    def wait(self) -> None:
        self._work.wait()


class TensorParallelGroup:
    """Gathers over one group, counted under `Purpose.PARTITION`.

    Args:
        group: PyTorch's process group.
        counters: Bytes are counted there.
    """

    def __init__(self, group: Any, counters: Counters) -> None:
        self._group, self._counters = group, counters
        self.processes: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.index = self.processes.index(dist.get_rank())

    def gather(self, part: Tensor, joined: Tensor) -> Ticket:
        """Start to fill `joined` (uint8 [size * n]) with every rank's `part` (uint8 [n])."""
        import deepspeed.comm

        with self._counters.purpose(Purpose.PARTITION):
            work = deepspeed.comm.all_gather_into_tensor(
                joined, part, group=self._group, async_op=True
            )
        return _Gathering(work, part)

    def exchange(self, mine: Tensor) -> Tensor:
        """Gather every rank's `mine` (int64 [n]) to the host: int64 [size, n]."""
        answers = mine.new_empty(len(self.processes) * mine.numel())
        self.gather(mine, answers).wait()
        return answers.view(len(self.processes), -1).cpu()


def find_group(engine: Any, mpu: Any, counters: Counters) -> TensorParallelGroup:
    """Return the group whose ranks hold the same activations.

    Args:
        engine: DeepSpeed's engine.
        mpu: A Megatron-style object; None uses `engine.mpu`.
        counters: Bytes are counted there.

    Raises:
        UnsupportedError: There is no such group, it has one rank, or its ranks train on different
            data.
    """
    from deepspeed.utils import groups

    mpu = mpu if mpu is not None else engine.mpu
    # Ulysses has its own group if the engine was given a mesh instead of an mpu
    sharded = _others(_group_of(mpu, _SEQUENCE) or _group_of(groups, _SEQUENCE[1:]))
    group = _group_of(mpu, _TENSOR)
    if group is None:
        named = "" if mpu is None else f" in {getattr(mpu, '__name__', type(mpu).__name__)}"
        why = (
            "sequence-parallel ranks (Ulysses) hold different tokens, and data-parallel ranks "
            "different data: recomputation would start from a mixture of them"
        )
        raise _refusal(f"no tensor-parallel group{named}", why, f"{_OFF}, or use {_SUPPORTED}")
    found = TensorParallelGroup(group, counters)
    ranks = f"a tensor-parallel group of ranks {', '.join(map(str, found.processes))}"
    if len(found.processes) == 1:
        remedy = f"{_OFF}, or use {_SUPPORTED} over 2 ranks or more"
        raise _refusal("a tensor-parallel group of one rank", "there is nothing to split", remedy)
    others = set(found.processes) - {dist.get_rank()}
    if others & sharded:
        why = "each holds different tokens: recomputation would start from a mixture of them"
        raise _refusal(f"{ranks}, which divide sequences between them (Ulysses)", why, _OFF)
    for name, data in (
        ("the mpu's data-parallel group", _group_of(mpu, ("get_data_parallel_group",))),
        ("ZeRO", getattr(engine.optimizer, "dp_process_group", None)),
    ):
        if others & _others(data):
            why = (
                "they hold activations of different data: recomputation would start from a mixture"
            )
            remedy = (
                f"{_OFF}, or pass an mpu whose tensor-parallel group is not part of a "
                "data-parallel one"
            )
            raise _refusal(f"{ranks}, of which {name} averages gradients", why, remedy)
    return found


def _refusal(found: str, why: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(Problem(_WHERE, found, why, remedy))


def _group_of(mpu: Any, names: tuple[str, ...]) -> Any:
    """Return the first of these groups that exists."""
    for name in names:
        getter = getattr(mpu, name, None)
        try:
            group = getter() if callable(getter) else None
        except (AssertionError, KeyError, RuntimeError, TypeError):
            continue  # Megatron's and DeepSpeed's errors for a group that was not created
        if group is not None:
            return group
    return None


def _others(group: Any) -> set[int]:
    """Return the other ranks of a group."""
    return set() if group is None else set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
