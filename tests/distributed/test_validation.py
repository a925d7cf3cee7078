"""The command's real path against its virtual one, its launch, and guards that act everywhere."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.lab.validate import experiment, processes
from ds_ckpt.lab.validate.experiment import RunPlan, read_candidates, read_results, train_missing
from ds_ckpt.lab.validate.task import TaskSpec, open_task
from tests.distributed import models
from tests.distributed.models import topk_section
from tests.distributed.pool import fresh, ranks
from tests.distributed.training import captured_log, conservation, of_all_ranks, running

LOSS_TOLERANCE = 5e-6
"""See test_virtual_training.py."""
SPEC = TaskSpec("language", world=2, batch=2, length=16, steps=8, hidden_size=16, layers=1)
SECTIONS: dict[str, Any] = {
    "3bit": {"compression": {"method": "quantize", "warmup_steps": 2, "min_numel": 0}},
    "topk": {"compression": {"method": "topk", "warmup_steps": 0, "min_numel": 0}},
    "offload": {"activation": {"policy": "block", "offload": True, "offload_min_bytes": 0}},
}


def files(folder: Path, names: list[str]) -> list[Path]:
    paths = []
    for name in names:
        path = folder / f"{name}.json"
        config = {"zero_optimization": {"stage": 3}, "ds_ckpt": SECTIONS[name]}
        path.write_text(json.dumps(config))
        paths.append(path)
    return paths


def _validated(spec: TaskSpec, paths: list[Path]) -> list[dict[str, Any]]:
    """The outcomes of the runs that `validate-accuracy --processes` launches."""

    def train_one(*arguments: Any) -> Any:
        fresh()
        return processes.train_zero3(*arguments)

    plan = RunPlan(open_task(spec), read_candidates(paths, "processes"), range(1), "processes")
    with patch.object(processes, "SAMPLE_EVERY", 2):
        results = train_missing(plan, {}, train_one, lambda *_: None)
        return [dataclasses.asdict(result.outcome) for result in results]


@pytest.mark.slow
def test_processes_and_virtual_workers_come_to_the_same(world2, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(experiment, "SAMPLE_EVERY", 2)
    everything = files(tmp_path, list(SECTIONS))
    spec = dataclasses.replace(SPEC, accumulation=2)
    candidates = read_candidates(files(tmp_path, ["3bit", "topk"]))
    plan = RunPlan(open_task(spec), candidates, range(1))
    results = train_missing(plan, {}, experiment.train_virtual, lambda *_: None)
    virtual = [result.outcome for result in results]
    real = world2.run(_validated, spec, everything, timeout=250)
    assert real[0] == real[1]
    dense, *compressed, offload = real[0]
    for ours, theirs in zip(virtual, [dense, *compressed], strict=True):
        assert [step for step, _ in ours.heldout] == [0, 8]
        assert ours.heldout[1][1] == pytest.approx(theirs["heldout"][1][1], abs=LOSS_TOLERANCE)
        for left, mine in zip(theirs["residual_stats"], ours.residual_stats, strict=True):
            assert left == pytest.approx(mine, rel=1e-4)
            assert 0.01 < left[1] < 1
    assert [len(ours.residual_stats) for ours in virtual] == [0, 3, 4]
    assert offload["digest"] == dense["digest"]
    assert dense["digest"] not in [one["digest"] for one in compressed]


@pytest.mark.slow
def test_launched_ranks_write_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    candidates = read_candidates(files(Path(), ["offload"]), "processes")
    plan = RunPlan(open_task(SPEC), candidates, range(1), "processes")
    logged: list[tuple[str, int]] = []
    results = Path("results.jsonl")
    processes.run_processes(
        plan, results, Path("out"), lambda name, done, _loss: logged.append((name, done))
    )
    assert logged == [("seed 0, dense", 8), ("seed 0, offload", 8)]
    found = read_results(results)
    dense, ours = (
        found[plan.key(one, 0)].outcome for one in (experiment.DENSE_CONTENDER, *candidates)
    )
    assert ours.digest == dense.digest


def section(every_n_steps: int) -> dict[str, Any]:
    guard = {"action": "dense", "error": 1e-6, "every_n_steps": every_n_steps}
    return topk_section(topk={"density": 0.05}, guard=guard)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.sampled(1)
@ranks(2)
def test_falling_back_happens_everywhere_in_the_same_step(tmp_path, accumulation) -> None:
    """Looked at in steps 2 and 4, both past the limit. A checkpoint keeps it."""
    back, seen = [], []
    with captured_log() as logged:
        with running("llama", section(2), accumulation=accumulation) as engine:
            session = ds_ckpt.session_of(engine)
            for step in range(8):
                models.train(engine, "llama", 1, first=step)
                back.append(session.exchange.step.is_disabled)
                last = session.exchange.guard.last
                seen.append(None if last is None else (last.error, last.residual_norm))
            assert not any(r.any() for r in session.residuals.values())
            engine.save_checkpoint(str(tmp_path), tag="mine")
        with running("llama", section(2), accumulation=accumulation) as engine:
            engine.load_checkpoint(str(tmp_path), tag="mine")
            assert ds_ckpt.session_of(engine).exchange.step.is_disabled
    assert back == [False] * 3 + [True] * 5
    one, other = of_all_ranks(seen)
    assert one == other
    warnings = [line for line in logged if "guard: step" in line]
    assert len(warnings) == (dist.get_rank() == 0)
    assert all("step 4" in line for line in warnings)


@ranks(2)
def test_falling_back_loses_nothing() -> None:
    worst, compressed = conservation("llama", section(1), 5, 3)
    assert compressed == 0
    assert worst < 1e-5
    _, compressed = conservation("llama", section(1), 1, 3)
    assert compressed > 3  # before it, there was a residual
