"""HeldActivations against numbers that can be worked out by hand, and against checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ds_ckpt.telemetry.activations import HeldActivations

ROWS, WIDTH = 8, 16
FLOAT = 4


class Stack(nn.Module):
    def __init__(self, layers: int = 3, *, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return x.square().sum()


def _input() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def test_counts_what_is_saved_and_no_weights() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), _input()
    with HeldActivations(model) as held:
        output = model(x)
    assert held.bytes == x.nbytes
    assert held.tensors == 1
    assert output.requires_grad


def test_a_shared_storage_counts_once() -> None:
    x = _input()
    with HeldActivations(nn.Identity()) as held:
        product = x * x.t().t() * 2
    assert product.requires_grad
    assert held.bytes == x.nbytes


def test_what_a_dropped_graph_has_freed_does_not_count() -> None:
    x = _input()
    with HeldActivations(nn.Identity()) as held:
        (x.exp() * 3).sum()
    assert held.bytes == 0


def test_it_leaves_no_cycle_behind() -> None:
    x = _input()
    with HeldActivations(nn.Identity()):
        result = x.exp()
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert storage.expired()


def test_checkpointing_leaves_the_boundaries() -> None:
    model, x = Stack(layers=3, checkpointing=True), _input()
    with HeldActivations(model) as held:
        loss = model(x)
    assert loss.requires_grad
    # The three blocks' inputs, and the last block's output, which `square` keeps.
    assert held.bytes == 4 * ROWS * WIDTH * FLOAT


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_same_with_and_without(checkpointing: bool) -> None:
    gradients = []
    for measured in (False, True):
        model, x = Stack(checkpointing=checkpointing), _input()
        if measured:
            with HeldActivations(model):
                loss = model(x)
        else:
            loss = model(x)
        loss.backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, seen in zip(*gradients, strict=True):
        assert plain is not None
        assert seen is not None
        assert torch.equal(plain, seen)


def test_an_error_inside_goes_through_and_leaves_no_hook() -> None:
    held = HeldActivations(nn.Identity())
    with pytest.raises(ZeroDivisionError), held:
        raise ZeroDivisionError
    x = _input()
    (x * x).sum().backward()
    assert held.bytes == 0
