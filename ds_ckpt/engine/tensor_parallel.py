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

_SEQUENCE = ("get_sequence_parallel_group", "_get_sequence_parallel_group")


class _Gathering(Ticket):
    """An all-gather in flight; keeps its input until it has ended."""

    def __init__(self, work: Any, part: Tensor) -> None:
        self._work, self._part = work, part

    def wait(self) -> None:
        self._work.wait()


class TensorParallelGroup:
    """Gathers over one group, counted under `Purpose.PARTITION`.

    Attributes:
        processes: global ranks, in the group's order.
        index: this rank's place among them.
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

    mpu = engine.mpu if mpu is None else mpu
    group = _group_of(mpu, "get_tensor_model_parallel_group", "get_model_parallel_group")
    if group is None:
        raise _refusal("no tensor-parallel group")
    found = TensorParallelGroup(group, counters)
    if len(found.processes) == 1:
        raise _refusal("a tensor-parallel group of one rank")
    ranks = f"a tensor-parallel group of ranks {', '.join(map(str, found.processes))}"
    # without an mpu Ulysses has its group in `deepspeed.utils.groups`
    sequence = _group_of(mpu, *_SEQUENCE) or _group_of(groups, *_SEQUENCE[1:])
    data = _group_of(mpu, "get_data_parallel_group")
    zero = getattr(engine.optimizer, "dp_process_group", None)
    for other, how in (
        (sequence, "which divide sequences between them"),
        (data, "of which the mpu's data-parallel group averages gradients"),
        (zero, "of which ZeRO averages gradients"),
    ):
        if other is not None:
            shared = set(found.processes) & set(dist.get_process_group_ranks(other))
            if shared - {dist.get_rank()}:
                raise _refusal(f"{ranks}, {how}")
    return found


def _refusal(found: str) -> UnsupportedError:
    return UnsupportedError(
        Problem(
            "$.activation_checkpointing.partition_activations ($.ds_ckpt.activation.partition)",
            found,
            "activations are split over ranks that hold the same ones; data-parallel and "
            "sequence-parallel (Ulysses) ranks hold those of other tokens",
            "set partition_activations to false, or use tensor parallelism over 2 ranks or more "
            '("tensor_parallel": {"autotp_size": 2}, or a Megatron-style mpu passed to initialize '
            "or attach)",
        )
    )


def _group_of(mpu: Any, *names: str) -> Any:
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
