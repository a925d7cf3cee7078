"""Tiny Hugging Face models of many architectures, made from scratch, and a batch for each."""

from typing import Any

import torch
from torch import nn

VOCAB = 48
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}
_SIZES = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
_LLAMA = {**_TOKENS, **_WIDE, **_SIZES}
_NEOX = {k: v for k, v in _LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
_OPT = {k: v for k, v in _NEOX.items() if k != "intermediate_size"}
_OPT |= {"ffn_dim": 40, "word_embed_proj_dim": 16}
_BART = {"d_model": 16, "max_position_embeddings": 32, **_TOKENS}
_BART |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_start_token_id": 1}
_BART |= {"decoder_attention_heads": 2, "decoder_ffn_dim": 40, "forced_eos_token_id": 2}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_VIT = {"image_size": 16, "patch_size": 8, "num_labels": 3}
_Kind = tuple[str, str, dict[str, Any], tuple[str, ...]]
"""Configuration, model, sizes, names of the number of layers."""


def _kind(name, sizes, model="ForCausalLM", layers="num_hidden_layers") -> _Kind:
    return name, name.removesuffix("Text") + model, sizes, tuple(layers.split())


_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 40, "num_heads": 2, "vocab_size": VOCAB}
_T5 |= {"decoder_start_token_id": 0}
_QWEN = {**_LLAMA, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"n_embd": 16, "n_head": 2, "n_positions": 32, **_TOKENS}
_BLOOM = {"hidden_size": 16, "n_head": 2, "hidden_dropout": 0.1, **_TOKENS}
_KINDS = {
    "llama": _kind("Llama", _LLAMA),
    "qwen2": _kind("Qwen2", _LLAMA),
    "mistral": _kind("Mistral", _LLAMA),
    "gemma": _kind("Gemma", _LLAMA),
    "phi": _kind("Phi", {**_NEOX, "resid_pdrop": 0.1}),
    "gpt2": _kind("GPT2", _GPT2, "LMHeadModel", "n_layer"),
    "gpt_neox": _kind("GPTNeoX", {**_NEOX, "hidden_dropout": 0.1}),
    "opt": _kind("OPT", _OPT),
    "bloom": _kind("Bloom", _BLOOM, layers="n_layer"),
    "mixtral": _kind("Mixtral", {**_LLAMA, **_MOE}),
    "bert": _kind("Bert", _NEOX, "ForMaskedLM"),
    "t5": _kind("T5", _T5, "ForConditionalGeneration", "num_layers num_decoder_layers"),
    "bart": _kind("Bart", _BART, "ForConditionalGeneration", "encoder_layers decoder_layers"),
    "vit": _kind("ViT", {**_WIDE, **_VIT}, "ForImageClassification"),
    "falcon": _kind("Falcon", {"hidden_size": 16, "num_attention_heads": 2, **_TOKENS}),
    "qwen3_moe": _kind("Qwen3Moe", _QWEN),
}
ARCHITECTURES = tuple(_KINDS)
_KINDS["qwen3"] = _kind("Qwen3", _LLAMA)
_KINDS["gemma3"] = _kind("Gemma3Text", _LLAMA)
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
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (2,), generator=generator)}
    tokens = torch.randint(3, VOCAB, (2, 11), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
