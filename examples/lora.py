"""LoRA with the HF Trainer: a frozen model whose adapters are trained, weights kept on every node.

    deepspeed --num_gpus 2 examples/lora.py --steps 60

The embeddings need no `enable_input_require_grads`. On several nodes `"resident"` keeps gathers of
the frozen weights inside each (`lora.json`); on one it changes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import peft
import torch
import transformers
from corpus import batches, small_llama

import ds_ckpt.auto  # noqa: F401, the import activates the plugin

ROWS, LENGTH = 2048, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    options = parser.parse_args()

    adapters = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    # This small model is built in full, before the arguments. Build a model that needs partitioning
    # after them: `from_pretrained` then partitions it while loading (`deepspeed.zero.Init`).
    model = peft.get_peft_model(small_llama(), adapters)
    rows = [{"input_ids": row, "labels": row} for row in next(batches(0, ROWS, LENGTH))]
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            deepspeed=str(Path(__file__).with_suffix(".json")),
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            max_steps=options.steps,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        result = trainer.train()
        if arguments.process_index == 0:
            print(f"{model.get_nb_trainable_parameters()[0]} parameters are trained")
            print(f"mean loss of {result.global_step} steps: {result.training_loss:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
