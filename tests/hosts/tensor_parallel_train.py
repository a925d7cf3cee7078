"""A public-style training script: tensor parallelism from the JSON file, no import of ds_ckpt."""

import argparse
import json

import deepspeed
import torch
from train import llama


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--losses")
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    model = llama()
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    losses = []
    for step in range(6):
        replica = engine.global_rank // engine.mp_world_size
        generator = torch.Generator().manual_seed(1000 * step + replica)
        tokens = torch.randint(0, 128, (2, 64), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with open(f"{args.losses}.{engine.global_rank}", "w") as sink:
        json.dump(losses, sink)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
