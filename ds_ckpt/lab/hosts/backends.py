"""Where experiments are launched: how a command reaches its hosts, and what it needs there.

The machines of a hostfile, and the hosts of `emulated`, are reached over pdsh or Open MPI;
`Loopback` is this machine alone. Nothing is started here: that is `launcher`.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ds_ckpt
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.hosts import Launcher

MASTER_PORT = 29500
SSH_S = 12.0
"""What a host may take to answer ssh."""
_LOOPBACK = Path("/sys/class/net/lo")
_ETH0 = Path("/sys/class/net/eth0")
_OUTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Prepared:
    """A command that reaches its hosts, and its environment."""

    command: list[str]
    environment: dict[str, str]


class Backend:
    """Where something is launched."""

    names: tuple[str, ...]
    """The hosts, the one with process 0 first."""
    port: int
    """The master port on the first host."""

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run something short on a host. Raises subprocess.TimeoutExpired after `SSH_S`."""
        raise NotImplementedError

    def gone(self) -> list[str]:
        """Hosts that are known not to be there any more."""
        return []

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
        if self.launcher == "openmpi" and self.interface is None and not _ETH0.exists():
            why = "deepspeed has mpirun use eth0, which this machine does not have"
            remedy = "name the network interface of all hosts: --interface ens5"
            problem = Problem("--launcher openmpi", "no --interface", why, remedy)
            raise ConfigError(problem, headline="this hostfile cannot be used")

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        more = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
        where = ["-p", str(self.ssh_port)] if self.ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8", *where, *more]
        return short(["ssh", *options, host, shlex.join(argv)])

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        import torch

        everywhere = environment(self.interface, gpus=torch.cuda.is_available())
        options = [f"--hostfile={self.hostfile.resolve()}", "--no_ssh_check"]
        options.append(f"--master_port={self.port}")
        if self.launcher != "pdsh":
            options.append(f"--launcher={self.launcher}")
            if self.interface is not None:  # deepspeed has mpirun use eth0
                options.append(f"--launcher_args=--mca btl_tcp_if_include {self.interface}")
        elif self.ssh_port:
            options.append(f"--ssh_port={self.ssh_port}")
        here = {**without_outer_launch(), **everywhere}
        here["DS_ENV_FILE"] = exported(everywhere, folder)
        if self.launcher == "openmpi" and self.ssh_port:  # deepspeed hands --ssh_port to pdsh alone
            name = "OMPI_MCA_plm_rsh_args"
            here[name] = f"{here.get(name, '')} -p {self.ssh_port}".strip()
        return Prepared(led(argv, options), here)

    def describe(self) -> str:
        hosts = ", ".join(f"{name} with {count}" for name, count in self.counts.items())
        by = f", {self.interface} of each" if self.interface else ""
        return (
            f"the machines of {self.hostfile.name} (processes: {hosts}{by}), launched by deepspeed "
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
        return short(argv)

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        # a cluster's own hostfile must not draw other machines in
        where = ["--hostfile=none", f"--num_gpus={self.processes}", "--master_addr=127.0.0.1"]
        command = led(argv, [*where, f"--master_port={self.port}"])
        interface = "lo" if _LOOPBACK.exists() else None
        everywhere = environment(interface, gpus=self.on_gpus())
        return Prepared(command, {**without_outer_launch(), **everywhere})

    def on_gpus(self) -> bool:
        """Whether what is launched runs on GPUs."""
        import torch

        wanted = os.environ.get("DS_ACCELERATOR") in (None, "cuda")
        return self.gpus and wanted and torch.cuda.device_count() >= self.processes

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
        slots = re.fullmatch(r"slots=([1-9][0-9]*)", words[1]) if len(words) == 2 else None
        if slots is None or words[0] in found:
            why = "each host stands once, with its processes"
            remedy = "write `name slots=8`"
            problems.append(Problem(f"{path}, line {number}", line.strip(), why, remedy))
        else:
            found[words[0]] = int(slots[1])
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


def free_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exported(everywhere: Mapping[str, str], folder: Path) -> str:
    """The file that DeepSpeed exports on every host: what the user's own one says, then this.

    pdsh would strip quotes, so there are none.
    """
    path, name = folder / "deepspeed_env", os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    theirs = (Path(place, name) for place in (Path.home(), "."))  # where DeepSpeed looks
    lines = [line for file in theirs if file.is_file() for line in file.read_text().splitlines()]
    lines += [f"{name}={value}" for name, value in everywhere.items()]
    path.write_text("".join(f"{line}\n" for line in lines if "=" in line))
    return str(path)


def led(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """A leading `deepspeed` is this Python environment's, and gets the options."""
    if Path(argv[0]).name != "deepspeed":
        return list(argv)
    return [str(Path(sys.executable).with_name("deepspeed")), *options, *argv[1:]]


def without_outer_launch() -> dict[str, str]:
    """This process's environment without what an outer launch or worker has set."""
    return {k: v for k, v in os.environ.items() if k not in _OUTER}


def short(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_S
    )
