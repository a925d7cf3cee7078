"""The command's real path against its virtual one, its launch, and guards that act everywhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.validate import experiment
from ds_ckpt.lab.validate.experiment import Plan, read_candidates, train_missing, train_virtual
from ds_ckpt.lab.validate.processes import run_processes
from ds_ckpt.lab.validate.runs import read_results
from ds_ckpt.lab.validate.task import TaskSpec, open_task
from tests.distributed import cases_compression, cases_validation
from tests.distributed.models import topk_section

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


@pytest.mark.slow
def test_processes_and_virtual_workers_come_to_the_same(
    world2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "SAMPLE_EVERY", 2)
    everything = [str(path) for path in files(tmp_path, list(SECTIONS))]
    spec = dataclasses.replace(SPEC, accumulation=2)
    candidates = read_candidates(files(tmp_path, ["3bit", "topk"]))
    plan = Plan(open_task(spec), candidates, range(1))
    virtual = [result.outcome for result in train_missing(plan, {}, train_virtual, lambda *_: None)]
    real = world2.run(cases_validation.validated, dataclasses.asdict(spec), everything, timeout=250)
    assert real[0] == real[1]
    dense, *compressed, offload = real[0]
    for ours, theirs in zip(virtual, [dense, *compressed], strict=True):
        assert [step for step, _ in ours.heldout] == [0, 8]
        assert ours.heldout[1][1] == pytest.approx(
            theirs["heldout"][1][1], abs=LOSS_TOLERANCE, rel=0
        )
        for left, mine in zip(theirs["left"], ours.left, strict=True):
            assert left == pytest.approx(mine, rel=1e-4)
            assert 0.01 < left[1] < 1
    assert [len(ours.left) for ours in virtual] == [0, 3, 4]
    assert offload["digest"] == dense["digest"]
    assert dense["digest"] not in [one["digest"] for one in compressed]


@pytest.mark.slow
def test_launched_ranks_write_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    candidates = read_candidates(files(Path(), ["offload"]), "processes")
    plan = Plan(open_task(SPEC), candidates, range(1), "processes")
    logged: list[tuple[str, int]] = []
    results = Path("results.jsonl")
    run_processes(plan, results, Path("out"), lambda name, done, _loss: logged.append((name, done)))
    assert logged == [("seed 0, dense", 8), ("seed 0, offload", 8)]
    found = read_results(results)
    dense, ours = (found[plan.key(one, 0)].outcome for one in (experiment.DENSE, *candidates))
    assert ours.digest == dense.digest


def section(every_n_steps: int) -> dict[str, Any]:
    guard = {"action": "dense", "error": 1e-6, "every_n_steps": every_n_steps}
    return topk_section(topk={"density": 0.05}, guard=guard)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.sampled(1)
def test_falling_back_happens_everywhere_in_the_same_step(
    world2: Any, tmp_path: Path, accumulation: int
) -> None:
    first, second = world2.run(cases_validation.guarded, section(2), 8, str(tmp_path), accumulation)
    # looked at in steps 2 and 4, both past the limit
    assert first["back"] == second["back"] == [False] * 3 + [True] * 5
    assert first["seen"] == second["seen"]
    assert first["unsent"] == second["unsent"] == 0
    assert first["kept"]
    assert second["kept"]
    assert len(first["messages"]) == 1
    assert "step 4" in first["messages"][0]
    assert second["messages"] == []


def test_falling_back_loses_nothing(world2: Any) -> None:
    accumulation = 3
    ours = section(1)
    for process in world2.run(cases_compression.conservation, "llama", ours, 5, accumulation):
        assert process["compressed"] == 0
        assert process["worst"] < 1e-5
    for process in world2.run(cases_compression.conservation, "llama", ours, 1, accumulation):
        assert process["compressed"] > 3  # before it, there was a residual
