"""The memory tracker against numbers that can be worked out by hand, and against checkpointing."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ds_ckpt.telemetry import memory

ROWS, WIDTH = 8, 16


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


@pytest.mark.parametrize(
    ("run", "held"),
    [
        (nn.Linear(WIDTH, WIDTH), 1),  # the input; weights do not count
        (lambda x: x * x.t().t() * 2, 1),  # a shared storage counts once
        (lambda x: (x.exp() * 3).sum().detach(), 0),  # of a dropped graph nothing is left
        # the three checkpointed inputs, and the last block's output, which `square` keeps
        (Stack(layers=3, checkpointing=True), 4),
    ],
)
def test_bytes_that_autograd_saves(run: Any, held: int) -> None:
    x = _input()
    with memory.SavedActivations(run if isinstance(run, nn.Module) else nn.Identity()) as found:
        output = run(x)
    assert output.numel()
    assert found.bytes == held * x.nbytes


def test_it_leaves_no_cycle_behind() -> None:
    x = _input()
    with memory.SavedActivations(nn.Identity()):
        result = x.exp()
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert storage.expired()


@pytest.mark.parametrize("leaf", [True, False])
def test_a_saved_tensor_changed_in_place_is_refused_as_by_autograd(leaf: bool) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with memory.SavedActivations(model):
        x = torch.randn(ROWS, WIDTH)
        h = x if leaf else _input() * 2
        loss = model(h).sum()
        h.add_(5)
    with pytest.raises(RuntimeError, match=f"{ROWS}x{WIDTH}.* modified by an inplace operation"):
        loss.backward()


def test_a_number_is_never_given_again() -> None:
    freed: list[int] = []
    storages = memory.Storages(freed.append)
    first = torch.zeros(100)
    number = storages.number(first)
    assert number is not None
    assert storages.number(first.view(10, 10)) == number
    del first
    assert freed == [number]
    assert number not in storages.alive
    # the allocator is likely to give the same memory, and Python the same address
    others = [storages.number(torch.zeros(100)) for _ in range(5)]
    assert len({number, *others}) == 6


@pytest.mark.parametrize("kind", ["cpu", "meta", "fake"])
def test_live_memory_counts_on_every_kind_of_tensor(kind: str) -> None:
    device = "meta" if kind == "meta" else "cpu"
    with FakeTensorMode() if kind == "fake" else nullcontext(), torch.no_grad():
        model = nn.Linear(WIDTH, WIDTH, device=device)
        x = torch.empty(ROWS, WIDTH, device=device)
        with memory.MemoryTracker(model) as tracker:
            y = model(x.view(ROWS, WIDTH))
            z = y.sin().cos()
            del y
    # the cosine is left; at the peak there were the product, its sine and the cosine
    assert (tracker.live_bytes, tracker.peak_bytes) == (z.nbytes, 3 * z.nbytes)


def test_the_place_follows_blocks_and_parts() -> None:
    model, x = Stack(layers=2), _input()
    blocks = {f"layers.{i}": model.layers[i] for i in range(2)}
    gelus = {name: [("mlp", block[1])] for name, block in blocks.items()}
    where = memory.ModuleTracker(model, blocks, gelus)
    seen: list[tuple[str, tuple[str, str]]] = []
    with (
        where,
        memory.MemoryTracker(
            model, operator=lambda op: seen.append((op.func._schema.name, where.place))
        ),
    ):
        model(x)
    places = {name: [p for n, p in seen if n == f"aten::{name}"] for name in ("gelu", "pow")}
    assert places["gelu"] == [("layers.0", "mlp"), ("layers.1", "mlp")]
    assert places["pow"][0] == (memory.OUTSIDE, "other")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
