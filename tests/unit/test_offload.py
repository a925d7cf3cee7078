"""Offload on the stand-in: equal gradients under every policy, every boundary out and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.offload import Copies, InputStore
from ds_ckpt.activation.policies import Policy, PolicySettings
from tests.unit.offload_models import (
    CPU,
    Block,
    LateCopies,
    Model,
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
