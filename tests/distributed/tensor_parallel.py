"""Run in the worker processes: tensor parallelism of DeepSpeed's kind and Megatron's, and Ulysses.

A group is made once a process and kept: making groups again and again would use up ports.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

_made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
_KEPT = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu")


def group_of(parts: list[list[int]]) -> dist.ProcessGroup:
    """This process's group, where the world is divided into `parts`."""
    key = tuple(tuple(part) for part in parts)
    for part in parts:
        group = _made.get(key) if dist.get_rank() in part else None
        if group is None and key not in _made:
            made = dist.new_group(part)
            if dist.get_rank() in part:
                group = made
        if group is not None:
            mine = group
    return _made.setdefault(key, mine)


def neighbours(size: int) -> list[list[int]]:
    """Tensor-parallel groups of neighbours: [[0, 1], [2, 3]]."""
    world = dist.get_world_size()
    return [list(range(first, first + size)) for first in range(0, world, size)]


def across(size: int) -> list[list[int]]:
    """The data-parallel groups that go with them: [[0, 2], [1, 3]]."""
    return [list(range(first, dist.get_world_size(), size)) for first in range(size)]


@contextmanager
def mpu_forgotten() -> Iterator[None]:
    """Remove the mpu that an engine leaves in DeepSpeed's globals."""
    before = {name: getattr(groups, name) for name in _KEPT}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(groups, name, value)


@contextmanager
def auto_tp(size: int) -> Iterator[None]:
    """DeepSpeed's module-level groups as AutoTP of this size finds them; gone afterwards."""
    tensor, data = group_of(neighbours(size)), group_of(across(size))
    with mpu_forgotten():
        groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = tensor
        groups._DATA_PARALLEL_GROUP = data
        yield


@contextmanager
def ulysses_forgotten() -> Iterator[None]:
    """Unregister the attention that Ulysses registers for good, and make its groups once."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before, make = ALL_ATTENTION_FUNCTIONS["sdpa"], parallel_state_sp.initialize_sequence_parallel
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None:
        parallel_state_sp.initialize_sequence_parallel = lambda **_: None
    try:
        with mpu_forgotten():
            yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before
        parallel_state_sp.initialize_sequence_parallel = make


class MegatronMpu:
    """An `mpu` with Megatron's interface, for the tensor- and data-parallel groups of the world.

    `old` has only the names of a Megatron without separate tensor and pipeline parallelism.
    """

    def __init__(self, tensor: list[list[int]], data: list[list[int]], *, old=False) -> None:
        kinds = {"model_parallel": group_of(tensor), "data_parallel": group_of(data)}
        if not old:
            kinds["tensor_model_parallel"] = kinds["model_parallel"]
        for kind, group in kinds.items():
            setattr(self, f"get_{kind}_group", partial(kinds.get, kind))
            setattr(self, f"get_{kind}_world_size", partial(dist.get_world_size, group))
            setattr(self, f"get_{kind}_rank", partial(dist.get_rank, group))


class _Copy(torch.autograd.Function):
    """Megatron's f: nothing forward, the sum over the group backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """Megatron's g: the sum over the group forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class ParallelBlock(nn.Module):
    """An MLP whose inner width is divided over the group, with dropout behind the sum.

    Takes a tuple, a keyword argument and a whole-number one, as blocks of real models do.
    """

    def __init__(self, width: int, group: Any, dropout: float) -> None:
        super().__init__()
        self._group = [group]  # in a list: no part of the module's state
        inner = 4 * width // (dist.get_world_size(group) if group is not None else 1)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, both, *, order, scale=None) -> tuple[Tensor, Tensor]:
        x, bias = both
        group = self._group[0]
        y = self.norm(x)[:, order]
        if group is None:
            y = self.down(torch.relu(self.up(y)))
        else:
            y = _Reduce.apply(self.down(torch.relu(self.up(_Copy.apply(y, group)))), group)
        y = self.dropout(y + bias)
        return x + (y if scale is None else y * scale), bias


class ParallelModel(nn.Module):
    """A few of them over an embedding of numbers."""

    def __init__(self, group: Any, *, width=16, blocks=3, dropout=0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(7, width)
        self.bias = nn.Parameter(torch.randn(width))
        torch.manual_seed(1 + (dist.get_rank(group) if group is not None else 0))
        self.blocks = nn.ModuleList(ParallelBlock(width, group, dropout) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.to(self.bias.dtype))
        bias = torch.tanh(self.bias).expand(x.shape[0], x.shape[1], -1)
        order = torch.arange(x.shape[1] - 1, -1, -1)
        scale = torch.linspace(0.5, 1.0, x.shape[-1]).to(x.dtype)
        for block in self.blocks:
            x, bias = block((x, bias), order=order, scale=scale)
        return x.square().mean()
