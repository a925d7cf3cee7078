"""Starts processes and never leaves one behind.

The launched command gets a process group of its own, so that one signal reaches all of it,
also what its children have started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from ds_ckpt.errors import DsCkptError, Problem

_GRACE_S = 8.0
_LOG_LINES = 40


class LaunchError(DsCkptError, RuntimeError):
    """The launched processes failed or took too long. The message has the end of their log."""

    headline = "the launched processes did not finish"


def deepspeed_command(
    module: str, arguments: Sequence[str], *, processes: int, master_port: int
) -> list[str]:
    """`deepspeed` of this Python's environment, for `processes` processes on this machine."""
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.exists() else shutil.which("deepspeed")
    launcher = [found] if found else [sys.executable, "-m", "deepspeed.launcher.runner"]
    return [
        *launcher,
        # A cluster's own hostfile must not draw other machines in.
        "--hostfile=none",
        f"--num_gpus={processes}",
        "--master_addr=127.0.0.1",
        f"--master_port={master_port}",
        "--module",
        module,
        *arguments,
    ]


def free_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def launched(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` in a process group of its own, its output in `log`; end it all on leaving.

    SIGTERM and SIGHUP to this process are turned into SystemExit meanwhile, so that they too lead
    through the clean-up.
    """
    with log.open("ab") as sink, signals_as_exit():
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)


def check_running(
    process: subprocess.Popen[bytes], *, started: float, time_limit_s: float, log: Path
) -> bool:
    """True while it runs, False once it has ended well. `started` is `time.monotonic()`'s.

    Raises LaunchError if it failed or has run for longer than `time_limit_s`.
    """
    code = process.poll()
    if code == 0:
        return False
    if code is not None:
        raise LaunchError(
            Problem(
                where=str(log),
                found=f"exit code {code}; the log ends with\n{log_tail(log)}",
                why="one of the processes failed",
                remedy="mend what the last error names, then start again",
            )
        )
    if time.monotonic() - started > time_limit_s:
        raise LaunchError(
            Problem(
                where=str(log),
                found=f"no end after {time_limit_s:.0f} s; the log ends with\n{log_tail(log)}",
                why="the time limit was reached",
                remedy="take fewer --steps, or a larger --time-limit-s on a slow machine",
            )
        )
    return True


def log_tail(log: Path) -> str:
    """The last traceback of a log, or else its last lines."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "    (no log)"
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if not starts:
        return _indented(lines[-_LOG_LINES:])
    # Processes fail one after the other: what came first is the cause, what follows its echo.
    first = starts[0]
    prefix = lines[first].partition("Traceback")[0]  # "[rank1]: " where torch writes it
    trace = [line.removeprefix(prefix) for line in lines[first:] if line.startswith(prefix)]
    return _indented(trace[-_LOG_LINES:] if prefix else trace[:_LOG_LINES])


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    psutil.wait_procs(family, timeout=_GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=_GRACE_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP to this process become SystemExit inside, so that clean-ups run."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # Not in the main thread: leave signals alone.
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
