"""The command's real path against its virtual one, its launch, and guards that act everywhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.validate import experiment
from ds_ckpt.lab.validate.experiment import (
    DENSE,
    Plan,
    read_candidates,
    train_missing,
    train_virtual,
)
from ds_ckpt.lab.validate.processes import run_processes
from ds_ckpt.lab.validate.runs import Store
from ds_ckpt.lab.validate.task import TaskSpec, open_task
from tests.distributed import cases_compression, cases_validation
from tests.distributed.models import topk_section

LOSS_TOLERANCE = 5e-6
"""See test_virtual_training.py."""
SPEC = TaskSpec(
    "language", world=2, batch=2, length=16, steps=8, evaluations=2, hidden_size=16, layers=1
)  # fmt: skip
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


def test_processes_and_virtual_workers_come_to_the_same(
    world2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "SAMPLE_EVERY", 2)
    candidates = read_candidates(files(tmp_path, list(SECTIONS)))
    store = Store(tmp_path / "results.jsonl")
    spec = dataclasses.replace(SPEC, accumulation=2)
    plan = Plan(open_task(spec), candidates, range(1))
    train_missing(plan, store, train_virtual)
    everyone = [DENSE, *candidates]
    real = world2.run(
        cases_validation.validated,
        dataclasses.asdict(spec),
        [one.file for one in candidates],
        str(tmp_path),
        timeout=250,
    )
    assert real[0] == real[1]
    digests = []
    for one, outcome in zip(everyone, real[0], strict=True):
        result = store.find(plan.key(one, 0))
        assert result is not None
        ours = result.outcome
        digests.append((outcome["digest"], ours.digest))
        assert [step for step, _ in ours.heldout] == [step for step, _ in outcome["heldout"]]
        for (_, a), (_, b) in zip(ours.heldout, outcome["heldout"], strict=True):
            assert a == pytest.approx(b, abs=LOSS_TOLERANCE, rel=0)
        if one.lossy:
            assert [step for step, _, _ in outcome["left"]] == [2, 4, 6, 8][-len(ours.left) :]
            for left, mine in zip(outcome["left"], ours.left, strict=True):
                assert left == pytest.approx(mine, rel=1e-4)
                assert 0.01 < left[1] < 1
        else:
            assert outcome["left"] == ours.left == []
    # bit for bit among processes, and among virtual workers
    dense, three_bits, _, offload = digests
    assert offload == dense
    assert all(a != b for a, b in zip(dense, three_bits, strict=True))


def test_the_launched_path_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths are the command's, wherever processes run
    candidates = read_candidates(files(Path(), ["offload"]))
    results = Path("results.jsonl")
    store = Store(results)
    plan = Plan(open_task(SPEC), candidates, range(1), "processes")
    told: list[tuple[str, int]] = []
    run_processes(
        plan, store, results, Path("out"), lambda name, done, _loss: told.append((name, done))
    )
    assert told == [("language, seed 0, dense", 8), ("language, seed 0, offload", 8)]
    dense, ours = (store.find(plan.key(c, 0)) for c in (DENSE, *candidates))
    assert dense is not None
    assert ours is not None
    assert ours.outcome.digest == dense.outcome.digest
    assert ours.step_s > 0
    before = Path("out", "launch.log").read_bytes()
    run_processes(plan, Store(results), results, Path("out"))  # nothing is missing
    assert Path("out", "launch.log").read_bytes() == before


TIGHT = {"error": 1e-6, "every_n_steps": 2}


def section(guard: dict[str, Any], **compression: Any) -> dict[str, Any]:
    return topk_section(topk={"density": 0.05}, guard=guard, **compression)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_falling_back_happens_everywhere_in_the_same_step(
    world2: Any, tmp_path: Path, accumulation: int
) -> None:
    guard = {"action": "dense", **TIGHT}
    first, second = world2.run(
        cases_validation.guarded, section(guard), 8, str(tmp_path), accumulation
    )
    # looked at in steps 2 and 4, both past the limit
    assert first["back"] == second["back"] == [False] * 3 + [True] * 5
    assert first["seen"] == second["seen"]
    assert first["owed"] == second["owed"] == 0
    assert first["kept"]
    assert second["kept"]
    assert len(first["said"]) == 1
    assert "step 4" in first["said"][0]
    assert second["said"] == []


def test_a_guard_that_warns_changes_nothing(world2: Any, tmp_path: Path) -> None:
    warned = world2.run(
        cases_validation.guarded, section({"action": "warn", **TIGHT}), 6, str(tmp_path / "a")
    )
    content = world2.run(
        cases_validation.guarded,
        section({"action": "dense", "residual_norm": 1e6, "every_n_steps": 2}),
        6,
        str(tmp_path / "b"),
    )
    for runs in (warned, content):
        assert all(not any(run["back"]) and run["owed"] > 0 and not run["kept"] for run in runs)
    assert warned[0]["seen"] == content[0]["seen"]
    assert warned[0]["sent"] == content[0]["sent"]
    assert [len(run["said"]) for run in (*warned, *content)] == [1, 0, 0, 0]


def test_falling_back_loses_nothing(world2: Any) -> None:
    accumulation = 3
    ours = section({"action": "dense", "error": 1e-6, "every_n_steps": 1})
    for process in world2.run(cases_compression.conservation, "llama", ours, 5, accumulation):
        assert process["compressed"] == 0
        assert process["worst"] < 1e-5
    for process in world2.run(cases_compression.conservation, "llama", ours, 1, accumulation):
        assert process["compressed"] > 3  # before it, something was owed
