"""Finds the tensor-parallel group of an engine.

DeepSpeed's AutoTP puts its groups into `engine.mpu`; Megatron's `mpu` is passed to
`deepspeed.initialize(mpu=...)` or to `attach`.
"""

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_ckpt.activation.offload import Wait
from ds_ckpt.errors import Problem, UnsupportedError, log
from ds_ckpt.telemetry import Counters, Purpose


class TensorParallelGroup:
    """Gathers over one group (`processes`, global ranks), counted under `Purpose.PARTITION`."""

    def __init__(self, group: Any, counters: Counters) -> None:
        self._group, self._counters = group, counters
        self.processes: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.index = self.processes.index(dist.get_rank())

    def gather(self, part: Tensor, joined: Tensor) -> Wait:
        """Start to fill `joined` (uint8 [size * n]) with every rank's `part` (uint8 [n])."""
        import deepspeed.comm

        with self._counters.purpose(Purpose.PARTITION):
            work = deepspeed.comm.all_gather_into_tensor(
                joined, part, group=self._group, async_op=True
            )

        def wait(part: Tensor = part) -> None:  # which is read until then
            work.wait()

        return wait

    def exchange(self, mine: Tensor) -> Tensor:
        """Gather every rank's `mine` (int64 [n]) to the host: int64 [size, n]."""
        answers = mine.new_empty(len(self.processes) * mine.numel())
        self.gather(mine, answers)()
        return answers.view(len(self.processes), -1).cpu()


def find_group(
    engine: Any, mpu: Any, counters: Counters, *, required: bool
) -> TensorParallelGroup | None:
    """Return the tensor-parallel group of `mpu`, or of `engine.mpu` if it is None.

    Without such a group, or in one of one rank, it raises UnsupportedError if our own section
    requires it. If DeepSpeed's section does, it warns and returns None. Checkpointed inputs are
    compared over it, which stops at a group whose ranks hold different ones.
    """
    mpu, group = engine.mpu if mpu is None else mpu, None
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        # Megatron and DeepSpeed raise these for a group that was not created
        with contextlib.suppress(AttributeError, AssertionError, KeyError, RuntimeError):
            group = group or getattr(mpu, name)()
    if group is None or dist.get_world_size(group) == 1:
        found = f"{'no' if group is None else 'one rank in the'} tensor-parallel group"
        why = "tensor-parallel ranks hold the same activations; data-parallel ranks hold others"
        remedy = (
            'set it to false, or use {"tensor_parallel": {"autotp_size": 2}}, or pass a '
            "Megatron-style mpu to initialize or attach"
        )
        if required:
            raise UnsupportedError(Problem("$.ds_ckpt.activation.partition", found, why, remedy))
        where = "$.activation_checkpointing.partition_activations"
        if dist.get_rank() == 0:
            log.warning("ds_ckpt: no effect: %s", Problem(where, found, why, remedy))
        return None
    return TensorParallelGroup(group, counters)
