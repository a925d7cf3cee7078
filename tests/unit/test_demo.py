"""The demo's choices before anything is launched: accelerator, environment, options."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ds_ckpt.errors import ConfigError
from ds_ckpt.harness import demo, demo_ground, follow
from ds_ckpt.harness.cells import CELLS, cell_steps, topk_start_step, write_configs


def _choose(monkeypatch: pytest.MonkeyPatch, gpus: int) -> tuple[str, dict[str, str], str]:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "A GPU")
    said = io.StringIO()
    accelerator, environment = demo_ground.accelerator_of(Console(file=said, width=200))
    return accelerator, environment, said.getvalue()


def test_no_gpu_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(demo_ground.os, "cpu_count", lambda: 8)
    accelerator, environment, said = _choose(monkeypatch, 0)
    assert accelerator == environment["DS_ACCELERATOR"] == "cpu"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert said == ""


def test_one_gpu_is_not_enough_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, environment, said = _choose(monkeypatch, 1)
    assert accelerator == environment["DS_ACCELERATOR"] == "cpu"
    assert "training on the CPU instead" in said


def test_two_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, environment, said = _choose(monkeypatch, 3)
    assert accelerator == "A GPU"
    assert "DS_ACCELERATOR" not in environment
    assert "2 of 3 GPUs" in said


def test_wrong_options_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(ConfigError) as caught:
        demo._check(2, tmp_path)
    assert [problem.where for problem in caught.value.problems] == ["--steps", "--output"]


def test_progress_counts_every_step() -> None:
    said = io.StringIO()
    total = sum(cell_steps(cell, 6) for cell in CELLS)
    with follow.following(steps=6, console=Console(file=said)) as heard:
        for step in range(total):
            heard({"phase": "training", "cell": "dense", "step": step, "loss": 5.5})
        heard({"phase": "done"})
    assert f"done: {total} of {total} steps" in said.getvalue()


def test_the_cells_files_are_ones_the_plugin_accepts(tmp_path: Path) -> None:
    from ds_ckpt.config import load_file, parse

    for cell, path in zip(CELLS, write_configs(tmp_path, steps=30), strict=True):
        config = parse(load_file(path), source=str(path))
        assert config.telemetry.enabled
        assert (config.activation.policy == "block") == cell.checkpointing
        if cell.method == "topk":
            assert config.compression.warmup_steps == topk_start_step(30) == 10


def test_on_emulated_hosts_the_timed_steps_are_the_last_and_after_the_warmup() -> None:
    for steps in range(demo.MINIMUM_STEPS, 100):
        shaped = demo_ground.shaped_steps(steps)
        assert 2 <= shaped <= demo_ground.SHAPED_STEPS
        assert steps - shaped > topk_start_step(steps)


def test_gpus_are_not_put_into_emulated_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_ground, "missing", list)
    assert demo_ground.why_no_hosts("cpu") == []
    assert demo_ground.why_no_hosts("A GPU")
    monkeypatch.setattr(demo_ground, "missing", lambda: ["network namespaces need root"])
    assert demo_ground.why_no_hosts("cpu") == ["network namespaces need root"]
