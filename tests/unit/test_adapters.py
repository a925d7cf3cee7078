"""PEFT's adapters on a frozen model: right to the bit, or refused with words."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings
from ds_ckpt.errors import UnsupportedError
from tests.architectures import batch, build


def _adapted(config: Any) -> nn.Module:
    from peft import get_peft_model

    base: Any = build("llama", use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        model: nn.Module = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad and not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.1)  # zeros would leave others without a gradient
    return model


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model(**batch("llama")).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _configs() -> dict[str, Any]:
    from peft import IA3Config, LoraConfig, PromptTuningConfig

    names = ["q_proj", "v_proj", "down_proj"]
    task = {"task_type": "CAUSAL_LM"}
    return {
        "lora": LoraConfig(r=2, target_modules=names, lora_dropout=0.1),
        "lora in one layer": LoraConfig(r=2, target_modules=names, layers_to_transform=[2]),
        "dora": LoraConfig(r=2, target_modules=names, use_dora=True),
        "ia3": IA3Config(target_modules=names, feedforward_modules=["down_proj"], **task),
        "prompts": PromptTuningConfig(num_virtual_tokens=4, **task),
    }


@pytest.mark.parametrize("kind", ["block", "attention", "mlp", "segments", "selective"])
@pytest.mark.parametrize("name", list(_configs()))
def test_adapters(name: str, kind: Any) -> None:
    """Without `enable_input_require_grads`: no input of a block below the first adapter needs a
    gradient."""
    models = [_adapted(_configs()[name]) for _ in range(2)]
    CheckpointedBlocks(models[1], policy=Policy(PolicySettings(kind)))
    plain, ours = map(_gradients, models)
    trainable = {n for n, p in models[0].named_parameters() if p.requires_grad}
    assert plain.keys() == ours.keys() == trainable
    assert all(bool(g.any()) for g in plain.values())
    assert all(torch.equal(plain[n], ours[n]) for n in plain)


def test_prefix_tuning_is_refused_with_the_block() -> None:
    """Its prefix is a filled cache; transformers' own checkpointing refuses to prepare it, too."""
    from peft import PrefixTuningConfig

    model = _adapted(PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    assert len(_gradients(model)) > 0
    CheckpointedBlocks(model, policy=Policy(PolicySettings("attention")))
    with pytest.raises(UnsupportedError, match="with 4 positions"):
        _gradients(model)
