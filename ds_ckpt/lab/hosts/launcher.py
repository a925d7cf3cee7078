"""Launch a module on every host of a backend, monitor it, and end it.

`check_hosts` examines the hosts first. `launch` starts `python -m MODULE` with a job over
`deepspeed`; the module calls `heartbeat.begin` first. A launch ends when its processes do, when one
fails, at a time limit, or after too long a silence. An error names the hosts that do not answer, or
has the end of the log. No process of it runs afterwards.

If it is ended gently, DeepSpeed's launcher runs `pkill -f` over pdsh, which could hit another run.
So it is killed; its processes on other machines are ended by their ssh, or by their own heartbeat.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ds_ckpt.environment import clear_stale_locks
from ds_ckpt.errors import DsCkptError, Problem
from ds_ckpt.lab.hosts.backends import SSH_S, Backend, HostError, Hostfile, Prepared
from ds_ckpt.lab.hosts.heartbeat import JOB, Listener

LOG = "launch.log"
_MODULES = ("ds_ckpt", "deepspeed", "torch", "transformers")
_LOG_LINES = 40
_POLL_S = 0.2
_END_S = 8.0
_REPORT = """
import glob, importlib.metadata, importlib.util, json, os, platform, socket, sys, time
now, port, modules, folder = time.time(), int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
missing = [m for m in modules if importlib.util.find_spec(m) is None]
if missing:
    sys.exit("no module " + ", ".join(missing))
if not os.path.isdir(folder):
    sys.exit(f"no folder {folder}, where the command starts\\nremedy: create or mount it there")
if port:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            sys.exit(f"port {port} is taken ({error})\\nremedy: name another with --port")
versions = {m: importlib.metadata.version(m) for m in modules}
versions["python"] = ".".join(platform.python_version_tuple()[:2])
try:
    address = socket.gethostbyname(socket.gethostname())
except OSError:
    address = ""
try:
    with open("/proc/self/net/route") as file:
        routes = [line.split() for line in file][1:]
except OSError:  # not Linux
    routes = []
interface = next((r[0] for r in sorted(routes, key=lambda r: r[1] != "00000000")), "none")
found = {"versions": versions, "time_s": now, "address": address, "interface": interface}
print(json.dumps({**found, "gpus": len(glob.glob("/dev/nvidia[0-9]*"))}))
"""


class LaunchError(DsCkptError, RuntimeError):
    """The launched processes failed or took too long. The message has the end of their log."""

    headline = "the launched processes did not finish"


@dataclass(frozen=True)
class NodeReport:
    """Facts about a node that can take part.

    Attributes:
        ahead_s: Minimum lead of its clock over this one's, in seconds.
        address: Address of its own name, to which gloo binds; empty: the name has none.
        gpus: Number of NVIDIA's devices.
    """

    name: str
    versions: Mapping[str, str]
    ahead_s: float
    address: str
    interface: str
    gpus: int


def check_hosts(hosts: Backend) -> list[NodeReport]:
    """Examine all nodes at once: ssh, Python, modules, their versions, folder and port.

    Raises HostError with every problem.
    """

    def report_on(name: str) -> Problem | NodeReport:
        port = hosts.port if name == hosts.names[0] else 0
        argv = [sys.executable, "-c", _REPORT, str(port), ",".join(_MODULES), os.getcwd()]
        asked = time.time()
        code, output = _try(hosts, name, argv)
        answered = time.time()
        if code == 255:
            remedy = f"make `ssh {name} true` work without a password from this machine"
            if "resolve host" in output:
                remedy = "correct the name in the hostfile, or add it to /etc/hosts"
            return Problem(name, output, "processes are started over ssh", remedy)
        if code:
            problem, _, remedy = output.partition("\nremedy: ")
            why = f"nodes need {sys.executable}, its modules and this folder, rank 0 a free port"
            install = "install this environment there at the same path: pip install 'ds_ckpt[hf]'"
            return Problem(name, problem, why, remedy or install)
        found = json.loads(output.splitlines()[-1])
        there = found.pop("time_s")  # between the question and the answer if both clocks agree
        return NodeReport(name, ahead_s=there - min(max(there, asked), answered), **found)

    with ThreadPoolExecutor(len(hosts.names)) as pool:
        results = list(pool.map(report_on, hosts.names))
    nodes = [found for found in results if isinstance(found, NodeReport)]
    problems = [found for found in results if isinstance(found, Problem)]
    for node in nodes:
        slots = hosts.counts.get(node.name, 0) if isinstance(hosts, Hostfile) else 0
        if 0 < node.gpus < slots and os.environ.get("DS_ACCELERATOR") != "cpu":
            found, why = f"slots={slots}, GPUs: {node.gpus}", "each rank needs a GPU of its own"
            remedy = f"write at most slots={node.gpus}, or set DS_ACCELERATOR=cpu"
            problems.append(Problem(node.name, found, why, remedy))
        for module, version in node.versions.items():
            if version != (wanted := nodes[0].versions[module]):
                why = f"{nodes[0].name} has {wanted}, and ranks must run the same code"
                remedy = f"install {module} {wanted} there"
                problems.append(Problem(node.name, f"{module} {version}", why, remedy))
    if problems:
        raise HostError(_grouped(problems))
    return nodes


def _grouped(problems: Sequence[Problem]) -> list[Problem]:
    """Join the nodes that have the same problem; its text is the first one's."""
    by_texts: dict[tuple[str, ...], list[Problem]] = {}
    for problem in problems:
        name = rf"(?i)(?<![\w-]){re.escape(problem.where)}(?![\w-])"
        texts = (problem.found, problem.why, problem.remedy)
        by_texts.setdefault(tuple(re.sub(name, "NODE", text) for text in texts), []).append(problem)
    return [
        replace(found[0], where=", ".join(one.where for one in found))
        for found in by_texts.values()
    ]


def unreachable(hosts: Backend) -> list[Problem]:
    """Return the hosts that no longer answer, for a run that has failed."""
    ended = hosts.ended_names()
    # all others are reached through the first one
    names = ended if ended and ended[0] == hosts.names[0] else hosts.names

    def problem(name: str) -> Problem | None:
        code, output = (255, "the node has ended") if name in ended else _try(hosts, name, ["true"])
        why = "the node dropped out of the network, or its link is down"
        remedy = "check the machine and its link; then repeat the command, which continues the run"
        return Problem(name, f"no answer: {output}", why, remedy) if code == 255 else None

    with ThreadPoolExecutor(len(names)) as pool:
        return _grouped([found for found in pool.map(problem, names) if found])


def _try(hosts: Backend, name: str, argv: Sequence[str]) -> tuple[int, str]:
    """Return a command's exit code, 255 without an answer, and its output."""
    try:
        result = hosts.on(name, argv)
    except subprocess.TimeoutExpired:
        return 255, f"no answer to ssh for {SSH_S:.0f} s"
    except FileNotFoundError as error:
        return 255, f"no {error.filename} on this machine"
    text = result.stderr if result.returncode else result.stdout
    output = (text or result.stdout).strip().removeprefix("ssh: ")
    return result.returncode, f"ssh: {output}" if result.returncode == 255 else output


def launch(
    backend: Backend,
    module: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    stall_s: float = 180.0,
    limit_s: float = math.inf,
    on_event: Callable[[dict[str, Any]], object] = lambda event: None,
) -> None:
    """Run `module` on all hosts of a backend, until it ends.

    The module calls `heartbeat.begin`, which returns `job` to every process. Rank 0 must see
    `folder`, too. `on_event` receives what rank 0 passes to `Heartbeat.beat`. Raises HostError if a
    host does not answer, LaunchError if processes fail, stall for `stall_s` or exceed `limit_s`.
    """
    folder = folder.absolute()
    (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
    listener = Listener(folder, stall_s=stall_s)

    def poll() -> None:
        for event in listener.poll():
            on_event(event)
        if (overdue_s := listener.overdue_s()) is not None:
            found = f"no progress for {overdue_s:.0f} s, and all nodes answer"
            remedy = "check the machine's load, or raise --stall-s above the longest step"
            raise _failed(found, remedy, ", ".join(backend.names), folder / LOG)

    arguments = [f"--folder={folder}", f"--token={listener.launch}", f"--stall-s={stall_s}"]
    with signals_as_exit():
        try:
            deepspeed(backend, ["--module", module, *arguments], folder, limit_s=limit_s, poll=poll)
        finally:
            for event in listener.poll():  # the last ones
                on_event(event)
            listener.end()


def deepspeed(
    backend: Backend,
    argv: Sequence[str],
    folder: Path,
    *,
    limit_s: float = 240.0,
    poll: Callable[[], None] = lambda: None,
) -> str:
    """Run `deepspeed ... argv` in `folder` over all hosts, as `supervise`; return its output."""
    prepared = backend.prepare(["deepspeed", *argv], folder)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_shared_buffers, backend.port)
        stack.enter_context(lock_cleared_on_failure(prepared.environment))
        return supervise(prepared, folder, limit_s=limit_s, poll=poll, backend=backend)


def supervise(
    prepared: Prepared,
    folder: Path,
    *,
    limit_s: float,
    poll: Callable[[], None] = lambda: None,
    backend: Backend | None = None,
) -> str:
    """Run a command in `folder`, with a session of its own, and its output in `LOG`; return that.

    `poll` is called a few times a second. If it raises, or the command fails or takes too long, the
    backend's hosts are checked.
    """
    log, where = folder / LOG, " ".join(prepared.command)
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
                    raise _failed(found, "raise the limit, or end what hangs", where, log)
                poll()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            if process.returncode:
                found = f"exit code {process.returncode}"
                raise _failed(found, "fix the cause of the last error", where, log)
        except LaunchError as error:
            if backend is not None and (problems := unreachable(backend)):
                raise HostError(problems, headline="a node has dropped out") from error
            raise
        finally:
            _kill(process, backend)
    return log.read_text(errors="replace")


def log_tail(log: Path) -> str:
    """Return the first traceback of a log, which is the cause of others, or else its last lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = lines[-_LOG_LINES:]
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts:
        prefix = lines[starts[0]].partition("Traceback")[0]  # "[rank1]: " if torch writes it
        mine = [x.removeprefix(prefix) for x in lines[starts[0] :] if x.startswith(prefix)]
        found = mine[-_LOG_LINES:] if prefix else mine[:_LOG_LINES]
    return "\n".join(f"    {line}" for line in found)


@contextlib.contextmanager
def lock_cleared_on_failure(variables: Mapping[str, str]) -> Iterator[None]:
    """Remove the lock, for which torch waits forever, of a failed build of an operator."""
    try:
        yield
    except BaseException:
        clear_stale_locks(0.0, variables)
        raise


def remove_shared_buffers(port: int) -> None:
    """Free the memory that DeepSpeed's CPU operator leaves: 69 MB per process and start."""
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
        if signal.getsignal(number) != signal.SIG_IGN:  # else nohup
            with contextlib.suppress(ValueError):  # not in the main thread
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(found: str, remedy: str, where: str, log: Path) -> LaunchError:
    found = f"{found}; its log ends with\n{log_tail(log)}"
    remedy = f"{remedy}; the full log is {log}"
    return LaunchError(Problem(where, found, "one of the ranks failed or hangs", remedy))


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
