"""Launching: nothing is left behind, and what went wrong is told with the log's words."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from ds_ckpt.hosts import cpu_op
from ds_ckpt.hosts.launcher import LaunchError, check_running, launched, log_tail

# A parent that starts a child which hears no SIGTERM.
FAMILY = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code])
print(child.pid, flush=True)
time.sleep(600)
"""


def _child_pid(log: Path) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        words = log.read_text().split() if log.exists() else []
        if words:
            return int(words[0])
        time.sleep(0.05)
    raise AssertionError("the child did not start")


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_interrupt_ends_the_whole_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_ckpt.hosts.launcher._GRACE_S", 1.0)
    log = tmp_path / "log"
    pids = []

    def interrupted() -> None:
        with launched([sys.executable, "-c", FAMILY], environment=os.environ, log=log) as process:
            pids.extend([process.pid, _child_pid(log)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(_gone(pid) for pid in pids)


def test_the_time_limit_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with launched(command, environment=os.environ, log=log) as process:
        with pytest.raises(LaunchError, match="no end after 1 s"):
            check_running(process, started=time.monotonic() - 2, time_limit_s=1.0, log=log)
    assert _gone(process.pid)


def test_a_failure_shows_the_first_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "print('[rank1]: Traceback (most recent call last):');"
        "print('[rank0]: Traceback (most recent call last):');"
        "print('[rank1]: ValueError: the cause'); print('[rank0]: RuntimeError: peer is gone');"
        "raise SystemExit(3)"
    )
    with launched([sys.executable, "-c", code], environment=os.environ, log=log) as process:
        process.wait(30)
        with pytest.raises(LaunchError, match="exit code 3") as caught:
            check_running(process, started=time.monotonic(), time_limit_s=60, log=log)
    assert "ValueError: the cause" in str(caught.value)
    assert "peer is gone" not in str(caught.value)


def test_the_log_of_a_failure_without_traceback_and_without_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == "    (no log)"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    assert log_tail(log).splitlines()[-1] == "    line 99"


def test_a_lock_left_by_a_failed_build_is_cleared(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    folder = tmp_path / "py3_cpu" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    assert not cpu_op.is_compiled(environment)

    def failing() -> None:
        with cpu_op.lock_cleared_on_failure(environment):
            (folder / "lock").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing()
    assert not cpu_op.locks(environment)
    (folder / "lock").touch()  # Another process's: it was there before.
    with pytest.raises(KeyboardInterrupt):
        failing()
    assert cpu_op.locks(environment)
    (folder / "deepspeed_shm_comm.so").touch()
    assert cpu_op.is_compiled(environment)
