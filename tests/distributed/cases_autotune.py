"""Run in the worker processes: the autotuner on a live engine, and the records of monitors and
files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine.gradients import Gradients
from ds_ckpt.engine.tuner import COUNTED_STEPS
from tests.distributed import models
from tests.distributed.pool import fresh

CYCLE = 2 * (1 + COUNTED_STEPS)


def _started(**options: Any) -> tuple[Any, Gradients]:
    """A run with one bucket for all, so that each step is one reduction."""
    fresh()
    section = models.quantize_section(exchange={"autotune": True})
    engine = models.start("llama", models.zero3_config(ds_ckpt=section, bucket=10**9, **options))
    session = ds_ckpt.session_of(engine)
    assert session is not None
    assert session.exchange is not None
    return engine, session.exchange


def tuned(slow: str, folder: str, *, process: int, **options: Any) -> dict[str, Any]:
    """Train past the first choice while one mode is slow on one rank's clock, and resume.

    Args:
        slow: "ours": compressed buckets; "other": those sent uncompressed or by DeepSpeed.
        process: the slow rank.
        options: of the configuration.
    """
    engine, gradients = _started(**options)
    step, tuner = gradients.step, gradients.step.tuner
    assert tuner is not None
    assert gradients.feedback is not None
    reduce, by_deepspeed = step.reduce, []

    def counted(*args: Any, deepspeed_reduce: Any, **kwargs: Any) -> Any:
        def reduced(tensors: Any) -> Any:
            by_deepspeed.append(tensors)
            return deepspeed_reduce(tensors)

        return reduce(*args, deepspeed_reduce=reduced, **kwargs)

    def seconds() -> float:
        is_slow = (tuner.current == "compressed") == (slow == "ours")
        return 3.0 if is_slow and dist.get_rank() == process else 1.0

    step.reduce = counted  # type: ignore[method-assign]
    models.set_clock(tuner, seconds)
    models.train(engine, "llama", CYCLE)
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
