"""The autotuner and telemetry on real engines: step log, where the time goes, profilers' ranges."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine.tuner import COUNTED_STEPS
from ds_ckpt.telemetry import Purpose
from ds_ckpt.telemetry.memory import SavedActivations
from ds_ckpt.telemetry.units import MB, number, size
from tests.distributed import models
from tests.distributed.models import quantize_section, topk_section
from tests.distributed.pool import ranks
from tests.distributed.training import captured_log, running

CYCLE = 2 * (1 + COUNTED_STEPS)


def _row(slots: list[int], slow: str, **options: Any) -> Any:
    marks = [pytest.mark.slow] if len(slots) > 1 else []
    return pytest.param(slots, slow, options, marks=marks)


@pytest.mark.parametrize(
    ("slots", "slow", "options"),
    [
        _row([2], "ours"),
        _row([2], "other"),
        _row([2], "ours", accumulation=2),
        _row([2], "other", accumulation=2),
        _row([2, 2], "ours", bf16={"enabled": True}),
    ],
)
@pytest.mark.sampled(2)
@ranks()
def test_the_shorter_step_is_chosen_by_all_ranks(tmp_path, slow, options) -> None:
    """One mode is slow on the last rank's clock: compressed buckets, or those sent uncompressed or
    by DeepSpeed. An accumulated step that is exchanged once is compared with an uncompressed one.
    No residual is left when DeepSpeed takes over. A load compares anew."""
    other = "uncompressed" if "accumulation" in options else "deepspeed"
    section = quantize_section(exchange={"autotune": True})
    # one bucket for all, so that each step is one reduction
    with running("llama", section, bucket=10**9, **options) as engine:
        gradients = ds_ckpt.session_of(engine).exchange
        step, tuner = gradients.step, gradients.step.tuner
        choose, by_deepspeed = step.choose_reduction, []

        def counted(*args: Any) -> Any:
            reduce = choose(*args)
            if reduce is None:
                by_deepspeed.append(args)
            return reduce

        def seconds() -> float:
            is_slow = (tuner.current == "compressed") == (slow == "ours")
            return 3.0 if is_slow and dist.get_rank() == dist.get_world_size() - 1 else 1.0

        step.choose_reduction = counted
        models.set_clock(tuner, seconds)
        models.train(engine, "llama", CYCLE)
        assert len(by_deepspeed) == (COUNTED_STEPS if other == "deepspeed" else 0)
        by_deepspeed.clear()
        models.train(engine, "llama", 2, first=400)
        assert len(by_deepspeed) == (2 if (slow, other) == ("ours", "deepspeed") else 0)
        unsent = sum(float(r.abs().sum()) for r in gradients.feedback.state_dict().values())
        assert (unsent == 0) is (slow == "ours")
        assert tuner.candidates == ("compressed", other)
        assert tuner.choice == (other if slow == "ours" else "compressed")
        assert step.is_compressing is (slow == "other")
        assert (gradients.groups.inside is not None) == (dist.get_world_size() == 4)
        engine.save_checkpoint(str(tmp_path), tag="mine")
        engine.load_checkpoint(str(tmp_path), tag="mine")
        assert (tuner.choice, tuner.current) == (None, "compressed")
        models.train(engine, "llama", 1, first=402)


@ranks(2)
def test_the_report_of_a_run_is_what_was_measured() -> None:
    """Bytes of activations as autograd keeps them, of gradients as counted; the run goes on."""
    section = quantize_section(exchange={"autotune": True}) | {"activation": {"policy": "block"}}
    with running("llama", section, bucket=10**9) as engine:
        session, data = ds_ckpt.session_of(engine), models.batch("llama", 0, 0)
        models.set_clock(session.exchange.step.tuner, lambda: 1.0)
        sent, kept = [0.0], list[str]()
        for step in range(CYCLE):
            models.train(engine, "llama", 1, first=step)
            sent.append(session.counters.bytes_sent[Purpose.REDUCE] / MB)
        said = session.report(**data)
        for act in (int, session.detach):
            act()
            with SavedActivations(engine.module) as found:
                loss = models.loss_of(engine(**data))
            engine.backward(loss)
            kept.append(size(found.bytes))
    ours, by_deepspeed, drained = sent[9] / 9, (sent[18] - sent[10]) / 8, sent[10] - sent[9]
    assert kept[0] != kept[1]
    assert said.replace("ds_ckpt: ", "") == (
        f"activations kept per rank: {kept[0]}; {kept[1]} without the policy (computed)\n"
        f"gradients sent per rank and step: compressed {number(ours)} MB (steps: 9), deepspeed "
        f"{number(by_deepspeed)} MB (steps: 8), uncompressed {number(drained)} MB (steps: 1)\n"
        "autotune: gradients: undecided (ms per step: compressed 1000.0, deepspeed 1000.0; no "
        "significant difference)"
    )


@ranks(2)
def test_monitors_and_the_step_log_get_the_records(tmp_path: Path) -> None:
    telemetry = {"enabled": True, "every_n_steps": 2, "path": str(tmp_path / "steps.jsonl")}
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    section = {**quantize_section(), "telemetry": telemetry}
    with running("llama", section, csv_monitor=csv) as engine:
        models.train(engine, "llama", 4)
        session = ds_ckpt.session_of(engine)
        own = (tmp_path / f"steps.{dist.get_rank()}.jsonl").read_text().splitlines()
        first, *records = map(json.loads, own)
        plan = asdict(session.exchange.assignment)["tensors"]
        assert first == json.loads(json.dumps({"plan": plan}))
        shapes = {n: tuple(p.ds_shape) for n, p in engine.module.named_parameters()}
        assert {t["name"]: tuple(t["shape"]) for t in plan} == shapes
        assert [record["step"] for record in records] == [2, 4]
        # one method; residuals are 0 at the own shard, so they belong to other ranks
        (norm,) = records[-1]["residual_norm"].values()
        held = sum(float(r.norm()) ** 2 for r in session.residuals.values()) ** 0.5
        assert norm == pytest.approx(held / float(engine.get_global_grad_norm()), rel=1e-4)
        assert all(0 < error < 1 for error in records[-1]["compression_error"].values())
        assert "4-bit values in blocks of 64" in session.summary
        text = " ".join(str(path) for path in tmp_path.rglob("*ds_ckpt*"))
        names = ("compression_error", "residual_norm", "sent_bytes_reduce", "exchange_s_wire")
        assert dist.get_rank() or all(name in text for name in names), text
        dist.barrier()


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
    for part in ("recomputation", "exposed exchange", f"exposed {weights}", "MB sent"):
        assert not lines or part in lines[-1]
    assert not lines or f"of the recomputation ({how})" in lines[-1]


@ranks(2)
def test_without_telemetry_nothing_is_timed() -> None:
    with running("llama", {"activation": {"policy": "block"}, **topk_section()}) as engine:
        session = ds_ckpt.session_of(engine)
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        assert session.counters.spans is None
        assert session.exchange.step.exchange.spans is None
        session.detach()
        assert not {"forward", "step"} & set(vars(engine))
        assert "fetch_sub_module" not in vars(coordinator)
