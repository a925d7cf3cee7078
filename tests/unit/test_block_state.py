"""State around a recomputation: modules x kinds to the bit, and refusals by name."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings, checkpoint
from ds_ckpt.activation.checkpoint import Call
from ds_ckpt.activation.snapshot import MAX_OBJECTS, UnrestoredState, _owners
from ds_ckpt.errors import RecomputeError, UnsupportedError
from tests.unit.stacks import KINDS, Block, Stack, backward, data, put, results, same

Inner = Callable[[Any, Tensor], Tensor]


class Stateful(nn.Module):
    """A module with all kinds of state; `use` reads and changes some of it."""

    def __init__(self, use: Inner) -> None:
        super().__init__()
        self.use = use
        self.calls, self.plain = 0, torch.ones(16)
        self.seen: list[Tensor] = []
        self.alias, self.nested = self.seen, {"list": [0.5]}
        self.last: dict[str, Tensor] = {}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("mean", torch.ones(16))
        self.register_buffer("lazy", None)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def _plain_attributes(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    m.plain = 0.9 * m.plain + 0.1 * x.detach().mean(0)
    return torch.sin(x) * m.plain * m.calls


def _containers(m: Any, x: Tensor) -> Tensor:
    m.seen.append(x.detach().square().mean())
    m.nested["list"].append(0.9 * len(m.alias))
    before = m.last.get("x", torch.zeros(())) + sum(m.recent) + m.nested["list"][-1]
    m.last["x"] = x.detach().amax()
    m.recent.append(m.last["x"])
    return torch.sin(x) * sum(m.seen) + before * x.exp()


def _generator(m: Any, x: Tensor) -> Tensor:
    return torch.sin(x * torch.rand(16, generator=m.generator))


def _written(m: Any, x: Tensor) -> Tensor:
    m.plain.mul_(0.9).add_(0.1 * x.detach().mean(0))
    m.steps += 1
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    with torch.no_grad():
        m.mean.mul_(0.5)
    return x.exp() * m.plain.clone() * m.steps + m.mean


def _begins(m: Any, x: Tensor) -> Tensor:
    m.scale = getattr(m, "scale", 1.0) * 1.5
    mean = x.detach().mean(0)
    m.lazy = mean if m.lazy is None else 0.5 * m.lazy + 0.5 * mean
    if "ema" not in m._buffers:
        m.register_buffer("ema", torch.zeros(16))
    m.ema = 0.5 * m.ema + 0.5 * mean
    return x.exp() * m.scale * m.lazy + m.ema


def _leaves_work_out(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return torch.sin(m.linear(x) if m.calls % 2 == 0 else x * m.linear.bias)


def _noise_in_training(m: Any, x: Tensor) -> Tensor:
    return x + 0.5 * torch.randn_like(x) if m.training else x


class Adjacent(nn.Module):
    """A sparse attribute and a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.links = torch.eye(5).to_sparse()
        self.register_buffer("csr", (2 * torch.eye(5)).to_sparse_csr(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.csr @ (self.links @ self.up(x)))


def _of(use: Inner) -> Callable[[], Stack]:
    return lambda: Stack(lambda: Block(Stateful(use)))


def _around(make: Callable[[], nn.Module]) -> Callable[[], Stack]:
    return lambda: Stack(lambda: Block(make()))


NORMED = nn.utils.parametrizations.spectral_norm
MODULES: dict[str, Callable[[], Stack]] = {
    **{use.__name__[1:]: _of(use) for use in (_plain_attributes, _containers, _generator)},
    **{use.__name__[1:]: _of(use) for use in (_written, _begins, _leaves_work_out)},
    "noise": _of(_noise_in_training),
    "sparse": lambda: Stack(Adjacent),
    "batch norm": _around(lambda: nn.BatchNorm1d(16)),
    "cumulative batch norm": _around(lambda: nn.BatchNorm1d(16, momentum=None)),
    "spectral norm": _around(lambda: NORMED(nn.Linear(16, 16))),
    "instance norm": _around(
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
        )
    ),
}


def _twice(model: nn.Module) -> list[Tensor]:
    loss = model(data())
    loss.backward(retain_graph=True)
    loss.backward()
    return [torch.get_rng_state()]


def _evaluation_before_backward(model: nn.Module) -> list[Tensor]:
    loss = model.train()(data())
    model.eval()
    loss.backward()
    assert not any(part.training for part in model.modules())
    return [loss.detach()]


def _in_both_modes(model: nn.Module) -> list[Tensor]:
    for training in (False, True):
        model.train(training)
        model(data()).backward()
    return []


def _functional_call(model: nn.Module) -> list[Tensor]:
    given = {name: p * 1.5 for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (data(),)).backward()
    return []


def _frozen_before_backward(model: nn.Module) -> list[Tensor | None]:
    x = data().requires_grad_()
    loss = model(x)
    model.requires_grad_(False)
    loss.backward()
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    return [x.grad]


STEPS: list[Callable[[nn.Module], Sequence[Tensor | None]]] = [backward, _twice]
STEPS += [_evaluation_before_backward, _in_both_modes]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("module", MODULES)
@KINDS
def test_state_is_changed_once(module: str, step: Any, kind: str) -> None:
    same(MODULES[module], kind, step, steps=2 if step is _twice else 3)


@pytest.mark.parametrize("step", [_functional_call, _frozen_before_backward])
@KINDS
def test_weights_are_those_of_the_forward(step: Any, kind: str) -> None:
    same(lambda: Stack(lambda: Block(torch.tanh)), kind, step)


class Reads(nn.Module):
    """Reads state that its owner changes before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.terms, self.names = 1.5, [0.5], {"a": 1.0}
        self.register_buffer("offset", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        own = self.factor * sum(self.terms) * self.names["a"] * getattr(self, "more", 1)
        return x.exp() * own * (2 if self.training else 3) + self.offset * x.sin()


CHANGES: dict[str, Callable[[Any], object]] = {
    "assigned": lambda m: setattr(m, "factor", m.factor + 1),
    "added": lambda m: setattr(m, "more", getattr(m, "more", 1) + 1),
    "in another's place": lambda m: setattr(m, "named", vars(m).pop("names")),
    "in a list": lambda m: m.terms.append(0.25),
    "another key": lambda m: m.names.update(b=m.names.pop("a")),
    "buffer": lambda m: setattr(m, "offset", m.offset * 2),
}


@pytest.mark.parametrize("change", CHANGES)
@KINDS
def test_changes_before_backward_do_not_reach_the_recomputation(change: str, kind: str) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        parts = [part for part in model.modules() if isinstance(part, Reads)]
        loss = model(data())
        for part in parts:
            CHANGES[change](part)
        now = [(dict(vars(p)), list(p.terms), dict(p._buffers)) for p in parts]
        loss.backward()
        assert [(vars(p), p.terms, p._buffers) for p in parts] == now
        return [loss.detach()]

    same(lambda: Stack(lambda: Block(Reads())), kind, step, steps=1)


class Auxiliary(Block):
    """Leaves a loss on itself and in a list, as routers of experts do."""

    def __init__(self, made: list[weakref.ref[Tensor]] | None = None) -> None:
        super().__init__(torch.tanh)
        self.losses: list[Tensor] = []
        self.made = made if made is not None else []

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        y = torch.tanh(self.up(x))
        self.auxiliary = y.square().mean()
        self.losses.append(torch.sin(y).mean())
        vars(self)["made"].append(weakref.ref(self.auxiliary))
        return torch.sin(x + self.down(y))


def _with_auxiliary(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        block.losses = []
        x = block(x)
    total: Tensor = x.sum() + sum(block.auxiliary + block.losses[0] for block in blocks)
    return total


@KINDS
def test_a_loss_left_on_the_module_is_the_forwards(kind: str) -> None:
    same(lambda: Stack(Auxiliary, _with_auxiliary), kind)


@pytest.mark.parametrize("with_backward", [True, False])
@KINDS
def test_former_steps_are_not_held_by_what_a_block_keeps(kind: str, with_backward: bool) -> None:
    """Results on a module or in its list reference a graph, which must not lead back to them."""
    model = Stack(Auxiliary)
    put(model, kind)
    left: list[weakref.ref[Tensor]] = []
    for _ in range(4):
        for block in model.blocks:
            block.losses = []
        loss = model(data())
        if with_backward:
            loss.backward()
        left.append(weakref.ref(model.blocks[0].losses[0]))
        del loss
    gc.collect()
    assert [ref() is not None for ref in left] == [False] * 3 + [True]


# arguments


class State:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclasses.dataclass
class Record:
    value: Tensor
    inner: Any = None


class Cache:
    """As transformers' caches: a list of layers with keys and values."""

    def __init__(self, value: Tensor) -> None:
        self.layers = [State(value)]


STATES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "object": (State, lambda s: s),
    "namespace": (lambda x: types.SimpleNamespace(value=x), lambda s: s),
    "nested": (lambda x: Record(torch.ones(1), State(x)), lambda s: s.inner),
    "dict": (lambda x: {"deep": [State(x)]}, lambda s: s["deep"][0]),
    "cache": (Cache, lambda s: s.layers[0]),
}


@KINDS
@pytest.mark.parametrize("state", STATES)
def test_a_block_that_replaces_the_tensors_of_an_object(state: str, kind: str) -> None:
    make, inner = STATES[state]

    class Updates(Block):
        def forward(self, state: Any, *_: Any) -> None:
            own = inner(state)
            own.value = torch.sin(super().forward(own.value))

    def join(blocks: Any, x: Tensor) -> Tensor:
        state = make(x)
        for block in blocks:
            block(state)
        return inner(state).value.sum()  # type: ignore[no-any-return]

    same(lambda: Stack(lambda: Updates(torch.tanh), join), kind)


@KINDS
@pytest.mark.parametrize("make", [dict, UserDict])
def test_keys_and_values_that_blocks_share(make: Callable[[], Any], kind: str) -> None:
    """As in Gemma: a block leaves keys and values for others in a dictionary."""

    class Shares(Block):
        def forward(self, x: Tensor, shared: Any, *_: Any) -> Tensor:
            if "kv" not in shared:
                shared["kv"] = torch.tanh(self.up(x)), x * 2
            key, value = shared["kv"]
            shared["count"] = shared.get("count", 0) + 1
            return super().forward(x) * key.mean() * shared["count"] + value.sin()

    def join(blocks: Any, x: Tensor) -> Tensor:
        shared = make()
        for block in blocks:
            x = block(x, shared)
        assert shared["count"] == len(blocks)
        return x.square().sum() + shared["kv"][0].sum()

    same(lambda: Stack(lambda: Shares(torch.tanh), join), kind)


@KINDS
@pytest.mark.parametrize("make", [State, lambda x: types.SimpleNamespace(value=x), Record])
def test_an_object_that_the_model_changes_after_the_block(make: Any, kind: str) -> None:
    def join(blocks: Any, x: Tensor) -> Tensor:
        state = make(torch.tanh(blocks[0].up(x)))
        for block in blocks:
            x = block(x, state)
            state.value = state.value * 2
        return x.square().sum()

    same(lambda: Stack(lambda: Block(lambda x, state: x * state.value), join), kind)


@KINDS
def test_a_generator_goes_on_as_without_checkpointing(kind: str) -> None:
    """Among the arguments, also in a container; the next step draws what follows the forward."""
    given: list[torch.Generator] = []

    def noise(x: Tensor, own: torch.Generator, of: Any) -> Tensor:
        return x * torch.rand(16, generator=own) + torch.rand(16, generator=of["of"][0])

    def join(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, given[0], {"of": [given[0]]})
        return x.square().sum()

    def make() -> Stack:
        given[:] = [torch.Generator().manual_seed(5)]
        return Stack(lambda: Block(noise), join)

    def step(model: nn.Module) -> list[Tensor]:
        backward(model)
        return [given[0].get_state()]

    same(make, kind, step)


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


# refused, by name


def _later(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    if m.calls > 1:
        m.steps += 1
    return x * m.steps.clone()


def _later_attribute(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    if m.calls > 1:
        m.plain.mul_(2)
    return x.exp() * m.plain.clone()


def _changes_its_argument(x: Tensor) -> Tensor:
    return x.mul_(2)


def _works_in_place(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(2)
    return torch.sin(y)


def _gradient_inside(x: Tensor) -> Tensor:
    return torch.autograd.grad(x.exp().tanh().sum(), x)[0]


class SavesTwice(torch.autograd.Function):
    """Unpacks its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 2
        return gradient * ctx.saved_tensors[1]


def _object(where: str) -> Callable[[], Stack]:
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

    return lambda: Stack(lambda: Block(read), join)


def _argument_changed_later(blocks: Any, x: Tensor) -> Tensor:
    x = x * 1
    y = blocks[0](x)
    x += 1
    return blocks[1](y + x).sum()  # type: ignore[no-any-return]


def _iterator(blocks: Any, x: Tensor) -> Tensor:
    return blocks[0](x, iter([x.mean()])).sum()  # type: ignore[no-any-return]


def _change(name: str) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        loss = model(data())
        with torch.no_grad():
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            tensors[name].mul_(2)
        loss.backward()

    return step


def _removed(model: Any) -> None:
    loss = model(data())
    model.checkpointed.remove()
    loss.backward()


def _left_by_an_exception(model: Any) -> None:
    try:
        model(data())
    except KeyError as error:
        error.args[0].backward()


def _raises(x: Tensor) -> Tensor:
    raise KeyError(x.sin().sum())


class InPlace(Block):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        y = x * 1
        x += self.down(torch.tanh(self.up(y)))
        return x


REFUSED: dict[str, tuple[Callable[[], Stack], Any, str]] = {
    "buffer written later": (_of(_later), backward, "the buffer Stateful.steps, changed by this"),
    "attribute written later": (_of(_later_attribute), backward, "a tensor in Stateful.plain, cha"),
    "argument changed by the block": (
        lambda: Stack(lambda: InPlace(nn.Identity()), lambda b, x: b[0](x * 1).sum()),
        backward,
        "its forward changes its argument tensor 1",
    ),
    "argument changed after the block": (
        lambda: Stack(lambda: Block(nn.Identity()), _argument_changed_later),
        backward,
        "an argument that was changed in place|an input that was changed in place",
    ),
    "weight": (_of(_generator), _change("blocks.1.up.weight"), "the weight Linear.weight"),
    "buffer": (
        _of(lambda m, x: torch.sin(x + m.mean)),
        _change("blocks.1.inner.mean"),
        "the buffer Stateful.mean, changed in place between",
    ),
    "object, by the block": (_object("block"), backward, "a tensor in a State, changed in place"),
    "object, by the model": (_object("model"), backward, "a tensor in a State, changed in place"),
    "saved tensor": (_around(lambda: _Calls(_works_in_place)), backward, r"a tensor \(5x16"),
    "iterator": (lambda: Stack(lambda: Block(torch.tanh), _iterator), backward, "a list_iterator"),
    "gradient inside": (_around(lambda: _Calls(_gradient_inside)), backward, "has not ended"),
    "exception": (_around(lambda: _Calls(_raises)), _left_by_an_exception, "ended with an exc"),
    "unpacked twice": (_around(lambda: _Calls(SavesTwice.apply)), backward, "asks for twice"),
    "removed": (_of(_generator), _removed, "checkpointing that was removed"),
}


class _Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("what", REFUSED)
@KINDS
def test_refused_with_the_blocks_name(what: str, kind: str) -> None:
    make, step, words = REFUSED[what]
    model = make()
    put(model, kind)
    with pytest.raises((UnsupportedError, RecomputeError), match=rf"blocks\.\d.*: found .*{words}"):
        results(model, lambda m: step(m) or [])


@pytest.mark.parametrize("saved", ["weight", "view"])
def test_a_weight_is_refused_too_below_frozen_blocks(saved: str) -> None:
    """Nothing is recomputed there, or autograd saves a view of the weight alone."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.weight.view(1, 8) if saved == "view" else self.weight)

    model = Stack(Scaled, lambda blocks, x: blocks[1](x).sum())
    model.requires_grad_(False)
    put(model, "block")
    loss = model(data().requires_grad_())
    with torch.no_grad():
        model.blocks[1].weight.mul_(2)
    with pytest.raises(UnsupportedError, match=r"blocks\.1: found the weight"):
        loss.backward()


# what is not restored is found


class Counter:
    def __init__(self) -> None:
        self.count, self.deep = 0, {"a": {"b": {"c": {"d": 0}}}}


COUNTED = [0]


def _counts_object(m: Any, x: Tensor) -> None:
    m.statistics.count += 1


def _counts_deep(m: Any, x: Tensor) -> None:
    m.statistics.deep["a"]["b"]["c"]["d"] += 1


def _writes_into_object(m: Any, x: Tensor) -> None:
    m.statistics.total = x.detach().sum()


def _draws(m: Any, x: Tensor) -> None:
    random.random()


def _draws_numpy(m: Any, x: Tensor) -> None:
    np.random.rand()


def _swaps_values(m: Any, x: Tensor) -> None:
    COUNTED[0] += 1


UNRESTORED: dict[Any, str] = {
    _counts_object: r"Unrestored\.statistics\.count",
    _counts_deep: r"Unrestored\.statistics\.deep\.a\.b\.c\.d",
    _writes_into_object: r"Unrestored\.statistics\.total",
    _draws: r"random\.getstate\(\)",
    _draws_numpy: r"numpy\.random\.get_state\(\)",
    _swaps_values: r"saved tensor \d",
}


class Unrestored(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use, self.statistics = use, Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.use(self, x)
        return torch.sin(x * (1 + COUNTED[0])).cos()


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
@pytest.mark.parametrize("use", UNRESTORED)
def test_check_determinism_finds_a_block_that_changes_anything_else(use: Any, kind: str) -> None:
    """Objects on modules, deeper containers, random states outside of torch, globals."""
    COUNTED[0] = 0
    model = Stack(lambda: Block(Unrestored(use)))
    put(model, kind, check=1)
    with pytest.raises(RecomputeError, match=rf"blocks\.\d: found .*{UNRESTORED[use]}"):
        model(data()).backward()


@pytest.mark.parametrize("module", MODULES)
def test_check_determinism_lets_restored_state_pass(module: str) -> None:
    same(MODULES[module], "block", check=1)


def test_the_search_for_changes_is_limited() -> None:
    many = State([State(n) for n in range(2 * MAX_OBJECTS)])  # type: ignore[arg-type]
    assert len(UnrestoredState([], [many])._seen) <= MAX_OBJECTS + 1
    ring = State(torch.ones(1))
    ring.value = ring  # type: ignore[assignment]
    assert UnrestoredState([], [ring]).changed(UnrestoredState([], [ring])) is None


def test_deepspeeds_bookkeeping_on_modules_is_let_be() -> None:
    module = nn.Linear(1, 1)
    module.ds_grads_remaining = 1  # type: ignore[assignment]
    module.own = 1  # type: ignore[assignment]
    names = {name for owner in _owners([module]) for name in owner.values}
    assert names == {"own", "in_features", "out_features", "training", "weight", "bias"}


# nothing stays behind


@pytest.fixture
def calls() -> Iterator[list[weakref.ref[Call]]]:
    """Calls made in a test, which must go by themselves and not with the next collection."""
    made: list[weakref.ref[Call]] = []
    original = Call.__init__

    def noted(self: Call, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    gc.disable()
    try:
        Call.__init__ = noted  # type: ignore[method-assign]
        yield made
        assert len(made) > 4
        assert all(ref() is None for ref in made)
    finally:
        Call.__init__ = original  # type: ignore[method-assign]
        gc.enable()


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
def test_nothing_stays_behind(kind: str, calls: list[weakref.ref[Call]]) -> None:
    """After a backward, a dropped loss, an error in a forward, an evaluation."""

    def fail(x: Tensor) -> Tensor:
        if flags["fail"]:
            raise ZeroDivisionError
        return x

    flags = {"fail": False}
    model = Stack(lambda: Block(fail))
    CheckpointedBlocks(model, policy=Policy(PolicySettings(kind), modules=("Block",)))
    model(data()).backward()
    loss = model(data())
    assert any(ref() is not None for ref in calls)
    del loss
    flags["fail"] = True
    with contextlib.suppress(ZeroDivisionError):
        model(data())
    flags["fail"] = False
    with torch.no_grad():
        model(data())
    model.eval()(data())


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
def test_forwards_that_interleave_leave_nothing(kind: str, calls: list[weakref.ref[Call]]) -> None:
    """Results of a recomputation that another call is linked to lead back to it."""
    for interleaved in (False, True):
        model = Stack(lambda: Block(nn.Dropout(0.2)))
        CheckpointedBlocks(model, policy=Policy(PolicySettings(kind), modules=("Block",)))
        one, other = data(1), data(2)
        for block in model.blocks:
            one = block(one)
            other = block(other) if interleaved else other
        one.sum().backward()
        if interleaved:
            other.square().sum().backward()
        del model, block, one, other
    gc.collect()


def test_attributes_of_a_model_are_what_they_are_without_checkpointing() -> None:
    models = [_of(_containers)() for _ in range(2)]
    put(models[1], "block")
    for model in models:
        results(model, backward)
    plain, ours = (m.blocks[1].inner for m in models)
    assert len(plain.seen) == len(ours.seen) == 3
    assert ours.alias is ours.seen
    assert plain.nested == ours.nested
    assert torch.equal(torch.stack(plain.seen), torch.stack(ours.seen))
