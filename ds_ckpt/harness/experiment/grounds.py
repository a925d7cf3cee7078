"""Where an experiment runs: emulated hosts, the machines of a hostfile, or this machine alone.

A ground says how a command gets to each host, starts `deepspeed` over all of them, and ends it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.harness.hosts import EmulatedHosts
from ds_ckpt.harness.hosts.host import namespace
from ds_ckpt.harness.hosts.launch import (
    Launcher,
    Prepared,
    deepspeed,
    environment,
    on_hosts,
    on_this_machine,
    run_prepared,
    without_outer_launch,
)
from ds_ckpt.harness.hosts.tools import tool

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
