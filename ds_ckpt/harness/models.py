"""Models built from a Hugging Face configuration, from scratch: nothing is downloaded.

transformers is imported when a model is built, not before.
"""

from __future__ import annotations

import torch

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.harness.corpus import VOCAB_SIZE


def llama(
    *,
    seed: int,
    hidden_size: int = 256,
    layers: int = 6,
    intermediate_size: int = 688,
    heads: int = 8,
    max_positions: int = 1024,
) -> torch.nn.Module:
    """A Llama of about 4.9 million parameters (with the defaults), fp32, embeddings untied.

    The same seed gives the same weights. Raises UnsupportedError where transformers is missing.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise UnsupportedError(
            Problem(
                where="transformers",
                found="not installed",
                why="the demo's model is a Hugging Face Llama",
                remedy="install the extra: pip install 'ds_ckpt[hf]'",
            )
        ) from error
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        use_cache=False,
        # Bytes have no special tokens.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = LlamaForCausalLM(config)
    return model


def count_parameters(model: torch.nn.Module) -> int:
    """Entries in all parameters. Under ZeRO-3 call it before the model is partitioned."""
    return sum(parameter.numel() for parameter in model.parameters())
