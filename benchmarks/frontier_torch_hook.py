"""A row of the frontier for comparison: torch's own PowerSGD hook for DDP.

    nice -n 19 python benchmarks/frontier_torch_hook.py [--ranks 4 16] [--seeds 0] [--steps 1500]

Two DDP processes over gloo train what the two virtual workers of `frontier.py` train: the same
weights, data, optimizer, clipping, schedule and dense warm-up. The hook runs as torch ships it,
with error feedback and warm start. Its bytes are what it counts itself (`compression_stats`), sent
in 16 bits by a ring all-reduce, which is how it would send bf16 gradients. Results go to the same
file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frontier import RESULTS, START, append, is_done
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from ds_ckpt.harness.corpus import embedded_corpus
from ds_ckpt.harness.launch import free_port
from ds_ckpt.validation.cell import Outcome
from ds_ckpt.validation.language import LanguageRun, LanguageTask
from ds_ckpt.validation.virtual_training import Recipe, Steps

EVALUATE_EVERY = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--start", type=int, default=START, help="first compressed step")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for seed in arguments.seeds:
        for rank in arguments.ranks:
            key = {"cell": f"torch's hook, rank {rank}", "seed": seed, "steps": arguments.steps}
            if not is_done(arguments.results, key):
                spawn(
                    _train,
                    (key, rank, arguments.start, arguments.results),
                    nprocs=LanguageTask().world,
                )


def _train(dp_rank: int, key: dict[str, Any], rank: int, start: int, results: Path) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.set_flush_denormal(True)
    task, recipe, text = LanguageTask(), Recipe(steps=key["steps"]), embedded_corpus()
    dist.init_process_group("gloo", rank=dp_rank, world_size=task.world)
    run = LanguageRun(task, text)
    run.begin(key["seed"])
    wrapped = DistributedDataParallel(run.model)
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        use_error_feedback=True,
        warm_start=True,
        random_seed=key["seed"],
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    run.forward = wrapped
    parameters = list(run.model.parameters())
    steps = Steps(parameters, recipe)
    heldout, train, losses, cpu_s = [], [], [], []
    for step in range(recipe.steps):
        started_s = time.process_time()
        loss = run.loss(step, 0, dp_rank)
        loss.backward()
        steps.take(step, [p.grad.view(-1) for p in parameters if p.grad is not None])
        losses.append(loss.item())
        cpu_s.append(time.process_time() - started_s)
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == recipe.steps:
            heldout.append((step + 1, run.heldout_loss() if dp_rank == 0 else 0.0))
            train.append(statistics.fmean(losses))
            losses.clear()
            print(key, heldout[-1], flush=True)
    _, _, sent = state.compression_stats()
    compressed_steps = recipe.steps - start
    if dp_rank == 0:
        ring = 2 * (task.world - 1) / task.world
        outcome = Outcome(
            heldout=heldout,
            train=train,
            step_bytes=4 * ring * sent / compressed_steps,
            warm_up_bytes=0.0,
            residual_norm=0.0,
            step_cpu_s=statistics.median(cpu_s),
            exchange_cpu_s=0.0,
            diverged=False,
        )
        append(
            results,
            key
            | {
                "settings": {"error_feedback": True, "start_step": start, "rank": rank},
                "task": dataclasses.asdict(task),
                "recipe": dataclasses.asdict(recipe),
                "corpus": text.sha256,
                "parameters": sum(p.numel() for p in parameters),
                "sixteen_bit_bytes": 2 * ring * sent / compressed_steps,
                **dataclasses.asdict(outcome),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
