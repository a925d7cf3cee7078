"""Results that `selective` keeps: if something writes over them, they are computed again."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings


def _put(h: Tensor, x: Tensor) -> Tensor:
    rows = torch.tensor([1, 0], device=h.device)
    return h.index_put_((rows,), x[:2], accumulate=True)


def _through_a_view(h: Tensor, x: Tensor) -> Tensor:
    h[..., 1:3].add_(x[..., 1:3])
    return h


def _as_result(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(h.detach(), 3.0, out=h.detach())
    return h + x


def _in_a_list(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_add_([x.clone(), h.detach()], 1.0)
    return h


def _outside_autograd(h: Tensor, x: Tensor) -> Tensor:
    h.data.add_(1.0)
    return h


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda h, x: h.add_(x),
    "mul_": lambda h, x: h.mul_(2.0),
    "relu_": lambda h, x: torch.relu_(h),
    "index_put_": _put,
    "a view": _through_a_view,
    "out=": _as_result,
    "_foreach_add_": _in_a_list,
    ".data": _outside_autograd,
}


class Block(nn.Module):
    """A product, a write over its result, and a second product."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor], bias: bool, matmul: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=bias)
        self.second = nn.Linear(8, 8, bias=bias)
        self.write, self.matmul = write, matmul

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.first.weight if self.matmul else self.first(x)
        return torch.add(x, self.second(torch.tanh(self.write(h, x))))


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("product", ["linear with bias", "matmul"])
@pytest.mark.parametrize("write", WRITES)
def test_results_that_are_written_over_are_not_kept(
    write: str, product: str, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"bias": "bias" in product, "matmul": product == "matmul"}
    model = nn.Sequential(*(Block(WRITES[write], **settings) for _ in range(2)))
    x = torch.randn(*shape)
    expected = _gradients(model, x)
    policy = Policy(settings=PolicySettings("selective"), modules=("Block",))
    CheckpointedBlocks(model, policy=policy)
    for _ in range(2):
        got = _gradients(model, x)
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class _Drawing(nn.Module):
    """Draws noise, whose values are saved, and after it dropout, which is drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = torch.tanh(h * torch.rand_like(h))
        return x + self.second(nn.functional.dropout(h, 0.4))


@pytest.mark.parametrize("save_ops", [("aten.rand_like",), ("matmuls", "aten.rand_like")], ids=str)
def test_random_numbers_after_saved_ones_are_those_of_the_forward(
    save_ops: tuple[str, ...],
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(_Drawing(), _Drawing()), torch.randn(4, 8)
    found = []
    for checkpointed in (False, True, True):
        if checkpointed and len(found) == 1:
            settings = PolicySettings("selective", save_ops=save_ops)
            CheckpointedBlocks(model, policy=Policy(settings, modules=("_Drawing",)))
        torch.manual_seed(1)
        found.append([*_gradients(model, x), torch.get_rng_state()])
    for got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True))


class _Outside(nn.Module):
    """Gets hold of a product that its blocks also use, and writes into it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(_Both() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            given = types.SimpleNamespace()
            y = block(x, self.way, given)
            if self.way == "tuple":
                y, h = y
            elif self.way == "object":
                y, h = y.y, y.h
            else:
                h = given.h if self.way == "argument" else block.h
            h += x
            x = h * y
        return x


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, way: str, given: types.SimpleNamespace) -> Any:
        h = self.a(x)
        y = self.b(torch.tanh(h))
        if way == "tuple":
            return y, h
        if way == "object":
            return types.SimpleNamespace(y=y, h=h)
        if way == "argument":
            given.h = h
        else:
            self.h = h
        return y


@pytest.mark.parametrize("way", ["tuple", "object", "argument", "attribute"])
@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)])
def test_a_product_that_others_can_write_into_is_not_kept(shape: tuple[int, ...], way: str) -> None:
    torch.manual_seed(0)
    model, x = _Outside(way), torch.randn(shape)

    plain = _gradients(model, x)
    CheckpointedBlocks(
        model, policy=Policy(settings=PolicySettings("selective"), modules=("_Both",))
    )
    ours = _gradients(model, x)
    assert len(plain) == len(ours) == 4
    assert all(map(torch.equal, plain, ours))
