"""What checkpointing must get right or refuse: state, shared and changed tensors, caches, modes."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings
from ds_ckpt.activation.checkpoint import Call
from ds_ckpt.errors import RecomputeError, UnsupportedError
from tests.architectures import batch, build
from tests.unit.stacks import Block, Stack, data

BLOCK = Policy(modules=("Block",))
SEGMENTS = Policy(PolicySettings("segments", segment_size=2), modules=("Block",))
SELECTIVE = Policy(PolicySettings("selective"), modules=("Block",))
PLAIN = pytest.mark.parametrize(
    "policy", [BLOCK, SEGMENTS, SELECTIVE], ids=lambda p: p.settings.policy
)


def _train(model: nn.Module, steps: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of all steps, and the model's state at the end."""
    gradients = []
    for seed in range(steps):
        torch.manual_seed(seed)
        model.zero_grad()
        model(data(seed)).backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, [t.clone() for t in model.state_dict().values()]


def _same(make: Callable[[], nn.Module], policy: Policy, steps: int = 3) -> None:
    """Gradients and state are those of no checkpointing, to the bit."""
    expected = _train(Stack(make), steps)
    model = Stack(make)
    CheckpointedBlocks(model, policy=policy)
    got = _train(model, steps)
    for plain, ours in zip(expected, got, strict=True):
        assert len(plain) > 0
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


# state that a forward changes


class Counting(nn.Module):
    """A buffer that is changed in place, and one that is replaced; both are used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * self.calls + self.mean


@PLAIN
@pytest.mark.parametrize(
    "inner",
    [
        lambda: nn.BatchNorm1d(16),
        lambda: nn.BatchNorm1d(16, momentum=None),
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
        ),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
        Counting,
    ],
    ids=["batch norm", "cumulative batch norm", "instance norm", "spectral norm", "own buffers"],
)
def test_state_is_changed_once(inner: Callable[[], nn.Module], policy: Policy) -> None:
    _same(lambda: Block(inner()), policy)


class Later(nn.Module):
    """Changes its buffer from the second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.seen += 1
        return x + self.seen


def test_state_that_changes_later_is_refused_by_name() -> None:
    model = Stack(lambda: Block(Later()))
    CheckpointedBlocks(model, policy=BLOCK)
    model(data()).backward()
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found the buffer Later\.seen"):
        model(data())


# shared and changed tensors


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        x += self.down(torch.tanh(self.up(y)))
        return x


def test_a_block_that_changes_its_argument_is_refused_by_name() -> None:
    model = Stack(lambda: InPlace(nn.Identity()))
    CheckpointedBlocks(model, ["InPlace"])
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found its forward changes its arg"):
        model(data())


class ChangesLater(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.blocks[0](x)
        x += 1
        return self.blocks[1](y + x).sum()


def test_an_argument_that_is_changed_after_the_block_is_refused_by_name() -> None:
    model = ChangesLater(lambda: Block(nn.Identity()))
    CheckpointedBlocks(model, policy=BLOCK)
    loss = model(data())
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found an argument that was changed"):
        loss.backward()


class ChangesBetween(Stack):
    """Works on what a block returned, in place, before the next one gets it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.5
            x.mul_(1.5)
        return x.sum()


class Shares(Stack):
    """One tensor with gradient goes into every block, and what block 0 makes into the others."""

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.tanh(self.blocks[0].up(x))
        first = None
        for block in self.blocks:
            x = block(x, bias, first=first)
            first = x if first is None else first
        return x.square().sum() + first.sum()


def _plus(x: Tensor, bias: Tensor, *, first: Tensor | None) -> Tensor:
    return x * bias + (0 if first is None else first.mean())


class SameTwice(Stack):
    """The same tensor in two arguments, and the first output again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x)
        return x.sum()


@PLAIN
@pytest.mark.parametrize(
    ("stack", "inner"),
    [
        (ChangesBetween, lambda x: x),
        (Shares, _plus),
        (SameTwice, lambda a, b: a * b.mean()),
    ],
)
def test_tensors_between_blocks(
    stack: type[Stack], inner: Callable[..., Tensor], policy: Policy
) -> None:
    models = [stack(lambda: Block(inner)) for _ in range(2)]
    CheckpointedBlocks(models[1], policy=policy)
    plain, ours = (_train(model)[0] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


# what goes in and what comes out


class Dicts(Block):
    def forward(self, state: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        x, count = state["x"][0], state["count"]
        return {"x": (super().forward(x) * scale, x.mean()), "count": count + 1}


class DictStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": (x, x), "count": 0}
        for block in self.blocks:
            state = block(state, scale=torch.tensor(0.5))
        assert state["count"] == len(self.blocks)
        return state["x"][0].sum() + state["x"][1]


@PLAIN
def test_nested_arguments_and_results(policy: Policy) -> None:
    policy = Policy(policy.settings, modules=("Dicts",))
    models = [DictStack(lambda: Dicts(nn.Identity())) for _ in range(2)]
    CheckpointedBlocks(models[1], policy=policy)
    plain, ours = (_train(model)[0] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@PLAIN
def test_frozen_blocks_and_inputs_without_gradient(policy: Policy) -> None:
    models = [Stack(lambda: Block(nn.Identity()), blocks=4) for _ in range(2)]
    for model in models:
        for frozen in (0, 2):
            model.blocks[frozen].requires_grad_(False)
    CheckpointedBlocks(models[1], policy=policy)
    plain, ours = (_train(model)[0] for model in models)
    assert len(plain) == 16
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


KINDS = pytest.mark.parametrize("kind", ["block", "attention", "mlp", "segments", "selective"])


@KINDS
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
def test_hidden_states_and_caches(name: str, kind: Any) -> None:
    """`output_hidden_states`, a loss on them, and a cache that training must not fill.

    To the bit as without a cache: filling one copies keys into another memory layout, which
    some processors' matrix products answer with another last bit.
    """

    def run(model: nn.Module, use_cache: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(2)
        out = model(**batch(name), output_hidden_states=True, use_cache=use_cache)
        states = out.get("hidden_states") or out["decoder_hidden_states"]
        (out.loss + sum(s.square().mean() for s in states)).backward()
        return [s.detach() for s in states], [
            p.grad for p in model.parameters() if p.grad is not None
        ]

    models = [build(name) for _ in range(3)]
    CheckpointedBlocks(models[1], policy=Policy(PolicySettings(kind)))
    plain, ours, cached = (run(m, use) for m, use in zip(models, (False, True, True), strict=True))
    for one, other, filled in zip(plain, ours, cached, strict=True):
        assert len(one) > 4
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for a, b in zip(other, filled, strict=True):
            torch.testing.assert_close(a, b)


@KINDS
def test_generating_afterwards_uses_the_cache(kind: Any) -> None:
    models = [build("llama") for _ in range(2)]
    CheckpointedBlocks(models[1], policy=Policy(PolicySettings(kind)))
    tokens = batch("llama")["input_ids"][:, :4]
    outputs = []
    for model in models:
        model(**batch("llama")).loss.backward()
        model.eval()
        with torch.no_grad():
            cache = model(tokens, use_cache=True).past_key_values
        assert cache.get_seq_length() == 4
        outputs.append(model.generate(tokens, max_new_tokens=5, do_sample=False, use_cache=True))
    assert torch.equal(*outputs)


def test_a_prefix_in_the_cache_is_refused() -> None:
    model = build("llama")
    with torch.no_grad():
        cache = model.eval()(batch("llama")["input_ids"], use_cache=True).past_key_values
    CheckpointedBlocks(model.train(), policy=Policy(PolicySettings("attention")))
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn: found DynamicCache with 11"):
        model(batch("llama")["input_ids"], past_key_values=cache)


# random states and modes


@PLAIN
def test_the_stream_of_random_numbers_goes_on_as_without(policy: Policy) -> None:
    states = []
    for checkpointed in (False, True):
        model = Stack(lambda: Block(nn.Dropout(0.3)))
        if checkpointed:
            CheckpointedBlocks(model, policy=policy)
        _train(model)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class Tracker:
    """As Megatron's: a named stream of its own, switched in for a region."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(7).get_state()}

    def get_states(self) -> dict[str, Tensor]:
        return self.states

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = states

    def dropout(self, x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states["model-parallel-rng"])
        try:
            return nn.functional.dropout(x, 0.4)
        finally:
            self.states["model-parallel-rng"] = torch.get_rng_state()
            torch.set_rng_state(before)


@PLAIN
def test_tensor_parallel_random_states(policy: Policy) -> None:
    results = []
    for trackers in (None, 0, 1):
        tracker = Tracker()
        model = Stack(lambda tracker=tracker: Block(tracker.dropout))  # type: ignore[misc]
        if trackers is not None:
            own = [tracker] * trackers
            CheckpointedBlocks(model, policy=policy, trackers=own)
        results.append((_train(model)[0], tracker.states["model-parallel-rng"]))
    plain, without, ours = results
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))
    assert torch.equal(plain[1], ours[1])
    assert not all(torch.equal(a, b) for a, b in zip(plain[0], without[0], strict=True))


@PLAIN
@pytest.mark.parametrize("cache", [True, False])
def test_autocast(policy: Policy, cache: bool) -> None:
    results = []
    for checkpointed in (False, True):
        model = Stack(lambda: Block(nn.Dropout(0.1)))
        if checkpointed:
            CheckpointedBlocks(model, policy=policy)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            torch.manual_seed(0)
            loss = model(data())
        loss.backward()  # outside of autocast, as usual
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# autograd's ways


@PLAIN
def test_a_retained_graph_can_be_used_twice(policy: Policy) -> None:
    models = [Stack(lambda: Block(nn.Dropout(0.2))) for _ in range(2)]
    CheckpointedBlocks(models[1], policy=policy)
    for model in models:
        torch.manual_seed(0)
        loss = model(data())
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@PLAIN
def test_forwards_that_interleave(policy: Policy) -> None:
    """Two batches go through block by block, and their backwards come in the other order."""
    models = [Stack(lambda: Block(nn.Dropout(0.2))) for _ in range(2)]
    CheckpointedBlocks(models[1], policy=policy)
    for model in models:
        torch.manual_seed(0)
        first, second = data(1), data(2)
        for block in model.blocks:
            first, second = block(first), block(second)
        first.sum().backward()
        second.square().sum().backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@PLAIN
def test_second_derivatives(policy: Policy) -> None:
    results = []
    for checkpointed in (False, True):
        model = Stack(lambda: Block(nn.Tanh()))
        if checkpointed:
            CheckpointedBlocks(model, policy=policy)
        x = data().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        gradient.square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(results[0]) > 6
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class SavesTwice(torch.autograd.Function):
    """Asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 2
        return gradient * ctx.saved_tensors[1]


@PLAIN
def test_a_function_that_asks_for_its_saved_tensors_twice_is_refused(policy: Policy) -> None:
    model = Stack(lambda: Block(SavesTwice.apply))
    CheckpointedBlocks(model, policy=policy)
    with pytest.raises(RecomputeError, match=r"blocks\.2: found a saved tensor that backward asks"):
        model(data()).backward()


@PLAIN
def test_torchs_checkpoint_inside(policy: Policy) -> None:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(
            lambda y: nn.functional.dropout(y.exp().tanh(), 0.2), x, use_reentrant=False
        )

    _same(lambda: Block(inner), policy)


def test_a_gradient_inside_a_forward_is_refused_by_name() -> None:
    def inner(x: Tensor) -> Tensor:
        y = x.exp().tanh()
        return torch.autograd.grad(y.sum(), x)[0]

    model = Stack(lambda: Block(inner))
    CheckpointedBlocks(model, policy=BLOCK)
    with pytest.raises(UnsupportedError, match=r"blocks\.0: found a gradient that is asked for"):
        model(data())


@PLAIN
def test_nothing_stays_behind(policy: Policy) -> None:
    """After a backward, a dropped loss, an error in a forward, an evaluation: no call is left."""

    def fail(x: Tensor) -> Tensor:
        if flags["fail"]:
            raise ZeroDivisionError
        return x

    flags = {"fail": False}
    model = Stack(lambda: Block(fail))
    CheckpointedBlocks(model, policy=policy)
    calls: list[weakref.ref[Call]] = []
    original = Call.__init__

    def noted(self: Call, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        calls.append(weakref.ref(self))

    gc.disable()  # calls must go by themselves, not with the next collection
    try:
        Call.__init__ = noted  # type: ignore[method-assign]
        model(data()).backward()
        loss = model(data())
        assert any(f() is not None for f in calls)
        del loss
        flags["fail"] = True
        with contextlib.suppress(ZeroDivisionError):
            model(data())
        flags["fail"] = False
        made = len(calls)
        with torch.no_grad():
            model(data())
        assert len(calls) == made > 4
        model.eval()(data())
        assert len(calls) > made
        assert all(f() is None for f in calls)
    finally:
        Call.__init__ = original  # type: ignore[method-assign]
        gc.enable()


def _calls() -> int:
    gc.collect()
    return sum(type(thing) is Call for thing in gc.get_objects())


@PLAIN
def test_forwards_that_go_on_from_each_other_or_not_leave_nothing(policy: Policy) -> None:
    """What a recompute makes for a call that may go on from it leads back to it."""
    before = _calls()
    for interleaved in (False, True):
        model = Stack(lambda: Block(nn.Dropout(0.2)))
        CheckpointedBlocks(model, policy=policy)
        one, other = data(1), data(2)
        for block in model.blocks:
            one = block(one)
            other = block(other) if interleaved else other
        one.sum().backward()
        if interleaved:
            other.square().sum().backward()
        del model, block, one, other
    assert _calls() == before
