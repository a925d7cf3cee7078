"""Rehearse the GPU checks on the CPU: the quick ones, and one that fails."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from ds_ckpt.compression import Quantize

CPU = torch.device("cpu")
QUICK = ("versions", "codecs", "offload", "dropout")


def _run(*command: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=gpu_check.ROOT, capture_output=True, text=True, **how)


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


def test_targets_follow_from_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is bound by memory or by instructions; three bits on half a card by the latter."""
    monkeypatch.setattr(gpu_check.fused, "is_supported", lambda device: True)
    monkeypatch.setattr(gpu_check, "_median_ms", lambda *_: 1e3)
    monkeypatch.setattr(Quantize, "pack_rows", lambda *_: None)
    rows = []
    for sms in (132, 66):
        card = SimpleNamespace(multi_processor_count=sms, clock_rate=1_755_000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
        rows.append(gpu_check._pack_times(CPU, 2, 64, 3.35e12)["3 bits"])
    entries, packed = 2 * 64 * 64, 2 * 8 * Quantize(bits=3).packed_bytes(512)
    in_memory = 1e3 * (8 * entries + packed) / 3.35e12 / gpu_check.REACHED
    issued = 1e3 * 502 * 4 * entries / 1024 / (4 * 66 * 1.755e9) / gpu_check.REACHED
    for row, bound in zip(rows, (issued / 2, issued), strict=True):
        assert row["pack_target_ms"] == pytest.approx(max(in_memory, bound))
    methods = {"3 bits": {"kernels_ms": 1e3}}
    found = {"pack": {"3 bits": rows[0]}, "entries": 1 << 28, "methods": methods}
    missed = gpu_check.missed_targets(found)
    assert ["pack: 1000" in missed[0], "unpack_add" in missed[1], "400 Gbit/s" in missed[2]] == [
        1
    ] * 3


def test_two_gpus_exchange_over_nccl_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(communicate=lambda: ("",), returncode=0)
    monkeypatch.setattr(gpu_check, "_python", lambda *_: ended)
    for gpus, backends in ((1, ["gloo"]), (2, ["gloo", "nccl"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert gpu_check.processes(torch.device("cuda"))["backends"] == backends


def test_a_file_is_written_without_a_gpu_and_when_time_is_up(tmp_path: Path) -> None:
    for more, status, words in (
        (["--device=cuda"], 2, "no GPU that torch can use"),
        (["--device=cpu", "--only", "alone", "--minutes=0"], 1, "not done after"),
    ):
        out = tmp_path / "found.json"
        ran = _run(sys.executable, "-m", "benchmarks.gpu_check", *more, f"--json={out}")
        assert ran.returncode == status, ran.stderr
        assert words in out.read_text()


def test_one_check_that_is_not_done_does_not_stop_the_others(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    more = "--only", "alone", "versions", "--limit-s", "0.1", "--json", str(out)
    ran = _run(sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", *more)
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
    ran = _run(*command)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["row"].split(",")[0] for line in lines] == [
        *["dense"] * 2,
        *("3 bits", "1 bit", "0.31 bits"),
    ]
    for line in lines:
        assert line["heldout"][-1][1] < line["heldout"][0][1]
        assert line["recipe"]["learning_rate"] == 6e-4


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        (None, "", "nvidia-smi is missing"),
        ("no devices were found", "", "the driver does not run"),
        ("CUDA Version: 12.4 ", "13.0", "newest torch for CUDA 12 (its version ends in +cu12"),
        ("CUDA Version: 13.1 ", "13.0", "ran with DS_IGNORE_CUDA_DETECTION=1"),
        ("CUDA Version: 12.2 ", "12.8", "ran with DS_IGNORE_CUDA_DETECTION=1"),
    ],
)
def test_the_script_says_what_is_missing_and_writes_its_file(driver, cuda, words, tmp_path) -> None:
    """Without nvcc; stand-ins take the place of nvidia-smi and of a Python with torch for CUDA."""
    scripts, tools = tmp_path / "scripts", tmp_path / "tools"
    for folder in (scripts, tools, tmp_path / ".venv-gpu" / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(gpu_check.ROOT / "scripts" / "gpu_check.sh", scripts)
    python = (
        '#!/bin/bash\ncase "$*" in *version.cuda*or*) echo "$TORCH_CUDA" ;; '
        '*benchmarks*) echo "ran with DS_IGNORE_CUDA_DETECTION=$DS_IGNORE_CUDA_DETECTION" ;; esac\n'
    )
    stand_ins = {tools / "python": python, tmp_path / ".venv-gpu" / "bin" / "python": python}
    if driver is not None:
        stand_ins[tools / "nvidia-smi"] = f"#!/bin/bash\necho '| {driver}|'\n"
    for path, text in stand_ins.items():
        path.write_text(text)
        path.chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": str(tools / "python")}
    environment |= {"TORCH_CUDA": cuda, "HOME": str(tmp_path)}
    command = ["bash", str(scripts / "gpu_check.sh"), "--json", str(tmp_path / "found.json")]
    ran = _run(*command, env=environment)
    assert words in ran.stdout + ran.stderr, ran
    if not words.startswith("ran"):
        assert ran.returncode == 2
        assert words in json.loads((tmp_path / "found.json").read_text())["error"]
