"""Offload with the CPU as the device: equal gradients, every input out and back."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation import CheckpointedBlocks, make_units
from ds_ckpt.activation.inputs import CheckpointedInputsConfig, build_inputs
from ds_ckpt.activation.offload import BlockCall, Copies, InputStore
from ds_ckpt.activation.policies import Policy, Rule, make_policy
from ds_ckpt.errors import UnsupportedError
from tests.architectures import batch, build
from tests.unit import offload_models
from tests.unit.offload_models import CPU, LateCopies, Model, equal, grads, nothing_left, put_on
from tests.unit.stacks import Stack

INPUT_BYTES = 64 * 8 * 4


@given(
    width=st.integers(1, 9),
    blocks=st.integers(1, 5),
    rows=st.integers(1, 5),
    input_gradient=st.booleans(),
    prefetch=st.integers(1, 3),
    late=st.booleans(),
    name=st.sampled_from(["block", "offload"]),
)
def test_gradients_are_bitwise_those_of_no_checkpointing(
    width: int, blocks: int, rows: int, input_gradient: bool, prefetch: int, late: bool, name: str
) -> None:
    model = Model(width, blocks)
    x = torch.randn(rows, width, requires_grad=input_gradient)
    plain = grads(model, x)
    copies = LateCopies() if late else Copies()
    policy = Policy(_POLICIES[name], modules=("Block",))
    checkpointed, store = put_on(model, None, policy=policy, copies=copies, prefetch=prefetch)
    for _ in range(2):
        assert equal(plain, grads(model, x))
        assert nothing_left(store)
    # the last block's tensors stay, all others go and come, in each of the two steps: its input,
    # or also relu's result, which two operators save, and what dropout dropped
    each = 3 if name == "offload" else 1
    assert store.counters.out.total() == store.counters.back.total() == 2 * each * (blocks - 1)
    assert store.counters.late == 0
    checkpointed.remove()


_POLICIES = {
    **{name: make_policy(name) for name in ("block", "offload", "attention", "mlp")},
    "every_n": make_policy("every_n", every_n=2),
    "segments": make_policy("segments", segment_size=2),
    "selective": make_policy("selective", save_ops=("matmuls",)),
}


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *((kind, "block") for kind in ("gpt2", "bert", "t5")),
        *(("llama", p) for p in _POLICIES),
        ("t5", "offload"),
    ],
)
def test_hugging_face_models_under_every_policy(kind: str, policy: str) -> None:
    model, data = build(kind), batch(kind)
    plain = grads(model, **data)
    checkpointed = CheckpointedBlocks(model, None)
    theirs = grads(model, **data)
    checkpointed.remove()
    _, store = put_on(model, None, copies=LateCopies(), policy=Policy(_POLICIES[policy]))
    # T5's shared position bias adds its gradients up in another order under any recomputation
    recomputed = kind == "t5" and policy != "offload"
    assert equal(grads(model, **data), theirs if recomputed else plain)
    calls = {"every_n": 2, "segments": 2}.get(policy, 4)
    counters = store.counters
    assert len(counters.out) >= calls - 1
    # rotary tables and masks, which all blocks save, leave once, and are there in backward
    assert (counters.back <= counters.out) if policy == "offload" else counters.out == counters.back
    assert counters.late == 0
    assert nothing_left(store)


def test_saved_results_of_operators_leave_with_their_block() -> None:
    model = Model(blocks=4)
    x = torch.randn(16, 8)
    plain = grads(model, x)
    policy = Policy(_POLICIES["selective"], modules=("Block",))
    _, store = put_on(model, None, copies=LateCopies(), policy=policy)
    assert equal(plain, grads(model, x))
    # the input, and the results of both products: 8, 24 and 8 wide
    assert store.counters.out_bytes == {f"blocks.{i}": 5 * 16 * 8 * 4 for i in range(3)}
    assert store.counters.out == store.counters.back == {f"blocks.{i}": 3 for i in range(3)}
    assert nothing_left(store)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_device_memory_is_one_input_and_those_fetched_ahead(prefetch: int) -> None:
    model = Model(blocks=6)
    refs: list[StorageWeakRef] = []
    handles = [
        block.register_forward_pre_hook(
            lambda _, args: refs.append(StorageWeakRef(args[0].untyped_storage()))
        )
        for block in model.blocks
    ]
    _, store = put_on(model, ["Block"], prefetch=prefetch)
    loss = model(torch.randn(64, 8))
    for handle in handles:
        handle.remove()
    assert [not ref.expired() for ref in refs] == [False] * 5 + [True]
    assert offload_models.device_bytes(store) == INPUT_BYTES
    assert offload_models.host_bytes(store) == 5 * INPUT_BYTES
    most: list[int] = []
    reach = store.reach

    def reach_and_count(call: BlockCall) -> None:
        reach(call)
        most.append(offload_models.device_bytes(store))

    store.reach = reach_and_count  # type: ignore[method-assign]
    loss.backward()
    assert max(most) == (1 + prefetch) * INPUT_BYTES
    assert store.counters.late == 0
    assert nothing_left(store)


def test_parameters_stay_where_they_are() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.rand(8))
    x = torch.randn(64, 8)
    plain = grads(model, x, model.scale.view(1, 8))
    _, store = put_on(model, ["Block"])
    assert equal(plain, grads(model, x, model.scale.view(1, 8)))
    assert store.counters.out.total() == 3


class Weighted(nn.Module):
    """Uses its weight as views and as `data`, as ZeRO-3 gathers it: in other memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.whole = self.weight.detach().clone()
        self.register_forward_pre_hook(lambda *_: self.set(self.whole.clone()))
        self.register_full_backward_pre_hook(lambda *_: self.set(self.whole.clone()))

    def set(self, data: Tensor) -> None:
        self.weight.data = data

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        y = x.sin() @ self.weight.t() + (x * self.weight.detach()[0] * self.weight.data[1]).cos()
        return y * given + y * given.view(1, 8)[0]


class Around(nn.Module):
    """Its weights are gathered when its own forward has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Weighted()

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return self.inner(x, given)


def test_weights_are_kept_by_reference() -> None:
    scale = nn.Parameter(torch.rand(8))

    def join(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, scale)
            block.inner.set(torch.empty(0))  # as ZeRO-3 after a forward
        return x.square().mean()

    model, x = Stack(Around, join), torch.randn(4, 8, requires_grad=True)
    model.scale = scale
    plain = grads(model, x)
    how = Policy(_POLICIES["offload"], modules=("Around",))
    _, store = put_on(model, None, policy=how, copies=LateCopies())
    assert equal(plain, grads(model, x))
    # of each block the input, both of sin's and cos's arguments and results, and y
    assert set(store.counters.out.values()) == {4}
    assert store.counters.out_bytes.total() == 2 * 4 * 4 * 8 * 4
    assert nothing_left(store)


def test_rules_mix_offload_with_recomputation_and_neither() -> None:
    model, x = Model(blocks=6), torch.randn(64, 8)
    plain = grads(model, x)
    rules = tuple(Rule(n, _POLICIES["offload"]) for n in ("0", "2", "4"))
    policy = Policy(make_policy("none"), (*rules, Rule("1", _POLICIES["block"])), ("Block",))
    units = make_units(model, policy)
    inputs = build_inputs(CheckpointedInputsConfig(offload_min_bytes=4096), model, units, CPU)
    assert inputs is not None
    on = CheckpointedBlocks(model, policy=policy, units=units, around=inputs.around)
    assert equal(plain, grads(model, x))
    counters = inputs.store.counters
    # relu's results: not the last call's, no recomputation's, and nothing smaller
    assert counters.out == counters.back == {"blocks.0": 1, "blocks.2": 1}
    assert counters.late == 0
    assert "4 blocks (Block), 3 of them offloaded and not recomputed" in on.describe()


@pytest.mark.parametrize("when", ["at once", "by an alias", "being copied", "copied"])
def test_a_saved_tensor_that_is_changed_is_refused_unless_it_was_copied(when: str) -> None:
    """Autograd refuses it, too; only a copy has the right values."""
    store = InputStore(CPU, LateCopies(), offload=False)
    call, x = store.begin("a", weights=()), torch.ones(8).sin()
    alias = x.data  # counts versions of its own
    refs = [store.pack(x, call), store.pack(alias, call)]
    if when.endswith("copied"):
        following = store.begin("b", weights=())
        store.started(call)
        store.ended(call)
        store.started(following)
        if when == "copied":
            store.ended(following)
    (alias if when == "by an alias" else x).mul_(2)
    if when == "copied":
        assert torch.equal(store.unpack(refs[0], call), torch.ones(8).sin())
        return
    with pytest.raises(UnsupportedError, match="a: found a saved tensor that was changed"):
        [store.unpack(ref, call) for ref in refs]


def test_two_tensors_that_share_a_storage_leave_once() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor, both: list[Tensor]) -> Tensor:
            return self.linear(x.t() + y + both[0][8:]) + both[1].t()

    def join(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            h = torch.cat([x, x.sin()])
            x = block(h[:8].t(), h[8:], [h, h[:8]])
        return x.square().mean()

    model, x = Stack(Pair, join), torch.randn(8, 8, requires_grad=True)
    plain = grads(model, x)
    _, store = put_on(model, ["Pair"])
    assert equal(plain, grads(model, x))
    assert store.counters.out == {"blocks.0": 1, "blocks.1": 1}
    assert store.counters.out_bytes.total() == 2 * 16 * 8 * 4


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
    expected, strides = view.clone(), view.stride()
    kept = store.pack(view, call)
    for number, one in enumerate((call, store.begin("b"))):
        assert store.counters.out.total() == 0, number
        store.started(one)
        store.ended(one)
    del base, view
    got = store.unpack(kept, call)
    assert torch.equal(got, expected)
    assert (got.dtype, got.stride()) == (dtype, strides)
    assert store.counters.back.total() == 1


@pytest.mark.parametrize("kind", ["plain", "llama", "t5"])
def test_evaluation_leaves_nothing_behind(kind: str) -> None:
    model = Model() if kind == "plain" else build(kind)
    _, store = put_on(model.eval(), ["Block"] if kind == "plain" else None)

    def forward() -> Tensor:
        return model(torch.randn(4, 8)) if kind == "plain" else model(**batch(kind)).loss

    with torch.no_grad():
        forward()
    with torch.inference_mode():
        forward()
    assert store.counters.out.total() == 0
    for dropped in (False, True):
        loss = forward()
        assert offload_models.host_bytes(store) > 0
        if not dropped:
            loss.backward()
        del loss
        assert nothing_left(store)
    assert store.counters.out.total() > 3


@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("block", [0, 2, 3])
@pytest.mark.parametrize("policy", ["block", "offload"])
@pytest.mark.sampled(8)
def test_an_exception_gives_everything_back(where: str, block: int, policy: str) -> None:
    if (where, policy) == ("recompute", "offload"):
        pytest.skip("nothing is recomputed")

    model = Model()
    calls = 0
    at = {"forward": 1, "recompute": 2}.get(where, 0)

    def trip(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError("boom")
        return offload_models.Boom.apply(output) if where == "backward" else None

    x = torch.randn(4, 8)
    plain = grads(model, x)
    how = Policy(_POLICIES[policy], modules=("Block",))
    _, store = put_on(model, None, policy=how, copies=LateCopies())
    handle = model.blocks[block].up.register_forward_hook(trip)
    with pytest.raises(OSError, match="boom"):
        grads(model, x)
    handle.remove()
    gc.collect()
    assert not store._fetched, "before the next forward"
    assert nothing_left(store)
    assert equal(plain, grads(model, x))
    assert nothing_left(store)


def test_a_tensor_that_is_written_anew_after_its_copy_has_left_is_kept_anew() -> None:
    """The first block's recomputation uses the copy, the last one's the new values."""

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
