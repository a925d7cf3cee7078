"""The HF Trainer: a classifier of help texts by topic, fine-tuned with blocks checkpointed.

    deepspeed --num_gpus 2 examples/trainer.py --steps 60

`ds_ckpt.install()` before the Trainer is all; the Trainer reads `trainer.json` as any DeepSpeed
file. `activation_checkpointing=True` in the arguments would mean the same policy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
import transformers
from torch.utils.data import Dataset

import ds_ckpt

LENGTH = 64


class Pieces(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the four longest help texts, and which text each is from."""

    def __init__(self) -> None:
        longest = sorted(topics.values(), key=len)[-4:]
        self.rows = [
            (torch.tensor(list(text[i : i + LENGTH].encode()[:LENGTH])), label)
            for label, text in enumerate(longest)
            for i in range(0, 12_000, LENGTH)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, label = self.rows[index]
        padded = torch.nn.functional.pad(ids, (0, LENGTH - len(ids)), value=0)
        return {"input_ids": padded, "labels": torch.tensor(label)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    options = parser.parse_args()

    ds_ckpt.install()
    # This small model is built in full, before the arguments. Build a model that needs partitioning
    # after them: `from_pretrained` then partitions it while loading (`deepspeed.zero.Init`).
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=4,
        pad_token_id=0,
    )
    model = transformers.LlamaForSequenceClassification(config)
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            deepspeed=str(Path(__file__).with_suffix(".json")),
            per_device_train_batch_size=8,
            learning_rate=5e-4,
            max_steps=options.steps,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            average_tokens_across_devices=False,  # examples count alike, not tokens
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Pieces())
        result = trainer.train()
        if arguments.process_index == 0:
            print(f"mean loss of {result.global_step} steps: {result.training_loss:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
