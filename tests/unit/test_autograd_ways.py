"""Ways in which autograd and modules are used besides a plain training step."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings
from tests.architectures import batch, build
from tests.unit.offload_models import Model, nothing_left, put_on
from tests.unit.stacks import KINDS, Block, Stack, data, same


def _stack(inner: Callable[..., Any] = torch.tanh) -> Callable[[], Stack]:
    return lambda: Stack(lambda: Block(inner))


# higher derivatives, parts of a graph


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
    loss = model(data())
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return []


@KINDS
@pytest.mark.parametrize("step", [_third_order, _some_inputs, _in_another_thread])
def test_derivatives(step: Callable[[nn.Module], list[Tensor]], kind: str) -> None:
    same(_stack(), kind, step)


# hooks


def _hooks(model: nn.Module) -> list[Tensor]:
    counted, held, handles = [0], [], []

    def count(gradient: Any) -> None:
        counted[0] += 1

    def hold(module: nn.Module, args: Any, out: Tensor) -> None:
        held.append(out)
        out.retain_grad()
        out.register_hook(count)

    for block in model.blocks:  # type: ignore[union-attr]
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


@KINDS
def test_hooks_on_modules_and_tensors(kind: str) -> None:
    same(_stack(), kind, _hooks)


# blocks that are used again, and work in place


class Looped(Stack):
    """Every block three times (a universal transformer), with statistics and noise."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x.square().sum()


def _tied() -> Stack:
    model = _stack()()
    for block in list(model.blocks)[1:]:
        block.up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
        block.down = model.blocks[0].down  # type: ignore[union-attr]
    return model


def _relu_between(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = torch.relu_(block(x))
    return x.square().sum()


class ReluAtTheEnd(Block):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return torch.relu_(super().forward(x))


@KINDS
@pytest.mark.parametrize(
    "make",
    [
        lambda: Looped(lambda: Block(nn.Dropout(0.2))),
        lambda: Looped(lambda: Block(nn.BatchNorm1d(16))),
        _tied,
        lambda: Stack(lambda: Block(lambda x: torch.relu_(x * 1)), _relu_between),
        lambda: Stack(lambda: ReluAtTheEnd(torch.tanh)),
    ],
    ids=["loop", "loop with statistics", "tied", "relu_ between", "relu_"],
)
def test_models(make: Callable[[], Stack], kind: str) -> None:
    same(make, kind)


# evaluation mode with gradients


@KINDS
def test_blocks_in_evaluation_mode_are_checkpointed(kind: str) -> None:
    """A backbone that is frozen in evaluation mode, or dropout switched off for training."""
    forwards = [0]

    def counted(x: Tensor) -> Tensor:
        forwards[0] += 1
        return torch.sin(x)

    def make() -> Stack:
        model = Stack(
            lambda: Block(nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.3), Calls(counted)))
        )
        model.blocks[1].eval()
        return model

    same(make, kind)
    # three steps of three blocks: plain once, then twice where blocks are recomputed
    assert forwards[0] == 3 * 3 * (2 if kind == "all offloaded" else 3)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_a_cache_in_evaluation_mode_is_filled() -> None:
    """With gradients on, too: someone who forgot no_grad, and prefixes that are trained."""
    models = [build("llama").eval() for _ in range(2)]
    CheckpointedBlocks(models[1])
    tokens = batch("llama")["input_ids"]
    for model in models:
        cache = model(tokens[:, :6], use_cache=True).past_key_values
        assert cache.get_seq_length() == 6
        model(tokens[:, 6:], past_key_values=cache, labels=tokens[:, 6:]).loss.backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


# copies of a model


@pytest.mark.parametrize("kind", ["block", "segments", "qkvo"])
def test_a_copy_of_a_model_runs_its_own_weights(kind: Any) -> None:
    """Copies are made for a moving average of the weights, or a reference model."""
    settings = (
        PolicySettings("selective", save_ops=("qkvo",)) if kind == "qkvo" else PolicySettings(kind)
    )
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
    assert all(p.grad is None for p in model.parameters())
    pairs = zip(twin.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


# threads, interruptions, graphs that are dropped


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


def test_a_dropped_graph_frees_device_memory_at_once() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    model = Model()
    put_on(model, ["Block"], min_bytes=0)
    given: list[StorageWeakRef] = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args: given.append(StorageWeakRef(args[0].untyped_storage()))
        )
    gc.disable()
    try:
        for backward_too in (False, True):
            given.clear()
            loss = model(torch.randn(64, 8))
            assert not given[-1].expired()
            if backward_too:
                loss.backward()
            del loss
            assert [ref.expired() for ref in given] == [True] * 4
    finally:
        gc.enable()
