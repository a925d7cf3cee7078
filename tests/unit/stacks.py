"""A stack of small blocks, with and without checkpointing and offload, compared to the bit."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, make_policy
from tests.unit.offload_models import LateCopies, nothing_left, put_on

_RECOMPUTED = ["block", "segments", "selective", "offload"]
RECOMPUTED = pytest.mark.parametrize("kind", _RECOMPUTED)
KINDS = pytest.mark.parametrize("kind", [*_RECOMPUTED, "all offloaded"])


class Block(nn.Module):
    def __init__(self, inner: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.inner = inner

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x + self.down(self.inner(torch.tanh(self.up(x)), *args, **kwargs))


class Stack(nn.Module):
    """Some of them; `join` says how they follow each other."""

    def __init__(self, make, join=None, blocks=3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        if self.join is not None:
            return self.join(self.blocks, x)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def around(inner: Callable[..., Any], join: Any = None) -> Callable[[], Stack]:
    return lambda: Stack(lambda: Block(inner), join)


def data(seed: int = 1) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def put(model: nn.Module, kind: str, check: int = 0) -> Callable[[], bool]:
    """Checkpointing on the model's blocks; returns whether nothing of it is left behind."""
    names = tuple({type(block).__name__ for block in model.blocks})  # type: ignore[union-attr]
    named = {"offload": "block", "all offloaded": "offload"}.get(kind, kind)
    policy = Policy(make_policy(named), modules=names, check_determinism=check)
    if named == kind:
        model.checkpointed = CheckpointedBlocks(model, policy=policy)  # type: ignore[assignment]
        return lambda: True
    model.checkpointed, store = put_on(model, None, policy=policy, copies=LateCopies())
    return lambda: gc.collect() >= 0 and nothing_left(store)


def backward(model: nn.Module) -> Sequence[Tensor]:
    model(data()).backward()
    return ()


def results(model, step, steps=3) -> list[Tensor | None]:
    """Return results and gradients of several steps, and the model's state at the end."""
    found: list[Tensor | None] = []
    for seed in range(steps):
        torch.manual_seed(seed)
        model.zero_grad()
        found += step(model)
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*found, *model.state_dict().values()]


def same(make, kind, step=backward, steps=3, check=0) -> None:
    """Check for equal bits with and without checkpointing, and for nothing left in host memory."""
    reference = make()
    plain = results(reference, step, steps)
    model = make()
    clean = put(model, kind, check)
    ours = results(model, step, steps)
    assert any(value is not None and bool(value.any()) for value in plain)
    assert len(plain) == len(ours)
    assert list(reference.state_dict()) == list(model.state_dict())
    for index, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert (a is None) == (b is None), index
        assert a is None or b is None or torch.equal(a, b), index
    assert clean()
