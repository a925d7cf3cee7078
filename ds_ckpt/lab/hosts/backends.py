"""Backends: how a command reaches its hosts, which environment it needs, and interface counters.

The machines of a hostfile and the hosts of `emulated` are reached over pdsh; `Loopback` is this
machine alone. `launcher` starts processes; nothing is started here.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

import ds_ckpt
from ds_ckpt.errors import ConfigError, DsCkptError, Problem

MASTER_PORT = 29500
SSH_S = 12.0
"""Time limit for a host's answer to ssh."""
INTERFACE = "eth0"
"""Network interface of every emulated host."""
FRAME_HEADER_BYTES = 66
"""Headers of a packet: Ethernet 14, IPv4 20, TCP with timestamps 32."""
_ROUTES = Path("/proc/self/net/route")
_OUTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


class HostError(DsCkptError, RuntimeError):
    """A node cannot take part, be emulated or be ended, or has dropped out."""

    headline = "not every node can take part"


@dataclass(frozen=True)
class Prepared:
    """A command that reaches its hosts, and its environment."""

    command: list[str]
    environment: dict[str, str]


class Backend:
    """A place to launch on: the hosts, rank 0's first, and the master port."""

    names: tuple[str, ...]
    port: int

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a quick command on a host; subprocess.TimeoutExpired after `SSH_S`."""
        raise NotImplementedError

    def ended_names(self) -> list[str]:
        """Return hosts that are known to have ended."""
        return []

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        """Prepare `argv` to run from the first host; `deepspeed` gets options for all hosts."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the place for a report."""
        raise NotImplementedError

    def set_rate(self, rate_mbit: float | None) -> None:
        """Set the rate of every link, of emulated nodes alone: others have none to set."""

    def end(self) -> None:
        """End from the inside what has to be killed, if possible."""


@dataclass
class Hostfile(Backend):
    """Real machines, this one the first; without `interface` gloo or NCCL choose one."""

    hostfile: Path
    interface: str | None = None
    port: int = MASTER_PORT
    ssh_port: int | None = None
    counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = read_hostfile(self.hostfile)
        self.names = tuple(self.counts)

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a quick command over ssh."""
        more = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
        where = ["-p", str(self.ssh_port)] if self.ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8", *where, *more]
        return run_quick(["ssh", *options, host, shlex.join(argv)])

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        """Prepare a command for the machines."""
        everywhere = environment(self.interface, gpus=torch.cuda.is_available())
        options = [f"--hostfile={self.hostfile.resolve()}", "--no_ssh_check"]
        options.append(f"--master_port={self.port}")
        if self.ssh_port:
            options.append(f"--ssh_port={self.ssh_port}")
        here = {"DS_ENV_FILE": exported(everywhere, folder)}
        return Prepared(
            with_launcher_args(argv, options), without_outer_launch() | everywhere | here
        )

    def describe(self) -> str:
        """Describe the machines."""
        hosts = ", ".join(f"{name} with {count}" for name, count in self.counts.items())
        by = f", interface {self.interface}" if self.interface else ""
        return f"nodes of {self.hostfile.name} (ranks: {hosts}{by}), link rate not changed"


@dataclass
class Loopback(Backend):
    """This machine alone, with GPUs if wanted, enough and not refused by DS_ACCELERATOR."""

    processes: int = 2
    gpus: bool = False
    port: int = field(default_factory=lambda: free_port())
    names: tuple[str, ...] = ("localhost",)

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a quick command here."""
        return run_quick(argv)

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        """Prepare a command for this machine; a cluster's own hostfile is not read."""
        where = ["--hostfile=none", f"--num_gpus={self.processes}", "--master_addr=127.0.0.1"]
        command = with_launcher_args(argv, [*where, f"--master_port={self.port}"])
        interface = "lo" if _ROUTES.exists() else None
        everywhere = environment(interface, gpus=self.on_gpus())
        return Prepared(command, without_outer_launch() | everywhere)

    def on_gpus(self) -> bool:
        """Return whether the launched processes run on GPUs."""
        wanted = os.environ.get("DS_ACCELERATOR") in (None, "cuda")
        return self.gpus and wanted and torch.cuda.device_count() >= self.processes

    def describe(self) -> str:
        """Describe this machine."""
        if self.on_gpus():
            return f"{self.processes} GPUs of one machine, link rate not changed"
        return (
            f"{self.processes} ranks on one machine over loopback, LINK NOT SHAPED: it is "
            "faster than any network, so times show the methods' cost and not their savings"
        )


def read_hostfile(path: Path) -> dict[str, int]:
    """Read the number of ranks by node, as DeepSpeed does; ConfigError if they are unequal."""
    found: dict[str, int] = {}
    problems, remedy = list[Problem](), "write `name slots=8` for each node, in one line"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line, where = line.strip(), f"{path}, line {number}"
        if not line or line.startswith("#"):
            continue
        # what follows, such as max_slots=8, is not read
        match = re.match(r"(\S+)\s+slots=0*([1-9]\d*)", line)
        if match is not None and match[1] not in found:
            found[match[1]] = int(match[2])
        else:
            why = "the node is in an earlier line" if match else "a line names a node and its ranks"
            problems.append(Problem(where, line, why, remedy))
    if len(set(found.values())) != 1 and not problems:
        slots = ", ".join(f"{name} with {count}" for name, count in found.items()) or "no nodes"
        why = "all nodes have the same number of ranks" if found else "a hostfile names its nodes"
        problems.append(Problem(str(path), slots, why, remedy))
    if problems:
        raise ConfigError(problems, headline="this hostfile cannot be used")
    return found


def environment(interface: str | None, *, gpus: bool = False) -> dict[str, str]:
    """Return what every process needs, also if ssh starts it with a bare environment."""
    package = str(Path(ds_ckpt.__file__).parents[1])
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    everywhere = {
        "TORCH_EXTENSIONS_DIR": compiled,
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


def free_port() -> int:
    """Return a TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exported(everywhere: Mapping[str, str], folder: Path) -> str:
    """Write DS_ENV_FILE: the user's own exports, then these, unquoted as pdsh strips quotes."""
    path, name = folder / "deepspeed_env", os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    theirs = (Path(place, name) for place in (Path.home(), "."))  # where DeepSpeed looks
    lines = [line for file in theirs if file.is_file() for line in file.read_text().splitlines()]
    lines += [f"{k}={v}" for k, v in everywhere.items() if k != "PYTHONPATH"]  # DeepSpeed's own
    path.write_text("".join(f"{line}\n" for line in lines if "=" in line))
    return str(path)


def with_launcher_args(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """Add options to a leading `deepspeed`, which becomes this Python environment's."""
    if Path(argv[0]).name != "deepspeed":
        return list(argv)
    return [str(Path(sys.executable).with_name("deepspeed")), *options, *argv[1:]]


def without_outer_launch() -> dict[str, str]:
    """Return this process's environment without the variables of an outer launch."""
    return {k: v for k, v in os.environ.items() if k not in _OUTER}


def run_quick(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with the time limit `SSH_S`."""
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_S
    )


def read_sent_bytes(interface: str) -> int:
    """Read the payload bytes that an interface has sent since boot; KeyError if it is missing."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False)[interface]
    return int(counted.bytes_sent - FRAME_HEADER_BYTES * counted.packets_sent)


def link_interface(where: str) -> str | None:
    """Return the interface to the other hosts; None without counters to read (not Linux)."""
    if not _ROUTES.exists():
        return None
    if where != "hostfile":
        return "lo" if where == "loopback" else INTERFACE
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if named := os.environ.get(name, "").split(",")[0].lstrip("="):
            return named
    routes = (line.split() for line in _ROUTES.read_text().splitlines()[1:])
    return next((fields[0] for fields in routes if fields[1] == "00000000"), None)
