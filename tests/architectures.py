"""Tiny Hugging Face models of many architectures, made from scratch, and a batch for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 48
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEOX = {k: v for k, v in _LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
_OPT = {
    **{k: v for k, v in _NEOX.items() if k != "intermediate_size"},
    "ffn_dim": 40,
    "word_embed_proj_dim": 16,
}
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BART = {
    "d_model": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
    **_TOKENS,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_VIT = {"image_size": 16, "patch_size": 8, "num_labels": 3}
_LAYERS = "num_hidden_layers"
_KINDS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    # configuration, model, sizes, names of the number of layers
    "llama": ("Llama", "LlamaForCausalLM", _LLAMA, (_LAYERS,)),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", _LLAMA, (_LAYERS,)),
    "mistral": ("Mistral", "MistralForCausalLM", _LLAMA, (_LAYERS,)),
    "gemma": ("Gemma", "GemmaForCausalLM", _LLAMA, (_LAYERS,)),
    "phi": ("Phi", "PhiForCausalLM", {**_NEOX, "resid_pdrop": 0.1}, (_LAYERS,)),
    "gpt2": (
        "GPT2",
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_head": 2, "n_positions": 32, **_TOKENS},
        ("n_layer",),
    ),
    "gpt_neox": ("GPTNeoX", "GPTNeoXForCausalLM", {**_NEOX, "hidden_dropout": 0.1}, (_LAYERS,)),
    "opt": ("OPT", "OPTForCausalLM", _OPT, (_LAYERS,)),
    "bloom": (
        "Bloom",
        "BloomForCausalLM",
        {"hidden_size": 16, "n_head": 2, "hidden_dropout": 0.1, **_TOKENS},
        ("n_layer",),
    ),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {**_LLAMA, **_MOE}, (_LAYERS,)),
    "bert": ("Bert", "BertForMaskedLM", _NEOX, (_LAYERS,)),
    "t5": (
        "T5",
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 40, "num_heads": 2, "decoder_start_token_id": 0}
        | {"vocab_size": VOCAB},
        ("num_layers", "num_decoder_layers"),
    ),
    "bart": ("Bart", "BartForConditionalGeneration", _BART, ("encoder_layers", "decoder_layers")),
    "vit": (
        "ViT",
        "ViTForImageClassification",
        {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2, **_VIT},
        (_LAYERS,),
    ),
    "falcon": (
        "Falcon",
        "FalconForCausalLM",
        {"hidden_size": 16, "num_attention_heads": 2, **_TOKENS},
        (_LAYERS,),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        "Qwen3MoeForCausalLM",
        {**_LLAMA, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
        (_LAYERS,),
    ),
}
ARCHITECTURES = tuple(_KINDS)
_KINDS["qwen3"] = ("Qwen3", "Qwen3ForCausalLM", _LLAMA, (_LAYERS,))
_KINDS["gemma3"] = ("Gemma3Text", "Gemma3ForCausalLM", _LLAMA, (_LAYERS,))
OFTEN = ("llama", "t5", "mixtral", "vit")
"""Architectures that meet every policy in the fast tier; the others meet some."""


def build(kind: str, layers: int = 4, **options: Any) -> nn.Module:
    """The same weights in every process and every call; in training mode.

    Without a cache, which checkpointed blocks do not fill either: filling one copies keys into
    another memory layout, and some processors' products of matrices round that differently.
    """
    import transformers

    config_name, model_name, sizes, layer_keys = _KINDS[kind]
    values = {"use_cache": False, **sizes, **dict.fromkeys(layer_keys, layers), **options}
    config = getattr(transformers, f"{config_name}Config")(**values)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, model_name)(config)
    return model.train()


def batch(kind: str, seed: int = 0) -> dict[str, Any]:
    """Inputs and labels that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 3, (2,), generator=generator),
        }
    tokens = torch.randint(3, VOCAB, (2, 11), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
