"""Run in the worker processes: what the pool's own tests need."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch import nn


def identity(value: Any, *, factor: int = 1) -> dict[str, Any]:
    """Where it ran, and the argument that came."""
    return {
        "dp_rank": dist.get_rank(),
        "value": value * factor,
        "environment": {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "LOCAL_SIZE")},
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "drawn": torch.rand(1).item(),
    }


def all_reduce(numel: int) -> torch.Tensor:
    tensor = torch.full((numel,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor


def raise_in(victim: int) -> int:
    """One process raises; the others wait for it."""
    if dist.get_rank() == victim:
        raise ValueError(f"wrong in process {victim}")
    dist.barrier()
    return dist.get_rank()


def hang_in_a_loop() -> None:
    """Each process hangs, with a child beside it that is in another process group."""
    print("about to hang", flush=True)
    with subprocess.Popen(["sleep", "600"], start_new_session=True):
        while True:
            time.sleep(0.01)


def leave_an_engine() -> int:
    """Trains a step and clears nothing away."""
    model = nn.Linear(8, 8)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    parameter_offload.FWD_MODULE_STACK.append(engine.module)
    leave_an_engine.kept = engine  # type: ignore[attr-defined]
    return len(parameter_offload.FWD_MODULE_STACK)


def what_is_left() -> int:
    del leave_an_engine.kept  # type: ignore[attr-defined]
    return len(parameter_offload.FWD_MODULE_STACK)
