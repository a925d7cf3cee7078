"""Launch a module on every host of a backend, monitor it, and end it.

`check_hosts` examines the hosts first. `launch` starts `python -m MODULE` with a job over
`deepspeed`; the module calls `heartbeat.begin` first. A launch ends when its processes do, when one
fails, at a time limit, or after too long a silence. An error names the hosts that do not answer, or
has the end of the log. No process of it runs afterwards.

DeepSpeed's launcher runs `pkill -f` over pdsh when it is ended gently, which could hit another run
on a shared machine. So it is killed; its processes on other machines are ended by their ssh, or by
their own heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from ds_ckpt.errors import DsCkptError, Problem
from ds_ckpt.lab.hosts.backends import SSH_S, Backend, Prepared
from ds_ckpt.lab.hosts.heartbeat import JOB, Listener
from ds_ckpt.lab.hosts.sets import HostsError

LOG = "launch.log"
CHECK_LIMIT_S = 2 * SSH_S + 5
"""Time limit of `check_hosts` and `unreachable`."""
_MODULES = ("ds_ckpt", "deepspeed", "torch", "transformers")
_LOG_LINES = 40
_POLL_S = 0.2
_END_S = 8.0
_EXAMINE = """
import importlib.util, json, socket, sys
missing = [m for m in sys.argv[2].split(",") if importlib.util.find_spec(m) is None]
taken = ""
if int(sys.argv[1]):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(sys.argv[1])))
        except OSError as error:
            taken = str(error)
print("ds_ckpt-host", json.dumps({"missing": missing, "taken": taken}))
"""


class HostError(DsCkptError, RuntimeError):
    """A host cannot take part, or has dropped out."""

    headline = "not every host can take part"


class LaunchError(DsCkptError, RuntimeError):
    """The launched processes failed or took too long. The message has the end of their log."""

    headline = "the launched processes did not finish"


def check_hosts(hosts: Backend) -> None:
    """Check all hosts at once: ssh, this Python, its modules, the first one's port.

    Raises HostError with every problem.
    """
    with ThreadPoolExecutor(len(hosts.names)) as pool:
        found = list(pool.map(lambda name: _examine(hosts, name), hosts.names))
    problems = [problem for host in found for problem in host]
    if problems:
        raise HostError(problems)


def unreachable(hosts: Backend) -> list[Problem]:
    """Return the hosts that no longer answer, for a run that has failed."""
    gone = hosts.gone()
    # all others are reached through the first one
    asked = gone if gone and gone[0] == hosts.names[0] else hosts.names

    def failure(name: str) -> str | None:
        return "the host has ended" if name in gone else _try(hosts, name, ["true"])[0]

    with ThreadPoolExecutor(len(asked)) as pool:
        failures = list(pool.map(failure, asked))
    return [
        Problem(
            where=name,
            found=f"no answer: {text}",
            why="the host dropped out of the network, or its link is down",
            remedy="check the machine and its link; then repeat the command, which continues the "
            "run",
        )
        for name, text in zip(asked, failures, strict=True)
        if text is not None
    ]


def _try(
    hosts: Backend, name: str, argv: Sequence[str]
) -> tuple[str | None, subprocess.CompletedProcess[str]]:
    """Return why a host does not answer, or None; and the command's result."""
    try:
        result = hosts.on(name, argv)
    except subprocess.TimeoutExpired:
        result = subprocess.CompletedProcess(argv, 255, "", f"nothing for {SSH_S:.0f} s")
    except FileNotFoundError as error:
        result = subprocess.CompletedProcess(argv, 255, "", f"no {error.filename} on this machine")
    failed = result.returncode == 255
    return (result.stderr.strip() or "ssh failed") if failed else None, result


def _examine(hosts: Backend, name: str) -> list[Problem]:
    port = hosts.port if name == hosts.names[0] else 0
    argv = [sys.executable, "-c", _EXAMINE, str(port), ",".join(_MODULES)]
    failure, result = _try(hosts, name, argv)
    if failure is not None:
        found, why = f"no answer to ssh: {failure}", "deepspeed starts the processes over ssh"
        remedy = f"make `ssh {name} true` work without a password from the first host"
        return [Problem(name, found, why, remedy)]
    lines = [line for line in result.stdout.splitlines() if line.startswith("ds_ckpt-host ")]
    if result.returncode or not lines:
        output = (result.stderr or result.stdout).strip()
        why = "every host runs the same Python at the same path"
        remedy = "install this environment there, at this path"
        return [Problem(name, f"{sys.executable} fails there: {output}", why, remedy)]
    problems = []
    seen = json.loads(lines[0].partition(" ")[2])
    if seen["missing"]:
        why = f"the launched processes import it, with {sys.executable}"
        remedy = "install it there: pip install 'ds_ckpt[hf]' in that environment"
        problems.append(Problem(name, f"no module {', '.join(seen['missing'])}", why, remedy))
    if seen["taken"]:
        why, remedy = "rank 0 listens on it", "end what listens on it, or name another: --port"
        problems.append(Problem(name, f"port {port} is taken ({seen['taken']})", why, remedy))
    return problems


def launch(
    backend: Backend,
    module: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    stall_s: float = 180.0,
    limit_s: float = math.inf,
    on_event: Callable[[dict[str, Any]], object] = lambda event: None,
    if_silent: str = "",
) -> None:
    """Run `module` on all hosts of a backend, until it ends.

    Args:
        backend: place to launch on.
        module: calls `heartbeat.begin`.
        job: JSON; `heartbeat.begin` returns it to every process.
        folder: for job, events and log; seen by this process and rank 0.
        stall_s: limit without progress; longer than the longest step.
        limit_s: limit of the whole launch.
        on_event: receives what rank 0 passes to `Heartbeat.beat`, also before a failure.
        if_silent: another remedy for a silence, for the error.

    Raises:
        HostError: a host no longer answers.
        LaunchError: the processes failed, were silent, or took too long.
    """
    folder = folder.absolute()
    (folder / JOB).write_text(json.dumps(job), encoding="utf-8")

    def on_request(request: dict[str, Any]) -> None:
        backend.set_rate(request["rate_mbit"])

    listener = Listener(folder, stall_s=stall_s, on_event=on_event, on_request=on_request)

    def poll() -> None:
        listener.poll()
        overdue_s = listener.overdue_s()
        if overdue_s is not None:
            raise LaunchError(
                Problem(
                    where=", ".join(backend.names),
                    found=f"no progress for {overdue_s:.0f} s, and all hosts answer; "
                    f"the log ends with\n{log_tail(folder / LOG)}",
                    why="a process hangs, or a step or the start takes longer",
                    remedy=f"read {folder / LOG} and check the machine's load; then repeat the "
                    f"command, which continues the run{if_silent}",
                )
            )

    arguments = [f"--folder={folder}", f"--token={listener.launch}", f"--stall-s={stall_s}"]
    arguments.append(f"--port={backend.port}")  # mpirun does not pass on deepspeed's --master_port
    with signals_as_exit():
        try:
            argv = ["--module", module, *arguments]
            deepspeed(backend, argv, folder, limit_s=limit_s, poll=poll)
        finally:
            listener.poll(answer=False)  # the last events; nobody waits for an answer any more
            listener.end()


def deepspeed(
    backend: Backend,
    argv: Sequence[str],
    folder: Path,
    *,
    limit_s: float = 240.0,
    poll: Callable[[], None] = lambda: None,
) -> str:
    """Run `deepspeed ... argv` in `folder` over all hosts of a backend; return its output.

    `poll` is called a few times a second. Raises LaunchError or HostError; no process of it runs
    here afterwards.
    """
    prepared = backend.prepare(["deepspeed", *argv], folder)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_shared_buffers, backend.port)
        stack.enter_context(lock_cleared_on_failure(prepared.environment))
        return run(prepared, folder, limit_s=limit_s, poll=poll, backend=backend)


def run(
    prepared: Prepared,
    folder: Path,
    *,
    limit_s: float,
    poll: Callable[[], None] = lambda: None,
    backend: Backend | None = None,
) -> str:
    """Run a command in `folder` with its output in `LOG`; return the output.

    It gets a session of its own, all of which is killed at the end. If it fails, hangs, or `poll`
    raises, the backend's hosts are checked.
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
                    found = f"it took longer than its limit of {limit_s:g} s"
                    raise _failed(found, "raise the limit, or end what hangs", prepared, log)
                poll()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            if process.returncode:
                found = f"exit code {process.returncode}"
                raise _failed(found, "fix the cause of the last error", prepared, log)
        except (LaunchError, HostsError) as error:
            if backend is not None and (problems := unreachable(backend)):
                raise HostError(problems, headline="a host has dropped out") from error
            raise
        finally:
            _kill(process, backend)
    return log.read_text(errors="replace")


def run_in_foreground(prepared: Prepared, *, limit_s: float | None = None) -> int:
    """Run a prepared command on this terminal; return its exit code, or 124 after `limit_s`."""
    with subprocess.Popen(prepared.command, env=prepared.environment) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            process.kill()


def log_tail(log: Path) -> str:
    """Return the first traceback of a log, or else its last lines.

    Processes fail one after the other: the first traceback is the cause.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "    (no log)"
    found = lines[-_LOG_LINES:]
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts:
        prefix = lines[starts[0]].partition("Traceback")[0]  # "[rank1]: " if torch writes it
        mine = [x.removeprefix(prefix) for x in lines[starts[0] :] if x.startswith(prefix)]
        found = mine[-_LOG_LINES:] if prefix else mine[:_LOG_LINES]
    return "\n".join(f"    {line}" for line in found)


def locks(environment: Mapping[str, str]) -> set[Path]:
    """Return the lock files of running or interrupted builds of DeepSpeed's CPU operator.

    `deepspeed.comm` builds `deepspeed_shm_comm` at the first start on a machine without GPUs, which
    no setting disables. torch waits for the lock without a limit.
    """
    named = environment.get("TORCH_EXTENSIONS_DIR")
    compiled = Path(named) if named else Path.home() / ".cache" / "torch_extensions"
    return set(compiled.glob("**/deepspeed_shm_comm/lock"))


@contextlib.contextmanager
def lock_cleared_on_failure(environment: Mapping[str, str]) -> Iterator[None]:
    """Remove the lock if the block fails while building. Its processes must have ended.

    A lock that another program took meanwhile stays: torch keeps the file open while it builds.
    """
    before = locks(environment)
    try:
        yield
    except BaseException:
        left = locks(environment) - before
        opened: set[str] = set()
        for process in psutil.process_iter() if left else ():
            with contextlib.suppress(psutil.Error):
                opened |= {file.path for file in process.open_files()}
        for lock in left:
            if str(lock.resolve()) not in opened:
                lock.unlink(missing_ok=True)
        raise


def remove_shared_buffers(port: int) -> None:
    """Free the memory that DeepSpeed's CPU operator leaves: 69 MB per process and start.

    Its segments in /dev/shm have the master port in their names, so those of other runs stay.
    """
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        with contextlib.suppress(OSError):
            segment.unlink()


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that cleanup runs."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        with contextlib.suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(found: str, remedy: str, prepared: Prepared, log: Path) -> LaunchError:
    return LaunchError(
        Problem(
            where=" ".join(prepared.command),
            found=f"{found}; its log ends with\n{log_tail(log)}",
            why="one of the processes failed or hangs",
            remedy=f"{remedy}; the full log is {log}",
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
