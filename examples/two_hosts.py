r"""Train on two nodes by a hostfile: a script without ds_ckpt, started through it.

    ds-ckpt exec -- deepspeed --hostfile hostfiles/two_hosts examples/two_hosts.py \
        --deepspeed_config examples/two_hosts.json --steps 100

Write the nodes' names into the hostfile. The same without a second machine: `--num_gpus 2` in
place of `--hostfile ...`; or on two emulated nodes:

    ds-ckpt exec -- ds-ckpt hosts run --hosts 2 --rate 200mbit -- deepspeed \
        examples/two_hosts.py --deepspeed_config examples/two_hosts.json --steps 20
"""

from __future__ import annotations

import argparse
import socket

import deepspeed
import torch.distributed as dist
from corpus import batches, small_llama

SEQUENCES, LENGTH = 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    options = parser.parse_args()

    model = small_llama()
    engine, _, _, _ = deepspeed.initialize(
        args=options, model=model, model_parameters=model.parameters()
    )
    rank, names = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    if rank == 0:
        print("processes on:", ", ".join(names), flush=True)
    data = batches(rank, SEQUENCES, LENGTH)
    for step in range(options.steps):
        ids = next(data).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step + 1:4}  loss {loss.item():.4f}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
