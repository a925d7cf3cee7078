"""Offload under graphs of all kinds: retained, several at once, nested, of second order."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks
from tests.unit.offload_models import (
    Block,
    LateCopies,
    Model,
    equal,
    grads,
    nothing_left,
    put_on,
)


def test_a_retained_graph_can_ask_again() -> None:
    model = Model()
    x = torch.randn(16, 8)
    plain = grads(model, x)
    _, store = put_on(model, ["Block"], copies=LateCopies())
    torch.manual_seed(3)
    loss = model(x)
    for round_ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=round_ < 2)
        assert equal(plain, [p.grad for p in model.parameters() if p.grad is not None])
        assert store.counters.back.total() == 3 * (round_ + 1)
    assert store.counters.out.total() == 3
    del loss
    assert nothing_left(store)


def test_several_forwards_before_a_backward_in_any_order() -> None:
    xs = [torch.randn(16, 8) for _ in range(3)]
    model = Model()
    model.eval()
    plain = []
    for x in xs:
        model.zero_grad()
        model(x).backward()
        plain.append([p.grad.clone() for p in model.parameters()])
    for block in model.blocks:
        block.dropout.p = 0.0
    model.train()
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        _, store = put_on(model, ["Block"], copies=LateCopies())
        losses = [model(x) for x in xs]
        # all but the very last boundary have left: 2 forwards of 4 and one of 3
        assert store.counters.out.total() == 11
        for index in order:
            model.zero_grad()
            losses[index].backward()
            assert equal(plain[index], [p.grad for p in model.parameters()])
        del losses
        assert nothing_left(store)
        for block in model.blocks:
            del block.forward


def test_one_backward_over_two_forwards() -> None:
    model = Model()
    xs = [torch.randn(16, 8) for _ in range(2)]

    def grads() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        (model(xs[0]) + 2 * model(xs[1])).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = grads()
    _, store = put_on(model, ["Block"], copies=LateCopies())
    assert equal(plain, grads())
    assert store.counters.out.total() == store.counters.back.total() == 7
    assert nothing_left(store)


def test_checkpointing_inside_a_block_is_left_to_the_outer_recompute() -> None:
    from torch.utils.checkpoint import checkpoint

    class Nested(Block):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            def inner(y: Tensor) -> Tensor:
                return self.down(torch.relu(self.up(y)))

            return x + checkpoint(inner, x, use_reentrant=False)

    class Outer(Model):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"a": Nested(8), "b": Nested(8)}) for _ in range(3)
            )
            for pair in self.blocks:
                pair.forward = lambda x, p=pair: p["b"](p["a"](x))  # type: ignore[method-assign]

        def forward(self, x: Tensor) -> Tensor:
            for pair in self.blocks:
                x = pair.forward(x)
            return x.square().mean()

    model, x = Outer(), torch.randn(4, 8)
    plain = grads(model, x)
    _, store = put_on(model, ["Nested"], copies=LateCopies())
    assert equal(plain, grads(model, x))
    assert store.counters.out.total() == store.counters.back.total() == 5
    assert nothing_left(store)


def test_second_derivatives() -> None:
    class Smooth(Model):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x.square().mean()

    model = Smooth()
    model.train()
    for block in model.blocks:
        block.dropout.p = 0.0
    x = torch.randn(4, 8, requires_grad=True)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(model(x), x, create_graph=True)
        (answer,) = torch.autograd.grad(first.square().sum(), x)
        return answer

    plain = second()
    CheckpointedBlocks(model, ["Block"]).remove()
    _, store = put_on(model, ["Block"], copies=LateCopies())
    ours = second()
    assert torch.allclose(plain, ours, rtol=1e-6, atol=1e-9)
    gc.collect()
    assert nothing_left(store)
