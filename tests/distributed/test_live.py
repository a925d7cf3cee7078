"""Where the time of a live run goes: the step log's fields and line, and ranges of profilers."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from tests.distributed import models
from tests.distributed.models import topk_section
from tests.distributed.pool import ranks
from tests.distributed.training import captured_log, running


@pytest.mark.parametrize(
    ("warmup_steps", "how", "weights"),
    [(0, "estimated", "weights"), pytest.param(4, "measured", "gather", marks=pytest.mark.slow)],
)
@ranks(1, 1)
def test_the_parts_of_a_live_step(tmp_path, warmup_steps, how, weights) -> None:
    """Resident weights arrive as changes, others by gathers."""
    section = {
        **topk_section(warmup_steps=warmup_steps),
        "activation": {"policy": "block", "offload": True, "offload_min_bytes": 0},
        "weights": {"resident": weights == "weights"},
        "telemetry": {"enabled": True, "every_n_steps": 2, "path": str(tmp_path / "live.jsonl")},
    }
    with captured_log() as logged, running("llama", section, reuse=0) as engine:
        models.train(engine, "llama", 6)
        with torch.profiler.profile() as seen:
            models.train(engine, "llama", 1, first=6)
    log = (tmp_path / f"live.{dist.get_rank()}.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, log) if "step" in record]
    assert [record["step"] for record in records] == [2, 4, 6]
    for record in records:
        exposed = record["exposed_s"]
        assert min(record["recompute_s"], exposed["exchange"], exposed[weights]) > 0
        assert record["recompute_s"] + sum(exposed.values()) < record["step_time_s"]
        is_compressed = record["step"] > warmup_steps
        assert list(record.get("recompute_paid_share", ())) == [how] * is_compressed
    ranges, blocks, parameters = Counter(event.name for event in seen.events()), 3, 30
    assert ranges["ds_ckpt/forward"] == 1
    assert ranges["ds_ckpt/recompute"] == blocks
    assert ranges["ds_ckpt/offload"] == 2 * (blocks - 1)
    assert ranges["ds_ckpt/gather"] > parameters
    assert ranges["ds_ckpt/exchange"] > 0
    assert ("ds_ckpt/weights" in ranges) == (weights == "weights")
    lines = [line for line in logged if line.startswith("ds_ckpt: step ")]
    assert len(lines) == (3 if dist.get_rank() == 0 else 0)
    for part in ("recomputation", "exposed exchange", f"exposed {weights}", "MB sent") * bool(
        lines
    ):
        assert part in lines[-1]
    assert not lines or f"of the recomputation ({how})" in lines[-1]


@ranks(2)
def test_without_telemetry_nothing_is_timed() -> None:
    with running("llama", {"activation": {"policy": "block"}, **topk_section()}) as engine:
        session = ds_ckpt.session_of(engine)
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        assert session.counters.spans is None
        assert session.exchange.step.exchange.timings.spans is None
        session.detach()
        assert not {"forward", "step"} & set(vars(engine))
        assert "fetch_sub_module" not in vars(coordinator)
