"""Run in the worker processes: where a live run says its time goes, in its log and in profilers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_ckpt
from tests.distributed import models
from tests.distributed.pool import fresh


def live(folder: str, warmup_steps: int, resident: bool, steps: int) -> dict[str, Any]:
    """Records and log lines of a run, and the ranges of one more step under torch's profiler."""
    fresh()
    path = Path(folder) / "live.jsonl"
    section = {
        **models.topk_section(warmup_steps=warmup_steps),
        "activation": {"policy": "block", "offload": True, "offload_min_bytes": 0},
        "weights": {"resident": resident},
        "telemetry": {"enabled": True, "every_n_steps": 2, "path": str(path)},
    }
    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ds_ckpt")
    before = log.level
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    try:
        engine = models.start("llama", models.zero3_config(reuse=0, ds_ckpt=section))
        models.train(engine, "llama", steps)
        with torch.profiler.profile() as seen:
            models.train(engine, "llama", 1, first=steps)
    finally:
        log.removeHandler(heard)
        log.setLevel(before)
    records = path.with_suffix(f".{dist.get_rank()}.jsonl").read_text().splitlines()
    names = [event.name for event in seen.events()]
    engine.destroy()
    return {
        "records": [r for r in map(json.loads, records) if "step" in r],
        "lines": [line for line in lines if line.startswith("ds_ckpt: step ")],
        "ranges": {name: names.count(name) for name in names if name.startswith("ds_ckpt/")},
    }


def untimed() -> bool:
    """Whether a run without telemetry records no spans, and ends with DeepSpeed's own methods."""
    fresh()
    section = {"activation": {"policy": "block"}, **models.topk_section()}
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    session = ds_ckpt.session_of(engine)
    assert session is not None
    assert session.exchange is not None
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    spans = (session.counters.spans, session.exchange.step.exchange.timings.spans)
    session.detach()
    left = {"forward", "step"} & set(vars(engine)) | {"fetch_sub_module"} & set(vars(coordinator))
    return spans == (None, None) and not left
