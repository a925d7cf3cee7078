"""LoRA with PEFT: a frozen model whose adapters are trained, weights kept on every host.

    deepspeed --num_gpus 2 examples/lora.py --steps 60

With ds_ckpt the embeddings need no `enable_input_require_grads`. On several hosts `"resident"`
keeps gathers of the frozen weights inside each (`lora.json`); on one it changes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peft
import torch.distributed as dist
from corpus import batches, small_llama

import ds_ckpt

SEQUENCES, LENGTH = 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    options = parser.parse_args()

    adapters = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(small_llama(), adapters)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = ds_ckpt.initialize(
        model=model, model_parameters=trained, config=str(Path(__file__).with_suffix(".json"))
    )
    rank = dist.get_rank()
    if rank == 0:
        print(model.get_nb_trainable_parameters()[0], "parameters are trained", flush=True)
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
