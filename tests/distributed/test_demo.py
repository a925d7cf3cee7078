"""The demo from end to end, with very few steps: every promise of its table."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ds_ckpt.lab.measure.findings import Row
from ds_ckpt.lab.measure.report import Report

STEPS = 8
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "run"
    command = [
        *(sys.executable, "-m", "ds_ckpt.cli.demo", "--loopback"),
        *("--steps", str(STEPS), "--output", str(folder), "--time-limit-s", "380"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Held-out loss" in run.stdout
    assert "NOT SHAPED" in run.stdout
    return folder


@pytest.fixture(scope="module")
def report(run_folder: Path) -> Report:
    return Report.of(run_folder)


@pytest.fixture(scope="module")
def rows(report: Report) -> dict[str, Row]:
    return {row.configuration: row for row in report.findings.rows}


@pytest.mark.timeout(420)
def test_checkpointing_off_and_on_dense_and_topk(report: Report) -> None:
    assert report.findings.missing == []
    assert {row.configuration for row in report.findings.rows} == {
        f"{policy}/{method}"
        for policy in ("none", "block")
        for method in ("stock", "dense", "topk")
    }


def test_losses_are_finite_and_fall(report: Report) -> None:
    for loss in report.losses.values():
        assert all(math.isfinite(one) for one in loss.train_losses)
        assert loss.heldout_loss < loss.train_losses[0]


def test_checkpointing_holds_less_than_half(rows: dict[str, Row]) -> None:
    plain, kept = rows["none/stock"], rows["block/stock"]
    assert plain.number("held_bytes") > 2 * kept.number("held_bytes") > 0


def test_checkpointing_changes_no_bit(report: Report) -> None:
    for method in ("stock", "dense", "topk"):
        plain, kept = report.losses[f"none/{method}"], report.losses[f"block/{method}"]
        assert plain.train_losses == kept.train_losses
        assert plain.weights_sha256 == kept.weights_sha256 != ""
        assert plain.heldout_loss == kept.heldout_loss


def test_other_gradients_lead_to_other_weights(report: Report) -> None:
    """The digest is of the weights: it tells trainings apart."""
    assert report.losses["none/stock"].weights_sha256 != report.losses["none/topk"].weights_sha256


def test_checkpointing_sends_no_more_weights(rows: dict[str, Row]) -> None:
    for method in ("stock", "dense", "topk"):
        plain, kept = rows[f"none/{method}"], rows[f"block/{method}"]
        assert kept.number("weight_bytes") == plain.number("weight_bytes") > 0


def test_topk_sends_a_tenth(rows: dict[str, Row]) -> None:
    stock, topk = (rows[f"none/{m}"].number("gradient_bytes") for m in ("stock", "topk"))
    assert 0 < 10 * topk < stock


def test_the_warmup_is_dense_training(report: Report) -> None:
    # A loss is taken before its step's update: the first compressed step shows one later.
    dense, topk = report.losses["none/dense"], report.losses["none/topk"]
    assert topk.start_step == STEPS // 4
    same = topk.start_step + 1
    assert dense.train_losses[:same] == topk.train_losses[:same]
    assert dense.train_losses != topk.train_losses


def test_the_all_to_all_sends_half_of_stock_and_trains_alike(
    report: Report, rows: dict[str, Row]
) -> None:
    stock, dense = (rows[f"none/{m}"].number("gradient_bytes") for m in ("stock", "dense"))
    assert dense == pytest.approx(stock / 2, rel=0.02)
    assert report.losses["none/dense"].train_losses == report.losses["none/stock"].train_losses


def test_the_interface_has_counted_what_was_sent(rows: dict[str, Row]) -> None:
    for row in rows.values():
        assert row.number("interface_over_purposes") == pytest.approx(1, rel=0.1)


def test_everything_is_written(run_folder: Path) -> None:
    assert len(list((run_folder / "configs").glob("*.json"))) == 6
    assert "<svg" in (run_folder / "report.html").read_text(encoding="utf-8")


def test_no_process_is_left(run_folder: Path) -> None:
    for process in psutil.process_iter(["cmdline"]):
        assert str(run_folder) not in " ".join(process.info["cmdline"] or [])


def test_a_used_folder_is_refused_with_other_settings(run_folder: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "ds_ckpt.cli.demo", "--loopback"),
            *("--output", str(run_folder), "--steps", "9"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert "--output" in run.stderr
    assert "Traceback" not in run.stderr
