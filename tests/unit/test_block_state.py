"""State beside buffers: weights, attributes of modules, objects among a block's arguments."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_ckpt.activation import checkpoint
from ds_ckpt.activation.checkpoint import Call
from ds_ckpt.activation.snapshot import MOST, Attributes, Found, look, put_back
from ds_ckpt.errors import RecomputeError, UnsupportedError
from tests.unit.offload_models import put_on
from tests.unit.stacks import KINDS, Block, Stack, backward, data, put, results, same

# attributes of modules


class Replaced(nn.Module):
    """A number, a tensor that is assigned anew, a list, a dict, a generator; all are used."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = 0, torch.ones(16)
        self.seen: list[Tensor] = []
        self.last: dict[str, Tensor] = {}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen.append(x.detach().mean())
        before = self.last.get("x", torch.zeros(())) + sum(self.recent)
        self.last["x"] = x.detach().amax()
        self.recent.append(self.last["x"])
        noise = torch.rand(16, generator=self.generator)
        return torch.sin(x) * self.mean * self.calls * sum(self.seen) + noise * before * x.exp()


class Written(nn.Module):
    """A plain tensor that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x.exp() * self.mean.clone()


class Begins(nn.Module):
    """An attribute that the first forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = 1 + x.detach().std()
        else:
            self.scale = self.scale * 1.5
        return x.exp() * self.scale


class Tagged(nn.Module):
    """Reads what stands on its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.up(x) * getattr(x, "scale", 1.0) + getattr(x, "shift", 0.0))


def _tags(blocks: Any, x: Tensor) -> Tensor:
    for number, block in enumerate(blocks, 2):
        x = x * 1.0
        x.scale, x.shift = float(number), x.mean().exp()  # type: ignore[attr-defined]
        x = block(x)
    return x.square().sum()


class Adjacent(nn.Module):
    """A sparse attribute and a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.links = torch.eye(5).to_sparse()
        self.register_buffer("csr", (2 * torch.eye(5)).to_sparse_csr(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.csr @ (self.links @ self.up(x)))


class Statistics:
    """An object of the module's own."""

    def __init__(self) -> None:
        self.count, self.total = 1, torch.zeros(())


class Owns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        self.statistics.count += 1
        self.statistics.total = self.statistics.total + x.detach().mean()
        return x.exp() * self.statistics.count + self.statistics.total


class Decays(nn.Module):
    """A buffer that the forward writes to before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5)
        return torch.tanh(x) * self.mean.clone()


@KINDS
def test_attributes_of_arguments_are_there_again(kind: str) -> None:
    same(lambda: Stack(Tagged, _tags), kind)


class Skips(nn.Module):
    """Stochastic depth, begun with a forward that leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.forwards = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return torch.sin(self.up(x) if self.forwards % 2 == 0 else x * self.scale)


@KINDS
def test_a_block_may_leave_its_work_out(kind: str) -> None:
    same(lambda: Stack(Skips), kind)


class Holds(nn.Module):
    """Takes its input from an object or a parameter; a buffer is on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("elsewhere", torch.empty(2, device="meta"), persistent=False)

    def forward(self, given: Any) -> Tensor:
        return torch.sin(self.up(getattr(given, "x", given)))


@pytest.mark.parametrize("wrap", [nn.Parameter, lambda x: types.SimpleNamespace(x=x)])
def test_random_states_are_kept_of_where_parameters_and_objects_lie(
    wrap: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps those of where the tensors lie that it is given."""
    seen = []

    def spied(function: Any, *given: Tensor, **options: Any) -> Any:
        seen.append({tensor.device.type for tensor in given})
        return torch_checkpoint(function, *(t for t in given if not t.is_meta), **options)

    monkeypatch.setattr(checkpoint, "checkpoint", spied)
    model = Stack(Holds, lambda blocks, x: sum(b(wrap(x)).sum() for b in blocks))
    assert put(model, "block")()
    model(data()).backward()
    assert seen == [{"meta"}] * 3


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@KINDS
def test_sparse_state_is_no_obstacle(kind: str) -> None:
    same(lambda: Stack(Adjacent), kind)


@KINDS
def test_each_of_two_backwards_begins_where_the_forward_did(kind: str) -> None:
    def twice(model: nn.Module) -> list[Tensor]:
        loss = model(data())
        loss.backward(retain_graph=True)
        loss.backward()
        return []

    same(lambda: Stack(lambda: Block(Decays())), kind, twice)


@KINDS
@pytest.mark.parametrize("inner", [Replaced, Written, Begins, Owns])
def test_attributes_are_changed_once(inner: type[nn.Module], kind: str) -> None:
    same(lambda: Stack(lambda: Block(inner())), kind)


def test_attributes_of_a_model_are_what_they_are_without_checkpointing() -> None:
    models = [Stack(lambda: Block(Replaced())) for _ in range(2)]
    put(models[1], "block")
    for model in models:
        results(model, lambda m: [m(data())] if m(data()).backward() is None else [])
    plain, ours = (m.blocks[1].inner for m in models)
    assert plain.calls == ours.calls == 6
    assert len(plain.seen) == len(ours.seen) == 6
    assert torch.equal(plain.mean, ours.mean)
    assert torch.equal(plain.generator.get_state(), ours.generator.get_state())


class Auxiliary(Block):
    """Leaves a loss on itself, as routers of experts do."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        y = torch.tanh(self.up(x))
        self.auxiliary = y.square().mean()
        return x + self.down(y)


def _with_auxiliary(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    total: Tensor = x.sum() + sum(block.auxiliary for block in blocks)
    return total


@KINDS
def test_a_loss_left_on_the_module_is_the_forwards(kind: str) -> None:
    same(lambda: Stack(lambda: Auxiliary(torch.tanh), _with_auxiliary), kind)


def test_what_a_recompute_leaves_on_a_module_goes_with_it() -> None:
    """Else every block's inner activations would stay until the next forward."""
    made: list[weakref.ref[Tensor]] = []

    class Noted(Auxiliary):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            y = super().forward(x)
            made.append(weakref.ref(self.auxiliary))
            return torch.sin(y)

    model = Stack(lambda: Noted(torch.tanh), _with_auxiliary)
    put(model, "block")
    model(data()).backward()
    assert len(made) == 6
    gc.collect()
    assert [ref() is not None for ref in made] == [True] * 3 + [False] * 3


def test_a_tensor_that_is_written_later_is_refused_by_name() -> None:
    class Later(Written):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) if self.calls > 1 else x.exp() * self.mean

    model = Stack(lambda: Block(Later()))
    put(model, "block")
    model(data()).backward()
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found a tensor in Later\.mean, change"):
        model(data())


def test_former_steps_are_not_held_by_what_attributes_were() -> None:
    class Keeps(Block):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            self.before = torch.sin(super().forward(x))
            return self.before

    model = Stack(lambda: Keeps(torch.tanh))
    put(model, "block")
    values: list[weakref.ref[Tensor]] = []
    for _ in range(4):
        model(data())  # and no backward
        values.append(weakref.ref(model.blocks[0].before))
    gc.collect()
    assert [v() is not None for v in values] == [False] * 3 + [True]
    calls = [c for c in gc.get_objects() if isinstance(c, Call)]
    assert len(calls) <= 3


@KINDS
@pytest.mark.parametrize(
    ("fresh", "fill"),
    [
        (list, list.append),
        (dict, lambda held, value: held.update(value=value)),
        (set, set.add),
        (lambda: deque(maxlen=3), deque.append),
    ],
)
@pytest.mark.parametrize("backward", [True, False])
def test_former_steps_are_not_held_by_what_a_list_on_a_block_held(
    fresh: Callable[[], Any], fill: Callable[[Any, Tensor], Any], backward: bool, kind: str
) -> None:
    """Routers of experts leave their losses there, and not every step uses them."""
    left: list[weakref.ref[Tensor]] = []

    class Fills(Block):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            y = super().forward(x)
            fill(self.losses, torch.sin(y).mean())
            return y

    model = Stack(lambda: Fills(torch.tanh))
    put(model, kind)
    for _ in range(4):
        for block in model.blocks:
            block.losses = fresh()
        loss = model(data())
        if backward:
            loss.backward()
        del loss
        (held,) = {*_values(model.blocks[0].losses)}
        left.append(weakref.ref(held))
        del held
    gc.collect()
    assert [ref() is not None for ref in left] == [False] * 3 + [True]
    for block in model.blocks:
        block.losses.clear()


def _values(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)


@KINDS
def test_a_list_that_blocks_fill_and_read_is_right(kind: str) -> None:
    """Each reads what was there before it; one list is in two places of a block."""

    class Reads(Block):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.seen: list[Tensor] = []
            self.again, self.nested = self.seen, {"list": [0.5]}
            self.shared: list[float] = []
            self.holder = types.SimpleNamespace(shared=self.shared)

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            self.shared.append(1.0)
            x = x * len(self.holder.shared)
            x = x * (1 + sum(self.again, torch.zeros(())) * self.nested["list"][-1])
            self.seen.append(x.detach().square().mean())
            self.nested["list"].append(0.9 * len(self.seen))
            return super().forward(x)

    same(lambda: Stack(Reads), kind)


# what is changed between a forward and its backward


@KINDS
@pytest.mark.parametrize("frozen", [True, False])
def test_weights_that_are_frozen_or_unfrozen_before_backward(frozen: bool, kind: str) -> None:
    """As many rows as columns: what autograd has saved has the same shape either way."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    def step(model: nn.Module) -> list[Tensor | None]:
        for parameter in model.parameters():
            parameter.grad = None
        model.requires_grad_(not frozen)
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = model(x)
        model.requires_grad_(frozen)
        loss.backward()
        assert all(p.requires_grad is frozen for p in model.parameters())
        return [x.grad]

    same(lambda: Stack(Square), kind, step)


class Reads(nn.Module):
    """Reads of its own all that can be new in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.terms, self.names = 1.5, [0.5], {"a": 1.0}
        self.register_buffer("offset", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        own = self.factor * sum(self.terms) * self.names["a"] * getattr(self, "more", 1)
        return x.exp() * own * (2 if self.training else 3) + self.offset * x.sin()


NEWS: dict[str, Callable[[Any], object]] = {
    "assigned": lambda m: setattr(m, "factor", m.factor + 1),
    "added": lambda m: setattr(m, "more", getattr(m, "more", 1) + 1),
    "in another's place": lambda m: setattr(m, "named", vars(m).pop("names")),
    "in a list": lambda m: m.terms.append(0.25),
    "in a list's place": lambda m: m.terms.__setitem__(0, m.terms[0] + 1),
    "another key": lambda m: m.names.update(b=m.names.pop("a")),
    "mode": lambda m: m.train(not m.training),
    "buffer": lambda m: setattr(m, "offset", m.offset * 2),
}


@pytest.mark.parametrize("news", NEWS)
@KINDS
def test_what_is_new_on_a_block_before_its_backward_is_taken_back(news: str, kind: str) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        parts = [part for part in model.modules() if isinstance(part, Reads)]
        loss = model(data())
        for part in parts:
            NEWS[news](part)
        now = [(dict(vars(p)), list(p.terms), dict(p._buffers)) for p in parts]
        loss.backward()
        assert [(vars(p), p.terms, p._buffers) for p in parts] == now
        return [loss.detach()]

    same(lambda: Stack(lambda: Block(Reads())), kind, step, steps=1)


class Gathers(nn.Module):
    """A buffer that takes over the graph in which it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.sums = self.sums.detach()
        self.sums.add_(x.mean(0))
        return x.exp()


def _calls() -> int:
    return sum(type(thing) is Call for thing in gc.get_objects())


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_a_graph_that_a_buffer_took_over_goes_with_it(kind: str) -> None:
    gc.collect()
    before, model = _calls(), Stack(lambda: Block(Gathers()))
    put(model, kind)
    for _ in range(3):
        loss = model(data())
        loss.backward()
    for block in model.blocks:
        assert block.inner.sums.grad_fn is not None  # type: ignore[union-attr]
        block.inner.sums = torch.zeros(16)  # type: ignore[union-attr]
    del loss
    assert _calls() == before


# objects among the arguments


class State:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Slotted:
    __slots__ = ("extra", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclasses.dataclass
class Record:
    value: Tensor
    inner: Any = None


class Shelf(dict[str, Any]):
    """A dict of a class that nobody knows."""


KINDS_OF_STATE: list[Callable[[Tensor], Any]] = [
    State,
    Slotted,
    lambda x: types.SimpleNamespace(value=x),
    lambda x: Record(torch.ones(1), State(x)),
    lambda x: {"deep": [State(x)]},
]


def _inner(state: Any) -> Any:
    if isinstance(state, dict):
        return state["deep"][0]
    return state.inner if isinstance(state, Record) else state


class Updates(Block):
    """Reads its state and puts its result there."""

    def forward(self, state: Any, *_: Any) -> None:
        own = _inner(state)
        own.value = torch.sin(super().forward(own.value))


@KINDS
@pytest.mark.parametrize("make", KINDS_OF_STATE)
def test_a_block_that_replaces_the_tensors_of_an_object(
    make: Callable[[Tensor], Any], kind: str
) -> None:
    def join(blocks: Any, x: Tensor) -> Tensor:
        state = make(x)
        for block in blocks:
            block(state)
        return _inner(state).value.sum()  # type: ignore[no-any-return]

    same(lambda: Stack(lambda: Updates(torch.tanh), join), kind)


@KINDS
@pytest.mark.parametrize("make", [*KINDS_OF_STATE[:3], lambda x: Shelf(value=x), lambda x: [x]])
def test_an_object_that_the_model_changes_after_the_block(
    make: Callable[[Tensor], Any], kind: str
) -> None:
    """Its tensor needs a gradient, and another takes its place."""

    def read(x: Tensor, state: Any) -> Tensor:
        if isinstance(state, list | dict):
            return x * state["value" if isinstance(state, dict) else 0]  # type: ignore[call-overload]
        return x * state.value

    def join(blocks: Any, x: Tensor) -> Tensor:
        state = make(torch.tanh(blocks[0].up(x)))
        for block in blocks:
            x = block(x, state)
            if isinstance(state, list):
                state[0] = state[0] * 2
            elif isinstance(state, dict):
                state["value"] = state["value"] * 2
            else:
                state.value = state.value * 2
        return x.square().sum()

    same(lambda: Stack(lambda: Block(read), join), kind)


@pytest.mark.parametrize("hide", [State, lambda x: Record(x)])
def test_tensors_in_unknown_objects_are_right_and_stay_on_the_device(hide: Any) -> None:
    def join(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, hide(torch.sin(x)))
        return x.sum()

    def make() -> Stack:
        return Stack(lambda: Block(lambda y, state: y * state.value.mean()), join)

    same(make, "offload")
    model = make()
    _, store = put_on(model, ["Block"])
    model(data()).backward()
    boundary = data().nbytes
    for index in (0, 1):
        moved = store.counters.out_bytes[f"blocks.{index}"]
        assert moved == boundary


@pytest.mark.parametrize("where", ["block", "model"])
def test_a_tensor_in_an_object_that_is_changed_in_place_is_refused(where: str) -> None:
    def read(x: Tensor, state: State) -> Tensor:
        y = x * state.value.clone()
        if where == "block":
            state.value.mul_(2)
        return y

    def join(blocks: Any, x: Tensor) -> Tensor:
        state = State(torch.full((1,), 0.5))
        for block in blocks:
            x = block(x, state)
            if where == "model":
                state.value.mul_(2)
        return x.square().sum()

    model = Stack(lambda: Block(read), join)
    put(model, "block")
    with pytest.raises(UnsupportedError, match=r"blocks\.\d: found a tensor in a State, changed"):
        model(data()).backward()


@pytest.mark.parametrize(
    ("hold", "get"),
    [
        (lambda t: argparse.Namespace(value=t), lambda held: held.value),
        (lambda t: UserDict(value=t), lambda held: held["value"]),
        (lambda t: UserList([t]), lambda held: held[0]),
        (lambda t: ChainMap({}, {"value": t}), lambda held: held["value"]),
        (lambda t: torch.distributions.Normal(t, 1.0), lambda held: held.loc),
    ],
    ids=["Namespace", "UserDict", "UserList", "ChainMap", "Normal"],
)
@KINDS
def test_a_tensor_in_a_container_of_pythons_or_torchs_that_is_changed_in_place_is_refused(
    hold: Callable[[Tensor], Any], get: Callable[[Any], Tensor], kind: str
) -> None:
    def join(blocks: Any, x: Tensor) -> Tensor:
        value = torch.full((16,), 0.5)
        for block in blocks:
            x = block(x, hold(value))
        value.mul_(3)
        return x.square().sum()

    model = Stack(lambda: Block(lambda y, held: y + get(held)), join)
    put(model, kind)
    loss = model(data())
    with pytest.raises(UnsupportedError, match=r"blocks\.\d: found a tensor in a \w+, changed"):
        loss.backward()


@KINDS
def test_an_object_that_is_replaced_before_each_step_is_changed_once(kind: str) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        owners = [part for part in model.modules() if isinstance(part, Owns)]
        for owner in owners:
            owner.statistics = Statistics()
        loss = model(data())
        loss.backward()
        return [loss.detach(), *(owner.statistics.total for owner in owners)]

    same(lambda: Stack(lambda: Block(Owns())), kind, step)


@KINDS
def test_an_object_that_is_changed_in_training_alone_is_changed_once(kind: str) -> None:
    class InTraining(Owns):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x.exp() * self.statistics.count

    def step(model: nn.Module) -> list[Tensor]:
        for training in (False, True, False, True):
            model.train(training)
            model(data()).backward()
        counts = [part.statistics.count for part in model.modules() if isinstance(part, Owns)]
        return [torch.tensor(counts)]

    same(lambda: Stack(lambda: Block(InTraining())), kind, step)


@KINDS
def test_spectral_norm_after_an_evaluation_with_gradients(kind: str) -> None:
    """Its power iteration writes to buffers in training alone."""

    def step(model: nn.Module) -> list[Tensor]:
        for training in (False, True):
            model.train(training)
            model(data()).backward()
        return []

    def make() -> Stack:
        normed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        return Stack(lambda: Block(normed))

    same(make, kind, step)


@KINDS
def test_a_dictionary_of_pythons_on_a_block_is_counted_up_once(kind: str) -> None:
    class Counts(Block):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.counts = UserDict(calls=0)

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            self.counts["calls"] += 1
            return super().forward(x * self.counts["calls"])

    same(lambda: Stack(Counts), kind)


def test_an_iterator_is_refused() -> None:
    def join(blocks: Any, x: Tensor) -> Tensor:
        return blocks[0](x, iter([x.mean()])).sum()  # type: ignore[no-any-return]

    model = Stack(lambda: Block(lambda x, values: x * next(values)), join)
    put(model, "block")
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found a list_iterator among the block"):
        model(data())


@KINDS
def test_a_generator_among_the_arguments_starts_again(kind: str) -> None:
    def join(blocks: Any, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        for block in blocks:
            x = block(x, {"of": [generator]})
        return x.square().sum() * torch.rand(1, generator=generator)[0]

    def noise(x: Tensor, of: Any) -> Tensor:
        return x * torch.rand(16, generator=of["of"][0])

    same(lambda: Stack(lambda: Block(noise), join), kind)


@KINDS
def test_a_generator_goes_on_as_without_checkpointing(kind: str) -> None:
    """The next step draws what comes after the forward's numbers, whatever was drawn again."""

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(4)

        def forward(self, x: Tensor, given: torch.Generator) -> Tensor:
            return x * torch.rand(16, generator=given) + torch.rand(16, generator=self.generator)

    given: list[torch.Generator] = []

    def make() -> Stack:
        given[:] = [torch.Generator().manual_seed(5)]
        return Stack(lambda: Block(Draws()), join)

    def join(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, given[0])
        return x.square().sum()

    def step(model: nn.Module) -> list[Tensor]:
        backward(model)
        own = [m.generator for m in model.modules() if isinstance(m, Draws)]
        return [generator.get_state() for generator in (*given, *own)]

    same(make, kind, step)


# weights


@KINDS
@pytest.mark.parametrize("weight", ["blocks.1.up.weight", "blocks.1.down.bias"])
def test_a_weight_that_is_changed_before_backward_is_refused(weight: str, kind: str) -> None:
    model = Stack(lambda: Block(torch.tanh))
    put(model, kind)
    model(data()).backward()
    loss = model(data())
    with torch.no_grad():
        model.get_parameter(weight).mul_(2)
    with pytest.raises(UnsupportedError, match=r"blocks\.1: found the weight Linear\."):
        loss.backward()
    model(data()).backward()


def _weight_changed_below_frozen_ones(make: Callable[[], nn.Module], name: str, match: str) -> None:
    model = Stack(make, lambda blocks, x: blocks[1](x).sum())
    model.requires_grad_(False)
    put(model, "block")
    loss = model(data().requires_grad_())
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    with pytest.raises(UnsupportedError, match=match):
        loss.backward()


def test_a_weight_is_refused_too_where_autograd_saves_a_view_of_it_alone() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    _weight_changed_below_frozen_ones(
        Product, "blocks.1.linear.weight", r"blocks\.1: found the weight"
    )


def test_a_weight_is_refused_too_where_nothing_is_recomputed() -> None:
    calls = []

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x * self.weight

    _weight_changed_below_frozen_ones(
        Scaled, "blocks.1.weight", r"blocks\.1: found the weight 8 float32, changed in place"
    )
    assert len(calls) == 1


@KINDS
def test_weights_given_by_functional_call(kind: str) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        given = {name: p * 1.5 for name, p in model.named_parameters()}
        torch.func.functional_call(model, given, (data(),)).backward()
        return []

    same(lambda: Stack(lambda: Block(torch.tanh)), kind, step)


class LeftError(Exception):
    """Carries a tensor out of a forward."""


class Leaves(nn.Module):
    """Shows a tensor around and is then left by an exception."""

    def forward(self, x: Tensor) -> Tensor:
        raise LeftError(x.sin().sum())


@KINDS
def test_a_tensor_of_a_forward_that_an_exception_has_ended(kind: str) -> None:
    model = Stack(lambda: Block(Leaves()))
    put(model, kind)
    with pytest.raises(LeftError) as caught:
        model(data())
    with pytest.raises(UnsupportedError, match=r"blocks\.0.*: found a backward through a forward"):
        caught.value.args[0].backward()


class Offset(nn.Module):
    """A buffer that it does not change, and of which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.offset)


@KINDS
def test_buffers_given_by_functional_call(kind: str) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        given = {name: b * 3 for name, b in model.named_buffers()}
        before = [b.clone() for b in model.buffers()]
        torch.func.functional_call(model, given, (data(),)).backward()
        assert all(torch.equal(b, now) for b, now in zip(before, model.buffers(), strict=True))
        return []

    same(lambda: Stack(lambda: Block(Offset())), kind, step)


@KINDS
def test_a_buffer_that_is_replaced_before_backward(kind: str) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        loss = model(data())
        for part in model.modules():
            if isinstance(part, Offset):
                part.offset = part.offset * 2
        loss.backward()
        return [b.clone() for b in model.buffers()]

    same(lambda: Stack(lambda: Block(Offset())), kind, step)


@KINDS
def test_a_buffer_that_is_changed_in_place_before_backward_is_refused(kind: str) -> None:
    model = Stack(lambda: Block(Offset()))
    put(model, kind)
    loss = model(data())
    for part in model.modules():
        if isinstance(part, Offset):
            part.offset.mul_(2)
    with pytest.raises(UnsupportedError, match=r"blocks\.\d.*: found the buffer Offset\.offset"):
        loss.backward()


@KINDS
def test_work_in_place_after_autograd_has_saved_is_refused(kind: str) -> None:
    """torch refuses it by itself; behind saved-tensor hooks it looks at no versions."""

    def inner(x: Tensor) -> Tensor:
        y = x.exp()
        y.mul_(2)
        return torch.sin(y)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Stack(lambda: Block(inner))(data()).backward()
    model = Stack(lambda: Block(inner))
    put(model, kind)
    with pytest.raises((UnsupportedError, RecomputeError), match=r"blocks\.2: found a tensor \(5x"):
        model(data()).backward()


# how holders are looked into


@pytest.mark.parametrize(
    ("holder", "change"),
    [
        ([1, 2], lambda h: h.append(3)),
        ({"a": 1}, lambda h: h.update(b=2)),
        ({1, 2}, lambda h: h.remove(1)),
        (deque([1], maxlen=1), lambda h: h.append(2)),
        (State(torch.ones(1)), lambda h: setattr(h, "value", 2)),
        (State(torch.ones(1)), lambda h: delattr(h, "value")),
        (State(torch.ones(1)), lambda h: setattr(h, "more", 2)),
        (Slotted(torch.ones(1)), lambda h: setattr(h, "extra", 2)),
        (Slotted(torch.ones(1)), lambda h: delattr(h, "value")),
    ],
)
def test_what_a_holder_held_can_be_put_back(holder: Any, change: Callable[[Any], Any]) -> None:
    before = look(holder)
    change(holder)
    assert look(holder) != before
    put_back(holder, before)
    assert look(holder) == before


def test_deepspeeds_bookkeeping_on_modules_is_let_be() -> None:
    module = nn.Linear(1, 1)
    module.ds_grads_remaining = 1  # type: ignore[assignment]
    module.own = 1  # type: ignore[assignment]
    names = {"own", "in_features", "out_features", "training", "weight", "bias"}
    assert set(Attributes([module]).names) == names


def test_who_hands_a_data_set_to_a_block_is_told(caplog: pytest.LogCaptureFixture) -> None:
    many = State([State(n) for n in range(2 * MOST)])  # type: ignore[arg-type]
    assert len(Found([many]).holders) <= MOST
    assert "not looked through" in caplog.text
    ring = State(torch.ones(1))
    ring.value = ring  # type: ignore[assignment]
    assert Found([ring, ring, itertools]).holders == [ring]
