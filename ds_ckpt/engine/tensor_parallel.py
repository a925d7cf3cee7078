"""Finds the tensor-parallel group of an engine, and refuses groups that hold different tensors.

DeepSpeed's AutoTP puts its groups into `engine.mpu`; Megatron's `mpu` comes there by
`deepspeed.initialize(mpu=...)`, or is given to `attach`.
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
_WORKS = (
    'tensor parallelism ("tensor_parallel": {"autotp_size": 2}, or a Megatron-style mpu given to '
    "initialize or attach)"
)


class _Gathering(Ticket):
    """An all-gather under way; holds its input until it has ended."""

    def __init__(self, work: Any, part: Tensor) -> None:
        self._work, self._part = work, part

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()


class TensorParallelGroup:
    """Gathers over one group, counted under `Purpose.PARTITION`.

    Args:
        group: torch's process group.
        counters: told of every collective, through DeepSpeed's backend.
    """

    def __init__(self, group: Any, counters: Counters) -> None:
        self._group, self._counters = group, counters
        self.processes: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.index = self.processes.index(dist.get_rank())

    def gather(self, part: Tensor, joined: Tensor) -> Ticket:
        """Start to fill `joined` (uint8 [size * n]) with every process's `part` (uint8 [n])."""
        import deepspeed.comm

        with self._counters.purpose(Purpose.PARTITION):
            work = deepspeed.comm.all_gather_into_tensor(
                joined, part, group=self._group, async_op=True
            )
        return _Gathering(work, part)

    def exchange(self, mine: Tensor) -> Tensor:
        """int64 [size, n] on the host: everybody's `mine` (int64 [n])."""
        answers = mine.new_empty(len(self.processes) * mine.numel())
        self.gather(mine, answers).wait()
        return answers.view(len(self.processes), -1).cpu()


def find_group(engine: Any, mpu: Any, counters: Counters) -> TensorParallelGroup:
    """The group over which this engine's activations are the same.

    Args:
        engine: DeepSpeed's.
        mpu: a Megatron-style object; None stands for `engine.mpu`.

    Raises:
        UnsupportedError: there is none, it has one process, or its processes train on different
            data.
    """
    from deepspeed.utils import groups

    mpu = mpu if mpu is not None else engine.mpu
    # Ulysses's own, where the engine was given a mesh instead of an mpu
    sequence = _group_of(mpu, _SEQUENCE) or _group_of(groups, _SEQUENCE[1:])
    sharded = _others(sequence)
    group = _group_of(mpu, _TENSOR)
    if group is None:
        raise _no_group(mpu, bool(sharded))
    found = TensorParallelGroup(group, counters)
    words = f"a tensor-parallel group of processes {', '.join(map(str, found.processes))}"
    if len(found.processes) == 1:
        why = "it would do nothing: one part in one is the whole"
        remedy = f"{_OFF}, or use {_WORKS} over 2 processes or more"
        raise _refused("a tensor-parallel group of one process", why, remedy)
    others = set(found.processes) - {dist.get_rank()}
    if others & sharded:
        why = "each holds other tokens, so recompute would begin with a mixture of them"
        raise _refused(f"{words}, which divide sequences between them (Ulysses)", why, _OFF)
    for name, data in (
        ("the mpu's data-parallel group", _group_of(mpu, ("get_data_parallel_group",))),
        ("ZeRO", getattr(engine.optimizer, "dp_process_group", None)),
    ):
        if others & _others(data):
            why = (
                "data-parallel processes hold activations of different data, and recompute would "
                "begin with a mixture of them"
            )
            remedy = (
                f"{_OFF}, or give an mpu whose tensor-parallel group is no part of a data-parallel "
                "one"
            )
            raise _refused(f"{words}, of which {name} averages gradients", why, remedy)
    return found


def _refused(found: str, why: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(Problem(_WHERE, found, why, remedy))


def _no_group(mpu: Any, sequence: bool) -> UnsupportedError:
    if sequence:
        why = (
            "processes that divide sequences between them (Ulysses) hold other tokens each, and "
            "data-parallel ones other data: parts of them make no whole"
        )
    else:
        why = (
            "only tensor-parallel processes hold the same activations; those of data-parallel ones "
            "differ, and recompute would begin with a mixture of them: wrong gradients"
        )
    named = "" if mpu is None else f" in {getattr(mpu, '__name__', type(mpu).__name__)}"
    return _refused(f"no tensor-parallel group{named}", why, f"{_OFF}, or use {_WORKS}")


def _group_of(mpu: Any, names: tuple[str, ...]) -> Any:
    """The first of these groups that there is."""
    for name in names:
        getter = getattr(mpu, name, None)
        try:
            group = getter() if callable(getter) else None
        except (AssertionError, KeyError, RuntimeError, TypeError):
            continue  # as Megatron and DeepSpeed say that it has not been made
        if group is not None:
            return group
    return None


def _others(group: Any) -> set[int]:
    """The other processes of a group."""
    return set() if group is None else set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
