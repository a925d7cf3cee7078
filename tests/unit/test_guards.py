"""Checkpointing computes right or refuses: state, shared and changed tensors, caches, modes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings
from ds_ckpt.errors import RecomputeError, UnsupportedError
from tests.architectures import batch, build
from tests.unit.stacks import KINDS, Block, Stack, data, put, same

BLOCK = Policy(modules=("Block",))
SEGMENTS = Policy(PolicySettings("segments", segment_size=2), modules=("Block",))
SELECTIVE = Policy(PolicySettings("selective"), modules=("Block",))
PLAIN = pytest.mark.parametrize(
    "policy", [BLOCK, SEGMENTS, SELECTIVE], ids=lambda p: p.settings.policy
)


def _train(model: nn.Module) -> list[Tensor]:
    """Gradients of two steps."""
    gradients = []
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        model(data(seed)).backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients


# shared and changed tensors


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


class Dicts(Block):
    """Nested arguments and results."""

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


def _half_frozen() -> Stack:
    model = Stack(lambda: Block(nn.Identity()), blocks=4)
    for frozen in (0, 2):
        model.blocks[frozen].requires_grad_(False)
    return model


def _torchs_own(x: Tensor) -> Tensor:
    return checkpoint(lambda y: nn.functional.dropout(y.exp(), 0.2), x, use_reentrant=False)  # type: ignore[no-any-return]


@KINDS
@pytest.mark.parametrize(
    "make",
    [
        lambda: ChangesBetween(lambda: Block(lambda x: x)),
        lambda: Shares(lambda: Block(_plus)),
        lambda: DictStack(lambda: Dicts(nn.Identity())),
        _half_frozen,
        lambda: Stack(lambda: Block(_torchs_own)),
    ],
    ids=["changes between", "shares", "dicts", "half frozen", "torch's checkpoint inside"],
)
def test_tensors_between_blocks(make: Callable[[], Stack], kind: str) -> None:
    same(make, kind)


POLICIES = pytest.mark.parametrize("kind", ["block", "attention", "segments"])


@POLICIES
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


@POLICIES
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


class Tracker:
    """A random state tracker as in Megatron: a named stream, switched in for a region."""

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
        results.append((_train(model), tracker.states["model-parallel-rng"]))
    plain, without, ours = results
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))
    assert torch.equal(plain[1], ours[1])
    assert not all(torch.equal(a, b) for a, b in zip(plain[0], without[0], strict=True))


@PLAIN
def test_autocast(policy: Policy) -> None:
    results = []
    for checkpointed in (False, True):
        model = Stack(lambda: Block(nn.Dropout(0.1)))
        if checkpointed:
            CheckpointedBlocks(model, policy=policy)
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(0)
            loss = model(data())
        loss.backward()  # outside of autocast, as usual
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# autograd's ways


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


# exceptions in a block


class Tries(nn.Module):
    """Falls back to another formula after any exception."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.sigmoid(x)
        except Exception:
            return 1 / (1 + torch.exp(-x))


class Only(Block):
    """Its last saved tensor is what `inner` saves."""

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.inner(self.down(torch.tanh(self.up(x))))


@KINDS
def test_a_block_may_catch_exceptions(kind: str) -> None:
    same(lambda: Stack(lambda: Only(Tries())), kind)


class Hides(nn.Module):
    """Is another function in its second run, and catches the error that this brings."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = itertools.count()  # a number would be put back for the recompute

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.sigmoid(x[:2] if next(self.runs) % 2 else x).mean(0) * x
        except Exception:
            return torch.sigmoid(x).mean(0) * x


@pytest.mark.parametrize("kind", ["block", "segments"])
def test_a_difference_that_a_block_catches_is_still_raised(kind: str) -> None:
    model = Stack(lambda: Block(Hides()))
    put(model, kind)
    with pytest.raises(RecomputeError, match=r"saved tensor \d+ is 2x16 float32, in the forward"):
        model(data()).backward()


# arguments without versions, and without memory of their own


class Scaled(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * (position >= 0).float().mean()


def _given(argument: Tensor) -> Callable[..., Tensor]:
    """Every block is given it."""

    def join(blocks: Any, x: Tensor) -> Tensor:
        return functools.reduce(lambda x, block: block(x, argument), blocks, x).square().sum()

    return join


@KINDS
def test_an_argument_from_inference_mode(kind: str) -> None:
    with torch.inference_mode():
        position = torch.arange(16) - 2
    same(lambda: Stack(lambda: Block(Scaled()), _given(position)), kind, check=1)
