"""`ds-ckpt measure --loopback`: the experiment without root, from end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ds_ckpt.lab.measure.measure_report import Report
from ds_ckpt.lab.measure.samples import Store, Trial

METHODS = ("stock", "dense", "topk")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _measure(*options: str) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "ds_ckpt.cli", "measure", "--loopback", *options],
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
    options = ["--demo", f"--output={folder}", "--tokens=32", "--steps=1"]
    options.append("--shape=hidden_size=256,layers=2,intermediate_size=688,heads=4")
    _measure(*options, "--repetitions=1")
    output = _measure(*options, "--repetitions=2")
    assert "Continuing" in output
    assert "NOT SHAPED" in output
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
        assert row.interface_bytes == pytest.approx(sum(row.purpose_bytes.values()), rel=0.1), name
        plain = rows[f"none/{name.partition('/')[2]}"]
        gathered, expected = (
            sum(n for purpose, n in one.purpose_bytes.items() if purpose.startswith("gather"))
            for one in (row, plain)
        )
        assert gathered == expected > 0
    assert (rows["none/stock"].peak_bytes or 0) > 1.5 * (rows["block/stock"].peak_bytes or 0) > 0
    baseline, dense, topk = (rows[f"none/{m}"].purpose_bytes["reduce"] for m in METHODS)
    assert dense == pytest.approx(baseline / 2, rel=0.02)
    assert 0 < 10 * topk < baseline
    assert "<svg" in (folder / "report.html").read_text()
    for process in psutil.process_iter(["cmdline"]):
        assert str(folder) not in " ".join(process.info["cmdline"] or [])
