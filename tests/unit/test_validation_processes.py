"""The launched path of a comparison: what is launched, told and kept, and that a hang ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from ds_ckpt.hosts.backends import Loopback
from ds_ckpt.validation import processes
from ds_ckpt.validation.processes import run_processes


def test_progress_is_told_and_nothing_else_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[str, Any] = {}

    def launch(
        backend: Loopback,
        module: str,
        job: dict[str, Any],
        folder: Path,
        *,
        heard: Callable[[dict[str, Any]], object],
        **bounds: float,
    ) -> None:
        launched.update(backend=backend, module=module, job=job, folder=folder, **bounds)
        heard({"kind": "begun"})
        heard({"kind": "progress", "seed": 0, "name": "dense", "done": 10, "loss": 1.0})

    monkeypatch.setattr(processes, "launch", launch)
    monkeypatch.setattr(processes, "_job", lambda *_: {"runs": []})
    plan, store, told = MagicMock(), MagicMock(), list[tuple[int, float]]()
    plan.task.spec.world = 3
    run_processes(
        plan, store, tmp_path / "new", lambda _, done, __, loss: told.append((done, loss))
    )
    assert told == [(10, 1.0)]
    assert (launched["backend"].processes, launched["backend"].gpus) == (3, True)
    assert launched["folder"].is_dir()
    assert 600 < launched["stall_s"] < 3600  # a hang ends, a slow step does not
    store.add.assert_not_called()


def test_nothing_is_launched_where_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "launch", MagicMock(side_effect=AssertionError))
    plan = MagicMock()
    plan.missing.return_value = []
    run_processes(plan, MagicMock(), tmp_path)
