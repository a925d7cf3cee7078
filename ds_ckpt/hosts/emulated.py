"""Hosts emulated on this machine: a network, process and name space each, links with a set rate.

Every host has its own sshd, so that `deepspeed --hostfile` reaches it over pdsh as it would reach
a real one. The namespaces have no names in the system: they live as long as a host's first process
does, the kernel kills what runs in a host with that process, and takes links and queues with it.
The first processes die with the Python thread that made them, however that ends. So nothing can
go on running, and several sets of hosts at once cannot clash. A maker that is killed leaves its
folder; `records` finds and removes it.

Delay is what it is: this shapes bandwidth alone. Launching on hosts is in `launch`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

import psutil

from ds_ckpt.errors import Problem
from ds_ckpt.hosts.host import INTERFACE, Host, namespace
from ds_ckpt.hosts.records import HostSet, ProcessId, new_folder
from ds_ckpt.hosts.ssh import write_files
from ds_ckpt.hosts.tools import SPACES, HostsError, call, missing, need, path

_PR_SET_PDEATHSIG = 1
_UP_S = 15.0
_SEGMENT_BYTES = 72_000
"""The kernel's largest segment with the headers of its packets."""
# $1 folder, $2 name, $3 sshd. /run is the host's own because sshd insists on /run/sshd, /dev/shm
# because hosts share no memory and DeepSpeed leaves segments there. Some machines lock
# root's password, which makes an sshd without PAM refuse root's key too.
_FIRST_PROCESS = """
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -m 755 /run/sshd
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/shadow" /etc/shadow
[ ! -e /etc/ssh/ssh_config ] || mount --bind "$1/ssh_config" /etc/ssh/ssh_config
mount -t sysfs sysfs /sys
hostname "$2"
ip link set lo up
until ip -4 address show dev eth0 2>/dev/null | grep -q inet; do sleep 0.05; done
exec "$3" -D -e -f "$1/$2.sshd"
"""


class EmulatedHosts:
    """A context: `count` hosts on one switch, each with a link of `rate_mbit` in each direction.

    Args:
        count: 1 to 200.
        rate_mbit: 10^6 bits a second, all headers counted; None leaves the links as fast as the
            machine is. The kernel's `tbf` keeps it.

    Attributes:
        hosts: while the context is open.
        folder: the set's own; goes when the context ends.

    Raises:
        HostsError: on entering, where `missing()` has reasons or a host does not come up.
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
            raise HostsError(
                Problem(
                    where="this machine",
                    found="; ".join(reasons),
                    why="each host is a network, process and mount namespace with an sshd",
                    remedy="run as root where these are there, name real machines in a hostfile, "
                    "or stay on loopback, whose link is not shaped",
                ),
                headline="hosts cannot be emulated here",
            )
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
        spaces = {namespace(pid) for pid in self._pids} - {None, namespace(os.getpid())}
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
        if spaces and any(namespace(pid) in spaces for pid in psutil.pids()):
            raise HostsError(
                Problem(
                    where=str(self.folder),
                    found="processes that outlive their hosts",
                    why="their first processes were killed",
                    remedy="end what holds them, then run `ds-ckpt hosts down`",
                )
            )
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = Path()

    def hostfile(self, slots: int = 1) -> str:
        """The text of DeepSpeed's hostfile for these hosts."""
        return "".join(f"{host.name} slots={slots}\n" for host in self.hosts)

    def set_rate(self, rate_mbit: float | None) -> None:
        """Give every link another rate at once; what is under way goes on at that rate."""
        self.rate_mbit = rate_mbit
        for i, pid in enumerate(self._pids[1:]):
            self._shape(_in_network(self._pids[0]), f"port{i}")
            self._shape(_in_network(pid), INTERFACE)

    def _up(self) -> None:
        self.folder = new_folder()
        self._record()
        names = [f"host{i}" for i in range(self.count)]
        addresses = [f"10.77.0.{i + 1}" for i in range(self.count)]
        write_files(self.folder, names, addresses)
        self._start(["sleep", "infinity"])  # the switch
        for name in names:
            first = ["sh", "-c", _FIRST_PROCESS, "sh", str(self.folder), name, need("sshd")]
            self._start(first, log=self.folder / f"{name}.log")
        for process in self._first:
            self._pids.append(_child_of(process))
        self._record()
        pids = self._pids
        inside = _in_network(pids[0])
        call([*inside, "ip", "link", "add", "switch", "type", "bridge"])
        call([*inside, "ip", "link", "set", "switch", "up"])
        for i, pid in enumerate(pids[1:]):
            self._link(inside, f"port{i}", pid, addresses[i])
        self.hosts = tuple(map(Host, names, addresses, pids[1:]))
        for host in self.hosts:
            self._wait_for_ssh(host)

    def _record(self) -> None:
        running = [*(process.pid for process in self._first), *self._pids]
        HostSet(
            self.folder,
            owner=ProcessId.of(os.getpid()),
            processes=tuple(ProcessId.of(pid) for pid in running),
            count=self.count,
            rate_mbit=self.rate_mbit,
        ).write()

    def _link(self, switch: list[str], port: str, pid: int, address: str) -> None:
        host = _in_network(pid)
        peer = ["peer", "name", INTERFACE, "netns", str(pid)]
        call([*switch, "ip", "link", "add", port, "type", "veth", *peer])
        call([*switch, "ip", "link", "set", port, "master", "switch", "up"])
        call([*host, "ip", "address", "add", f"{address}/24", "dev", INTERFACE])
        call([*host, "ip", "link", "set", INTERFACE, "up"])
        # what the host sends, and what the switch sends to it
        self._shape(host, INTERFACE)
        self._shape(switch, port)

    def _shape(self, where: list[str], device: str) -> None:
        tc = [*where, "tc", "qdisc"]
        if self.rate_mbit is None:
            call([*tc, "replace", "dev", device, "root", "noqueue"])
            return
        # what a link that was idle may send at once: a segment of 64 KiB, or what passes in 1 ms
        burst_bytes = round(max(_SEGMENT_BYTES, self.rate_mbit * 1e6 / 8 * 1e-3))
        limit = ["rate", f"{self.rate_mbit}mbit", "burst", f"{burst_bytes}b", "latency", "100ms"]
        call([*tc, "replace", "dev", device, "root", "tbf", *limit])

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
                raise HostsError(
                    Problem(
                        where=host.name,
                        found=f"no answer to ssh: {result.stderr.strip()}",
                        why=f"{_UP_S:.0f} s have passed; its sshd said: {log.strip()}",
                        remedy="mend what sshd names",
                    )
                )
            time.sleep(0.1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _in_network(pid: int) -> list[str]:
    return [need("nsenter"), f"--target={pid}", "--net", "--"]


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """The first process inside of what `unshare` has made, by its pid outside."""
    limit = time.monotonic() + _UP_S
    while time.monotonic() < limit and process.poll() is None:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children()
            if children and namespace(children[0].pid) not in (None, namespace(os.getpid())):
                return int(children[0].pid)
        time.sleep(0.01)
    raise HostsError(
        Problem(
            where=f"{process.args!r}",
            found=f"no process inside, exit code {process.returncode}",
            why="namespaces could not be made",
            remedy="look whether this machine lets root make network and process namespaces",
        )
    )


def _collect_adopted(spaces: set[str | None]) -> None:
    """Collect what ended in these namespaces and was handed to this process.

    That happens where this process is a subreaper and an `nsenter` was killed before its child.
    The kernel keeps a host's first process until all others of the host have been collected.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{child.pid}/ns/pid") in spaces:
                os.waitpid(child.pid, os.WNOHANG)
