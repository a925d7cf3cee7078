"""A user's training script: a tiny Llama under ZeRO-3, without any import of ds_ckpt.

It trains and evaluates once with each of the DeepSpeed files in --folder, and each process writes
there, by the files' names, its losses and what its host's interface has sent, to
`trained_<process>.json`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def sent_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, values = line.strip().partition(":")
        if name == "eth0":
            return int(values.split()[8])
    return 0


def llama(width: int = 128) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(shape)


def train(config: Path, steps: int, width: int) -> dict[str, Any]:
    model = llama(width)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=str(config)
    )
    before = sent_bytes()
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
        tokens = torch.randint(0, 128, (1, 32), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    torch.distributed.barrier()
    time.sleep(0.5)  # changes that are sent beside the next forward arrive
    trained = sent_bytes()
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=tokens, labels=tokens).loss.item())
    torch.distributed.barrier()  # what was handed over is then on its way
    evaluated = sent_bytes()
    engine.destroy()
    sent = {"sent_bytes": trained - before, "evaluation_bytes": evaluated - trained}
    return {"losses": losses, **sent}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    deepspeed.init_distributed()
    configs = sorted(arguments.folder.glob("*.json"))
    trained = {config.stem: train(config, arguments.steps, arguments.width) for config in configs}
    dp_rank = torch.distributed.get_rank()
    (arguments.folder / f"trained_{dp_rank}.json").write_text(json.dumps(trained))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
