"""Offload leaves nothing behind, and refuses what was changed in place."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.errors import UnsupportedError
from tests.unit.offload_models import (
    Block,
    LateCopies,
    Model,
    batch,
    build,
    equal,
    grads,
    nothing_left,
    put_on,
)


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_nothing_is_kept(training: bool) -> None:
    model = Model().train(training)
    _, store = put_on(model, ["Block"])
    with torch.no_grad():
        model(torch.randn(4, 8))
    with torch.inference_mode():
        model(torch.randn(4, 8))
    assert store.counters.out.total() == 0
    assert nothing_left(store)
    hf = build("llama").train(training)
    _, store = put_on(hf, None)
    with torch.no_grad():
        hf(**batch())
    assert store.counters.out.total() == 0


@pytest.mark.parametrize("kind", ["plain", "llama", "gpt2", "bert", "t5"])
def test_evaluation_with_gradients_leaves_nothing_behind(kind: str) -> None:
    model = Model() if kind == "plain" else build(kind)
    _, store = put_on(model.eval(), ["Block"] if kind == "plain" else None)
    for dropped in (False, True):
        loss = model(torch.randn(4, 8)) if kind == "plain" else model(**batch()).loss
        assert store.nbytes_on_host > 0
        if not dropped:
            loss.backward()
        del loss
        assert nothing_left(store)
    assert store.counters.out.total() > 3


@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("block", [0, 2, 3])
def test_an_exception_gives_everything_back(where: str, block: int) -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise OSError("boom")

    model = Model()
    calls = 0
    at = {"forward": 1, "recompute": 2}.get(where, 0)

    def trip(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError("boom")
        return Boom.apply(output) if where == "backward" else None

    x = torch.randn(4, 8)
    plain = grads(model, x)
    _, store = put_on(model, ["Block"], copies=LateCopies())
    handle = model.blocks[block].up.register_forward_hook(trip)
    with pytest.raises(OSError, match="boom"):
        grads(model, x)
    handle.remove()
    gc.collect()
    assert nothing_left(store)
    assert equal(plain, grads(model, x))
    assert nothing_left(store)


def test_frozen_blocks_below_the_first_gradient_keep_nothing() -> None:
    model = Model()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    x = torch.randn(4, 8)
    plain = grads(model, x)
    _, store = put_on(model, ["Block"])
    assert equal(plain, grads(model, x))
    assert set(store.counters.out) == {"blocks.2"}
    assert nothing_left(store)


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    class Inside(Block):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            y = super().forward(x)
            x.mul_(2)
            return y

    class Between(Model):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            for block in self.blocks:
                y = block(x)
                x.mul_(2)
                x = y
            return x.square().mean()

    inside = Model()
    inside.blocks = nn.ModuleList(Inside(8) for _ in range(3))
    for model, patterns in ((inside, ["Inside"]), (Between(), ["Block"])):
        _, store = put_on(model, patterns)
        with pytest.raises(UnsupportedError, match=r"blocks\.\d: found .* in place"):
            model(torch.randn(4, 8).exp()).backward()
        gc.collect()
        assert nothing_left(store)


def test_a_change_while_the_copy_is_on_its_way_is_refused() -> None:
    class Delayed(Model):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            previous = x.clone()

            def spoil(*_: Any) -> None:
                previous.mul_(2)

            handle = self.blocks[1].up.register_forward_hook(spoil)
            x = previous
            for block in self.blocks:
                x = block(x)
            handle.remove()
            return x.square().mean()

    model = Delayed()
    _, store = put_on(model, ["Block"], copies=LateCopies())
    loss = model(torch.randn(4, 8))
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found an input that was changed"):
        loss.backward()
    del loss
    gc.collect()
    assert nothing_left(store)


def test_a_tensor_that_is_written_anew_for_each_block_is_not_shared() -> None:
    """The same storage with other values: kept apart, and the first user is refused."""

    class Reusing(Model):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            scale = torch.ones(64)
            for index, block in enumerate(self.blocks):
                x = block(x, scale=scale.fill_(index).view(8, 8)[0])
            return x.square().mean()

    model = Reusing()
    put_on(model, ["Block"])
    loss = model(torch.randn(8, 8))
    with pytest.raises(UnsupportedError, match="changed in place"):
        loss.backward()


def test_a_tensor_that_is_written_anew_after_its_copy_has_left_is_kept_anew() -> None:
    """The first block's recompute takes the copy, the last one's the new values."""

    class Reusing(Model):
        anew = False

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            scale = torch.full((8,), 0.5)
            x = self.blocks[0](x, scale=scale)
            x = self.blocks[2](self.blocks[1](x))
            scale = torch.full((8,), 2.0) if self.anew else scale.fill_(2.0)
            return self.blocks[3](x, scale=scale).square().mean()

    model, x = Reusing(), torch.randn(8, 8)
    model.anew = True
    expected = grads(model, x)
    model.anew = False
    put_on(model, ["Block"])
    assert equal(grads(model, x), expected)
