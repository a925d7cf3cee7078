"""A run of `ds-ckpt measure`: what is shown and noted, where it goes on, what is refused."""

from __future__ import annotations

import io
import json
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
from ds_ckpt.lab.hosts.checks import HostError
from ds_ckpt.lab.measure import run, worker
from ds_ckpt.lab.measure.samples import Key, Model, Store, Trial
from ds_ckpt.lab.measure.spec import Configuration, Spec
from tests.unit import measure_samples as known


class _KillError(BaseException):
    """Takes a process's life in between."""


def _vanished(*_: object, **__: object) -> None:
    raise HostError(Problem("b", "no answer any more", "it has vanished", "look"))


def test_a_run_does_not_go_on_in_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other versions, machines or hosts with the same settings: times cannot be put together."""
    monkeypatch.setattr(run, "check_hosts", lambda ground: None)
    monkeypatch.setattr(run, "launch", _vanished)
    folder, console, ground = tmp_path / "run", Console(), MagicMock()
    ground.describe.return_value = "hosts"
    for _ in range(2):  # nothing is measured yet, so it may begin anew anywhere
        with pytest.raises(HostError):
            run.measure(Spec(), folder, backend=ground, console=console)
    Store(folder).append([Model(parameters=1, text="", heldout_bytes=1, corpus_sha256="a")])
    with pytest.raises(HostError):
        run.measure(Spec(), folder, backend=ground, console=console)
    ground.describe.return_value = "other hosts"
    with pytest.raises(ConfigError, match="other hosts"):
        run.measure(Spec(), folder, backend=ground, console=console)
    ground.describe.return_value = "hosts"
    monkeypatch.setattr(run, "versions", lambda: {"torch": "0.1"})
    with pytest.raises(ConfigError, match=r"0\.1"):
        run.measure(Spec(), folder, backend=ground, console=console)


@pytest.mark.parametrize("kind", ["config.json", "a folder", "mine:make"])
def test_a_run_does_not_go_on_with_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Under the same name."""
    monkeypatch.setattr(run, "check_hosts", lambda ground: None)
    monkeypatch.setattr(run, "check", lambda spec: None)
    monkeypatch.setattr(run, "launch", _vanished)
    (tmp_path / "m").mkdir()
    (file := tmp_path / "m" / "config.json").write_text("{}")
    (module := tmp_path / "mine.py").write_text("")
    model = {"config.json": str(file), "a folder": str(file.parent)}.get(kind, kind)
    spec = Spec(model=model, folder=str(tmp_path))
    folder, console, ground = tmp_path / "run", Console(), MagicMock()
    ground.describe.return_value = "hosts"
    with pytest.raises(HostError):
        run.measure(spec, folder, backend=ground, console=console)
    Store(folder).append([Model(parameters=1, text="", heldout_bytes=1, corpus_sha256="a")])
    with pytest.raises(HostError):
        run.measure(spec, folder, backend=ground, console=console)
    for changed in (file, module):
        changed.write_text("{ }")
    with pytest.raises(ConfigError, match="whose model were"):
        run.measure(spec, folder, backend=ground, console=console)


def test_progress_is_shown_a_line_a_tenth_without_a_terminal() -> None:
    said = io.StringIO()
    with run.shown(Console(file=said, width=100)) as show:
        for done in range(1, 41):
            show({"words": f"{done} of 40 trials", "done": done, "total": 40})
            show({"words": None})
        show({"words": "training none/stock for its loss", "done": 0, "total": 60})
    lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
    assert lines[:2] == ["1 of 40 trials", "4 of 40 trials"]
    assert lines[-1] == "training none/stock for its loss"
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--loopback", "--rates=50mbit"], "only the links of emulated hosts"),
        (["--loopback", "--batches=2,many"], "write numbers with commas"),
        (["--loopback", "--policies=block"], "add none"),
        (["--loopback", "--methods=zip"], "zip"),
        (["--loopback", "--launcher=slurm"], "'slurm' is not one of 'pdsh', 'openmpi'"),
        (["--loopback", "--shape=width=3"], "hidden_size"),
        (["--loopback", "--shape=heads=3"], "256 is not 3 heads of an even width"),
        (["--loopback", "--shape=layers=0"], "layers=0"),
        (["--loopback", "--slots=1"], "a single process exchanges nothing"),
        (["--rates=fast"], "write 200mbit"),
        (["--rates=50mbit,50mbit"], "names a rate twice"),
        (["--loopback", "--hosts=3"], "--hosts would change nothing"),
        (["--loopback", "--launcher=openmpi", "--port=3"], "--launcher, --port would change"),
        (["--interface=eth0", "--ssh-port=3"], "--interface, --ssh-port would change nothing"),
        (["--hostfile={file}", "--hosts=3"], "--hosts would change nothing"),
        (["--hostfile={file}", "--loopback"], "--loopback would change nothing"),
        (["--hostfile={file}.none"], "does not exist"),
        (["--text={file}.none"], "does not exist"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(
    tmp_path: Path, options: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("node slots=2\n")
    options = [option.format(file=tmp_path / "file") for option in options]
    result = CliRunner().invoke(app, ["measure", f"--output={tmp_path / 'run'}", *options])
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_notes_outlive_a_kill_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground, write = MagicMock(), Path.write_text
    ground.describe.return_value = "here"
    with run._noted(Spec(), tmp_path, ground) as note:
        note["ended_well"] = True

    def torn(path: Path, text: str, **options: Any) -> int:
        write(path, text[: 2 * len(text) // 3], **options)
        raise _KillError

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(_KillError), run._noted(Spec(), tmp_path, ground):
        pass
    monkeypatch.undo()
    (kept,) = (tmp_path / run.RUNS).read_text().splitlines()
    assert json.loads(kept)["ended_well"]
    with run._noted(Spec(), tmp_path, ground):
        pass
    assert len((tmp_path / run.RUNS).read_text().splitlines()) == 2


def test_the_memory_of_configurations_is_agreed_on_where_the_backend_can(
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
        memory=lambda _batch: (1, 2), configuration=SimpleNamespace(name="none/stock")
    )
    with pytest.raises(_KillError):
        worker.Worker._memory(MagicMock(), one, 4)  # type: ignore[arg-type]
    assert devices == ["meta"]


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on takes the trials it lacks; where none is lacking, no engine is built."""
    spec, store = Spec(rates=(100.0,), repetitions=2, warm_up=0), Store(tmp_path)
    built: list[str] = []

    def running(configuration: Configuration, _spec: Spec) -> Any:
        built.append(configuration.name)
        peak = 100 if configuration.policy == "none" else 10
        return SimpleNamespace(
            configuration=configuration, memory=lambda n: (n, n * peak), end=lambda: None
        )

    def trial(self: worker.Worker, one: Any, key: Key, rate: float, repetition: int) -> None:
        base = known.trial(known.SPEC, one.configuration.name, rate, repetition, 0.0)
        self.append(base.model_copy(update={"sequences": key.sequences}))

    monkeypatch.setattr(worker, "Running", running)
    monkeypatch.setattr(worker.Worker, "_trial", trial)
    monkeypatch.setattr(worker.Worker, "_ask_for", lambda self, rate: None)
    monkeypatch.setattr(worker.Worker, "batches", lambda self, sequences, step: sequences)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: None)

    def go_on() -> list[str]:
        """What was built, with the records that are there."""
        built.clear()
        done = {sample.key: sample for sample in store.read()}
        worker.Worker(spec, store, MagicMock(), done, MagicMock(), None)._measure_trials()
        return built

    assert len(go_on()) == 8
    whole = store.path.read_text().splitlines(keepends=True)
    found = [s for s in store.read() if isinstance(s, Trial)]
    assert len(found) == 2 * 8
    assert go_on() == []
    store.path.write_text("".join(whole[:-3]))
    assert len(go_on()) == 8
    assert store.path.read_text().splitlines(keepends=True) == whole
