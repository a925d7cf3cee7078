"""`ds-ckpt measure --loopback`: the experiment without root, from end to end."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ds_ckpt.lab.measure.report import Report
from ds_ckpt.lab.measure.samples import Store, Trial

STEPS = 8
METHODS = ("stock", "dense", "topk")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _measure(*options: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "ds_ckpt.cli", "measure", "--loopback", *options],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(600)
def test_the_demo_keeps_its_promises_and_continues(tmp_path: Path) -> None:
    """Without root; the second call continues the first."""
    folder = tmp_path / "run"
    options = ["--demo", f"--output={folder}", f"--loss-steps={STEPS}", "--tokens=32", "--steps=1"]
    options.append("--shape=hidden_size=256,layers=2,intermediate_size=688,heads=4")
    _measure(*options, "--repetitions=1")
    output = _measure(*options, "--repetitions=2")
    assert "Continuing" in output
    assert "NOT SHAPED" in output
    assert "changed no training loss and no final weight" in " ".join(output.split())
    samples = Store(folder).read()
    trials = [s for s in samples if isinstance(s, Trial)]
    assert set(Counter(s.key for s in trials).values()) == {1}
    names = {f"{p}/{m}" for p in ("none", "block") for m in ("stock", "dense", "topk", "no_comm")}
    assert {(t.configuration, t.repetition) for t in trials} == {
        (n, r) for n in names for r in (0, 1)
    }
    for trial in trials:
        assert trial.rate_mbit is None
        for step in trial.steps:
            assert sum(step.parts_s.values()) == pytest.approx(step.step_s, rel=0.03)
    report = Report.of(folder)
    assert report.findings.missing == []
    rows = {row.configuration: row for row in report.findings.rows}
    for name, row in rows.items():
        assert row.number("interface_over_purposes") == pytest.approx(1, rel=0.1), name
        plain = rows[f"none/{name.partition('/')[2]}"]
        assert row.number("weight_bytes") == plain.number("weight_bytes") > 0
    assert rows["none/stock"].number("held_bytes") > 2 * rows["block/stock"].number("held_bytes")
    stock, dense, topk = (rows[f"none/{m}"].number("gradient_bytes") for m in METHODS)
    assert dense == pytest.approx(stock / 2, rel=0.02)
    assert 0 < 10 * topk < stock
    losses = report.findings.losses
    for method in METHODS:
        plain_loss, kept = losses[f"none/{method}"], losses[f"block/{method}"]
        assert plain_loss.train_losses == kept.train_losses
        assert plain_loss.weights_sha256 == kept.weights_sha256
        assert plain_loss.heldout_loss == kept.heldout_loss < kept.train_losses[0]
        assert all(math.isfinite(one) for one in kept.train_losses)
    assert losses["none/stock"].weights_sha256 != losses["none/topk"].weights_sha256
    # the warm-up is dense; a loss is taken before its step's update
    same = losses["none/topk"].start_step + 1
    assert same == STEPS // 4 + 1
    assert losses["none/topk"].train_losses[:same] == losses["none/dense"].train_losses[:same]
    assert losses["none/topk"].train_losses != losses["none/dense"].train_losses
    assert len(list((folder / "configs").glob("*.json"))) == 8
    assert "<svg" in (folder / "report.html").read_text()
    for process in psutil.process_iter(["cmdline"]):
        assert str(folder) not in " ".join(process.info["cmdline"] or [])


@pytest.mark.timeout(600)
def test_a_users_model_is_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(64, 64)\n"
        "    def forward(self, x):\n"
        "        return x + torch.relu(self.fc(x))\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(Block() for _ in range(3))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x)\n"
        "        return x.float().square().mean()\n"
        "def make(batch):\n"
        "    return Net(), torch.randn(batch, 64)\n"
    )
    folder = tmp_path / "run"
    options = ["--model=mine:make", "--policies=none", "--methods=4bit", "--batch=3"]
    options += ["--loss-steps=0", "--accumulation=2", "--repetitions=1", "--steps=1", "--tokens=1"]
    _measure(f"--output={folder}", *options, cwd=tmp_path)
    trials = {s.configuration: s for s in Store(folder).read() if isinstance(s, Trial)}
    assert trials.keys() == {f"none/{method}" for method in ("stock", "dense", "4bit", "no_comm")}
    elements = 3 * (64 * 64 + 64)
    gathers = trials["none/stock"].purpose_bytes["gather_forward"]
    assert gathers == 2 * 4 * elements  # in each of two micro-steps, half from either process
    assert "mine:make" in (folder / "report.md").read_text()
