"""Rehearse the GPU checks on the CPU: the quick ones, and one that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check

CPU = torch.device("cpu")
QUICK = ("versions", "codecs", "offload", "dropout")


@pytest.mark.parametrize("name", QUICK)
def test_a_check_passes_on_the_cpu(name: str) -> None:
    result = gpu_check.run(name, CPU)
    assert result["ok"], result


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(gpu_check.CHECKS.keys() - QUICK))
def test_every_check_passes_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    result = gpu_check.run_apart(name, CPU, 120)
    assert result["ok"], result


def test_a_method_that_loses_something_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = gpu_check.Quantize(bits=4)
    monkeypatch.setattr(gpu_check, "METHODS", {"4 bits": codec})
    monkeypatch.setattr(gpu_check, "RESIDUALS", gpu_check.RESIDUALS[:1])
    assert gpu_check.run("law3", CPU)["ok"]
    pack = type(codec).pack_rows

    def forgets(self: object, values: torch.Tensor, out: torch.Tensor) -> None:
        pack(codec, values, out)
        values[:, ::7] = 0.0

    monkeypatch.setattr(type(codec), "pack_rows", forgets)
    result = gpu_check.run("law3", CPU)
    assert not result["ok"]
    assert "AssertionError" in result["error"]


def test_one_check_that_is_not_done_does_not_stop_the_others(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--json", str(out)]
        + ["--only", "alone", "versions", "--limit-s", "0.1"],
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    checks = json.loads(out.read_text())["checks"]
    assert list(checks) == ["alone", "versions"]
    assert all("not done after" in check["error"] for check in checks.values())
    assert ran.stdout.count("FAILED") == 2


@pytest.mark.slow
def test_loss_at_scale_is_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    """Ten steps, the fewest: the rows train, and each is written down when it has ended."""
    command = [sys.executable, "benchmarks/loss_at_scale.py", "--device=cpu", "--minutes=0"]
    command += ["--hidden-size=64", "--layers=1", f"--results={tmp_path}/lines.jsonl"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["row"].split(",")[0] for line in lines] == [
        *["dense"] * 2,
        *("3 bits", "1 bit", "0.31 bits"),
    ]
    for line in lines:
        assert line["heldout"][-1][1] < line["heldout"][0][1]
        assert line["recipe"]["learning_rate"] == 6e-4
