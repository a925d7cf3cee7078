"""A user's scripts, by their first argument. They know nothing of ds_ckpt.

Each process writes to --folder the sessions that it finds on its engines, and its last loss.
"""

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import initialize
from torch import nn
from torch.utils import checkpoint

PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3},
}
OWN = {"ds_ckpt": {"activation": {"policy": "segments", "modules": ["Block"]}}}
WRONG = {"ds_ckpt": {"activation": {"policy": "blok"}}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.relu(self.up(rows)))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 64), *(Block() for _ in range(3)), nn.Linear(64, 64))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

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
    own = blocks()
    engine, *_ = initialize(model=own, model_parameters=own.parameters(), **given)
    ids = Rows()[dist.get_rank()]["input_ids"]
    for _ in range(2):
        loss = nn.functional.cross_entropy(engine(ids), ids)
        engine.backward(loss)
        engine.step()
    summary = found(engine)
    engine.destroy()
    return summary, loss.item()


def script(arguments: argparse.Namespace) -> list[tuple[str, float]]:
    """A file in the arguments, and objects that are built in code, one with a section.

    As ms-swift does, torch's checkpointing is set to be reentrant for all callers.
    """
    torchs = checkpoint.checkpoint
    checkpoint.checkpoint = functools.wraps(torchs)(
        lambda *args, use_reentrant=None, **named: torchs(*args, use_reentrant=True, **named)
    )
    given: tuple[dict[str, Any], ...] = ({"args": arguments}, {"config": PLAIN | OWN})
    return [train(**one) for one in (*given, {"config_params": dict(PLAIN)})]


def trainer(arguments: argparse.Namespace) -> list[tuple[str, float]]:
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    given = TrainingArguments(
        str(arguments.folder / "trainer"),
        deepspeed=arguments.deepspeed_config,
        per_device_train_batch_size=1,
        **options,
    )
    running = Trainer(model=llama(), args=given, train_dataset=Rows())
    result = running.train()
    return [(found(running.model_wrapped), result.training_loss)]


def accelerate(arguments: argparse.Namespace) -> list[tuple[str, float]]:
    """Its configuration comes from `accelerate launch`."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DummyOptim

    PartialState(cpu=True)  # else it counts one rank where there is no GPU
    accelerator = Accelerator()
    own = llama()
    has_optimizer = "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config
    optimizer = (DummyOptim if has_optimizer else torch.optim.AdamW)(own.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=1)
    engine, optimizer, loader = accelerator.prepare(own, optimizer, loader)
    for rows, _ in zip(loader, range(2), strict=False):
        loss = engine(**rows).loss
        accelerator.backward(loss)  # and the engine's step
    return [(found(engine), loss.item())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["script", "trainer", "accelerate"])
    parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--deepspeed_config")
    arguments = parser.parse_args()
    results = globals()[arguments.kind](arguments)
    path = arguments.folder / f"{arguments.kind}_{dist.get_rank()}.json"
    path.write_text(json.dumps({"results": results, "path": sys.path[0]}))
    if arguments.kind == "script":
        deepspeed.initialize(model=blocks(), config=PLAIN | WRONG)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
