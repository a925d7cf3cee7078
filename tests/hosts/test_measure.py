"""`ds-ckpt measure` on emulated hosts: the experiment, going on after a kill."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_ckpt.lab.measure.findings import byte_notes, headline
from ds_ckpt.lab.measure.measure_report import Report
from ds_ckpt.lab.measure.samples import PARTS, Store
from ds_ckpt.lab.measure.spec import Spec
from ds_ckpt.lab.measure.worker import build_model
from ds_ckpt.lab.workload import count_parameters
from tests.hosts.conftest import COMMAND, FEW, LARGER, far_bytes, trials

SMALL = [*FEW, "--shape=hidden_size=128,layers=2,intermediate_size=344,heads=4"]


def wait_for_trials(folder: Path, process: subprocess.Popen[str], count: int = 2) -> None:
    limit = time.monotonic() + 240
    while len(trials(folder)) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit, "no trial was measured in time"
        time.sleep(0.1)


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "measure", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def measured(can_emulate: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measure") / "run"
    process = start([f"--output={folder}", "--rates=200mbit", *LARGER])
    output = process.communicate(timeout=700)[0]
    assert process.returncode == 0, output
    return folder


@pytest.mark.timeout(600)
def test_the_demo_measures_configurations_in_one_start(can_emulate, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    few = ["--tokens=16", "--batch=1", "--steps=1", "--repetitions=1"]
    small = "--shape=hidden_size=64,layers=1,intermediate_size=128,heads=2"
    process = start(["--demo", f"--output={tmp_path / 'run'}", *few, small])
    output = process.communicate(timeout=580)[0]
    assert process.returncode == 0, output
    assert output.count("starting the ranks, about") == 1
    assert Report.of(tmp_path / "run").findings.missing == []
    assert headline(Report.of(tmp_path / "run").findings) in " ".join(output.split())
    table = output[output.index("\n configuration ") :].partition("Why none/dense")[0]
    lines = [name for line in table.splitlines() if "/" in (name := line.strip().split(" ")[0])]
    assert lines[:3] == ["none/stock", "none/dense", "block/dense"]
    assert lines[3:] == [f"block/{name}" for name in ("3bit", "topk", "powersgd", "3bit/whole")]
    assert max(map(len, table.splitlines())) <= 80
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_goes_on_where_it_was(can_emulate: None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [f"--output={folder}", "--rates=200mbit,unlimited", *SMALL]
    process = start(arguments)
    wait_for_trials(folder, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    Store(folder).truncate_partial()
    before = (folder / "samples.jsonl").read_bytes()
    process = start(arguments)
    output = process.communicate(timeout=700)[0]
    assert process.returncode == 0, output
    assert "Continuing" in output
    content = (folder / "samples.jsonl").read_bytes()
    assert content.startswith(before), "what was measured before the kill is kept"
    keys = [json.loads(line) for line in content.splitlines()]
    again = [k for k in keys if k["kind"] == "trial"]
    assert len(again) == len(trials(folder)), "no trial is measured twice"
    assert len(json.loads((folder / "report.json").read_text())["runs"]) == 2


@pytest.mark.timeout(1200)
def test_the_parts_of_a_step_add_up_to_the_step_within_3_percent(measured: Path) -> None:
    """The step has a clock of its own, read once before and once after."""
    for trial in trials(measured):
        for step in trial.steps:
            assert set(step.parts_s) == set(PARTS)
            assert sum(step.parts_s.values()) == pytest.approx(step.step_s, rel=0.03), trial.key
            assert min(step.parts_s.values()) >= 0
            recomputes = trial.configuration.startswith("block")
            assert (step.parts_s["recompute"] > 0) == recomputes
            assert (step.parts_s["network_recompute"] > 0) == recomputes
            assert step.parts_s["network_forward"] > 0


def test_interfaces_count_the_bytes_of_the_collectives_within_3_percent(measured: Path) -> None:
    for trial in trials(measured):
        counted = sum(trial.far_bytes.values())
        assert sum(trial.interface_bytes) == pytest.approx(counted, rel=0.03), trial.key
        # the rate was really set: no interface sends more than it allows
        busy_s = 8e-6 * max(trial.interface_bytes) / (trial.rate_mbit or 1.0)
        assert busy_s < 1.1 * max(step.step_s for step in trial.steps), trial.key
        assert (len(trial.interface_bytes), trial.rate_mbit) == (2, 200.0)
    report = Report.of(measured)
    assert byte_notes(report.findings) == []
    assert "measure" in report.runs[0]["command"]
    assert report.runs[0]["versions"]["deepspeed"]
    assert "<svg" in (measured / "report.html").read_text()


def test_configurations_send_the_expected_bytes(measured: Path) -> None:
    reduced = {t.configuration: t.far_bytes["reduce"] for t in trials(measured)}
    for policy in ("none", "block"):
        assert reduced[f"{policy}/stock"] == pytest.approx(2 * reduced[f"{policy}/dense"], rel=0.02)
        assert 0 < reduced[f"{policy}/4bit"] < reduced[f"{policy}/dense"] / 6
        assert reduced[f"{policy}/no_comm"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resident_weights_and_a_baseline_send_less_between_hosts(can_emulate, tmp_path) -> None:
    """Two micro-steps in bf16: ZeRO-3 gathers four times, the others send weights once."""
    folder = tmp_path / "run"
    options = [f"--output={folder}", "--rates=unlimited", *LARGER, "--bf16", "--accumulation=2"]
    options += ["--policies=none", "--methods=", "--weights=whole,lossless", "--baselines=zero2"]
    process = start([*options])
    output = process.communicate(timeout=280)[0]
    assert process.returncode == 0, output
    found = {t.configuration: t for t in trials(folder)}
    parameters = count_parameters(build_model(Spec.load(folder)))
    where = ("", "/whole", "/lossless")
    names = {f"none/{method}{w}" for method in ("stock", "dense", "no_comm") for w in where}
    assert set(found) == {*names, "none/stock/zero2"}
    for method in ("stock", "dense", "no_comm"):
        baseline, whole, lossless = (max(found[f"none/{method}{w}"].interface_bytes) for w in where)
        assert lossless < 0.95 * whole
        assert whole < 0.7 * baseline
    # of a process, half of 2 bytes a parameter: each time that it is gathered, or sent whole
    for name, gathers, changes in (
        ("none/dense", 4, 0),
        ("none/dense/whole", 0, 1),
        ("none/stock/zero2", 0, 1),
    ):
        counted = far_bytes(found[name], "gather"), far_bytes(found[name], "weights")
        assert counted == pytest.approx([gathers * parameters, changes * parameters], rel=0.01), (
            name
        )
    assert far_bytes(found["none/dense/lossless"], "weights") < 0.5 * parameters
    stored = found["none/dense/whole"].stored_weight_bytes
    assert stored == pytest.approx((1 + 2) * parameters, rel=0.01)
    for trial in found.values():
        assert far_bytes(trial) == pytest.approx(max(trial.interface_bytes), rel=0.03), trial.key
    assert "| none/dense/lossless | " in (folder / "report.md").read_text()
