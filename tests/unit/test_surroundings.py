"""What may change between a forward and its recompute, and what a block may do to stop one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings
from ds_ckpt.errors import RecomputeError

KINDS = pytest.mark.parametrize("kind", ["block", "segments", "selective"])


class Block(nn.Module):
    """A product around what `inner` does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x: Tensor, *args: Any) -> Any:
        return x + self.down(self.inner(torch.tanh(self.up(x)), *args))


class Bare(Block):
    """Parameters of its own, so that ZeRO-3 would gather them by the block's hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.gain = nn.Parameter(torch.ones(8))
        self.gain.ds_id = 1  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *args: Any) -> Any:
        return torch.tanh(super().forward(x, *args)) * self.gain


class Noise(nn.Module):
    """Noise while it trains, from its own code."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.randn_like(x) if self.training else x


class Stack(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module], block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(inner()) for _ in range(2))

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *args)
        return x.square().sum()


def _checkpoint(model: Stack, kind: Any, **options: Any) -> CheckpointedBlocks:
    modules = (type(model.blocks[0]).__name__,)
    return CheckpointedBlocks(
        model, policy=Policy(PolicySettings(kind), modules=modules, **options)
    )


def _x(seed: int = 1) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def _train(model: nn.Module, *args: Any, between: Callable[[], Any] = lambda: None) -> list[Tensor]:
    """Gradients of three steps, then the state; `between` runs before each backward."""
    results = []
    for seed in range(3):
        model.train()
        model.zero_grad()
        torch.manual_seed(seed)
        loss = model(_x(seed), *args)
        between()
        loss.backward()
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*results, *model.state_dict().values()]


def _equal(plain: list[Tensor], ours: list[Tensor]) -> None:
    assert len(plain) > 12
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


# train and eval


@KINDS
@pytest.mark.parametrize("block", [Block, Bare])
@pytest.mark.parametrize("inner", [Noise, lambda: nn.Dropout(0.4), lambda: nn.BatchNorm1d(8)])
def test_eval_between_forward_and_backward(
    inner: Callable[[], nn.Module], block: type[Block], kind: str
) -> None:
    models = [Stack(inner, block) for _ in range(2)]
    _checkpoint(models[1], kind)
    _equal(*(_train(model, between=model.eval) for model in models))
    assert not any(part.training for part in models[1].modules())


def test_a_part_that_is_not_trained_stays_so_in_the_recompute() -> None:
    models = [Stack(Noise) for _ in range(2)]
    _checkpoint(models[1], "block")
    gradients = []
    for model in models:
        block = model.blocks[0]
        assert isinstance(block, Block)
        block.inner.eval()
        torch.manual_seed(0)
        loss = model(_x())
        model.train()
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@KINDS
def test_checkpointing_that_goes_before_backward_is_named(kind: str) -> None:
    model = Stack(nn.Identity, Bare)
    blocks = _checkpoint(model, kind)
    with pytest.raises(RecomputeError, match=r"blocks\.\d: found checkpointing that was taken off"):
        _train(model, between=blocks.remove)


# buffers


class Lazy(nn.Module):
    """A buffer without a value until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ema: Tensor | None
        self.register_buffer("ema", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.ema = mean if self.ema is None else 0.5 * self.ema + 0.5 * mean
        return x * self.ema


class Registers(nn.Module):
    """A buffer that its first forward registers and every other one changes."""

    ema: Tensor

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if "ema" not in self._buffers:
            self.register_buffer("ema", torch.zeros(8))
        self.ema = 0.5 * self.ema + 0.5 * mean
        return x * self.ema


class Second(nn.Module):
    """Two buffers that begin in its second training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.later: Tensor
        self.given: Tensor | None
        self.register_buffer("given", None)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if int(self.steps) < 2:
            return x
        if self.given is None:
            self.given = x.detach().mean(0)
            self.register_buffer("later", x.detach().amax(0))
        return x * self.given + self.later


@KINDS
@pytest.mark.parametrize("inner", [Lazy, Registers, Second])
def test_a_buffer_that_begins_in_a_forward_is_changed_once(
    inner: Callable[[], nn.Module], kind: str
) -> None:
    models = [Stack(inner) for _ in range(2)]
    _checkpoint(models[1], kind)
    _equal(*(_train(model) for model in models))
    assert list(models[0].state_dict()) == list(models[1].state_dict())


# exceptions in a block


class Tries(nn.Module):
    """Falls back to another formula whatever happens."""

    def __init__(self, caught: type[BaseException] = Exception) -> None:
        super().__init__()
        self.caught, self.calls = caught, 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.sigmoid(x)
        except self.caught:
            return 1 / (1 + torch.exp(-x))


class Only(Block):
    """Its last saved tensor is what `inner` saves."""

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.inner(self.down(torch.tanh(self.up(x))))


@KINDS
@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_a_block_may_catch_what_it_wants(caught: type[BaseException], kind: str) -> None:
    models = [Stack(lambda: Tries(caught), Only) for _ in range(2)]
    _checkpoint(models[1], kind)
    _equal(*(_train(model) for model in models))


class Hides(nn.Module):
    """Is another function in its second run, and catches the error that this brings."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = itertools.count()  # a number would be put back for the recompute

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.sigmoid(x[:2] if next(self.runs) % 2 else x).mean(0) * x
        except Exception:
            return torch.sigmoid(x).mean(0) * x


@pytest.mark.parametrize("kind", ["block", "segments"])
def test_a_difference_that_a_block_catches_is_still_told(kind: str) -> None:
    model = Stack(Hides)
    _checkpoint(model, kind)
    with pytest.raises(RecomputeError, match=r"saved tensor \d+ is 2x8 float32, in the forward"):
        _train(model)


# arguments without versions, and without memory of their own


class Scaled(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * (position >= 0).float().mean()


class Mixed(nn.Module):
    def forward(self, x: Tensor, adjacent: Tensor) -> Any:
        return torch.sparse.mm(adjacent, x)


@KINDS
@pytest.mark.parametrize("every", [0, 1])
def test_an_argument_from_inference_mode(kind: str, every: int) -> None:
    with torch.inference_mode():
        position = torch.arange(8) - 2
    models = [Stack(Scaled) for _ in range(2)]
    _checkpoint(models[1], kind, check_determinism=every)
    _equal(*(_train(model, position) for model in models))


@KINDS
def test_a_sparse_argument(kind: str) -> None:
    models = [Stack(Mixed) for _ in range(2)]
    _checkpoint(models[1], kind)
    _equal(*(_train(model, torch.eye(4).to_sparse()) for model in models))
