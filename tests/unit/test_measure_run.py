"""A run of `ds-ckpt measure`: progress, log, continuation, refused options, the demo's preset."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ds_ckpt.cli import app
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.hosts import emulated
from ds_ckpt.lab.hosts.launcher import HostError
from ds_ckpt.lab.measure import run, worker
from ds_ckpt.lab.measure.samples import Model, Store, Trial
from ds_ckpt.lab.measure.spec import Configuration, Spec
from tests.unit import measure_samples as known


class _KillError(BaseException):
    """Ends a process in mid-work."""


def _vanished(*_: object, **__: object) -> None:
    raise HostError(Problem("b", "no answer", "it has vanished", "look"))


def test_a_run_continues_only_with_its_model_versions_and_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "check_hosts", lambda backend: None)
    monkeypatch.setattr(run, "check", lambda spec: None)
    monkeypatch.setattr(run, "launch", _vanished)
    (file := tmp_path / "config.json").write_text("{}")
    (module := tmp_path / "mine.py").write_text("")
    backend, console = MagicMock(), Console()

    def begin(model: str | None, folder: Path, repetitions: int = 6) -> None:
        spec = Spec(model=model, folder=str(tmp_path), repetitions=repetitions)
        run.measure(spec, folder, backend=backend, console=console)

    for number, model in enumerate((None, str(file), str(tmp_path), "mine:make")):
        folder = tmp_path / "runs" / str(number)
        for measured in (False, True):
            backend.describe.return_value = f"hosts {measured}"  # may change before a measurement
            with pytest.raises(HostError):
                begin(model, folder)
            if not measured:
                Store(folder).append(
                    [Model(parameters=1, text="", heldout_bytes=1, corpus_sha256="a")]
                )
                (folder / run.RUNS).unlink()
        with pytest.raises(HostError):
            begin(model, folder, repetitions=7)
        with pytest.raises(ConfigError, match="other settings"):
            begin(model, folder, repetitions=6)
        backend.describe.return_value = "other hosts"
        with pytest.raises(ConfigError, match="other hosts"):
            begin(model, folder, repetitions=7)
        backend.describe.return_value = "hosts True"
        with monkeypatch.context() as patch:
            patch.setattr(run, "versions", lambda: {"torch": "0.1"})
            with pytest.raises(ConfigError, match=r"0\.1"):
                begin(model, folder, repetitions=7)
        if model is not None:
            for changed in (file, module):
                changed.write_text(f"{number}")
            with pytest.raises(ConfigError, match="whose model was"):
                begin(model, folder, repetitions=7)


def test_progress_is_a_line_per_tenth_without_a_terminal() -> None:
    output = io.StringIO()
    with run.progress_shown(Console(file=output, width=100)) as show:
        for done in range(1, 41):
            show({"words": f"{done} of 40 trials", "done": done, "total": 40})
            show({"words": None})
        show({"words": "training none/stock for its loss", "done": 0, "total": 60})
    lines = [line.strip() for line in output.getvalue().splitlines() if line.strip()]
    assert lines[:2] == ["1 of 40 trials", "4 of 40 trials"]
    assert lines[-1] == "training none/stock for its loss"
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loopback", "--rates=50mbit"], "only the links of emulated nodes"),
        (["--loopback", "--methods=zip"], "zip"),
        (["--loopback", "--launcher=slurm"], "'slurm' is not one of 'pdsh', 'openmpi'"),
        (["--loopback", "--shape=width=3"], "hidden_size"),
        (["--loopback", "--slots=1"], "a single process exchanges nothing"),
        (["--rates=fast"], "write 200mbit"),
        (["--loopback", "--hosts=3"], "--hosts would change nothing"),
        (["--loopback", "--launcher=openmpi", "--port=3"], "--launcher, --port would change"),
        (["--interface=eth0", "--ssh-port=3"], "--interface, --ssh-port would change nothing"),
        (["--hostfile={file}", "--hosts=3"], "--hosts would change nothing"),
        (["--hostfile={file}", "--loopback"], "--loopback would change nothing"),
        (["--hostfile={file}.none"], "does not exist"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "file").write_text("node slots=2\n")
    options = [option.format(file=tmp_path / "file") for option in options]
    result = CliRunner().invoke(app, ["measure", f"--output={tmp_path / 'run'}", *options])
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    result = CliRunner().invoke(app, ["measure", f"--output={tmp_path}", "--loopback"])
    assert result.exit_code == 1
    assert "which holds something else" in result.output


@pytest.mark.parametrize("on_hosts", [True, False])
def test_the_demo_is_a_preset(
    on_hosts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[Spec] = []

    def measured(spec: Spec, path: Path, **_: object) -> None:
        specs.append(spec)
        raise _vanished()  # type: ignore[misc]

    monkeypatch.setattr(run, "measure", measured)
    monkeypatch.setattr(emulated, "missing", lambda: [] if on_hosts else ["no root"])
    monkeypatch.setattr(emulated, "EmulatedHosts", lambda *_, **__: nullcontext())
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["measure", "--demo", "--loss-steps=8", "--baselines=zero1"])
    (spec,) = specs
    assert (spec.where, spec.processes) == ("emulated" if on_hosts else "loopback", 2)
    assert (spec.methods, spec.repetitions, spec.loss_steps) == (("topk",), 4, 8)
    assert spec.baselines == ("zero1",)


def test_the_log_outlives_a_kill_in_mid_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, write = MagicMock(), Path.write_text
    backend.describe.return_value = "here"
    with run._logged(Spec(), tmp_path, backend) as entry:
        entry["completed"] = True

    def torn(path: Path, text: str, **options: Any) -> int:
        write(path, text[: 2 * len(text) // 3], **options)
        raise _KillError

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(_KillError), run._logged(Spec(), tmp_path, backend):
        pass
    monkeypatch.undo()
    (kept,) = (tmp_path / run.RUNS).read_text().splitlines()
    assert json.loads(kept)["completed"]
    with run._logged(Spec(), tmp_path, backend):
        pass
    assert len((tmp_path / run.RUNS).read_text().splitlines()) == 2


def test_the_memory_of_policies_is_reduced_on_the_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL takes no tensor of the host."""
    devices = []

    def all_reduce(tensor: torch.Tensor, **_: Any) -> None:
        devices.append(str(tensor.device))
        raise _KillError

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(
        worker, "get_accelerator", lambda: SimpleNamespace(current_device_name=lambda: "meta")
    )
    one = SimpleNamespace(
        memory=lambda _batch: (1, 2), configuration=SimpleNamespace(policy="none")
    )
    with pytest.raises(_KillError):
        worker.Worker._memory(MagicMock(), one)  # type: ignore[arg-type]
    assert devices == ["meta"]


def test_existing_trials_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no trial is missing, no engine is built."""
    spec, store = Spec(rates=(100.0, 50.0), repetitions=2, warm_up=0), Store(tmp_path)
    built: list[str] = []
    rates: list[float | None] = []

    def engine(configuration: Configuration, _spec: Spec) -> Any:
        built.append(configuration.name)
        return SimpleNamespace(
            configuration=configuration, memory=lambda batch: (1, 2), end=lambda: None
        )

    def trial(self: worker.Worker, one: Any, rate: float, repetition: int) -> None:
        assert rates[-1] == rate
        self._append(known.trial(known.SPEC, one.configuration.name, rate, repetition, 0.0))

    monkeypatch.setattr(worker, "EngineRun", engine)
    monkeypatch.setattr(worker.Worker, "_trial", trial)
    monkeypatch.setattr(worker.Worker, "_set_rate", lambda self, rate: rates.append(rate))
    monkeypatch.setattr(worker.Worker, "batches", lambda self, step: step)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: None)

    def engines_built() -> int:
        built.clear()
        done = {sample.key: sample for sample in store.read()}
        worker.Worker(spec, store, MagicMock(), done, MagicMock(), None)._measure_trials()
        return len(built)

    assert engines_built() == 8
    whole = store.path.read_text().splitlines(keepends=True)
    assert len([s for s in store.read() if isinstance(s, Trial)]) == 2 * 2 * 8
    assert rates == [100.0, 50.0, 100.0, 50.0, None]
    assert engines_built() == 0
    store.path.write_text("".join(whole[:-3]))
    assert engines_built() == 8
    assert store.path.read_text().splitlines(keepends=True) == whole
