"""`ds-ckpt measure --loopback`: the experiment without root, from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ds_ckpt.measure.records import Store, Trial

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
    options += ["--repetitions=1", "--steps=1", "--loss-steps=2", f"--methods={mine}"]
    command = [sys.executable, "-m", "ds_ckpt.cli", "measure", "--loopback", f"--output={folder}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=580
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NOT SHAPED" in result.stdout
    trials = [s for s in Store(folder).read() if isinstance(s, Trial)]
    assert {t.configuration for t in trials if not t.equal_memory} == {
        f"{policy}/{method}"
        for policy in ("none", "block")
        for method in ("stock", "dense", "mine", "silent")
    }
    reduced = {t.configuration: t.purpose_bytes["reduce"] for t in trials if not t.equal_memory}
    assert 0 < reduced["none/mine"] < reduced["none/dense"] / 3
    for trial in trials:
        assert trial.rate_mbit is None
        for step in trial.steps:
            assert sum(step.parts_s.values()) == pytest.approx(step.step_s, rel=0.03)
    page = (folder / "report.html").read_text()
    assert "NOT SHAPED" in page
    for process in psutil.process_iter(["cmdline"]):
        assert str(folder) not in " ".join(process.info["cmdline"] or [])
