"""Weight gathers of each parameter a step, stock against ds_ckpt, side by side in one run.

    deepspeed --num_gpus 2 benchmarks/gathers.py [--json benchmarks/results/gathers.json]

On the same models and data: DeepSpeed without checkpointing, with transformers' own checkpointing
(non-reentrant, its default, and reentrant), and with policy `block`. Counted where
DeepSpeed's coordinator starts a gather. `reuse` is `stage3_max_reuse_distance`; 0 (with prefetch 0)
is what a model sees that does not fit into it.
"""

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

import ds_ckpt

WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SHAPE = {**WIDTH, "vocab_size": 256, "num_hidden_layers": 8, "num_key_value_heads": 4}
STEPS = 6


def build(kind: str) -> torch.nn.Module:
    """Llama-style, Mixtral or Llama with LoRA, a few hundred thousand parameters."""
    import transformers

    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=4, use_cache=False, **SHAPE)
        return transformers.MixtralForCausalLM(config)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **SHAPE))
    if kind == "llama + LoRA":
        import peft

        targets = ["q_proj", "v_proj", "down_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    return model


def measure(kind: str, mode: str, reuse: int) -> list[float]:
    """Mean gathers of a parameter in each of `STEPS` steps."""
    section: dict[str, Any] = {"telemetry": {"enabled": True}}
    if mode == "ds_ckpt":
        section["activation"] = {"policy": "block"}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": reuse}
    if reuse == 0:
        zero["stage3_prefetch_bucket_size"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "ds_ckpt": section,
    }
    model = build(kind)
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_ckpt.initialize(model=model, model_parameters=trainable, config=config)
    if mode.startswith("transformers"):
        inner = engine.module.get_base_model() if "LoRA" in kind else engine.module
        inner.activation_checkpointing_enable({"use_reentrant": "reentrant" in mode})
    session = ds_ckpt.session_of(engine)
    assert session is not None
    engine.train()
    means = []
    for step in range(STEPS):
        before = session.counters.snapshot()
        tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        delta = session.counters.snapshot() - before
        counts = [delta.gathers.get(p.ds_id, 0) for p in engine.module.parameters()]
        means.append(sum(counts) / len(counts))
    session.detach()
    engine.destroy()
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ds_ckpt").addHandler(logging.NullHandler())
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rows = []
    for kind in ("llama", "mixtral", "llama + LoRA"):
        for reuse in (0, 1_000_000_000):
            for mode in ("none", "transformers", "transformers reentrant", "ds_ckpt"):
                means = measure(kind, mode, reuse)
                rows.append({"model": kind, "reuse": reuse, "mode": mode, "gathers": means})
    if torch.distributed.get_rank() != 0:
        return
    print("\n| model | reuse distance | checkpointing | first step | last step |")
    print("|---|---|---|---|---|")
    for row in rows:
        first, last = row["gathers"][0], row["gathers"][-1]
        reuse = f"{row['reuse']:.0e}" if row["reuse"] else "0"
        print(f"| {row['model']} | {reuse} | {row['mode']} | {first:.2f} | {last:.2f} |")
    if options.json:
        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
