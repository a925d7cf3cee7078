"""A user's training script: a tiny Llama under ZeRO-3. It knows nothing of ds_ckpt.

Each process writes its losses to `losses_<process>.json` in the folder named by --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    arguments = deepspeed.add_config_arguments(parser).parse_args()

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(shape)
    engine, *_ = deepspeed.initialize(
        args=arguments, model=model, model_parameters=model.parameters()
    )
    dp_rank = torch.distributed.get_rank()
    losses = []
    for step in range(arguments.steps):
        generator = torch.Generator().manual_seed(1000 * step + dp_rank)
        tokens = torch.randint(0, 128, (1, 32), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    (arguments.out / f"losses_{dp_rank}.json").write_text(json.dumps(losses))
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
