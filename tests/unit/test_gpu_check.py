"""What is run on a GPU is rehearsed on the CPU: the quick checks, and what one does that fails."""

from __future__ import annotations

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
    pack = type(codec).pack_all

    def forgets(self: object, shards: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pack(codec, shards)
        for values, _ in shards:
            values[:, ::7] = 0.0

    monkeypatch.setattr(type(codec), "pack_all", forgets)
    result = gpu_check.run("law3", CPU)
    assert not result["ok"]
    assert "AssertionError" in result["error"]


def _times(share: float, takes_ms: float) -> gpu_check.Found:
    pack = {"pack_ms": 1.0, "pack_share": 0.9, "unpack_add_ms": 1.0, "unpack_add_share": share}
    return {
        "entries": 16 * 4096**2,
        "methods": {"3 bits": {"kernels_ms": takes_ms}},
        "pack": {"4 bits": {**pack, "unpack_add_share": 0.9}, "3 bits": pack},
    }


def test_missed_targets_of_speed_are_named_with_their_figures() -> None:
    assert gpu_check.missed_targets(_times(0.5, 7.4)) == []
    # seven eighths of 2.7e8 entries: 470 MB in bf16, 95 MB in 3.25 bits, 50 GB a second
    slow, late = gpu_check.missed_targets(_times(0.49, 7.6))
    assert slow.startswith("3 bits, unpack_add: 0.49 of a copy's bandwidth")
    assert "take 7.60 ms of a bucket of 268435456 entries and save 7.49 ms at 400 Gbit/s" in late
    unfused = {**_times(0.9, 1.0), "pack": {"left out": "no Triton for this device"}}
    missed = gpu_check.missed_targets(unfused)
    assert missed == ["kernels are not fused: no Triton for this device"]


def test_a_missed_target_fails_its_check_and_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {**_times(0.49, 1.0), "missed": ["too slow", "and late"]}
    monkeypatch.setitem(gpu_check.CHECKS, "times", (lambda device: found, 1))
    result = gpu_check.run("times", CPU)
    assert result == {"ok": False, "error": "too slow; and late", "found": found}
    monkeypatch.setitem(gpu_check.CHECKS, "times", (lambda device: {**found, "missed": []}, 1))
    assert gpu_check.run("times", CPU)["ok"]


def test_one_check_that_is_not_done_does_not_stop_the_others(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--json", str(out)]
        + ["--only", "alone", "versions", "--limit-s", "0.1"],
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    checks = json.loads(out.read_text())["checks"]
    assert list(checks) == ["alone", "versions"]
    assert all("not done after" in check["error"] for check in checks.values())
    assert ran.stdout.count("FAILED") == 2
