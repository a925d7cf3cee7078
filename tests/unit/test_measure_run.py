"""A run of `ds-ckpt measure`: progress, log, continuation, refused options, the demo's preset."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.hosts import emulated
from ds_ckpt.lab.hosts.launcher import HostError
from ds_ckpt.lab.measure import trials
from ds_ckpt.lab.measure.samples import Store
from ds_ckpt.lab.measure.spec import Spec
from tests.unit import measure_samples as known


def test_a_run_continues_only_with_its_settings_versions_and_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs list what is missing; the first launch measures one trial and fails."""
    launched: list[dict[str, Any]] = []
    folder, backend, spec = tmp_path / "run", MagicMock(), Spec(methods=("4bit",), repetitions=1)
    backend.describe.return_value = "hosts"

    def launch(_backend: Any, _module: str, job: dict[str, Any], *_: Any, **options: Any) -> None:
        launched.append(job)
        options["on_event"]({"words": "1 of 8 trials", "done": 1, "total": 8})
        name, repetition = job["trials"][0]
        Store(folder).append(known.trial(spec, name, 200.0, repetition, 0.0))
        raise HostError(Problem("b", "no answer", "it has vanished", "look"))

    monkeypatch.setattr(trials, "check_hosts", lambda backend: None)
    monkeypatch.setattr(trials, "launch", launch)

    def begin(**changes: Any) -> None:
        trials.measure(
            Spec(**{"methods": ("4bit",), "repetitions": 1, **changes}),
            folder,
            backend=backend,
            console=Console(quiet=True),
        )

    for _ in range(2):
        with pytest.raises(HostError):
            begin()
    with pytest.raises(HostError):
        begin(repetitions=2)
    assert [len(job["trials"]) for job in launched] == [8, 7, 14]
    backend.set_rate.assert_called_with(200.0)
    for changes in ({"repetitions": 1}, {"repetitions": 2, "batch": 3}):
        with pytest.raises(ConfigError, match="other settings"):
            begin(**changes)
    with monkeypatch.context() as patch:
        patch.setattr("ds_ckpt.lab.workload.versions", lambda: {"torch": "0.1"})
        with pytest.raises(ConfigError, match=r"0\.1"):
            begin(repetitions=2)
    backend.describe.return_value = "other hosts"
    with pytest.raises(ConfigError, match="other hosts"):
        begin(repetitions=2)
    assert len(trials.read_runs(folder)) == 3


def test_a_complete_run_needs_no_launch() -> None:
    spec = replace(known.SPEC, rates=(100.0, 50.0), repetitions=2)
    jobs = trials.jobs(spec, set())
    assert [job["rate"] for job in jobs] == [100.0, 50.0]
    assert [job["memory"] for job in jobs] == [["none", "block"], []]
    first, second = jobs[0]["trials"][:8], jobs[0]["trials"][8:]
    beside = [name for name, _ in first]
    assert beside[2:6] == ["none/dense", "block/dense", "none/4bit", "block/4bit"]
    assert [name for name, _ in second] == [name for name, _ in [*first[1:], first[0]]]
    done = {sample.key for sample in known.samples(spec)}
    assert trials.jobs(spec, done) == []
    done.remove(("trial", "block/4bit", 50.0, 1))
    (job,) = trials.jobs(spec, done)
    assert (job["rate"], job["trials"]) == (50.0, [("block/4bit", 1)])


def test_progress_is_a_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    show = trials._printer(Console(width=100))
    for done in range(1, 41):
        show({"words": f"{done} of 40 trials", "done": done, "total": 40})
        show({})
    show({"words": "done"})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["1 of 40 trials", "4 of 40 trials"]
    assert lines[-1] == "done"
    assert len(lines) == 12


@pytest.mark.parametrize("on_hosts", [True, False])
def test_the_demo_is_a_preset(
    on_hosts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[Spec] = []

    def measured(spec: Spec, path: Path, **_: object) -> None:
        specs.append(spec)
        raise HostError(Problem("b", "no answer", "it has vanished", "look"))

    monkeypatch.setattr(trials, "measure", measured)
    monkeypatch.setattr(emulated, "missing", lambda: [] if on_hosts else ["no root"])
    monkeypatch.setattr(emulated, "EmulatedHosts", lambda *_, **__: nullcontext())
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["measure", "--demo", "--baselines=zero1"])
    (spec,) = specs
    assert (spec.where, spec.processes) == ("emulated" if on_hosts else "loopback", 2)
    assert (spec.methods, spec.repetitions) == (("topk",), 4)
    assert spec.baselines == ("zero1",)
    CliRunner().invoke(app, ["measure"])
    assert specs[1].methods == Spec().methods == ("topk", "powersgd", "3bit")
