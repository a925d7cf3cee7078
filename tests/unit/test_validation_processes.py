"""The launched path of a comparison: what is launched and told, and that a hang ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.validate import processes
from ds_ckpt.lab.validate.experiment import DENSE, Plan
from ds_ckpt.lab.validate.processes import run_processes
from ds_ckpt.lab.validate.store import Result, Store
from ds_ckpt.lab.validate.task import Task, TaskSpec
from ds_ckpt.lab.validate.trainer import Outcome


def test_what_is_launched_and_told_and_nothing_where_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []
    results, folder = tmp_path / "r.jsonl", tmp_path / "new"
    task = Task(TaskSpec("language", world=3), None, "task", "", "", ())  # type: ignore[arg-type]
    plan = Plan(task, (), range(1), "processes")
    outcome = Outcome([], [], [], "", [], 0.0, 0.0, 0.0, 0.0, 0.0, diverged=False)

    def launch(
        backend: Loopback,
        module: str,
        job: dict[str, Any],
        folder: Path,
        *,
        heard: Callable[[dict[str, Any]], object],
        **bounds: float,
    ) -> None:
        launched.append({"backend": backend, "folder": folder, **bounds})
        heard({"kind": "begun"})
        heard({"kind": "progress", "name": "dense", "done": 10, "loss": 1.0})
        Store(results).add(Result(plan.key(DENSE, 0), ("language", "dense"), outcome, 1, 1, {}))

    monkeypatch.setattr(processes, "launch", launch)
    store, told = Store(results), list[tuple[str, int, float]]()
    for _ in range(2):
        run_processes(plan, store, results, folder, lambda *said: told.append(said))
    (once,) = launched
    assert told == [("dense", 10, 1.0)]
    assert (once["backend"].processes, once["backend"].gpus) == (3, True)
    assert once["folder"].is_dir()
    assert 600 < once["stall_s"] < 3600  # a hang ends, a slow step does not
    found = store.find(plan.key(DENSE, 0))  # what the processes have kept
    assert found is not None
    assert found.outcome == outcome


def test_processes_that_do_not_write_know_what_was_found(tmp_path: Path) -> None:
    outcome = Outcome([], [], [], "", [], 0.0, 0.0, 0.0, 0.0, 0.0, diverged=True)
    task = Task(TaskSpec("language"), None, "task", "", "", ())  # type: ignore[arg-type]
    key = Plan(task, (), range(1), "processes").key(DENSE, 0)
    store = Store(tmp_path / "r.jsonl", writes=False)
    store.add(Result(key, ("language", "dense"), outcome, 1, 1, {}))
    assert store.find(key) is not None
    assert not (tmp_path / "r.jsonl").exists()
