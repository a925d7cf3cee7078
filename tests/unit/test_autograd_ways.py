"""Ways in which autograd and modules are used besides a plain training step: ways x kinds."""

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ckpt.activation import CheckpointedBlocks, Policy, make_policy
from ds_ckpt.errors import RecomputeError
from tests.architectures import batch, build
from tests.unit.offload_models import Model, equal, nothing_left, put_on
from tests.unit.stacks import KINDS, Block, Stack, around, backward, data, put, results, same


class Way(NamedTuple):
    """A model that is built anew in each run, and what is done with it in a step."""

    make: Callable[[], Stack]
    step: Callable[[Any], Sequence[Tensor | None]] = backward
    check: int = 0


def _third_order(model: nn.Module) -> list[Tensor]:
    x = data().requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    second.sum().backward()
    return [first.detach(), second.detach()]


def _some_inputs(model: nn.Module) -> list[Tensor]:
    loss = model(data())
    last, first = list(model.parameters())[-1], next(model.parameters())
    found = [
        *torch.autograd.grad(loss, last, retain_graph=True),
        *torch.autograd.grad(loss, first, retain_graph=True),
    ]
    loss.backward(inputs=[last])
    return found


def _in_another_thread(model: nn.Module) -> list[Tensor]:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(model(data()).backward).result()
    return []


def _functional_call(model: nn.Module) -> list[Tensor]:
    given = {name: p * 1.5 for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (data(),)).backward()
    return []


def _autocast(model: nn.Module) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(data())
    loss.backward()  # outside of autocast, as usual
    return []


def _compiled(model: nn.Module) -> list[Tensor]:
    """Blocks with more than torch's own checkpointing stay eager."""
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(data()).backward()
    return []


def interleaved(model: Any) -> list[Tensor]:
    """Two batches go through block by block, and their backwards come in the other order."""
    first, second = data(1), data(2)
    for block in model.blocks:
        first, second = block(first), block(second)
    first.sum().backward()
    second.square().sum().backward()
    return []


def _several_forwards(model: nn.Module) -> list[Tensor]:
    losses = [model(data(seed)) for seed in range(3)]
    for index in (1, 2, 0):
        losses[index].backward()
    return []


def _hooks(model: Any) -> list[Tensor]:
    counted, held, handles = [0], [], []

    def count(gradient: Any) -> None:
        counted[0] += 1

    def hold(module: nn.Module, args: Any, out: Tensor) -> None:
        held.append(out)
        out.retain_grad()
        out.register_hook(count)

    for block in model.blocks:
        handles += [
            block.register_forward_pre_hook(lambda m, args: (args[0] * 1.01,)),
            block.register_full_backward_hook(lambda m, given, _: (given[0] * 0.9,)),
            block.up.register_forward_hook(lambda m, args, out: out * 1.1),
            block.up.register_full_backward_pre_hook(lambda m, given: (given[0] * 1.2,)),
            block.down.register_full_backward_hook(lambda m, given, _: (given[0] * 1.3,)),
            block.down.register_forward_hook(hold),
        ]
    handles += [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
    model(data().requires_grad_()).backward()
    for handle in handles:
        handle.remove()
    gradients = [h.grad for h in held[:3]]  # those of the forward; a recompute makes others
    assert all(g is not None for g in gradients)
    return [torch.tensor(counted[0]), *gradients]  # type: ignore[list-item]


def _noisy(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.2)


def _torchs_own(x: Tensor) -> Tensor:
    return checkpoint(lambda y: _noisy(y.exp()), x, use_reentrant=False)  # type: ignore[no-any-return]


class ReluAtTheEnd(Block):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return torch.relu_(super().forward(x))


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


class Auxiliary(Block):
    """Leaves a loss on itself and in a list, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        y = torch.tanh(self.up(x))
        self.auxiliary = y.square().mean()
        self.losses.append(torch.sin(y).mean())
        return torch.sin(x + self.down(y))


class Dicts(Block):
    def forward(self, state: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        x, count = state["x"][0], state["count"]
        return {"x": (super().forward(x) * scale, x.mean()), "count": count + 1}


class Sharing(Block):
    """Gemma's form: a block leaves keys and values for others in a dictionary."""

    def forward(self, x: Tensor, shared: Any, *_: Any) -> Tensor:
        if "kv" not in shared:
            shared["kv"] = torch.tanh(self.up(x)), x * 2
        key, value = shared["kv"]
        shared["count"] = shared.get("count", 0) + 1
        return super().forward(x) * key.mean() * shared["count"] + value.sin()


def _three_times(blocks: Any, x: Tensor) -> Tensor:
    """Run one block three times, like a universal transformer."""
    return functools.reduce(lambda x, block: block(x), 3 * list(blocks), x).square().sum()


def _relu_between(blocks: Any, x: Tensor) -> Tensor:
    return functools.reduce(lambda x, block: torch.relu_(block(x)), blocks, x).square().sum()


def _changes_between(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
        x += 0.5
        x.mul_(1.5)
    return x.sum()


def _one_for_all(blocks: Any, x: Tensor) -> Tensor:
    """One tensor with gradient goes into every block, and what block 0 makes into the others."""
    bias, first = torch.tanh(blocks[0].up(x)), None
    for block in blocks:
        x = block(x, bias, first=first)
        first = x if first is None else first
    return x.square().sum() + first.sum()  # type: ignore[union-attr]


def _plus(x: Tensor, bias: Tensor, *, first: Tensor | None) -> Tensor:
    return x * bias + (0 if first is None else first.mean())


def _in_dictionaries(blocks: Any, x: Tensor) -> Tensor:
    state: dict[str, Any] = {"x": (x, x), "count": 0}
    for block in blocks:
        state = block(state, scale=torch.tensor(0.5))
    assert state["count"] == len(blocks)
    return state["x"][0].sum() + state["x"][1]


def _shared(blocks: Any, x: Tensor) -> Tensor:
    shared: dict[str, Any] = {}
    for block in blocks:
        x = block(x, shared)
    assert shared["count"] == len(blocks)
    return x.square().sum() + shared["kv"][0].sum()


def _with_auxiliary(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        block.losses = []
        x = block(x)
    total: Tensor = x.sum() + sum(block.auxiliary + block.losses[0] for block in blocks)
    return total


def _from_inference_mode(blocks: Any, x: Tensor) -> Tensor:
    """An argument without a version."""
    with torch.inference_mode():
        position = torch.arange(16) - 2
    return functools.reduce(lambda x, block: block(x, position), blocks, x).square().sum()


def _tied() -> Stack:
    model = around(torch.tanh)()
    for block in list(model.blocks)[1:]:
        block.up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
        block.down = model.blocks[0].down  # type: ignore[union-attr]
    return model


def _half_frozen() -> Stack:
    model = Stack(lambda: Block(nn.Identity()), blocks=4)
    for frozen in (0, 2):
        model.blocks[frozen].requires_grad_(False)
    return model


WAYS = {
    "third derivatives": Way(around(torch.tanh), _third_order),
    "gradients of some inputs": Way(around(torch.tanh), _some_inputs),
    "another thread": Way(around(torch.tanh), _in_another_thread),
    "functional call": Way(around(torch.tanh), _functional_call),
    "hooks": Way(around(torch.tanh), _hooks),
    "autocast": Way(around(_noisy), _autocast),
    "compiled": Way(around(torch.sigmoid), _compiled),
    "several forwards": Way(around(_noisy), _several_forwards),
    "interleaved": Way(around(_noisy), interleaved),
    "loop": Way(around(_noisy, _three_times)),
    "loop with statistics": Way(lambda: Stack(lambda: Block(nn.BatchNorm1d(16)), _three_times)),
    "tied": Way(_tied),
    "half frozen": Way(_half_frozen),
    "relu_ inside": Way(around(lambda x: torch.relu_(x * 1), _relu_between)),
    "relu_ at the end": Way(lambda: Stack(lambda: ReluAtTheEnd(torch.tanh))),
    "changed between": Way(around(lambda x: x, _changes_between)),
    "one tensor for all": Way(around(_plus, _one_for_all)),
    "dictionaries": Way(lambda: Stack(lambda: Dicts(nn.Identity()), _in_dictionaries)),
    "shared keys and values": Way(lambda: Stack(lambda: Sharing(torch.tanh), _shared)),
    "loss on a module": Way(lambda: Stack(Auxiliary, _with_auxiliary)),
    "torch's checkpoint inside": Way(around(_torchs_own)),
    "exceptions caught": Way(lambda: Stack(lambda: Only(Tries()))),
    "argument from inference mode": Way(
        around(lambda x, p: x * (p >= 0).float().mean(), _from_inference_mode), check=1
    ),
}


@KINDS
@pytest.mark.parametrize("way", WAYS)
def test_results_are_those_without_checkpointing(way: str, kind: str) -> None:
    make, step, check = WAYS[way]
    same(make, kind, step, check=check)


@KINDS
def test_blocks_in_evaluation_mode_are_checkpointed(kind: str) -> None:
    """A backbone that is frozen in evaluation mode, or dropout switched off for training."""
    forwards: list[int] = []

    def make() -> Stack:
        model = Stack(lambda: Block(nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.3))))
        for block in model.blocks:
            block.inner.register_forward_pre_hook(lambda *_: forwards.append(1))
        model.blocks[1].eval()
        return model

    same(make, kind)
    # three steps of three blocks: plain once, then twice where blocks are recomputed
    assert len(forwards) == 3 * 3 * (2 if kind == "all offloaded" else 3)


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


class Drifts(nn.Module):
    """Gives other values in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = itertools.count(1)

    @torch.compiler.disable
    def factor(self) -> int:
        return next(self.runs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.factor())


def test_the_check_of_values_is_in_force_under_a_compiler() -> None:
    model = Stack(lambda: Block(Drifts()))
    put(model, "block", check=1)
    with pytest.raises(RecomputeError):
        _compiled(model)


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


@pytest.mark.parametrize("kind", ["block", "segments", "selective"])
def test_tensor_parallel_random_states(kind: Any) -> None:
    found = []
    for trackers in (None, 0, 1):
        tracker = Tracker()
        model = around(tracker.dropout)()
        if trackers is not None:
            policy = Policy(make_policy(kind), modules=("Block",))
            CheckpointedBlocks(model, policy=policy, trackers=[tracker] * trackers)
        found.append([*results(model, backward), tracker.states["model-parallel-rng"]])
    plain, without, ours = found
    assert all(map(torch.equal, plain, ours))
    assert not all(map(torch.equal, plain, without))


POLICIES = pytest.mark.parametrize("kind", ["block", "attention", "segments"])


@POLICIES
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
def test_hidden_states_and_caches(name: str, kind: Any) -> None:
    """`output_hidden_states`, a loss on them, and a cache that training must not fill.

    To the bit as without a cache: filling one copies keys into another memory layout, which
    some processors' matrix products answer with another last bit.
    """

    def run(model: nn.Module, use_cache: bool) -> list[Tensor]:
        torch.manual_seed(2)
        out = model(**batch(name), output_hidden_states=True, use_cache=use_cache)
        states = out.get("hidden_states") or out["decoder_hidden_states"]
        (out.loss + sum(s.square().mean() for s in states)).backward()
        return [*(s.detach() for s in states), *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    models = [build(name) for _ in range(3)]
    CheckpointedBlocks(models[1], policy=Policy(make_policy(kind)))
    plain, ours, cached = (run(m, use) for m, use in zip(models, (False, True, True), strict=True))
    assert equal(plain, ours)
    for a, b in zip(ours, cached, strict=True):
        torch.testing.assert_close(a, b)


@POLICIES
def test_generating_afterwards_uses_the_cache(kind: Any) -> None:
    models = [build("llama") for _ in range(2)]
    CheckpointedBlocks(models[1], policy=Policy(make_policy(kind)))
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


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_cache_in_evaluation_mode_is_filled() -> None:
    """Gradients may be on: a forgotten no_grad, or trained prefixes."""
    models = [build("llama").eval() for _ in range(2)]
    CheckpointedBlocks(models[1])
    tokens = batch("llama")["input_ids"]
    for model in models:
        cache = model(tokens[:, :6], use_cache=True).past_key_values
        assert cache.get_seq_length() == 6
        model(tokens[:, 6:], past_key_values=cache, labels=tokens[:, 6:]).loss.backward()
    assert equal(*map(_gradients, models))


@pytest.mark.parametrize("kind", ["block", "segments", "qkvo"])
def test_a_copy_of_a_model_runs_its_own_weights(kind: Any) -> None:
    """Copies are made for a moving average of the weights, or a reference model."""
    settings = make_policy("selective", save_ops=("qkvo",)) if kind == "qkvo" else make_policy(kind)
    model = build("llama")
    CheckpointedBlocks(model, policy=Policy(settings))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    reference = build("llama")
    reference.load_state_dict(twin.state_dict())
    for one in (twin, reference):
        one(**batch("llama")).loss.backward()
    assert not _gradients(model)
    assert equal(_gradients(twin), _gradients(reference))


def test_threads_share_a_model_and_its_host_memory() -> None:
    model = Model().eval()
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    plain = [_input_gradient(model, x) for x in inputs]
    _, store = put_on(model, ["Block"], min_bytes=0)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # between any two steps of Python
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda x: _input_gradient(model, x), 20 * inputs))
    finally:
        sys.setswitchinterval(interval_s)
    assert all(map(torch.equal, found, 20 * plain))
    assert store.counters.out.total() > 0
    assert nothing_left(store)


def _input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x), x)[0]
