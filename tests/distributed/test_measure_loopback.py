"""`ds-ckpt measure --loopback`: the experiment without root, from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ds_ckpt.lab.measure.samples import Store, Trial

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_the_experiment_runs_without_root_and_says_that_the_link_is_not_shaped(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    mine = tmp_path / "mine.json"
    mine.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3},
                "train_micro_batch_size_per_gpu": 1,
                "ds_ckpt": {"compression": {"method": "quantize", "quantize": {"bits": 8}}},
            }
        )
    )
    options = ["--shape=hidden_size=256,layers=2,intermediate_size=688,heads=4", "--tokens=32"]
    options += ["--steps=1", "--loss-steps=2", f"--methods={mine}"]
    command = [sys.executable, "-m", "ds_ckpt.cli", "measure", "--loopback", f"--output={folder}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for repetitions in (1, 2):  # the second goes on
        result = subprocess.run(
            [*command, *options, f"--repetitions={repetitions}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert "Going on" in result.stdout
    done = Counter(s.key for s in Store(folder).read() if isinstance(s, Trial))
    assert set(done.values()) == {1}
    assert {key[-1] for key in done} == {0, 1}
    trials = [s for s in Store(folder).read() if isinstance(s, Trial)]
    assert {t.configuration for t in trials} == {
        f"{policy}/{method}"
        for policy in ("none", "block")
        for method in ("stock", "dense", "mine", "silent")
    }
    reduced = {t.configuration: t.purpose_bytes["reduce"] for t in trials}
    assert 0 < reduced["none/mine"] < reduced["none/dense"] / 3
    for trial in trials:
        assert trial.rate_mbit is None
        for step in trial.steps:
            assert sum(step.parts_s.values()) == pytest.approx(step.step_s, rel=0.03)
    page = (folder / "report.html").read_text()
    assert "not shaped" in page
    for process in psutil.process_iter(["cmdline"]):
        assert str(folder) not in " ".join(process.info["cmdline"] or [])


@pytest.mark.timeout(600)
def test_a_users_model_and_deepspeed_file_are_measured(tmp_path: Path) -> None:
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
    file = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    content = {"zero_optimization": zero, "optimizer": optimizer}
    content |= {"zero_force_ds_cpu_optimizer": False, "gradient_accumulation_steps": 2}
    file.write_text(json.dumps({**content, "train_micro_batch_size_per_gpu": 3}))
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "ds_ckpt.cli", "measure", "--loopback", f"--output={folder}"]
    options = ["--model=mine:make", f"--deepspeed={file}", "--policies=none", "--methods=4bit"]
    options += ["--loss-steps=0", "--repetitions=1", "--steps=1", "--tokens=1"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    trials = {s.configuration: s for s in Store(folder).read() if isinstance(s, Trial)}
    assert trials.keys() == {f"none/{method}" for method in ("stock", "dense", "4bit", "silent")}
    assert all(trial.sequences == 3 for trial in trials.values())
    elements = 3 * (64 * 64 + 64)
    gathers = trials["none/stock"].purpose_bytes["gather_forward"]
    assert gathers == 2 * 4 * elements  # in each of two micro-steps, half from either process
    assert "mine:make" in (folder / "report.md").read_text()
