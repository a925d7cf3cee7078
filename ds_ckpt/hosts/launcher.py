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
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import ds_ckpt
from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.hosts import Launcher
from ds_ckpt.hosts.checks import SSH_S, HostError, Reachable, unreachable
from ds_ckpt.hosts.cpu_op import lock_cleared_on_failure, remove_shared_buffers
from ds_ckpt.hosts.emulated import SSH_PORT, EmulatedHosts, namespace, tool
from ds_ckpt.hosts.heartbeat import JOB, Listener
from ds_ckpt.hosts.interfaces import INTERFACE
from ds_ckpt.hosts.records import HostsError

MASTER_PORT = 29500
LOG = "launch.log"
_LOG_LINES = 40
_POLL_S = 0.2
_END_S = 8.0
_LOOPBACK = Path("/sys/class/net/lo")
_OUTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchError(DsCkptError, RuntimeError):
    """The launched processes failed or took too long. The message has the end of their log."""

    headline = "the launched processes did not finish"


@dataclass(frozen=True)
class Prepared:
    """A command that reaches its hosts, and its environment."""

    command: list[str]
    environment: dict[str, str]


def launch(
    backend: Backend,
    module: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    stall_s: float = 180.0,
    limit_s: float = math.inf,
    heard: Callable[[dict[str, Any]], object] = lambda event: None,
    look: Callable[[], None] = lambda: None,
    if_silent: str = "",
) -> None:
    """Run `module` on all hosts of a backend, until it ends.

    Args:
        job: JSON; `heartbeat.begin` gives it to every process.
        folder: of the launch, seen by this process and process 0: job, events, log.
        stall_s: end when process 0 has been silent for so long: more than the longest step takes.
        heard: gets what process 0 tells with `Heartbeat.beat`, also what came before a failure.
        look: called a few times a second.
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
        look()
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
    with signals_as_exit():
        try:
            argv = ["--module", module, *arguments]
            backend.deepspeed(argv, folder, limit_s=limit_s, attend=attend)
        finally:
            listener.listen(answer=False)  # what came last; nobody waits for an answer any more


class Backend(Reachable):
    """Where something is launched."""

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        """`argv`, to be run from the first host; a leading `deepspeed` is led to all of them."""
        raise NotImplementedError

    def describe(self) -> str:
        """A sentence for a report."""
        raise NotImplementedError

    def set_rate(self, rate_mbit: float | None) -> None:
        """Give every link a rate."""
        raise NotImplementedError("only the links of emulated hosts take a rate")

    def end(self) -> None:
        """End from the inside what has to be killed, where there is a way."""

    def clear(self) -> None:
        """Take away what DeepSpeed leaves behind, when nothing of it runs any more."""

    def deepspeed(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        limit_s: float = 240.0,
        attend: Callable[[], None] = lambda: None,
    ) -> str:
        """Run `deepspeed ... argv` in `folder` over all hosts; its output.

        `attend` is called a few times a second. Raises LaunchError or HostError; whatever happens,
        nothing of it runs here when it returns.
        """
        prepared = self.prepare(["deepspeed", *argv], folder)
        with contextlib.ExitStack() as stack:
            stack.callback(self.clear)
            stack.enter_context(lock_cleared_on_failure(prepared.environment))
            return run(prepared, folder, limit_s=limit_s, attend=attend, backend=self)


@dataclass
class Emulated(Backend):
    """Hosts that `EmulatedHosts` has up. After a launch that had to be killed they are down."""

    hosts: EmulatedHosts
    slots: int = 1
    launcher: Launcher = "pdsh"
    port: int = MASTER_PORT

    def __post_init__(self) -> None:
        self.names = tuple(host.name for host in self.hosts.hosts)
        self._up = self.hosts.hosts

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        config = f"{self.hosts.folder}/ssh_config"
        ssh = [str(tool("ssh")), "-F", config, host, shlex.join(argv)]
        return _short(self._up[0].command(ssh, folder=Path("/")))

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        """`argv` in the first host, in `folder`.

        A leading `deepspeed` gets the options that lead it to all the hosts, unless it names a
        hostfile itself. For others the environment names DeepSpeed's hostfile (`DS_CKPT_HOSTFILE`)
        and has what pdsh and Open MPI's `mpirun` need to reach the hosts.
        """
        hostfile = self.hosts.folder / "hostfile"
        hostfile.write_text("".join(f"{name} slots={self.slots}\n" for name in self.names))
        everywhere = environment(INTERFACE)
        named = any(word.split("=")[0] in ("-H", "--hostfile") for word in argv)
        where = [f"--hostfile={hostfile}", f"--master_addr={self._up[0].address}"]
        where += [f"--master_port={self.port}", "--no_ssh_check"]
        pdsh = self.launcher == "pdsh"
        where.append(f"--ssh_port={SSH_PORT}" if pdsh else "--launcher=openmpi")
        command = _led(argv, [] if named else where)
        ssh = f"-F {self.hosts.folder}/ssh_config"
        reach = {
            "PDSH_SSH_ARGS_APPEND": ssh,  # DeepSpeed adds `-p PORT` itself
            "PDSH_RCMD_TYPE": "ssh",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_plm_rsh_args": ssh,
            "OMPI_MCA_oob_tcp_if_include": INTERFACE,
            "OMPI_MCA_btl_tcp_if_include": INTERFACE,
            # The hosts share /tmp, and small pids and names come back in every set.
            "OMPI_MCA_orte_tmpdir_base": "/run",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "DS_ENV_FILE": _exported(everywhere, self.hosts.folder),
            "DS_CKPT_HOSTFILE": str(hostfile),
        }
        inside = self._up[0].command(command, folder=folder)
        return Prepared(inside, {**_without_outer_launch(), **everywhere, **reach})

    def set_rate(self, rate_mbit: float | None) -> None:
        self.hosts.set_rate(rate_mbit)

    def gone(self) -> list[str]:
        return [host.name for host in self._up if namespace(host.pid) is None]

    def end(self) -> None:
        self.hosts.down()

    def describe(self) -> str:
        return (
            f"{len(self.names)} hosts emulated on one machine (network namespaces, a virtual link "
            f"each, its bandwidth shaped by the kernel, its delay not), {self.slots} processes "
            f"each, launched by deepspeed over {self.launcher}"
        )


@dataclass
class Hostfile(Backend):
    """Real machines. This one must be the first of them, or share the launch's folder with it.

    Args:
        hostfile: DeepSpeed's.
        interface: of every host to the others; None leaves the choice to gloo or NCCL.
    """

    hostfile: Path
    interface: str | None = None
    launcher: Launcher = "pdsh"
    port: int = MASTER_PORT
    ssh_port: int | None = None
    counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = read_hostfile(self.hostfile)
        self.names = tuple(self.counts)

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        more = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
        where = ["-p", str(self.ssh_port)] if self.ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8", *where, *more]
        return _short(["ssh", *options, host, shlex.join(argv)])

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        import torch

        everywhere = environment(self.interface, gpus=torch.cuda.is_available())
        options = [f"--hostfile={self.hostfile.resolve()}", "--no_ssh_check"]
        options.append(f"--master_port={self.port}")
        if self.launcher != "pdsh":
            options.append(f"--launcher={self.launcher}")
        elif self.ssh_port:
            options.append(f"--ssh_port={self.ssh_port}")
        here = {**_without_outer_launch(), **everywhere}
        here["DS_ENV_FILE"] = _exported(everywhere, folder)
        if self.launcher == "openmpi" and self.ssh_port:  # deepspeed hands --ssh_port to pdsh alone
            name = "OMPI_MCA_plm_rsh_args"
            here[name] = f"{here.get(name, '')} -p {self.ssh_port}".strip()
        return Prepared(_led(argv, options), here)

    def describe(self) -> str:
        hosts = ", ".join(f"{name} with {count}" for name, count in self.counts.items())
        return (
            f"the machines of {self.hostfile.name} (processes: {hosts}), launched by deepspeed "
            f"over {self.launcher}; the link is what it is"
        )


@dataclass
class Loopback(Backend):
    """This machine alone; the link between its processes is memory and is not shaped.

    Args:
        gpus: use them where there is one for each process and DS_ACCELERATOR does not say `cpu`.
    """

    processes: int = 2
    gpus: bool = False
    port: int = field(default_factory=lambda: free_port())
    names: tuple[str, ...] = ("localhost",)

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _short(argv)

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        # a cluster's own hostfile must not draw other machines in
        where = ["--hostfile=none", f"--num_gpus={self.processes}", "--master_addr=127.0.0.1"]
        command = _led(argv, [*where, f"--master_port={self.port}"])
        interface = "lo" if _LOOPBACK.exists() else None
        everywhere = environment(interface, gpus=self.on_gpus())
        return Prepared(command, {**_without_outer_launch(), **everywhere})

    def on_gpus(self) -> bool:
        """Whether what is launched runs on GPUs."""
        import torch

        wanted = os.environ.get("DS_ACCELERATOR") in (None, "cuda")
        return self.gpus and wanted and torch.cuda.device_count() >= self.processes

    def clear(self) -> None:
        remove_shared_buffers(self.port)

    def describe(self) -> str:
        if self.on_gpus():
            return f"{self.processes} GPUs of one machine, whose link is what it is"
        return (
            f"{self.processes} processes on one machine over loopback, WHOSE LINK IS NOT SHAPED: "
            "it is faster than any network, so times say what the methods cost, not what they save"
        )


def read_hostfile(path: Path) -> dict[str, int]:
    """Processes by host. Raises ConfigError on what is not `name slots=N`."""
    found: dict[str, int] = {}
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 else ""
        if not slots.isdigit() or int(slots) < 1 or words[0] in found:
            why = "each host stands once, with its processes"
            remedy = "write `name slots=8`"
            problems.append(Problem(f"{path}, line {number}", line.strip(), why, remedy))
        else:
            found[words[0]] = int(slots)
    if not problems and not found:
        why = "the experiment runs on the hosts that it names"
        problems.append(Problem(str(path), "no hosts", why, "write `name slots=8`, one a line"))
    if len(set(found.values())) > 1:
        why = "every host has the same part in an experiment"
        problems.append(Problem(str(path), "hosts with different slots", why, "give all the same"))
    if problems:
        raise ConfigError(problems, headline="this hostfile cannot be used")
    return found


def environment(interface: str | None, *, gpus: bool = False) -> dict[str, str]:
    """What every process needs, also those that start over ssh with a bare environment."""
    package = str(Path(ds_ckpt.__file__).parents[1])
    everywhere = {
        "TORCH_EXTENSIONS_DIR": os.environ.get(
            "TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions"
        ),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": ":".join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        # This Python's own tools first: DeepSpeed compiles with the ninja beside it.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
    }
    if not gpus:
        everywhere |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # sums in one order
    if interface:
        everywhere["GLOO_SOCKET_IFNAME"] = interface
        if gpus:
            everywhere["NCCL_SOCKET_IFNAME"] = interface
    return everywhere


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
                    raise _failed(f"it took longer than {limit_s:g} s", prepared, log)
                attend()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            if process.returncode:
                raise _failed(f"exit code {process.returncode}", prepared, log)
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


def free_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def _failed(what: str, prepared: Prepared, log: Path) -> LaunchError:
    return LaunchError(
        Problem(
            where=" ".join(prepared.command),
            found=f"{what}; its log ends with\n{log_tail(log)}",
            why="one of the processes failed or did not come to an end",
            remedy=f"mend what the last error names; the whole log is {log}",
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


def _exported(everywhere: Mapping[str, str], folder: Path) -> str:
    """The file that DeepSpeed exports on every host; pdsh would strip quotes, so there are none."""
    path = folder / "deepspeed_env"
    path.write_text("".join(f"{name}={value}\n" for name, value in everywhere.items()))
    return str(path)


def _led(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """A leading `deepspeed` is this Python environment's, and gets the options."""
    if Path(argv[0]).name != "deepspeed":
        return list(argv)
    return [str(Path(sys.executable).with_name("deepspeed")), *options, *argv[1:]]


def _without_outer_launch() -> dict[str, str]:
    """This process's environment without what an outer launch or worker has set."""
    return {k: v for k, v in os.environ.items() if k not in _OUTER}


def _short(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_S
    )
