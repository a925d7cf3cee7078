"""A plain training script under ZeRO-3: blocks checkpointed, gradients in 3 bits.

    deepspeed --num_gpus 2 examples/train.py --steps 100

Without a GPU the two processes train on CPUs over gloo. `train.json` has all settings; the script
has one line of ds_ckpt, `ds_ckpt.initialize`, which takes and returns what `deepspeed.initialize`
does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist
from corpus import batches, small_llama

import ds_ckpt

SEQUENCES, LENGTH = 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    options = parser.parse_args()

    model = small_llama()
    engine, _, _, _ = ds_ckpt.initialize(
        model=model, model_parameters=model.parameters(), config=str(options.config)
    )
    rank = dist.get_rank()
    data = batches(rank // engine.mp_world_size, SEQUENCES, LENGTH)  # one order a group
    for step in range(options.steps):
        ids = next(data).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step + 1:4}  loss {loss.item():.4f}", flush=True)

    if rank == 0 and (session := ds_ckpt.session_of(engine)) is not None:
        print(session.report(input_ids=ids, labels=ids), flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
