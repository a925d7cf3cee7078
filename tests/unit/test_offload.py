"""Offload on the stand-in: equal gradients under every policy, every boundary out and back."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.inputs import Keeping, describe
from ds_ckpt.activation.offload import Copies, InputStore
from ds_ckpt.activation.policies import Policy, PolicySettings
from ds_ckpt.errors import UnsupportedError
from tests.unit.offload_models import (
    CPU,
    Block,
    LateCopies,
    Model,
    batch,
    build,
    equal,
    gradients,
    grads,
    nothing_left,
    put_on,
)


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 9),
    blocks=st.integers(1, 5),
    rows=st.integers(1, 5),
    input_gradient=st.booleans(),
    prefetch=st.integers(1, 3),
    late=st.booleans(),
)
def test_gradients_are_bitwise_those_of_no_checkpointing(
    width: int, blocks: int, rows: int, input_gradient: bool, prefetch: int, late: bool
) -> None:
    model = Model(width, blocks)
    x = torch.randn(rows, width, requires_grad=input_gradient)
    plain = grads(model, x)
    copies = LateCopies() if late else Copies()
    checkpointed, store = put_on(model, ["Block"], copies=copies, prefetch=prefetch)
    for _ in range(2):
        assert equal(plain, grads(model, x))
        assert nothing_left(store)
    # the last block's boundary stays, all others go and come, in each of the two steps
    assert store.counters.out.total() == store.counters.back.total() == 2 * (blocks - 1)
    checkpointed.remove()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5"])
def test_hugging_face_models(kind: str, late: bool) -> None:
    model = build(kind)
    plain = gradients(model)
    CheckpointedBlocks(model, None)
    theirs = gradients(model)
    model = build(kind)
    _, store = put_on(model, None, copies=LateCopies() if late else None)
    ours = gradients(model)
    # T5's shared position bias adds its gradients up in another order under any checkpointing
    assert equal(ours, theirs if kind == "t5" else plain)
    assert equal(ours, theirs)
    blocks = 6 if kind == "t5" else 4
    counters = store.counters
    assert len(counters.out) >= blocks - 1
    assert counters.out == counters.back
    assert counters.out_bytes == counters.back_bytes
    assert counters.late == counters.in_vain == 0
    assert nothing_left(store)


_SELECTIVE = PolicySettings("selective", save_ops=("matmuls",))
_TREATMENTS = {
    "attention": PolicySettings("attention"),
    "mlp": PolicySettings("mlp"),
    "every_n": PolicySettings("every_n", every_n=2),
    "segments": PolicySettings("segments", segment_size=2),
    "selective": _SELECTIVE,
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("policy", _TREATMENTS)
def test_every_policy_with_offload(policy: str, kind: str) -> None:
    model = build(kind)
    plain = gradients(model)
    _, store = put_on(model, None, copies=LateCopies(), policy=Policy(_TREATMENTS[policy]))
    assert equal(plain, gradients(model))
    calls = {"every_n": 2, "segments": 2}.get(policy, 4)
    counters = store.counters
    assert len(counters.out) >= calls - 1
    assert counters.out == counters.back
    assert counters.late == counters.in_vain == 0
    assert nothing_left(store)


def test_saved_results_of_operators_leave_with_their_block() -> None:
    model = Model(blocks=4)
    x = torch.randn(16, 8)
    plain = grads(model, x)
    policy = Policy(_SELECTIVE, modules=("Block",))
    _, store = put_on(model, None, copies=LateCopies(), policy=policy)
    assert equal(plain, grads(model, x))
    # the input, and the results of both products: 8, 24 and 8 wide
    boundary_bytes = 16 * 8 * 4
    assert store.counters.out_bytes == {f"blocks.{i}": 5 * boundary_bytes for i in range(3)}
    assert store.counters.out_bytes == store.counters.back_bytes
    assert store.counters.out == {f"blocks.{i}": 3 for i in range(3)}
    assert store.counters.peak_device_bytes == 2 * 5 * boundary_bytes
    assert nothing_left(store)


def test_blocks_of_one_recompute_come_back_together() -> None:
    model = Model(blocks=6)
    scale = torch.rand(6, 64, 8).unbind()
    policy = Policy(PolicySettings("segments", segment_size=2), modules=("Block",))
    checkpointed, store = put_on(model, None, policy=policy)
    model(torch.randn(64, 8), scale[0].clone()).backward()
    assert checkpointed.units[0].blocks[1].name == "blocks.1"
    assert store.counters.out == {"blocks.0": 1, "blocks.2": 1}
    assert store.counters.late == 0
    assert nothing_left(store)


def _boundaries(model: nn.Module, classes: tuple[type, ...]) -> tuple[list[Any], list[Any]]:
    """Weak references to the storages that the blocks are given, filled during forward."""
    refs: list[StorageWeakRef] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["x"]
        refs.append(StorageWeakRef(x.untyped_storage()))

    handles = [
        m.register_forward_pre_hook(note, with_kwargs=True)
        for m in model.modules()
        if isinstance(m, classes)
    ]
    return refs, handles


def test_after_the_forward_one_boundary_is_on_the_device() -> None:
    model = Model(blocks=6)
    _, store = put_on(model, ["Block"])
    refs, handles = _boundaries(model, (Block,))
    loss = model(torch.randn(64, 8))
    for handle in handles:
        handle.remove()
    boundary_bytes = 64 * 8 * 4
    assert [not ref.expired() for ref in refs] == [False] * 5 + [True]
    assert store.counters.device_bytes == boundary_bytes
    assert store.nbytes_on_host == 5 * boundary_bytes
    loss.backward()
    # in backward: the one in use and the one that is on its way
    assert store.counters.peak_device_bytes == 2 * boundary_bytes
    assert nothing_left(store)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_prefetch_is_a_number_of_blocks(prefetch: int) -> None:
    model = Model(blocks=6)
    _, store = put_on(model, ["Block"], prefetch=prefetch)
    model(torch.randn(64, 8)).backward()
    assert store.counters.late == store.counters.in_vain == 0
    assert store.counters.peak_device_bytes == (1 + prefetch) * 64 * 8 * 4


def test_a_boundary_by_keyword_goes_out_too() -> None:
    class Keywords(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x)
            return x.square().mean()

    model = Keywords()
    x = torch.randn(3, 8)
    plain = grads(model, x)
    _, store = put_on(model, ["Block"])
    assert equal(plain, grads(model, x))
    assert store.counters.out.total() == store.counters.back.total() == 3


class _Asked(list[Tensor]):
    """How often all of them were gone through."""

    times = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.times += 1
        return super().__iter__()


def test_parameters_are_looked_through_once_for_all_arguments_of_a_call() -> None:
    weights = nn.Parameter(torch.randn(8))
    owned = _Asked([weights, *(nn.Parameter(torch.randn(3)) for _ in range(4))])
    store = InputStore(CPU, Copies(), owned=owned)
    for number in range(2):
        call = store.begin(f"block {number}")
        held = [store.pack(torch.randn(5), call) for _ in range(6)]
        held.append(store.pack(weights.data.view(2, 4), call))
        assert [type(kept).__name__ for kept in held] == ["OffloadedRef"] * 6 + ["InPlaceRef"]
        assert owned.times == number + 1
        store.started(call)
        # inside the block weights are gathered into other memory
        weights.data = torch.randn(8)
        assert store.unfit(weights.data[2:]) == "a part of the model"
        owned.times = number + 1
        store.ended()
        weights.data = torch.randn(8)


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


@pytest.mark.parametrize(
    ("keeping", "words"),
    [
        (Keeping(), ["^$"]),
        (
            Keeping(offload=True),
            ["3 of 4 checkpointed inputs", "twice their bytes", "no memory is saved"],
        ),
    ],
)
def test_the_start_line_says_what_it_costs(keeping: Keeping, words: list[str]) -> None:
    text = describe(keeping, 4, CPU)
    assert all(re.search(word, text) for word in words)
    assert "no memory" not in describe(keeping, 4, torch.device("cuda"))
