"""Requests for transformers' own checkpointing are taken over, and generation keeps its cache."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, install
from tests.architectures import batch, build
from tests.unit.offload_models import grads
from tests.unit.stacks import Block, Stack, data
from tests.unit.test_recompute import enable

WRITERS = {  # without their own dropout
    "llama": {},
    "qwen3": {},
    "gemma3": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def _writer(kind: str, **options: Any) -> Any:
    """A model in training mode whose next token depends on all before."""
    model: Any = build(kind, 2, use_cache=True, **{**WRITERS[kind], **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def _texts(model: Any) -> list[Any]:
    prompt = torch.randint(3, 48, (1, 6), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    texts = [model.generate(prompt, **options, do_sample=s).tolist() for s in (False, True)]
    with torch.no_grad():
        cache = model(**batch(model.config.model_type.removesuffix("_text")), use_cache=True)
    return [*texts, cache.past_key_values.get_seq_length(), torch.get_rng_state().sum().item()]


@pytest.mark.parametrize("kind", WRITERS)
def test_generation_in_training_mode_writes_what_it_writes_without(kind: str) -> None:
    plain = _texts(_writer(kind))
    model = _writer(kind)
    checkpointed = CheckpointedBlocks(model)
    assert _texts(model) == plain
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert _texts(model) == plain
    assert _texts(copy.deepcopy(model)) == plain
    with torch.enable_grad():
        assert model.is_gradient_checkpointing
    checkpointed.remove()
    assert not model.is_gradient_checkpointing


def test_sampling_with_dropout_draws_the_same_random_numbers() -> None:
    for kind, dropout in (("llama", {"attention_dropout": 0.2}), ("gpt2", {"resid_pdrop": 0.2})):
        plain, model = _writer(kind, **dropout), _writer(kind, **dropout)
        CheckpointedBlocks(model)
        assert _texts(model) == _texts(plain)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("another library's checkpointing runs")


def _around_generation(model: Any) -> None:
    """Repeat what trl does around generation."""
    model.gradient_checkpointing_disable()
    with torch.no_grad():
        model(**batch("llama"))
    model.gradient_checkpointing_enable({"use_reentrant": True})


def _for_kbit_training(model: Any) -> None:
    from peft import prepare_model_for_kbit_training

    model.is_loaded_in_8bit = True
    prepare_model_for_kbit_training(model)
    model.requires_grad_(True)


REQUESTS: dict[str, Callable[[Any], None]] = {
    "enable": enable,
    "deprecated": lambda m: m.gradient_checkpointing_enable({"use_reentrant": False}),
    "function": lambda m: m._set_gradient_checkpointing(True, _never),
    "submodule": lambda m: m.model._set_gradient_checkpointing(True, _never),
    "off and on": _around_generation,
    "off": lambda m: m.gradient_checkpointing_disable(),
    "peft": _for_kbit_training,
    "inputs": lambda m: m.enable_input_require_grads(),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_requests_are_taken_over_with_one_note(request_name, is_late, caplog) -> None:
    install._warn_once.cache_clear()
    caplog.set_level(logging.INFO, logger="ds_ckpt")
    data, model = batch("llama"), build("llama", 2)
    plain = grads(build("llama", 2), **data)
    forwards: list[int] = []
    for layer in model.model.layers:  # type: ignore[union-attr, operator]
        layer.mlp.gate_proj.register_forward_pre_hook(lambda *_: forwards.append(1))
    if not is_late:
        REQUESTS[request_name](model)
    CheckpointedBlocks(model)
    if is_late:
        REQUESTS[request_name](model)
    del forwards[:]
    for _ in range(2):
        assert all(map(torch.equal, grads(model, **data), plain))
    assert len(forwards) == 2 * 2 * 2  # two steps, two layers, forward and recomputation
    is_request = request_name != "inputs" and (is_late or request_name != "off")
    assert [r.getMessage() for r in caplog.records if "takes over" in r.getMessage()] == [
        "ds_ckpt: the policy takes over transformers' checkpointing: requests to switch it on or "
        "off, and their arguments, change nothing"
    ] * is_request


def test_a_tower_of_its_own_kind_is_not_switched_on() -> None:
    """A model may carry the flag, and call torch's checkpoint itself."""

    class Tower(nn.Module):
        gradient_checkpointing = False

        def forward(self, x: Tensor) -> Tensor:
            return _never() if self.gradient_checkpointing else x * 2

    model = nn.ModuleDict({"tower": Tower(), "layers": build("llama", 1)})
    checkpointed = CheckpointedBlocks(model)
    assert model["tower"](torch.ones(1)) == 2
    checkpointed.remove()
    assert not vars(model["tower"]).get("gradient_checkpointing")


@pytest.mark.parametrize("patterns", [["Block"], ["blocks.*"]])
def test_checkpointing_replaces_what_is_on_the_model(patterns: list[str]) -> None:
    calls: list[int] = []
    model = Stack(lambda: Block(lambda x: calls.append(1) or x))  # type: ignore[func-returns-value]
    before = [dict(vars(m)) for m in model.modules()]
    CheckpointedBlocks(model, ["Block"])
    second = CheckpointedBlocks(model, patterns)
    model(data()).backward()
    assert len(calls) == 6
    second.remove()
    assert [dict(vars(m)) for m in model.modules()] == before
