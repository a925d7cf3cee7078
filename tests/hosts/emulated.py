"""Hosts emulated on this machine: a network, process and name space each, links with a set rate.

Every host has its own sshd, so that `deepspeed --hostfile` reaches it over pdsh as it would reach
a real one. The namespaces have no names in the system: they live as long as a host's first process
does, the kernel kills what runs in a host with that process, and takes links and queues with it.
The first processes die with the Python process that made them, however that ends. So nothing can
be left behind, and several sets of hosts at once cannot clash.

Launching on them is in `launch.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tests.hosts.ssh import write_files
from tests.hosts.tools import SPACES, call, missing, need, path

INTERFACE = "eth0"
_PR_SET_PDEATHSIG = 1
_UP_S = 15.0
# $1 folder, $2 name. /run is the host's own because sshd insists on /run/sshd. Some machines
# lock root's password, which makes an sshd without PAM refuse root's key too.
_FIRST_PROCESS = """
set -e
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/shadow" /etc/shadow
mount -t sysfs sysfs /sys
hostname "$2"
ip link set lo up
until ip -4 address show dev eth0 2>/dev/null | grep -q inet; do sleep 0.05; done
exec "$3" -D -e -f "$1/$2.sshd"
"""


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
        """What runs in this host, without its sshd."""
        own = _namespace(self.pid)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                dead = process.status() == psutil.STATUS_ZOMBIE
                if not dead and process.name() != "sshd" and _namespace(process.pid) == own:
                    found.append(process)
        return found

    def _counter(self, column: int) -> int:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, values = line.strip().partition(":")
            if name == INTERFACE:
                return int(values.split()[column])
        raise RuntimeError(f"{self.name} has no interface {INTERFACE}")


class EmulatedHosts:
    """A context: `count` hosts on one switch, each with a link of `rate_mbit` in each direction.

    `rate_mbit` None leaves the links as fast as the machine is. The kernel's `tbf` sets the
    rate; delay stays what it is. Raises RuntimeError where `missing()` has reasons, or if a host
    does not come up.
    """

    def __init__(self, count: int = 2, *, rate_mbit: float | None = 200.0) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"count {count} is not between 1 and 200")
        self.count = count
        self.rate_mbit = rate_mbit
        self.hosts: tuple[Host, ...] = ()
        self.folder = Path()
        self._first: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []

    def __enter__(self) -> EmulatedHosts:
        reasons = missing()
        if reasons:
            raise RuntimeError(f"hosts cannot be emulated here: {'; '.join(reasons)}")
        atexit.register(self.down)
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def down(self) -> None:
        """Kill the hosts with all that runs in them; idempotent. Returns when they are gone."""
        atexit.unregister(self.down)
        spaces = {_namespace(pid) for pid in self._pids} - {None, _namespace(os.getpid())}
        for pid in self._pids:  # the first processes: `unshare` collects its own and ends
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        limit = time.monotonic() + _UP_S
        while self._pids and any(process.poll() is None for process in self._first):
            _collect_adopted(spaces)
            if time.monotonic() > limit:
                break
            time.sleep(0.02)
        for process in self._first:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._first.clear()
        self._pids.clear()
        self.hosts = ()
        if spaces and any(_namespace(pid) in spaces for pid in psutil.pids()):
            raise RuntimeError("processes of the emulated hosts outlive their hosts")
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = Path()

    def hostfile(self, slots: int = 1) -> str:
        """The text of DeepSpeed's hostfile for these hosts."""
        return "".join(f"{host.name} slots={slots}\n" for host in self.hosts)

    def environment(self) -> dict[str, str]:
        """What pdsh needs to reach the hosts, to be added to a launcher's environment."""
        # DeepSpeed adds `-p PORT` itself
        return {"PDSH_SSH_ARGS_APPEND": f"-F {self.folder}/ssh_config", "PDSH_RCMD_TYPE": "ssh"}

    def _up(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ds_ckpt_hosts_"))
        names = [f"host{i}" for i in range(self.count)]
        addresses = [f"10.77.0.{i + 1}" for i in range(self.count)]
        write_files(self.folder, names, addresses)
        self._start(["sleep", "infinity"])  # the switch
        for name in names:
            first = ["sh", "-c", _FIRST_PROCESS, "sh", str(self.folder), name, need("sshd")]
            self._start(first, log=self.folder / f"{name}.log")
        for process in self._first:
            self._pids.append(_child_of(process))
        pids = self._pids
        inside = [need("nsenter"), f"--target={pids[0]}", "--net", "--"]
        call([*inside, "ip", "link", "add", "switch", "type", "bridge"])
        call([*inside, "ip", "link", "set", "switch", "up"])
        for i, pid in enumerate(pids[1:]):
            self._link(inside, f"port{i}", pid, addresses[i])
        self.hosts = tuple(map(Host, names, addresses, pids[1:]))
        for host in self.hosts:
            self._wait_for_ssh(host)

    def _link(self, switch: list[str], port: str, pid: int, address: str) -> None:
        host = [need("nsenter"), f"--target={pid}", "--net", "--"]
        peer = ["peer", "name", INTERFACE, "netns", str(pid)]
        call([*switch, "ip", "link", "add", port, "type", "veth", *peer])
        call([*switch, "ip", "link", "set", port, "master", "switch", "up"])
        call([*host, "ip", "address", "add", f"{address}/24", "dev", INTERFACE])
        call([*host, "ip", "link", "set", INTERFACE, "up"])
        if self.rate_mbit is None:
            return
        # what the host sends, and what the switch sends to it
        for where, device in ((host, INTERFACE), (switch, port)):
            limit = ["rate", f"{self.rate_mbit}mbit", "burst", "256kb", "latency", "100ms"]
            call([*where, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit])

    def _start(self, argv: list[str], log: Path | None = None) -> subprocess.Popen[bytes]:
        with (log or Path(os.devnull)).open("wb") as sink:
            process = subprocess.Popen(
                [need("unshare"), *SPACES, *argv],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path()},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._first.append(process)
        return process

    def _wait_for_ssh(self, host: Host) -> None:
        ssh = [need("ssh"), "-F", f"{self.folder}/ssh_config", host.name, "true"]
        limit = time.monotonic() + _UP_S
        while True:
            result = subprocess.run(
                self.hosts[0].command(ssh), capture_output=True, text=True, timeout=_UP_S
            )
            if result.returncode == 0:
                return
            if time.monotonic() > limit:
                log = (self.folder / f"{host.name}.log").read_text()
                raise RuntimeError(
                    f"{host.name} does not answer to ssh: {result.stderr}\nits sshd said:\n{log}"
                )
            time.sleep(0.1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """The first process inside of what `unshare` has made, by its pid outside."""
    limit = time.monotonic() + _UP_S
    while time.monotonic() < limit and process.poll() is None:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children()
            if children and _namespace(children[0].pid) not in (None, _namespace(os.getpid())):
                return int(children[0].pid)
        time.sleep(0.01)
    raise RuntimeError(f"namespaces could not be made: {process.args!r} gave {process.returncode}")


def _namespace(pid: int) -> str | None:
    """Identity of the process namespace that `pid` lives in; None if it has ended."""
    try:
        os.readlink(f"/proc/{pid}/ns/net")  # a process that waits to be collected has none
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _collect_adopted(spaces: set[str | None]) -> None:
    """Collect what ended in these namespaces and was handed to this process.

    That happens where this process is a subreaper and an `nsenter` was killed before its child.
    The kernel keeps a host's first process until all others of the host have been collected.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{child.pid}/ns/pid") in spaces:
                os.waitpid(child.pid, os.WNOHANG)
