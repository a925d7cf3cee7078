"""What may change between a forward and its recompute, and what a block may do to stop one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings
from ds_ckpt.errors import RecomputeError
from tests.unit.stacks import KINDS, Block, Stack, data, put, same

# train and eval


class Bare(Block):
    """Parameters of its own, so that ZeRO-3 would gather them by the block's hooks."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__(inner)
        self.gain = nn.Parameter(torch.ones(8))
        self.gain.ds_id = 1  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *args: Any) -> Any:
        return torch.tanh(super().forward(x, *args)) * self.gain


class Noise(nn.Module):
    """Noise while it trains, from its own code."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.randn_like(x) if self.training else x


@KINDS
@pytest.mark.parametrize("block", [Block, Bare])
@pytest.mark.parametrize("inner", [Noise, lambda: nn.Dropout(0.4), lambda: nn.BatchNorm1d(16)])
def test_eval_between_forward_and_backward(
    inner: Callable[[], nn.Module], block: type[Block], kind: str
) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        loss = model.train()(data())
        model.eval()
        loss.backward()
        assert not any(part.training for part in model.modules())
        return [loss.detach()]

    same(lambda: Stack(lambda: block(inner())), kind, step)


@KINDS
def test_a_part_that_is_not_trained_stays_so_in_the_recompute(kind: str) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        model.blocks[0].inner.eval()  # type: ignore[union-attr]
        loss = model(data())
        model.train()
        loss.backward()
        return [loss.detach()]

    same(lambda: Stack(lambda: Block(Noise())), kind, step)


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
def test_checkpointing_that_goes_before_backward_is_named(kind: str) -> None:
    model = Stack(lambda: Bare(nn.Identity()))
    checkpointed = CheckpointedBlocks(model, policy=Policy(PolicySettings(kind), modules=("Bare",)))
    loss = model(data())
    checkpointed.remove()
    with pytest.raises(RecomputeError, match=r"blocks\.\d: found checkpointing that was taken off"):
        loss.backward()


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
            self.register_buffer("ema", torch.zeros(16))
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
    same(lambda: Stack(lambda: Block(inner())), kind)


# exceptions in a block


class Tries(nn.Module):
    """Falls back to another formula whatever happens."""

    def __init__(self, caught: type[BaseException] = Exception) -> None:
        super().__init__()
        self.caught = caught

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
    same(lambda: Stack(lambda: Only(Tries(caught))), kind)


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
    model = Stack(lambda: Block(Hides()))
    put(model, kind)
    with pytest.raises(RecomputeError, match=r"saved tensor \d+ is 2x16 float32, in the forward"):
        model(data()).backward()


# arguments without versions, and without memory of their own


class Scaled(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * (position >= 0).float().mean()


class Mixed(nn.Module):
    def forward(self, x: Tensor, adjacent: Tensor) -> Any:
        return torch.sparse.mm(adjacent, x)


def _given(argument: Tensor) -> Callable[..., Tensor]:
    """Every block is given it."""

    def join(blocks: Any, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, block: block(x, argument), blocks, x).square().sum()

    return join


@KINDS
@pytest.mark.parametrize("every", [0, 1])
def test_an_argument_from_inference_mode(kind: str, every: int) -> None:
    with torch.inference_mode():
        position = torch.arange(16) - 2
    same(lambda: Stack(lambda: Block(Scaled()), _given(position)), kind, check=every)


@KINDS
def test_a_sparse_argument(kind: str) -> None:
    adjacent = torch.eye(5).to_sparse()
    same(lambda: Stack(lambda: Block(Mixed()), _given(adjacent)), kind)
