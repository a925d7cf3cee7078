"""Checkpointing is installed and removed, and recomputes every block once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ds_ckpt.activation import CheckpointedBlocks
from tests.architectures import batch, build
from tests.unit.offload_models import grads
from tests.unit.stacks import Block, Stack, data


def test_scopes_surround_every_recompute_and_nothing_else() -> None:
    model = Stack(lambda: Block(torch.tanh))
    events: list[str] = []

    @contextmanager
    def scope() -> Iterator[None]:
        events.append("in")
        try:
            yield
        finally:
            events.append("out")

    CheckpointedBlocks(model, ["Block"], [scope])
    loss = model(data())
    assert events == []
    loss.backward()
    assert events == ["in", "out"] * 3


def enable(model: Any, use_reentrant: bool = True) -> None:
    """transformers' own switch, by the name that it has in the installed version."""
    name = "activation_checkpointing_enable"
    getattr(model, name, model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def test_a_hugging_face_model_is_left_as_it_was_found() -> None:
    model: Any = build("llama", 2)
    before = [dict(vars(m)) for m in model.modules()]
    checkpointed = CheckpointedBlocks(model, None)
    assert model.is_gradient_checkpointing
    checkpointed.remove()
    assert [dict(vars(m)) for m in model.modules()] == before
    assert not model.is_gradient_checkpointing


def _forwards(model: Any) -> list[int]:
    """Forwards through each layer's MLP in one training step."""
    counts: Counter[nn.Module] = Counter()
    # before, not after: the recompute stops early, inside the MLP's last operator
    gates = [layer.mlp.gate_proj for layer in model.model.layers]
    handles = [g.register_forward_pre_hook(lambda m, _: counts.update([m])) for g in gates]
    model(**batch("llama")).loss.backward()
    for handle in handles:
        handle.remove()
    return [counts[gate] for gate in gates]


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, [2, 2]),
        (["LlamaDecoderLayer"], [2, 2]),
        (["model.layers.1"], [1, 2]),
        (["LlamaMLP"], [2, 2]),
    ],
)
def test_every_named_block_is_recomputed_exactly_once(modules, expected, is_on) -> None:
    """transformers' own checkpointing may be on before, and change later."""
    model: Any = build("llama", 2)
    if is_on:
        enable(model, use_reentrant=False)
    checkpointed = CheckpointedBlocks(model, modules)
    assert _forwards(model) == expected
    enable(model)  # the Trainer, later
    assert _forwards(model) == expected
    model.gradient_checkpointing_disable()
    assert _forwards(model) == expected
    checkpointed.remove()
    assert _forwards(model) == ([2, 2] if is_on else [1, 1])


def test_shared_tensors_with_gradient_are_as_exact_as_torchs_own_checkpointing() -> None:
    """T5's position bias is made in block 0 and used in all: its gradients add up otherwise."""
    model, data = build("t5", 3), batch("t5")
    plain = grads(model, **data)
    checkpointed = CheckpointedBlocks(model, None)
    ours = grads(model, **data)
    checkpointed.remove()
    enable(model, use_reentrant=False)
    theirs = grads(model, **data)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, plain, strict=True))
