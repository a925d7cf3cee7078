"""The demo from end to end, with very few steps: every promise of its table."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ds_ckpt.harness.cells import CELLS, topk_start_step
from ds_ckpt.harness.results import Results

STEPS = 6
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "run"
    command = [
        *(sys.executable, "-m", "ds_ckpt.harness.demo"),
        *("--steps", str(STEPS), "--output", str(folder), "--time-limit-s", "250"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Held-out loss" in run.stdout
    return folder


@pytest.fixture(scope="module")
def results(run_folder: Path) -> Results:
    return Results.load(run_folder / "results.json")


def test_four_cells_and_the_reference(results: Results) -> None:
    assert [cell.name for cell in results.cells] == [cell.name for cell in CELLS]
    assert {(c.method, c.checkpointing) for c in results.cells if not c.reference} == {
        ("dense", False),
        ("dense", True),
        ("topk", False),
        ("topk", True),
    }


def test_losses_are_finite_and_fall(results: Results) -> None:
    for cell in results.cells:
        assert all(math.isfinite(loss) for loss in cell.train_losses)
        if not cell.reference:
            assert cell.heldout_loss is not None
            assert cell.heldout_loss < cell.train_losses[0]


def test_checkpointing_holds_less_than_half(results: Results) -> None:
    for method in ("dense", "topk"):
        plain, kept = results.cell(method), results.cell(f"{method}-checkpointing")
        assert plain.held_activation_bytes > 2 * kept.held_activation_bytes > 0


def test_checkpointing_changes_no_bit(results: Results) -> None:
    for method in ("dense", "topk"):
        plain, kept = results.cell(method), results.cell(f"{method}-checkpointing")
        assert plain.train_losses == kept.train_losses
        assert plain.weights_sha256 == kept.weights_sha256
        assert plain.heldout_loss == kept.heldout_loss


def test_checkpointing_sends_no_more_weights(results: Results) -> None:
    for method in ("dense", "topk"):
        plain, kept = results.cell(method), results.cell(f"{method}-checkpointing")
        assert kept.traffic.weight_bytes == plain.traffic.weight_bytes > 0


def test_topk_sends_a_tenth_after_its_warmup_and_as_much_before(results: Results) -> None:
    stock, topk = results.cell("dense").traffic, results.cell("topk")
    assert 0 < 10 * topk.traffic.gradient_bytes < stock.gradient_bytes
    assert topk.warmup_traffic is not None
    assert topk.warmup_traffic.gradient_bytes > 0.4 * stock.gradient_bytes


def test_the_warmup_is_dense_training(results: Results) -> None:
    # A loss is taken before its step's update: the first compressed step shows one later.
    same = topk_start_step(STEPS) + 1
    dense, topk = results.cell("dense").train_losses, results.cell("topk").train_losses
    assert dense[:same] == topk[:same]
    assert dense != topk


def test_the_reference_sends_half_of_stock_and_trains_alike(results: Results) -> None:
    stock, reference = results.cell("dense"), results.cell("all-to-all")
    assert reference.traffic.gradient_bytes == pytest.approx(
        stock.traffic.gradient_bytes / 2, rel=0.02
    )
    assert reference.train_losses == stock.train_losses[: reference.steps]


def test_everything_is_written(run_folder: Path, results: Results) -> None:
    for cell in results.cells:
        assert (run_folder / cell.config_file).is_file()
    assert "<svg" in (run_folder / "report.html").read_text(encoding="utf-8")
    assert not (run_folder / "measurements.json").exists()


def test_no_process_is_left(run_folder: Path) -> None:
    for process in psutil.process_iter(["cmdline"]):
        assert str(run_folder) not in " ".join(process.info["cmdline"] or [])


def test_a_used_folder_is_refused(run_folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "ds_ckpt.harness.demo", "--output", str(run_folder), "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert "--output" in run.stderr
    assert "--steps" in run.stderr
    assert "Traceback" not in run.stderr
