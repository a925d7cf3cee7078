"""What the examples train on: the help texts that every Python ships, byte by byte, and a Llama."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import transformers

VOCABULARY = 256


def text() -> torch.Tensor:
    """uint8 [about 500,000]."""
    return torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8)


def batches(rank: int, sequences: int, length: int) -> Iterator[torch.Tensor]:
    """int64 [sequences, length], random places of the text, different on every rank; endless."""
    data, generator = text(), torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(data) - length, (sequences,), generator=generator)
        yield torch.stack([data[i : i + length] for i in starts.tolist()]).long()


def small_llama(seed: int = 0) -> transformers.LlamaForCausalLM:
    """0.8 million parameters; equal on every rank."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)
