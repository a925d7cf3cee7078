"""The memory tracker against numbers that can be worked out by hand, and against checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ds_ckpt.telemetry.memory import (
    OUTSIDE,
    MemoryTracker,
    ModuleTracker,
    Place,
    SavedActivations,
    Storages,
)

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
    with SavedActivations(model) as held:
        output = model(x)
    assert held.bytes == x.nbytes
    assert output.requires_grad


def test_a_shared_storage_counts_once() -> None:
    x = _input()
    with SavedActivations(nn.Identity()) as held:
        product = x * x.t().t() * 2
    assert product.requires_grad
    assert held.bytes == x.nbytes


def test_what_a_dropped_graph_has_freed_does_not_count() -> None:
    x = _input()
    with SavedActivations(nn.Identity()) as held:
        (x.exp() * 3).sum()
    assert held.bytes == 0


def test_it_leaves_no_cycle_behind() -> None:
    x = _input()
    with SavedActivations(nn.Identity()):
        result = x.exp()
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert storage.expired()


def test_checkpointing_leaves_the_checkpointed_inputs() -> None:
    model, x = Stack(layers=3, checkpointing=True), _input()
    with SavedActivations(model) as held:
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
            with SavedActivations(model):
                loss = model(x)
        else:
            loss = model(x)
        loss.backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, seen in zip(*gradients, strict=True):
        assert plain is not None
        assert seen is not None
        assert torch.equal(plain, seen)


@pytest.mark.parametrize("leaf", [True, False])
def test_what_is_changed_in_place_after_it_was_saved_is_refused_as_without(leaf: bool) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with SavedActivations(model):
        x = torch.randn(ROWS, WIDTH)
        h = x if leaf else _input() * 2
        loss = model(h).sum()
        h.add_(5)
    with pytest.raises(RuntimeError, match=f"{ROWS}x{WIDTH}.* modified by an inplace operation"):
        loss.backward()


def test_an_error_inside_goes_through_and_leaves_no_hook() -> None:
    held = SavedActivations(nn.Identity())
    with pytest.raises(ZeroDivisionError), held:
        raise ZeroDivisionError
    x = _input()
    (x * x).sum().backward()
    assert held.bytes == 0


def test_a_number_is_never_given_again() -> None:
    freed: list[int] = []
    storages = Storages(freed.append)
    first = torch.zeros(100)
    number = storages.number(first)
    assert number is not None
    assert storages.number(first.view(10, 10)) == number
    del first
    assert freed == [number]
    assert not storages.alive(number)
    # the allocator is likely to give the same memory, and Python the same address
    others = [storages.number(torch.zeros(100)) for _ in range(5)]
    assert len({number, *others}) == 6


def _live_and_peak(device: str, *, inputs_count: bool = False) -> tuple[int, int]:
    model = nn.Linear(WIDTH, WIDTH, device=device)
    x = torch.empty(ROWS, WIDTH, device=device)
    weights = list(model.parameters()) if inputs_count else None
    with torch.no_grad(), MemoryTracker(model, weights=weights) as tracker:
        y = model(x.view(ROWS, WIDTH))
        z = y.sin().cos()
        del y
    assert z.shape == (ROWS, WIDTH)
    return tracker.live_bytes, tracker.peak_bytes


@pytest.mark.parametrize("kind", ["cpu", "meta", "fake"])
def test_what_is_alive_counts_on_every_kind_of_tensor(kind: str) -> None:
    rows = ROWS * WIDTH * FLOAT
    if kind == "fake":
        with FakeTensorMode():
            found = _live_and_peak("cpu")
            with_input = _live_and_peak("cpu", inputs_count=True)
    else:
        found, with_input = _live_and_peak(kind), _live_and_peak(kind, inputs_count=True)
    # the cosine is left; at the peak there were the product, its sine and the cosine
    assert found == (rows, 3 * rows)
    assert with_input == (2 * rows, 4 * rows)


def test_the_place_follows_blocks_parts_and_phases() -> None:
    model, x = Stack(layers=2), _input()
    blocks = {f"layers.{i}": model.layers[i] for i in range(2)}
    gelus = {name: [("mlp", block[1])] for name, block in blocks.items()}
    where = ModuleTracker(blocks, gelus)
    seen: list[tuple[str, Place]] = []
    tracker = MemoryTracker(
        model, operator=lambda op: seen.append((op.func._schema.name, where.place))
    )
    with where, tracker:
        loss = model(x)
        where.backward()
        loss.backward()
        with where.recomputing():
            model.layers[1](x)
    places = {name: [p for n, p in seen if n == f"aten::{name}"] for name in ("gelu", "pow")}
    assert places["gelu"] == [
        Place("forward", "layers.0", "mlp"),
        Place("forward", "layers.1", "mlp"),
        Place("recompute", "layers.1", "mlp"),
    ]
    assert places["pow"][0] == Place("forward", OUTSIDE)
    backward = [p.block for n, p in seen if n == "aten::gelu_backward"]
    assert backward == ["layers.1", "layers.0"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_a_checkpointed_call_keeps_belongs_to_the_block_in_it() -> None:
    model = Stack(layers=2)
    where = ModuleTracker(
        {f"layers.{i}": m for i, m in enumerate(model.layers)}, {"layers.0": [], "layers.1": []}
    )
    savers = []

    def kept(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        savers.append(where.saver())  # before the block runs
        result: torch.Tensor = block(x)
        return result

    with where:
        where.around("layers.1", lambda f, *args: f(*args), kept, (model.layers[1], _input()), {})
        savers.append(where.saver())
    inside, outside = (saver() for saver in savers)
    assert inside == Place("forward", "layers.1", "checkpointed")
    assert outside == Place("forward", OUTSIDE)
