"""Launching: no process is left, and errors have the log's end or name the host; heartbeats."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from deepspeed.launcher.runner import parse_args

from ds_ckpt.errors import ConfigError
from ds_ckpt.lab.hosts import backends, emulated, heartbeat, launcher
from ds_ckpt.lab.hosts.backends import Backend, Hostfile, Loopback, Prepared, read_hostfile
from ds_ckpt.lab.hosts.heartbeat import STALLED, Heartbeat, Listener
from ds_ckpt.lab.hosts.launcher import HostError, LaunchError, check_hosts, launch, supervise

# A parent that starts a child which hears no SIGTERM, in a session of its own.
FAMILY = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
# `heartbeat.begin` without the process group.
MODULE = """
import argparse, json, os, sys, time
from pathlib import Path
from ds_ckpt.lab.hosts.heartbeat import JOB, Heartbeat
parser = argparse.ArgumentParser()
for name in ("--module", "--token", "--folder"):
    parser.add_argument(name)
parser.add_argument("--stall-s", type=float)
given = parser.parse_args()
folder = Path(given.folder)
process = Heartbeat(folder, launch=given.token, stall_s=600)
process.lead()
print("pid", os.getpid(), flush=True)
job = json.loads((folder / JOB).read_text())
"""


class Hosts(Backend):
    """Three hosts, some with prepared answers; the launched module runs here."""

    names = ("a", "b", "c")
    port = 1234

    def __init__(self, code: str = "", **answers: tuple[int, str, str]) -> None:
        self.code, self.answers = code, answers
        self.asked: list[list[str]] = []
        self.argv: list[str] = []
        self.ended = False

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert not self.ended, "it is too late to ask"
        self.asked.append([host, *argv])
        code, out, err = self.answers.get(host, (0, "banner", ""))
        if code == 124:
            raise subprocess.TimeoutExpired(list(argv), 1.0)
        return subprocess.CompletedProcess(list(argv), code, out, err)

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        self.argv = list(argv)
        command = [sys.executable, "-c", MODULE + self.code, *argv[1:]]
        return Prepared(command, dict(os.environ))

    def end(self) -> None:
        self.ended = True


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _pid(folder: Path) -> int:
    return int((folder / launcher.LOG).read_text().split()[1])


def _command(code: str) -> Prepared:
    return Prepared([sys.executable, "-c", code], dict(os.environ))


def test_an_interrupt_ends_the_whole_family(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        if words := (tmp_path / launcher.LOG).read_text().split():
            pids.append(int(words[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise(_command(FAMILY), tmp_path, limit_s=60, poll=interrupted)
    assert all(_gone(pid) for pid in pids)
    assert len(pids) == 1


def test_the_error_names_the_time_limit(tmp_path: Path) -> None:
    code = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(LaunchError, match=r"its limit of 2 s(.|\n)*raise the limit"):
        supervise(_command(code), tmp_path, limit_s=2.0)
    assert _gone(_pid(tmp_path))


def test_a_failure_shows_the_first_traceback(tmp_path: Path) -> None:
    code = (
        "print('[rank1]: Traceback (most recent call last):');"
        "print('[rank0]: Traceback (most recent call last):');"
        "print('[rank1]: ValueError: the cause'); print('[rank0]: RuntimeError: peer is gone');"
        "raise SystemExit(3)"
    )
    with pytest.raises(LaunchError, match="exit code 3") as caught:
        supervise(_command(code), tmp_path, limit_s=60)
    (problem,) = caught.value.problems
    assert "ValueError: the cause" in problem.found
    assert "peer is gone" not in problem.found


def test_a_lock_left_by_a_failed_build_is_cleared(tmp_path: Path) -> None:
    """Unless a process has it open: it is that one's then."""
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    lock = tmp_path / "py3_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)

    def failing() -> None:
        with launcher.lock_cleared_on_failure(environment):
            lock.touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing()
    assert not lock.exists()
    lock.touch()
    with lock.open(), pytest.raises(KeyboardInterrupt):
        failing()
    assert lock.exists()


def test_the_module_gets_its_job_and_sends_events_also_before_a_failure(tmp_path: Path) -> None:
    code = "process.beat(words=job['word']); process.beat(n=2); sys.exit(3)"
    hosts, events = Hosts(code), list[dict[str, Any]]()
    with pytest.raises(LaunchError, match="exit code 3"):
        launch(hosts, "m", {"word": "hello"}, tmp_path, stall_s=60, on_event=events.append)
    assert events == [{"words": "hello"}, {"n": 2}]
    _, _, module, *arguments = hosts.argv
    parsed = parse_args(["--num_gpus=2", *hosts.argv[1:]])  # none is taken for one of DeepSpeed's
    assert (parsed.user_script, parsed.user_args) == (module, arguments)


@pytest.mark.parametrize("begins", [True, False])
def test_a_silence_ends_what_is_launched(tmp_path, monkeypatch, begins) -> None:
    monkeypatch.setattr("ds_ckpt.lab.hosts.heartbeat.START_S", 60.0 if begins else 4.0)
    hosts = Hosts("process.beat()\n" * begins + "time.sleep(40)")
    with pytest.raises(LaunchError, match="and all nodes answer") as caught:
        launch(hosts, "m", {}, tmp_path, stall_s=1.0)
    words = str(caught.value)
    assert f"no progress for {1 if begins else 4} s" in words
    assert str(tmp_path / launcher.LOG) in words
    assert "raise --stall-s" in words
    assert hosts.ended
    assert _gone(_pid(tmp_path))


@pytest.mark.parametrize("code", ["time.sleep(600)", "sys.exit(1)"])
def test_a_host_that_does_not_answer_is_named_whatever_has_ended_the_launch(tmp_path, code) -> None:
    hosts = Hosts(f"process.beat()\n{code}", b=(255, "", "No route to host"), c=(124, "", ""))
    with pytest.raises(HostError, match="b: found no answer: ssh: No route") as caught:
        launch(hosts, "m", {}, tmp_path, stall_s=1.0)
    assert [problem.where for problem in caught.value.problems] == ["b", "c"]
    assert f"no answer to ssh for {backends.SSH_S:.0f} s" in str(caught.value)
    assert "continues the run" in str(caught.value)
    assert isinstance(caught.value.__cause__, LaunchError)


def test_every_host_that_cannot_take_part_is_named() -> None:
    hosts = Hosts(a=(1, "", "no module torch"), b=(255, "", "Connection refused"), c=(124, "", ""))
    with pytest.raises(HostError) as caught:
        check_hosts(hosts)
    found = [(p.where, p.found) for p in caught.value.problems]
    assert found == [
        ("a", "no module torch"),
        ("b", "ssh: Connection refused"),
        ("c", "no answer to ssh for 12 s"),
    ]
    ports = {asked[0]: asked[4] for asked in hosts.asked}
    assert ports == {"a": "1234", "b": "0", "c": "0"}
    # equal ones are one line
    b, c = ((255, "", f"ssh: {name}.org: connect to {name}: refused") for name in "BC")
    unknown = "ssh: Could not resolve hostname a: Name or service not known"
    with pytest.raises(HostError) as caught:
        check_hosts(Hosts(a=(255, "", unknown), b=b, c=c))
    other, alike = caught.value.problems
    assert (alike.where, alike.found) == ("b, c", "ssh: B.org: connect to B: refused")
    assert "`ssh b true`" in alike.remedy
    assert (other.where, "/etc/hosts" in other.remedy) == ("a", True)


@pytest.mark.parametrize(
    ("gpus", "wanted", "there", "cpu"),
    [(True, None, 2, False), (True, None, 1, True), (True, "cpu", 2, True), (False, None, 2, True)],
)
def test_gpus_are_used_if_there_are_enough(tmp_path, monkeypatch, gpus, wanted, there, cpu) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if wanted:
        monkeypatch.setenv("DS_ACCELERATOR", wanted)
    found = Loopback(2, gpus=gpus, port=5).prepare(["deepspeed", "x"], tmp_path)
    assert (found.environment.get("DS_ACCELERATOR") == "cpu") == cpu
    assert "--num_gpus=2" in found.command
    assert "--hostfile=none" in found.command


def test_hostfiles_that_cannot_be_used(tmp_path: Path) -> None:
    lines = ("node1", "node1 slots=0", "node1 8", "node1 max_slots=8")
    twice, unequal = "a slots=2\na slots=2", "a slots=2\nb slots=4"
    texts = dict.fromkeys(lines, "line 1") | {"": "names its nodes", twice: "line 2"}
    texts["a 1\na slots=2\nb 1"] = "line 1(.|\n)*line 3"
    for text, message in (texts | {unequal: "a with 2, b with 4"}).items():
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_hostfile(tmp_path / "hosts")


def test_a_hostfile_prepares_a_launch_over_pdsh(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    hostfile = tmp_path / "hostfile"
    lines = "# mine", " node1 slots=8", "", "node2\tslots=8 # the other", "w3 slots=08 max_slots=9"
    hostfile.write_text("\n".join(lines))
    backend = Hostfile(hostfile, "ens5", port=29501, ssh_port=2222)
    assert backend.counts == {"node1": 8, "node2": 8, "w3": 8} == fetch_hostfile(str(hostfile))
    one = backend.prepare(["deepspeed", "--module", "x"], tmp_path)
    options = {f"--hostfile={hostfile}", "--master_port=29501", "--ssh_port=2222"}
    assert options <= set(one.command)
    assert one.environment["GLOO_SOCKET_IFNAME"] == "ens5"


def test_the_users_exports_reach_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DS_ENV_FILE takes the place of the user's own file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\nGLOO_SOCKET_IFNAME=eth7\n\n")
    (tmp_path / "run").mkdir()
    path = backends.exported({"GLOO_SOCKET_IFNAME": "eth1"}, tmp_path / "run")
    found = dict(line.split("=", 1) for line in Path(path).read_text().splitlines())
    assert found == {"NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "eth1"}


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("true", 0)])
def test_the_first_rank_that_fails_ends_the_others(script: str, code: int, tmp_path: Path) -> None:
    ranks = [["sh", "-c", script], ["sh", "-c", "echo $$; exec sleep 600" if code else "true"]]
    (tmp_path / "ranks.json").write_text(json.dumps(ranks))
    command = [sys.executable, str(emulated._RANKS), str(tmp_path / "ranks.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert not done.stdout or not psutil.pid_exists(int(done.stdout))


LAUNCHED = """
import sys, time
from pathlib import Path
from ds_ckpt.lab.hosts import heartbeat
beating = heartbeat.Heartbeat(Path("."), launch="", stall_s=2.0)
beating.beat()
print("watched", flush=True)
for _ in range(int(sys.argv[1])):
    time.sleep(0.1)
    beating.beat()
time.sleep(0 if int(sys.argv[1]) else 60)
"""


@pytest.fixture(autouse=True)
def this_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat in pytest's own process must not end it."""
    monkeypatch.setattr(Heartbeat, "_watch", lambda self, every_s: None)


def leader(folder: Path, listener: Listener) -> Heartbeat:
    found = Heartbeat(folder, launch=listener.launch, stall_s=600.0)
    found.lead()
    return found


def launched(beats: int) -> tuple[int, str]:
    """Return the exit code and stderr of a process that ends after `beats`, or hangs after none."""
    command, pipe = [sys.executable, "-c", LAUNCHED, str(beats)], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "watched\n"
    output = process.communicate(timeout=45)[1]
    return process.returncode, output


def test_a_process_that_hangs_ends_itself_and_one_that_goes_on_does_not() -> None:
    code, output = launched(0)
    assert code == STALLED
    assert "no progress for 2 s" in output
    assert launched(40)[0] == 0


def test_rank_0_ends_when_its_launcher_is_gone_or_another_has_begun(tmp_path, monkeypatch) -> None:
    """Rank 0 on a hostfile's first host is a child of sshd; clocks of hosts may differ."""
    process = leader(tmp_path, Listener(tmp_path, stall_s=60.0))
    for apart_s in (0.0, -1e6, 1e6):
        moment_s = time.time() - apart_s
        os.utime(tmp_path / heartbeat.ALIVE, (moment_s, moment_s))
        assert process._reason_to_end() == ""
    with monkeypatch.context() as later:
        later.setattr(heartbeat, "ORPHANED_S", 0.0)
        assert "its launcher is gone" in process._reason_to_end()
    listener = Listener(tmp_path, stall_s=60.0)  # a command that is given again at once
    assert "or another has begun" in process._reason_to_end()
    process = leader(tmp_path, listener)
    assert process._reason_to_end() == ""
    listener.end()
    assert "its launch has ended" in process._reason_to_end()


def test_events_of_rank_0_arrive_once_and_complete(tmp_path: Path) -> None:
    old = leader(tmp_path, Listener(tmp_path, stall_s=60.0))
    old.beat(words="old")
    listener = Listener(tmp_path, stall_s=60.0)
    assert not (tmp_path / heartbeat.EVENTS).exists()
    old.beat(words="of a killed launch")
    process = leader(tmp_path, listener)
    process.beat(words="one", done=1)
    process.beat()
    Heartbeat(tmp_path, launch=listener.launch, stall_s=600.0).beat(words="of another rank")
    assert list(listener.poll()) == [{"words": "one", "done": 1}, {}]
    line = json.dumps({"launch": listener.launch, "event": {"words": "new"}}) + "\n"
    for text, events in ((line[:20], []), (line[20:], [{"words": "new"}])):
        with (tmp_path / heartbeat.EVENTS).open("a") as sink:
            sink.write(text)
        assert list(listener.poll()) == events
