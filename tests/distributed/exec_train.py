"""A user's scripts, by their first argument. They know nothing of ds_ckpt.

Each process writes to --folder the sessions that it finds on its engines, and its last loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import initialize
from transformers import LlamaConfig, LlamaForCausalLM

PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3},
}
OWN = {"ds_ckpt": {"activation": {"policy": "mlp"}}}
WRONG = {"ds_ckpt": {"activation": {"policy": "blok"}}}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, use_cache=False))


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 16) % 64
        return {"input_ids": ids, "labels": ids}


def found(engine: Any) -> str:
    session = vars(engine).get("_ds_ckpt_session")
    return session.summary if session is not None else "none"


def train(**given: Any) -> tuple[str, float]:
    own = model()
    engine, *_ = initialize(model=own, model_parameters=own.parameters(), **given)
    ids = Rows()[dist.get_rank()]["input_ids"][None]
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    summary = found(engine)
    engine.destroy()
    return summary, loss.item()


def script(arguments: argparse.Namespace) -> list[tuple[str, float]]:
    """A file in the arguments, and objects that are built in code, one with a section."""
    given: tuple[dict[str, Any], ...] = ({"args": arguments}, {"config": PLAIN | OWN})
    return [train(**one) for one in (*given, {"config_params": dict(PLAIN)})]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["script"])
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--deepspeed_config")
    arguments = parser.parse_args()
    results = globals()[arguments.kind](arguments)
    path = arguments.folder / f"{arguments.kind}_{dist.get_rank()}.json"
    path.write_text(json.dumps({"results": results, "path": sys.path[0]}))
    if arguments.kind == "script":
        deepspeed.initialize(model=model(), config=PLAIN | WRONG)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
