"""Starts a module on every host, follows it, and ends it: one way for all that is launched.

`launch` starts `python -m MODULE` with a job over `deepspeed` on a backend: emulated hosts or the
machines of a hostfile, reached over pdsh or Open MPI, or this machine alone. The module calls
`heartbeat.begin` first. A launch ends when its processes do, when one fails, at a time limit, or
when they are silent for too long; an error names the hosts that do not answer, or else has the end
of the log. Nothing of it runs then.

A launcher that is told to end gently runs `pkill -f` over pdsh, which on a machine that is shared
could reach somebody else's run. So it is killed; what it has started on other machines is ended by
their ssh, or by its own heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ds_ckpt.errors import DsCkptError, Problem
from ds_ckpt.lab.hosts.backends import Backend, Prepared
from ds_ckpt.lab.hosts.checks import HostError, unreachable
from ds_ckpt.lab.hosts.heartbeat import JOB, Listener
from ds_ckpt.lab.hosts.sets import HostsError

LOG = "launch.log"
_LOG_LINES = 40
_POLL_S = 0.2
_END_S = 8.0


class LaunchError(DsCkptError, RuntimeError):
    """The launched processes failed or took too long. The message has the end of their log."""

    headline = "the launched processes did not finish"


def launch(
    backend: Backend,
    module: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    stall_s: float = 180.0,
    limit_s: float = math.inf,
    heard: Callable[[dict[str, Any]], object] = lambda event: None,
    if_silent: str = "",
) -> None:
    """Run `module` on all hosts of a backend, until it ends.

    Args:
        job: JSON; `heartbeat.begin` gives it to every process.
        folder: of the launch, seen by this process and process 0: job, events, log.
        stall_s: end when process 0 has been silent for so long: more than the longest step takes.
        heard: gets what process 0 tells with `Heartbeat.beat`, also what came before a failure.
        if_silent: what else to do about a silence, for the error's remedy.

    Raises:
        HostError: a host does not answer any more.
        LaunchError: the processes failed, were silent, or took too long.
    """
    folder = folder.absolute()
    (folder / JOB).write_text(json.dumps(job), encoding="utf-8")

    def asked(question: dict[str, Any]) -> None:
        backend.set_rate(question["rate_mbit"])

    listener = Listener(folder, stall_s=stall_s, heard=heard, asked=asked)

    def attend() -> None:
        listener.listen()
        overdue_s = listener.overdue_s()
        if overdue_s is not None:
            raise LaunchError(
                Problem(
                    where=", ".join(backend.names),
                    found=f"nothing has come on for {overdue_s:.0f} s, and all hosts answer; "
                    f"the log ends with\n{log_tail(folder / LOG)}",
                    why="a process hangs, or a step or the start takes longer",
                    remedy=f"look into {folder / LOG} and at what else the machine does, then give "
                    f"the same command again, which goes on where this was{if_silent}",
                )
            )

    arguments = [f"--folder={folder}", f"--token={listener.launch}", f"--stall-s={stall_s}"]
    arguments.append(f"--port={backend.port}")  # mpirun hands deepspeed's --master_port to nobody
    with signals_as_exit():
        try:
            argv = ["--module", module, *arguments]
            deepspeed(backend, argv, folder, limit_s=limit_s, attend=attend)
        finally:
            listener.listen(answer=False)  # what came last; nobody waits for an answer any more
            listener.end()


def deepspeed(
    backend: Backend,
    argv: Sequence[str],
    folder: Path,
    *,
    limit_s: float = 240.0,
    attend: Callable[[], None] = lambda: None,
) -> str:
    """Run `deepspeed ... argv` in `folder` over all hosts of a backend; its output.

    `attend` is called a few times a second. Raises LaunchError or HostError; whatever happens,
    nothing of it runs here when it returns.
    """
    prepared = backend.prepare(["deepspeed", *argv], folder)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_shared_buffers, backend.port)
        stack.enter_context(lock_cleared_on_failure(prepared.environment))
        return run(prepared, folder, limit_s=limit_s, attend=attend, backend=backend)


def run(
    prepared: Prepared,
    folder: Path,
    *,
    limit_s: float,
    attend: Callable[[], None] = lambda: None,
    backend: Backend | None = None,
) -> str:
    """Run a command in `folder`, its output in `LOG` there; the output.

    It gets a session of its own, and all of that is killed on leaving. Where it fails, hangs, or
    `attend` says so, the backend's hosts are asked whether they are still there.
    """
    log = folder / LOG
    with log.open("wb") as sink:
        process = subprocess.Popen(
            prepared.command,
            cwd=folder,
            env=prepared.environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        limit = time.monotonic() + limit_s
        try:
            while process.poll() is None:
                if time.monotonic() > limit:
                    found, why = f"it took longer than {limit_s:g} s", "that is its limit"
                    raise _failed(found, why, "raise the limit, or mend what hangs", prepared, log)
                attend()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            if process.returncode:
                found, why = f"exit code {process.returncode}", "one of the processes failed"
                raise _failed(found, why, "mend what the last error names", prepared, log)
        except (LaunchError, HostsError) as error:
            if backend is not None and (problems := unreachable(backend)):
                raise HostError(problems, headline="a host has dropped out") from error
            raise
        finally:
            _kill(process, backend)
    return log.read_text(errors="replace")


def run_in_foreground(prepared: Prepared, *, limit_s: float | None = None) -> int:
    """Run a prepared command on this terminal; its exit code, or 124 after `limit_s` seconds."""
    with subprocess.Popen(prepared.command, env=prepared.environment) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            process.kill()


def log_tail(log: Path) -> str:
    """The first traceback of a log, or else its last lines."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "    (no log)"
    found = lines[-_LOG_LINES:]
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts:
        # Processes fail one after the other: what came first is the cause, what follows its echo.
        first = starts[0]
        prefix = lines[first].partition("Traceback")[0]  # "[rank1]: " where torch writes it
        trace = [line.removeprefix(prefix) for line in lines[first:] if line.startswith(prefix)]
        found = trace[-_LOG_LINES:] if prefix else trace[:_LOG_LINES]
    return "\n".join(f"    {line}" for line in found)


def locks(environment: Mapping[str, str]) -> set[Path]:
    """Lock files of builds of DeepSpeed's CPU operator that run, or that were stopped in between.

    `deepspeed.comm` builds `deepspeed_shm_comm` at the first start on a machine without GPUs; no
    setting turns that off. torch waits for the lock without end.
    """
    named = environment.get("TORCH_EXTENSIONS_DIR")
    compiled = Path(named) if named else Path.home() / ".cache" / "torch_extensions"
    return set(compiled.glob("**/deepspeed_shm_comm/lock"))


@contextlib.contextmanager
def lock_cleared_on_failure(environment: Mapping[str, str]) -> Iterator[None]:
    """Remove the lock if what runs inside fails while building. Its processes must have ended.

    One that another program took meanwhile stays: torch keeps the file open while it builds.
    """
    before = locks(environment)
    try:
        yield
    except BaseException:
        if left := locks(environment) - before:
            held = _open_files()
            for lock in left:
                if str(lock.resolve()) not in held:
                    lock.unlink(missing_ok=True)
        raise


def _open_files() -> set[str]:
    """Of every process of this machine whose files may be seen."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found |= {file.path for file in process.open_files()}
    return found


def remove_shared_buffers(port: int) -> None:
    """Free the memory that the operator leaves behind: 69 MB a process and start, until reboot.

    Its segments in /dev/shm have the master port in their names, so those of other runs stay.
    """
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        with contextlib.suppress(OSError):
            segment.unlink()


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP to this process become SystemExit inside, so that clean-ups run."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        with contextlib.suppress(ValueError):  # Not in the main thread: leave signals alone.
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(found: str, why: str, remedy: str, prepared: Prepared, log: Path) -> LaunchError:
    return LaunchError(
        Problem(
            where=" ".join(prepared.command),
            found=f"{found}; its log ends with\n{log_tail(log)}",
            why=why,
            remedy=f"{remedy}; the whole log is {log}",
        )
    )


def _kill(process: subprocess.Popen[bytes], backend: Backend | None) -> None:
    family: list[psutil.Process] = []
    if process.poll() is None and backend is not None:
        backend.end()  # from the inside first, then from the outside
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=_END_S)
