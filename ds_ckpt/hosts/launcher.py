"""Commands on emulated hosts, on the machines of a hostfile, and on this machine.

`prepare` turns a command into one that starts in the first emulated host and reaches the others;
`on_hosts` runs `deepspeed` that way with a time limit, `on_this_machine` on loopback instead. A
launcher that is told to end gently runs `pkill -f` over pdsh, which on a machine that is shared
could reach somebody else's run. So it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import psutil

import ds_ckpt
from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.hosts.cpu_op import shared_buffers_removed
from ds_ckpt.hosts.emulated import EmulatedHosts
from ds_ckpt.hosts.host import INTERFACE, namespace
from ds_ckpt.hosts.ssh import PORT
from ds_ckpt.hosts.tools import tool

Launcher = Literal["pdsh", "openmpi"]
MASTER_PORT = 29500
"""Free in emulated hosts, which have no servers but sshd."""
_OUTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Prepared:
    """A command to be run outside the hosts, which runs inside, and its environment."""

    command: list[str]
    environment: dict[str, str]


def prepare(
    hosts: EmulatedHosts,
    argv: Sequence[str],
    *,
    folder: Path,
    slots: int = 1,
    launcher: Launcher = "pdsh",
    port: int = MASTER_PORT,
) -> Prepared:
    """`argv` in the first host, in `folder`.

    A leading `deepspeed` gets the options that lead it to all the hosts, unless it names a
    hostfile itself. For others the environment names DeepSpeed's hostfile (`DS_CKPT_HOSTFILE`)
    and has what pdsh and Open MPI's `mpirun` need to reach the hosts.
    """
    hostfile, exported = hosts.folder / "hostfile", hosts.folder / "deepspeed_env"
    hostfile.write_text(hosts.hostfile(slots))
    everywhere = environment(INTERFACE)
    # DeepSpeed exports these on every host; pdsh would strip quotes, so there are none.
    exported.write_text("".join(f"{k}={v}\n" for k, v in everywhere.items()))
    command = list(argv)
    if Path(command[0]).name == "deepspeed":
        command[:1] = deepspeed()
        if not any(word.split("=")[0] in ("-H", "--hostfile") for word in command):
            command[1:1] = _options(hosts, hostfile, launcher, port)
    return Prepared(
        hosts.hosts[0].command(command, folder=folder),
        {
            **without_outer_launch(),
            **everywhere,
            **reach(hosts),
            "DS_ENV_FILE": str(exported),
            "DS_CKPT_HOSTFILE": str(hostfile),
        },
    )


def on_hosts(
    hosts: EmulatedHosts,
    argv: Sequence[str],
    *,
    folder: Path,
    slots: int = 1,
    limit_s: float = 240,
    launcher: Launcher = "pdsh",
    port: int = MASTER_PORT,
    while_running: Callable[[], None] = lambda: None,
) -> str:
    """Run `deepspeed ... argv` in `folder` from the first host on all of them; its output.

    `while_running` is called a few times a second. Raises LaunchError. After a launch that took
    too long the hosts are down.
    """
    command = ["deepspeed", *argv]
    prepared = prepare(hosts, command, folder=folder, slots=slots, launcher=launcher, port=port)
    return _run(prepared, folder, limit_s, hosts.down, while_running)


def on_this_machine(
    argv: Sequence[str],
    *,
    folder: Path,
    processes: int = 2,
    limit_s: float = 240,
    while_running: Callable[[], None] = lambda: None,
) -> str:
    """Run `deepspeed ... argv` in `folder` with `processes` processes over loopback; its output.

    Raises LaunchError.
    """
    where = ["--hostfile=none", f"--num_gpus={processes}", "--master_addr=127.0.0.1"]
    port = free_port()
    command = [*deepspeed(), *where, f"--master_port={port}", *argv]
    prepared = Prepared(command, {**without_outer_launch(), **environment("lo")})
    with shared_buffers_removed(port):
        return _run(prepared, folder, limit_s, lambda: None, while_running)


def run_prepared(
    prepared: Prepared, folder: Path, limit_s: float, *, while_running: Callable[[], None]
) -> str:
    """Run a command that reaches its hosts itself; its output. Raises LaunchError.

    What it has started on other machines is told to end by their launcher, or ends itself.
    """
    return _run(prepared, folder, limit_s, lambda: None, while_running)


def deepspeed() -> list[str]:
    """`deepspeed` of this Python's environment."""
    return [str(Path(sys.executable).with_name("deepspeed"))]


def environment(interface: str) -> dict[str, str]:
    """What every process needs, also those that start over ssh with a bare environment."""
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    package = str(Path(ds_ckpt.__file__).parents[1])
    return {
        "TORCH_EXTENSIONS_DIR": compiled,
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": ":".join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        # This Python's own tools first: DeepSpeed compiles with the ninja beside it.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
    }


def _options(hosts: EmulatedHosts, hostfile: Path, launcher: Launcher, port: int) -> list[str]:
    where = [f"--hostfile={hostfile}", f"--master_addr={hosts.hosts[0].address}"]
    where.append(f"--master_port={port}")
    if launcher == "openmpi":
        return [*where, "--no_ssh_check", "--launcher=openmpi"]
    return [*where, "--no_ssh_check", f"--ssh_port={PORT}"]


def reach(hosts: EmulatedHosts) -> dict[str, str]:
    """How pdsh and Open MPI's mpirun reach the hosts."""
    return {
        # DeepSpeed adds `-p PORT` itself
        "PDSH_SSH_ARGS_APPEND": f"-F {hosts.folder}/ssh_config",
        "PDSH_RCMD_TYPE": "ssh",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_args": f"-F {hosts.folder}/ssh_config",
        "OMPI_MCA_oob_tcp_if_include": INTERFACE,
        "OMPI_MCA_btl_tcp_if_include": INTERFACE,
        # The hosts share /tmp, and small pids and names come back in every set.
        "OMPI_MCA_orte_tmpdir_base": "/run",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }


def without_outer_launch() -> dict[str, str]:
    """This process's environment without what an outer launch or worker has set."""
    return {k: v for k, v in os.environ.items() if k not in _OUTER}


def _run(
    prepared: Prepared,
    folder: Path,
    limit_s: float,
    end: Callable[[], None],
    while_running: Callable[[], None],
) -> str:
    log = folder / "launch.log"
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
        ended = ""
        limit = time.monotonic() + limit_s
        try:
            while process.poll() is None:
                if time.monotonic() > limit:
                    ended = f"it took longer than {limit_s:g} s"
                    break
                while_running()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            _kill(process, end)
    if process.returncode and not ended:
        ended = f"exit code {process.returncode}"
    if ended:
        raise LaunchError(
            Problem(
                where=" ".join(prepared.command),
                found=f"{ended}; its log ends with\n{log_tail(log)}",
                why="one of the processes failed or did not come to an end",
                remedy=f"mend what the last error names; the whole log is {log}",
            )
        )
    return log.read_text(errors="replace")


def _kill(process: subprocess.Popen[bytes], end: Callable[[], None]) -> None:
    family: list[psutil.Process] = []
    if process.poll() is None:
        end()  # from the inside first, then from the outside
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()


def run_in_foreground(prepared: Prepared, *, limit_s: float | None = None) -> int:
    """Run a prepared command on this terminal; its exit code, or 124 after `limit_s` seconds."""
    with subprocess.Popen(prepared.command, env=prepared.environment) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return 124
        except BaseException:
            process.kill()
            raise


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


SSH_S = 12.0
"""What a host may take to answer ssh."""
Look = Callable[[], None]


class Ground(Protocol):
    """What an experiment needs of the place that it runs in."""

    names: tuple[str, ...]
    """The hosts, the one with process 0 first."""
    port: int
    """The master port, on the first host."""

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run something short on a host. Raises subprocess.TimeoutExpired after `SSH_S`."""
        ...

    def launch(self, argv: Sequence[str], folder: Path, limit_s: float, look: Look) -> None:
        """`deepspeed ... argv` on all hosts; `look` is called a few times a second.

        Raises LaunchError; whatever happens, nothing of it runs here when it returns.
        """
        ...

    def set_rate(self, rate_mbit: float | None) -> None:
        """Give every link a rate."""
        ...

    def gone(self) -> list[str]:
        """Hosts that are known not to be there any more."""
        ...

    def describe(self) -> str:
        """A sentence for the report."""
        ...


@dataclass
class Emulated:
    """Hosts that `EmulatedHosts` has up."""

    hosts: EmulatedHosts
    slots: int = 1
    launcher: Launcher = "pdsh"
    port: int = 29500

    def __post_init__(self) -> None:
        self.names = tuple(host.name for host in self.hosts.hosts)
        self._up = self.hosts.hosts

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        config = f"{self.hosts.folder}/ssh_config"
        ssh = [str(tool("ssh")), "-F", config, host, shlex.join(argv)]
        return _short(self._up[0].command(ssh, folder=Path("/")))

    def launch(self, argv: Sequence[str], folder: Path, limit_s: float, look: Look) -> None:
        on_hosts(
            self.hosts,
            argv,
            folder=folder,
            slots=self.slots,
            limit_s=limit_s,
            launcher=self.launcher,
            port=self.port,
            while_running=look,
        )

    def set_rate(self, rate_mbit: float | None) -> None:
        self.hosts.set_rate(rate_mbit)

    def gone(self) -> list[str]:
        return [host.name for host in self._up if namespace(host.pid) is None]

    def describe(self) -> str:
        return (
            f"{len(self.names)} hosts emulated on one machine (network namespaces, a virtual link "
            f"each, its bandwidth shaped by the kernel, its delay not), {self.slots} processes "
            f"each, launched by deepspeed over {self.launcher}"
        )


@dataclass
class Hostfile:
    """Real machines. This one must be the first of them, or share the run's folder with it.

    Args:
        hostfile: DeepSpeed's.
        interface: of every host to the others; None leaves the choice to gloo or NCCL.
    """

    hostfile: Path
    interface: str | None = None
    launcher: Launcher = "pdsh"
    port: int = 29500
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

    def launch(self, argv: Sequence[str], folder: Path, limit_s: float, look: Look) -> None:
        import torch

        everywhere = environment(self.interface or "")
        if self.interface is None:
            del everywhere["GLOO_SOCKET_IFNAME"]
        elif torch.cuda.is_available():
            everywhere["NCCL_SOCKET_IFNAME"] = self.interface
        if torch.cuda.is_available():
            del everywhere["DS_ACCELERATOR"], everywhere["OMP_NUM_THREADS"]
        exported = folder / "deepspeed_env"
        exported.write_text("".join(f"{k}={v}\n" for k, v in everywhere.items()))
        command = [*deepspeed(), f"--hostfile={self.hostfile.resolve()}", "--no_ssh_check"]
        command += [f"--master_port={self.port}"]
        if self.launcher != "pdsh":
            command.append(f"--launcher={self.launcher}")
        elif self.ssh_port:
            command.append(f"--ssh_port={self.ssh_port}")
        here = {**without_outer_launch(), **everywhere, "DS_ENV_FILE": str(exported)}
        if self.launcher == "openmpi" and self.ssh_port:  # deepspeed hands --ssh_port to pdsh alone
            name = "OMPI_MCA_plm_rsh_args"
            here[name] = f"{here.get(name, '')} -p {self.ssh_port}".strip()
        run_prepared(Prepared([*command, *argv], here), folder, limit_s, while_running=look)

    def set_rate(self, rate_mbit: float | None) -> None:
        raise NotImplementedError("the links of real machines are what they are")

    def gone(self) -> list[str]:
        return []

    def describe(self) -> str:
        hosts = ", ".join(f"{name} with {count}" for name, count in self.counts.items())
        return (
            f"the machines of {self.hostfile.name} (processes: {hosts}), launched by deepspeed "
            f"over {self.launcher}; the link is what it is"
        )


@dataclass
class Loopback:
    """This machine alone; the link between its processes is memory and is not shaped."""

    processes: int = 2
    port: int = 0
    names: tuple[str, ...] = ("localhost",)

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _short(argv)

    def launch(self, argv: Sequence[str], folder: Path, limit_s: float, look: Look) -> None:
        on_this_machine(
            argv, folder=folder, processes=self.processes, limit_s=limit_s, while_running=look
        )

    def set_rate(self, rate_mbit: float | None) -> None:
        raise NotImplementedError("loopback has no rate")

    def gone(self) -> list[str]:
        return []

    def describe(self) -> str:
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


def _short(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_S
    )
