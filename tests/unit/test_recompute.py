"""Checkpointing on plain torch: bit-equal gradients, one recompute a block, taken off again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.errors import UnsupportedError

CALLS: Counter[int] = Counter()
"""By id of the block. A number on the module would be put back after a recompute."""


class Block(nn.Module):
    """Keyword arguments, a dict output, dropout and a call counter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        CALLS[id(self)] += 1
        return {"x": x + scale * self.dropout(self.down(torch.relu(self.up(x))))}


class Model(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, scale=0.5 + index)["x"]
        return x.square().mean()


def _gradients(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_scopes_surround_every_recompute_and_nothing_else() -> None:
    model = Model(4, 3)
    events: list[str] = []

    @contextmanager
    def scope() -> Iterator[None]:
        events.append("in")
        try:
            yield
        finally:
            events.append("out")

    CheckpointedBlocks(model, ["Block"], [scope])
    loss = model(torch.randn(2, 4))
    assert events == []
    loss.backward()
    assert events == ["in", "out"] * 3


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_blocks_are_left_alone(training: bool) -> None:
    model = Model(4, 2).train(training)
    CheckpointedBlocks(model, ["Block"])
    CALLS.clear()
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert [CALLS[id(b)] for b in model.blocks] == [1, 1]


def _enable(model: Any, kwargs: dict[str, bool] | None, **options: Any) -> None:
    """transformers' own switch, by the name that it has in the installed version."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        if options:
            pytest.skip("this transformers has no such option")
        enable = model.gradient_checkpointing_enable
    enable(kwargs, **options)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
        )
    ).train()


def test_a_hugging_face_model_is_left_as_it_was_found() -> None:
    model = _llama()
    before = [dict(vars(m)) for m in model.modules()]
    checkpointed = CheckpointedBlocks(model, None)
    assert model.is_gradient_checkpointing
    checkpointed.remove()
    assert [dict(vars(m)) for m in model.modules()] == before
    assert not model.is_gradient_checkpointing


def test_transformers_own_switch_changes_nothing() -> None:
    model = _llama()
    CheckpointedBlocks(model, None)
    forward = model.model.layers[0].forward
    model.gradient_checkpointing_disable()
    _enable(model, {"use_reentrant": False})
    assert not model.model.layers[0].gradient_checkpointing
    assert model.model.layers[0].forward is forward


REFUSED: list[tuple[dict[str, bool] | None, dict[str, Any]]] = [
    ({"use_reentrant": True}, {}),
    ({"use_reentrant": False, "preserve_rng_state": False}, {}),
    (None, {"every_n_layers": 2}),
    (None, {"offload": True}),
]


@pytest.mark.parametrize(("kwargs", "options"), REFUSED)
@pytest.mark.parametrize("is_on", [False, True])
def test_other_checkpointing_is_refused(
    kwargs: dict[str, bool] | None, options: dict[str, Any], is_on: bool
) -> None:
    model = _llama()
    if is_on:
        _enable(model, kwargs, **options)
    else:
        CheckpointedBlocks(model, None)
    with pytest.raises(UnsupportedError, match=r"activation_checkpointing_kwargs(.|\n)*policy"):
        CheckpointedBlocks(model, None) if is_on else _enable(model, kwargs, **options)


def _forwards(model: Any) -> list[int]:
    """Forwards through each layer's MLP in one training step."""
    counts = [0] * len(model.model.layers)

    def count(index: int) -> Any:
        def hook(*_: Any) -> None:
            counts[index] += 1

        return hook

    handles = [
        # before, not after: the recompute stops early, inside the MLP's last operator
        layer.mlp.gate_proj.register_forward_pre_hook(count(i))
        for i, layer in enumerate(model.model.layers)
    ]
    tokens = torch.arange(8).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("flag_before", [False, True])
@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, [2, 2]),
        (["LlamaDecoderLayer"], [2, 2]),
        (["model.layers.*"], [2, 2]),
        (["model.layers.1"], [1, 2]),
        (["LlamaMLP"], [2, 2]),
    ],
)
def test_every_named_block_is_recomputed_exactly_once(
    modules: list[str] | None, expected: list[int], flag_before: bool
) -> None:
    model = _llama()
    if flag_before:
        _enable(model, {"use_reentrant": False})
    checkpointed = CheckpointedBlocks(model, modules)
    assert _forwards(model) == expected
    _enable(model, {"use_reentrant": False})  # the Trainer, later
    assert _forwards(model) == expected
    checkpointed.remove()
    assert _forwards(model) == ([2, 2] if flag_before else [1, 1])


def test_shared_tensors_with_gradient_are_as_exact_as_torchs_own_checkpointing() -> None:
    """T5's position bias is made in block 0 and used in all: its gradients add up otherwise."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 32}
    model = T5ForConditionalGeneration(
        T5Config(num_layers=3, use_cache=False, decoder_start_token_id=0, **sizes)
    ).train()
    tokens = torch.arange(10).view(1, 10)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    checkpointed = CheckpointedBlocks(model, None)
    ours = gradients()
    checkpointed.remove()
    _enable(model, {"use_reentrant": False})
    theirs = gradients()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, plain, strict=True))
