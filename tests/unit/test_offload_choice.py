"""What offload lets be, what it moves once for several, and any layout back as it was."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_ckpt.activation.offload import InputStore
from tests.unit.offload_models import CPU, LateCopies, Model, equal, grads, put_on


def test_small_tensors_and_parameters_are_let_be() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.rand(8))
    x = torch.randn(64, 8)
    plain = grads(model, x, model.scale.view(1, 8))
    _, store = put_on(model, ["Block"])
    ours = grads(model, x, model.scale.view(1, 8))
    assert len(plain) == 17
    assert equal(plain, ours)
    assert store.counters.left == {"a part of the model": 4}
    assert store.counters.out.total() == 3


def test_detached_and_frozen_parameters_are_not_copied() -> None:
    model = Model()
    for alias in (model.blocks[0].up.weight.detach()[0], model.blocks[0].up.weight.data[1]):
        model.register_buffer("table", torch.rand(8), persistent=False)
        _, store = put_on(model, ["Block"])
        model(torch.randn(64, 8), alias).backward()
        assert store.counters.left == {"a part of the model": 4}
        store.counters.reset()
        model(torch.randn(64, 8), model.table).backward()
        assert store.counters.left == {"a part of the model": 4}
        for block in model.blocks:
            del block.forward


def test_two_tensors_that_share_a_storage_leave_once() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor, both: list[Tensor]) -> Tensor:
            return self.linear(x.t() + y + both[0][8:]) + both[1].t()

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Pair() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                h = torch.cat([x, x.sin()])
                x = block(h[:8].t(), h[8:], [h, h[:8]])
            return x.square().mean()

    model = Pairs()
    x = torch.randn(8, 8, requires_grad=True)
    plain = grads(model, x)
    _, store = put_on(model, ["Pair"])
    assert equal(plain, grads(model, x))
    assert store.counters.out == {"blocks.0": 1, "blocks.1": 1}
    assert store.counters.out_bytes.total() == 2 * 16 * 8 * 4


def test_of_a_large_storage_the_used_part_leaves() -> None:
    model = Model(blocks=2)
    large = torch.randn(1000, 8)
    _, store = put_on(model, ["Block"])
    model(large[501:511]).backward()
    assert 10 * 8 * 4 <= store.counters.out_bytes["blocks.0"] < 10 * 8 * 4 + 64


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_layout_comes_back_as_it_was(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
    base = torch.randint(0, 2, [n + 2 for n in sizes]).to(dtype)
    view = base
    for dim, n in enumerate(sizes):
        view = view.narrow(dim, data.draw(st.integers(0, 2)), n)
    if sizes:
        view = view.permute(data.draw(st.permutations(range(len(sizes)))))
    if data.draw(st.booleans()):
        view = view.unsqueeze(0).expand(3, *view.shape)
    store = InputStore(CPU, LateCopies())
    call = store.begin("a")
    expected = view.clone()
    kept = store.pack(view, call)
    store.started(call)
    store.ended()
    following = store.begin("b")
    store.started(following)
    store.ended()
    strides = view.stride()
    del base, view
    got = store.unpack(kept)
    assert torch.equal(got, expected)
    assert got.dtype == dtype
    assert got.stride() == strides
    assert store.counters.back.total() == 1
