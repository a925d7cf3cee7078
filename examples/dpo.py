"""DPO with trl and LoRA; the reference is the model without adapters.

    pip install -c constraints.txt -e ".[hf,trainers]"
    deepspeed --num_gpus 2 examples/dpo.py --steps 60

trl requests checkpointing itself, and switches it off around the reference's forward: the policy of
`dpo.json` takes that over, with one log line.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import peft
import torch
import transformers
import trl
from corpus import small_llama
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import ds_ckpt.auto  # noqa: F401, the import activates the plugin


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte; a newline ends an answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    known.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known.decoder = decoders.ByteLevel()
    end = {"eos_token": "Ċ", "pad_token": "Ċ"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=known, **end)


def preferences() -> Dataset:
    """Sums that are right, over sums that are not."""
    pairs = [(a, b) for a in range(1, 20) for b in range(1, 20)]
    return Dataset.from_list(
        [
            {"prompt": f"{a} plus {b} is", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"}
            for a, b in pairs
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    options = parser.parse_args()

    # This small model is built in full, before the arguments. Build a model that needs partitioning
    # after them: `from_pretrained` then partitions it while loading (`deepspeed.zero.Init`).
    model = small_llama()
    with TemporaryDirectory() as folder:
        arguments = trl.DPOConfig(
            output_dir=folder,
            deepspeed=str(Path(__file__).with_suffix(".json")),
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            max_steps=options.steps,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
        )
        adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trainer = trl.DPOTrainer(
            model,
            args=arguments,
            train_dataset=preferences(),
            processing_class=byte_tokenizer(),
            peft_config=adapters,
        )
        result = trainer.train()
        if arguments.process_index == 0:
            print(f"mean loss of {result.global_step} steps: {result.training_loss:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
