"""Run in the worker processes: the autotuner on a live engine, and the records of monitors and
files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine.gradients import Gradients
from tests.distributed import models
from tests.distributed.pool import fresh


def _started(**options: Any) -> tuple[Any, Gradients]:
    """A run with one bucket for all, so that a slow mode costs one pause a step."""
    fresh()
    section = models.quantize_section(exchange={"autotune": True})
    engine = models.start("llama", models.zero3_config(ds_ckpt=section, bucket=10**9, **options))
    session = ds_ckpt.session_of(engine)
    assert session is not None
    assert session.exchange is not None
    return engine, session.exchange


def tuned(slow: str, folder: str, *, process: int, **options: Any) -> dict[str, Any]:
    """Train past the first choice while one mode is slowed down on one rank, and resume.

    Args:
        slow: "ours": compressed buckets; "other": those sent uncompressed or by DeepSpeed.
        process: the slow rank.
        options: of the configuration.
    """
    engine, gradients = _started(**options)
    step, tuner = gradients.step, gradients.step.tuner
    assert tuner is not None
    assert gradients.feedback is not None
    ours, by_deepspeed = step.exchange.average, []

    def slowed_exchange(*args: Any, choose: Any = None, **kwargs: Any) -> Any:
        if dist.get_rank() == process and (choose is not None) == (slow == "other"):
            time.sleep(0.2)
        return ours(*args, choose=choose, **kwargs)

    reduce = step.reduce

    def slowed_deepspeed(*args: Any, deepspeed_reduce: Any, **kwargs: Any) -> Any:
        def counted(tensors: Any) -> Any:
            by_deepspeed.append(tensors)
            if dist.get_rank() == process and slow == "other":
                time.sleep(0.2)
            return deepspeed_reduce(tensors)

        return reduce(*args, deepspeed_reduce=counted, **kwargs)

    step.exchange.average = slowed_exchange  # type: ignore[method-assign]
    step.reduce = slowed_deepspeed  # type: ignore[method-assign]
    steps = 0
    while tuner.choice is None:  # a busy machine may need more cycles than one
        models.train(engine, "llama", 1, first=steps)
        steps += 1
    compared = len(by_deepspeed)
    models.train(engine, "llama", 2, first=400)
    unsent = sum(float(r.abs().sum()) for r in gradients.feedback.state_dict().values())
    result = {
        "compared": compared,
        "kept": len(by_deepspeed) - compared,
        "unsent": unsent,
        "candidates": tuner.candidates,
        "choice": tuner.choice,
        "compresses": step.is_compressing,
        "levels": gradients.groups.levels,
    }
    engine.save_checkpoint(folder, tag="mine")
    engine.load_checkpoint(folder, tag="mine")
    result["after a load"] = (tuner.choice, tuner.current)
    models.train(engine, "llama", 1, first=402)
    engine.destroy()
    return result


def monitored(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return the names of the CSV files of DeepSpeed's monitor, and the records of the step log."""
    fresh()
    path = Path(folder) / "steps.jsonl"
    telemetry = {"enabled": True, "every_n_steps": 2, "path": str(path)}
    section = {**section, "telemetry": telemetry}
    csv = {"enabled": True, "output_path": folder, "job_name": "job"}
    engine = models.start("llama", models.zero3_config(ds_ckpt=section, csv_monitor=csv))
    models.train(engine, "llama", 4)
    session = ds_ckpt.session_of(engine)
    own = path.with_suffix(f".{dist.get_rank()}.jsonl")
    result = {
        "files": sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*ds_ckpt*")),
        "records": [json.loads(line) for line in own.read_text().splitlines()],
        "summary": session.summary,
        "plan": session.exchange.assignment.records(),
        "norm": float(engine.get_global_grad_norm()),
        "residuals": sum(float(r.norm()) ** 2 for r in session.residuals.values()) ** 0.5,
        "parameters": {n: tuple(p.ds_shape) for n, p in engine.module.named_parameters()},
    }
    engine.destroy()
    dist.barrier()
    return result
