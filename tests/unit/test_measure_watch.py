"""Whoever launches and the launched: signs of life, rates, silence, and what is said of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
from ds_ckpt.harness.experiment import preflight
from ds_ckpt.harness.experiment import watch as watching
from ds_ckpt.harness.experiment.folder import STALLED, Folder
from ds_ckpt.harness.experiment.preflight import HostError, check_hosts, unreachable
from ds_ckpt.harness.experiment.watch import Watch
from ds_ckpt.harness.hosts import HostsError
from ds_ckpt.measure import run, worker
from ds_ckpt.measure.records import Model
from ds_ckpt.measure.spec import Spec

WATCHDOG = """
import sys, time
from pathlib import Path
from ds_ckpt.harness.experiment import folder
folder.START_S, folder.ORPHANED_S = 0.1, 1.0
watchdog = folder.Watchdog(float(sys.argv[1]))
watchdog.beat()
if sys.argv[2]:
    watchdog.look_at(Path(sys.argv[2]), sys.argv[5])
print("watched", flush=True)
for _ in range(int(sys.argv[3])):
    time.sleep(0.1)
    watchdog.beat()
time.sleep(60 if sys.argv[4] == "hang" else 0)
"""


class _KillError(BaseException):
    """Takes a process's life in between."""


class Ground:
    """Three hosts of which some answer as told."""

    names: tuple[str, ...] = ("a", "b", "c")
    port: int = 1234

    def __init__(self, **answers: tuple[int, str, str]) -> None:
        self.answers = answers
        self.rates: list[float | None] = []
        self.asked: list[list[str]] = []

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append([host, *argv])
        well = "banner\nds_ckpt-look " + json.dumps({"missing": [], "taken": ""}) + "\n"
        code, out, err = self.answers.get(host, (0, well, ""))
        if code == 124:
            raise subprocess.TimeoutExpired(list(argv), 1.0)
        return subprocess.CompletedProcess(list(argv), code, out, err)

    def set_rate(self, rate_mbit: float | None) -> None:
        self.rates.append(rate_mbit)

    def gone(self) -> list[str]:
        return []


class Gone(Ground):
    """Hosts of which one vanishes while it runs."""

    where = "hosts"

    def __init__(self) -> None:
        super().__init__(b=(255, "", "No route to host"))

    def describe(self) -> str:
        return self.where

    def launch(
        self, argv: Sequence[str], folder: Path, limit_s: float, look: Callable[[], None]
    ) -> None:
        (folder / "wanted_rate").write_text("50.0")
        look()

    def set_rate(self, rate_mbit: float | None) -> None:
        why = Problem("nsenter", "exit code 1", "there is no such namespace", "look")
        raise HostsError(why)


def _watchdog(
    limit_s: float, alive: str, beats: int, then: str, launch: str = ""
) -> tuple[int, str, float]:
    command = [sys.executable, "-c", WATCHDOG, str(limit_s), alive, str(beats), then, launch]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "watched\n"
    started = time.monotonic()
    said = process.communicate(timeout=60)[1]
    return process.returncode, said, time.monotonic() - started


def test_a_process_that_hangs_ends_itself() -> None:
    code, said, took_s = _watchdog(2.0, "", 0, "hang")
    assert code == STALLED
    assert "nothing has come on for 2 s" in said
    assert took_s < 30


def test_a_process_that_goes_on_is_left_alone() -> None:
    assert _watchdog(2.0, "", 40, "end")[0] == 0


def test_a_process_whose_launcher_is_gone_ends_itself(tmp_path: Path) -> None:
    (tmp_path / "alive").touch()
    code, said, _ = _watchdog(60.0, str(tmp_path / "alive"), 300, "hang")
    assert code == STALLED
    assert "who launched it is gone" in said


def test_what_is_left_of_a_killed_launch_ends_when_another_begins(tmp_path: Path) -> None:
    """Its launcher was killed and the command given again at once: the file is touched again."""
    folder = Folder(tmp_path)
    launch = folder.begin_launch()
    later_s = time.time() + 600  # as if it were touched again and again
    os.utime(folder.alive, (later_s, later_s))
    assert _watchdog(60.0, str(folder.alive), 5, "end", launch)[0] == 0
    folder.begin_launch()
    os.utime(folder.alive, (later_s, later_s))
    code, said, _ = _watchdog(60.0, str(folder.alive), 300, "hang", launch)
    assert code == STALLED
    assert "another launch has begun" in said


def test_a_rate_that_no_link_takes_names_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host vanishes while the rates change: the kernel refuses, and that is not all to say."""
    monkeypatch.setattr(run, "check_hosts", lambda ground: None)
    ground = Gone()
    with pytest.raises(HostError, match="b: found no answer") as caught:
        run.measure(
            Spec(loss_steps=0),
            tmp_path / "run",
            backend=ground,
            console=Console(),
            account=["Like nothing on earth."],
        )
    assert isinstance(caught.value.__cause__, HostsError)
    assert "nothing on earth" in (tmp_path / "run" / run.LIKE).read_text()  # also when it stops


def test_a_run_does_not_go_on_in_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other versions, machines or hosts with the same settings: times cannot be put together."""
    monkeypatch.setattr(run, "check_hosts", lambda ground: None)
    folder, console = tmp_path / "run", Console()
    ground = Gone()
    for _ in range(2):  # nothing is measured yet, so it may begin anew anywhere
        with pytest.raises(HostError):
            run.measure(Spec(), folder, backend=ground, console=console)
    Folder(folder).store.append([Model(parameters=1, text="", heldout_bytes=1, corpus_sha256="a")])
    with pytest.raises(HostError):
        run.measure(Spec(), folder, backend=ground, console=console)
    ground.where = "other hosts"
    with pytest.raises(ConfigError, match="other hosts"):
        run.measure(Spec(), folder, backend=ground, console=console)
    ground.where = "hosts"
    monkeypatch.setattr(run, "versions", lambda: {"torch": "0.1"})
    with pytest.raises(ConfigError, match=r"0\.1"):
        run.measure(Spec(), folder, backend=ground, console=console)


def test_a_rate_that_is_asked_for_is_given(tmp_path: Path) -> None:
    folder, ground = Folder(tmp_path), Ground()
    for rate in (50.0, None):
        asking = threading.Thread(target=folder.ask_for, args=(rate,))
        asking.start()
        while asking.is_alive():
            folder.serve_rate(ground.set_rate)
            time.sleep(0.01)
    assert ground.rates == [50.0, None]


def test_wishes_of_a_killed_run_are_forgotten(tmp_path: Path) -> None:
    folder, ground = Folder(tmp_path), Ground()
    (tmp_path / "wanted_rate").write_text("7.0")
    folder.beat("old")
    folder.forget_wishes()
    folder.serve_rate(ground.set_rate)
    assert ground.rates == []
    assert not folder.beats.exists()


def _watch(tmp_path: Path, ground: Ground, stall_s: float) -> tuple[Watch, Folder, io.StringIO]:
    said = io.StringIO()
    folder = Folder(tmp_path)
    return Watch(ground, folder, stall_s, Console(file=said, width=100)), folder, said  # type: ignore[arg-type]


def test_progress_is_shown_and_silence_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = Ground(b=(255, "", "no route to host"))
    watch, folder, said = _watch(tmp_path, ground, 0.5)
    with watch:
        assert folder.alive.exists()
        folder.beat("3 of 4 trials", done=3, total=4)
        folder.beat(None)
        watch()
        assert "3 of 4 trials" in said.getvalue()
        with folder.beats.open("a") as sink:
            sink.write('{"words": "half')
        watch()
        time.sleep(0.6)
        with pytest.raises(HostError) as caught:
            watch()
    assert "b: found no answer any more: no route to host" in str(caught.value)
    assert len(caught.value.problems) == 1


def test_silence_with_all_hosts_well_is_said_so(tmp_path: Path) -> None:
    watch, folder, _ = _watch(tmp_path, Ground(), 0.2)
    with watch:
        folder.beat("1 of 4 trials", done=1, total=4)
        watch()
        time.sleep(0.3)
        with pytest.raises(HostError, match="all hosts answer") as caught:
            watch()
    assert "launch.log" in str(caught.value)
    assert "--stall-s" in str(caught.value)


def test_the_first_start_is_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _, _ = _watch(tmp_path, Ground(), 0.1)
    with watch:
        time.sleep(0.2)
        watch()
        monkeypatch.setattr(watching, "START_S", 0.1)
        with pytest.raises(HostError):
            watch()


def test_every_host_that_is_found_wanting_is_named() -> None:
    wanting = "ds_ckpt-look " + json.dumps({"missing": ["torch", "deepspeed"], "taken": "in use"})
    ground = Ground(
        a=(0, wanting, ""), b=(255, "", "Connection refused"), c=(127, "", "no such file")
    )
    with pytest.raises(HostError) as caught:
        check_hosts(ground)  # type: ignore[arg-type]
    found = {(p.where, p.found) for p in caught.value.problems}
    assert ("a", "no module torch, deepspeed") in found
    assert ("a", "port 1234 is taken (in use)") in found
    assert ("b", "no answer to ssh: Connection refused") in found
    assert any(where == "c" and "no such file" in said for where, said in found)
    ports = {asked[0]: asked[4] for asked in ground.asked}
    assert ports == {"a": "1234", "b": "0", "c": "0"}


def test_a_host_that_says_nothing_is_named() -> None:
    with pytest.raises(HostError, match=r"b: found no answer to ssh: nothing for 12 s"):
        check_hosts(Ground(b=(124, "", "")))  # type: ignore[arg-type]
    (problem,) = unreachable(Ground(c=(124, "", "")))  # type: ignore[arg-type]
    assert problem.where == "c"
    assert f"{preflight.SSH_S:.0f} s" in problem.found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--loopback", "--rates=50mbit"], "only the links of emulated hosts"),
        (["--loopback", "--like=4 nodes x 8 A100, 100 Gbit/s, llama-7b"], "of emulated links"),
        (["--loopback", "--batches=2,many"], "write numbers with commas"),
        (["--loopback", "--policies=block"], "add none"),
        (["--loopback", "--methods=zip"], "zip"),
        (["--loopback", "--launcher=slurm"], "neither pdsh nor openmpi"),
        (["--loopback", "--shape=width=3"], "hidden_size"),
        (["--loopback", "--shape=heads=3"], "256 is not 3 heads of an even width"),
        (["--loopback", "--shape=layers=0"], "layers=0"),
        (["--loopback", "--slots=1"], "a single process exchanges nothing"),
        (["--rates=fast"], "write 200mbit"),
        (["--rates=50mbit,50mbit"], "names a rate twice"),
        (["--loopback", "--hosts=3"], "--hosts would change nothing"),
        (["--loopback", "--launcher=openmpi", "--port=3"], "--launcher, --port would change"),
        (["--interface=eth0", "--ssh-port=3"], "--interface, --ssh-port would change nothing"),
        (["--links={file}", "--hardware={file}", "--loopback"], "--hardware, --links would"),
        (["--hostfile={file}", "--hosts=3"], "--hosts would change nothing"),
        (["--hostfile={file}", "--loopback"], "--loopback would change nothing"),
        (["--hostfile={file}.none"], "does not exist"),
        (["--text={file}.none"], "does not exist"),
        (["--loopback", "--like=x", "--hardware={file}.none"], "does not exist"),
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
    folder, ground, write = Folder(tmp_path), MagicMock(), Path.write_text
    ground.describe.return_value = "here"
    with run._noted(folder, ground) as note:
        note["ended_well"] = True

    def torn(path: Path, text: str, **options: Any) -> int:
        write(path, text[: 2 * len(text) // 3], **options)
        raise _KillError

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(_KillError), run._noted(folder, ground):
        pass
    monkeypatch.undo()
    (kept,) = (tmp_path / run.RUNS).read_text().splitlines()
    assert json.loads(kept)["ended_well"]
    with run._noted(folder, ground):
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
