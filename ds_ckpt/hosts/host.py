"""One emulated host: how to run something in it, what runs in it, what its interface has sent.

And what tells processes apart: the namespace that one lives in, and when it was started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_ckpt.hosts.tools import need

INTERFACE = "eth0"
"""The name of every emulated host's network interface."""


@dataclass(frozen=True)
class Host:
    """One emulated host. `pid` is its first process, as seen from outside."""

    name: str
    address: str
    pid: int

    def command(self, argv: Sequence[str], *, folder: Path | None = None) -> list[str]:
        """The command that, run outside, runs `argv` in this host, in `folder` or the current."""
        spaces = ["--net", "--mount", "--pid", "--uts", f"--wdns={folder or Path.cwd()}"]
        return [need("nsenter"), f"--target={self.pid}", *spaces, "--", *argv]

    def tx_bytes(self) -> int:
        """Bytes that have left this host by its interface, headers included."""
        return self._counter(8)

    def rx_bytes(self) -> int:
        """Bytes that have reached this host by its interface, headers included."""
        return self._counter(0)

    def processes(self) -> list[psutil.Process]:
        """What runs in this host, without its sshd; nothing once the host is gone."""
        own = namespace(self.pid)
        found: list[psutil.Process] = []
        if own is None:
            return found
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                dead = process.status() == psutil.STATUS_ZOMBIE
                if not dead and process.name() != "sshd" and namespace(process.pid) == own:
                    found.append(process)
        return found

    def _counter(self, column: int) -> int:
        return interface_counter(Path(f"/proc/{self.pid}/net/dev"), INTERFACE, column)


def interface_counter(table: Path, interface: str, column: int) -> int:
    """One number of a `/proc/.../net/dev`. Raises KeyError if there is no such interface."""
    for line in table.read_text().splitlines():
        name, _, values = line.strip().partition(":")
        if name == interface:
            return int(values.split()[column])
    raise KeyError(interface)


def namespace(pid: int) -> str | None:
    """Identity of the process namespace that `pid` lives in; None if it has ended."""
    try:
        os.readlink(f"/proc/{pid}/ns/net")  # a process that waits to be collected has none
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """When a running process was started, in clock ticks since boot; None if it has ended.

    With the pid it names one process for as long as the machine is up: pids come back, this not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
