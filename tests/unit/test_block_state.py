"""State around a recomputation: modules x kinds to the bit, and refusals by name."""

import contextlib
import dataclasses
import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import snapshot
from ds_ckpt.activation.checkpoint import Call
from ds_ckpt.errors import RecomputeError, UnsupportedError
from tests.unit import stacks
from tests.unit.stacks import KINDS, Block, Stack, around, backward, data, put, same
from tests.unit.test_autograd_ways import Auxiliary, interleaved

Inner = Callable[[Any, Tensor], Tensor]


class Stateful(nn.Module):
    """A module with all kinds of state; `use` reads and changes some of it."""

    def __init__(self, use: Inner) -> None:
        super().__init__()
        self.use = use
        self.calls, self.plain = 0, torch.ones(16)
        self.large = torch.empty(snapshot.COPIED_BYTES)
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


def _noise_in_training(m: Any, x: Tensor) -> Tensor:
    return x + 0.5 * torch.randn_like(x) if m.training else x


def _of(use: Inner) -> Callable[[], Stack]:
    return lambda: Stack(lambda: Block(Stateful(use)))


NORMED = nn.utils.parametrizations.spectral_norm
MODULES: dict[str, Callable[[], Stack]] = {
    **{use.__name__[1:]: _of(use) for use in (_plain_attributes, _containers, _generator)},
    **{use.__name__[1:]: _of(use) for use in (_written, _begins, _noise_in_training)},
    "batch norm": lambda: Stack(lambda: Block(nn.BatchNorm1d(16))),
    "spectral norm": lambda: Stack(lambda: Block(NORMED(nn.Linear(16, 16)))),
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


STEPS = [backward, _twice, _evaluation_before_backward, _in_both_modes]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("module", MODULES)
@KINDS
@pytest.mark.sampled(24)
def test_state_is_changed_once(module: str, step: Any, kind: str) -> None:
    same(MODULES[module], kind, step, steps=2 if step is _twice else 3)


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
    "in a list": lambda m: m.terms.append(0.25),
    "buffer": lambda m: setattr(m, "offset", m.offset * 2),
}


@pytest.mark.parametrize("change", CHANGES)
@KINDS
@pytest.mark.sampled(4)
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


@KINDS
def test_former_steps_are_not_held_by_what_a_block_keeps(kind: str) -> None:
    """Results on a module or in its list reference a graph, which must not lead back to them."""
    model = Stack(Auxiliary)
    put(model, kind)
    left: list[weakref.ref[Tensor]] = []
    for step in range(4):
        for block in model.blocks:
            block.losses = []
        loss = model(data())
        if step % 2:
            loss.backward()
        left.append(weakref.ref(model.blocks[0].losses[0]))
        del loss
    gc.collect()
    assert [ref() is not None for ref in left] == [False] * 3 + [True]


class State:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclasses.dataclass
class Record:
    value: Tensor
    inner: Any = None


class Cache:
    """A cache as in transformers: a list of layers with keys and values."""

    def __init__(self, value: Tensor) -> None:
        self.layers = [State(value)]


STATES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "object": (State, lambda s: s),
    "nested": (lambda x: Record(torch.ones(1), State(x)), lambda s: s.inner),
    "dict": (lambda x: {"deep": [State(x)]}, lambda s: s["deep"][0]),
    "cache": (Cache, lambda s: s.layers[0]),
}


@KINDS
@pytest.mark.parametrize("state", STATES)
@pytest.mark.sampled(4)
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


def _large(m: Any, x: Tensor) -> Tensor:
    m.large[0].fill_(2)
    return x * m.large[0].clone()


def _works_in_place(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(2)
    return torch.sin(y)


def _gradient_inside(x: Tensor) -> Tensor:
    return torch.autograd.grad(x.exp().tanh().sum(), x)[0]


class SavesTwice(torch.autograd.Function):
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
    "large tensor": (_of(_large), backward, "a tensor in Stateful.large, changed in place by"),
    "argument changed by the block": (
        lambda: Stack(lambda: InPlace(nn.Identity()), lambda b, x: b[0](x * 1).sum()),
        backward,
        "its forward changes an argument in place",
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
        "the buffer Stateful.mean that was changed in place",
    ),
    "object, by the block": (_object("block"), backward, "a tensor in a State, changed in place"),
    "object, by the model": (_object("model"), backward, "a tensor in a State that was changed"),
    "saved tensor": (around(_works_in_place), backward, r"it changes saved t"),
    "gradient inside": (around(_gradient_inside), backward, "has not ended"),
    "exception": (around(_raises), _left_by_an_exception, "ended with an exc"),
    "unpacked twice": (around(SavesTwice.apply), backward, "is unpacked twice"),
    "removed": (_of(_generator), _removed, "checkpointing that was removed"),
}


@pytest.mark.parametrize("what", REFUSED)
@stacks.RECOMPUTED
def test_refused_with_the_blocks_name(what: str, kind: str) -> None:
    make, step, words = REFUSED[what]
    model = make()
    put(model, kind)
    with pytest.raises((UnsupportedError, RecomputeError), match=rf"blocks\.\d.*: found .*{words}"):
        stacks.results(model, lambda m: step(m) or [])


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


class Counter:
    def __init__(self) -> None:
        self.count, self.deep = 0, {"a": {"b": {"c": {"d": 0}}}}


COUNTED = [0]
NAMED = Counter()


class Named(nn.Module):
    """Reaches state by names alone."""

    number = 0
    counter = Counter()

    def __init__(self) -> None:
        super().__init__()
        cell, array = 0, np.zeros(3)

        def in_closure() -> None:
            nonlocal cell
            cell += 1
            array[0] = 0

        def by_default(seen: list[int] = []) -> None:  # noqa: B006
            seen.append(1)

        def in_array() -> None:
            array[1] += 1

        self.in_closure, self.by_default, self.in_array = in_closure, by_default, in_array
        self.plain = [nn.BatchNorm1d(1, affine=False)]

    def count(self) -> None:
        self.counter.count += 1

    @staticmethod
    def in_global() -> None:
        global RUNS
        RUNS += 1

    def of_a_function(self) -> None:
        self.by_default.calls = getattr(self.by_default, "calls", 0) + 1  # type: ignore[attr-defined]


RUNS = 0
stacks.level = 0  # type: ignore[attr-defined]


def _in_a_function_that_is_called() -> None:
    NAMED.count += 1


UNRESTORED: dict[str, Callable[[Any, Tensor], object]] = {
    r"statistics\.count": lambda m, x: setattr(m.statistics, "count", m.statistics.count + 1),
    r"statistics\.deep\.a\.b\.c\.d": lambda m, x: m.statistics.deep["a"]["b"]["c"].update(d=x),
    r"statistics\.total": lambda m, x: setattr(m.statistics, "total", x.detach().sum()),
    r"random\.getstate\(\)": lambda m, x: random.random(),
    r"numpy\.random\.get_state\(\)": lambda m, x: np.random.rand(),
    r"saved tensor \d": lambda m, x: COUNTED.append(COUNTED.pop() + 1),
    r"global RUNS": lambda m, x: m.named.in_global(),
    r"global NAMED\.count": lambda m, x: _in_a_function_that_is_called(),
    r"global tests\.unit\.stacks\.level": lambda m, x: setattr(stacks, "level", stacks.level + 1),
    r"class attribute Named\.number": lambda m, x: setattr(Named, "number", Named.number + 1),
    r"class attribute Named\.counter\.count": lambda m, x: m.named.count(),
    r"cell in the closure of in_closure": lambda m, x: m.named.in_closure(),
    r"array in the closure of": lambda m, x: m.named.in_array(),
    r"by_default\.__defaults__\.0": lambda m, x: m.named.by_default(),
    r"by_default\.__dict__\.calls": lambda m, x: m.named.of_a_function(),
    r"Named\.plain\.0\.num_batches": lambda m, x: m.named.plain[0](x.detach()[:, :1]),
}


class Unrestored(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use, self.statistics, self.named = use, Counter(), Named()

    def forward(self, x: Tensor) -> Tensor:
        self.use(self, x)
        return torch.sin(x * (1 + COUNTED[0])).cos()


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
@pytest.mark.parametrize("path", UNRESTORED)
def test_check_determinism_finds_any_other_change(path: str, kind: str) -> None:
    """Objects on modules, deeper containers, random states outside of torch, globals."""
    COUNTED[0] = 0
    model = Stack(lambda: Block(Unrestored(UNRESTORED[path])))
    put(model, kind, check=1)
    with pytest.raises(RecomputeError, match=rf"blocks\.\d: found .*{path}"):
        model(data()).backward()


@pytest.mark.parametrize("module", MODULES)
def test_check_determinism_lets_restored_state_pass(module: str) -> None:
    same(MODULES[module], "block", check=1)


def test_the_search_for_changes_is_limited() -> None:
    many = State([State(n) for n in range(2 * snapshot.MAX_OBJECTS)])  # type: ignore[arg-type]
    many.ring = many  # type: ignore[attr-defined]
    target = snapshot.CheckpointedModule("", nn.Identity())
    before, after = (snapshot.Snapshot(target, [many]).unrestored() for _ in range(2))
    assert snapshot.MAX_OBJECTS < len(before) < 3 * snapshot.MAX_OBJECTS
    assert before.keys() == after.keys()


def test_deepspeeds_bookkeeping_on_modules_is_let_be() -> None:
    module = nn.Linear(1, 1)
    module.ds_grads_remaining = 1  # type: ignore[assignment]
    module.own = 1  # type: ignore[assignment]
    names = {name for *_, values in snapshot.holders([module]) for name in values}
    assert names == {"own", "in_features", "out_features", "training", "weight", "bias"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Call]]]:
    """Calls made in a test, which must go by themselves and not with the next collection."""
    made: list[weakref.ref[Call]] = []
    original = Call.__init__

    def noted(self: Call, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Call, "__init__", noted)
    gc.disable()
    try:
        yield made
        assert len(made) > 4
        assert all(ref() is None for ref in made)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
def test_nothing_stays_behind(kind: str, calls: list[weakref.ref[Call]]) -> None:
    """The cases: a backward, a dropped loss, an error in a forward, an evaluation."""

    def fail(x: Tensor) -> Tensor:
        return x if not flags["fail"] else 1 / 0

    flags = {"fail": False}
    model = Stack(lambda: Block(fail))
    put(model, kind)
    model(data()).backward()
    loss = model(data())
    assert any(ref() is not None for ref in calls)
    del loss
    flags["fail"] = True
    with contextlib.suppress(ZeroDivisionError):
        model(data())
    flags["fail"] = False
    model.eval()(data())


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
def test_forwards_that_interleave_leave_nothing(kind: str, calls: list[weakref.ref[Call]]) -> None:
    """Results of a recomputation reference it if another call is linked to it."""
    model = Stack(lambda: Block(nn.Dropout(0.2)))
    put(model, kind)
    interleaved(model)
    del model
    gc.collect()
