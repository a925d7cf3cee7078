"""Hosts emulated on this machine: own network, process and name space each, links with a set rate.

Every host has its own sshd, so `deepspeed --hostfile` reaches it over pdsh like a real one. The
namespaces have no names in the system: they exist as long as a host's first process, with which the
kernel kills the host's processes and removes its links and queues. The first processes die with the
Python thread that made them, however that ends. So no process is left over, and several sets of
hosts do not clash. A killed maker leaves its folder; `sets` finds and removes it.

Bandwidth alone is shaped, not delay. Hosts are down after a launch that had to be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_ckpt.errors import Problem
from ds_ckpt.lab.hosts.backends import (
    INTERFACE,
    MASTER_PORT,
    Backend,
    Prepared,
    environment,
    exported,
    run_quick,
    with_launcher_args,
    without_outer_launch,
)
from ds_ckpt.lab.hosts.sets import HostsError, new_set

SSH_PORT = 2222
_TOOLS = ("ip", "tc", "pdsh", "ssh", "ssh-keygen", "sshd", "nsenter", "unshare")
_PACKAGES = "iproute2 pdsh openssh-client openssh-server util-linux"
_SYSTEM_FOLDERS = f"{os.defpath}:/usr/sbin:/sbin:/usr/local/sbin"
# for `unshare`: own namespaces of each host; it dies with its maker
_SPACES = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
_PR_SET_PDEATHSIG = 1
_CALL_S, _UP_S = 30.0, 15.0
_SEGMENT_BYTES = 72_000
"""The kernel's largest segment, with headers."""
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


def missing() -> list[str]:
    """Return why nodes cannot be emulated here; empty if they can."""
    if sys.platform != "linux":
        return ["network namespaces need Linux"]
    reasons = [] if os.geteuid() == 0 else ["network namespaces need root"]
    if absent := [name for name in _TOOLS if tool(name) is None]:
        reasons.append(f"not found: {', '.join(absent)} (Debian packages: {_PACKAGES})")
    if not reasons:  # root in a container may lack the right
        tried = _run(["unshare", *_SPACES, "true"])
        if tried.returncode:
            reasons.append(f"the kernel refuses new namespaces: {tried.stderr.strip()}")
    return reasons


def tool(name: str) -> str | None:
    """Find a system tool."""
    return shutil.which(name, path=_environment()["PATH"])


@dataclass(frozen=True)
class Host:
    """One emulated host. `pid` is its first process, seen from outside."""

    name: str
    address: str
    pid: int

    def command(self, argv: Sequence[str], *, folder: Path | None = None) -> list[str]:
        """Return the outside command that runs `argv` in this host, in `folder` or the current."""
        spaces = ["--net", "--mount", "--pid", "--uts", f"--wdns={folder or Path.cwd()}"]
        return ["nsenter", f"--target={self.pid}", *spaces, "--", *argv]


def namespace(pid: int) -> str | None:
    """Identify the process namespace of `pid`; None if it has ended."""
    try:
        os.readlink(f"/proc/{pid}/ns/net")  # a process that waits to be collected has none
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


class EmulatedHosts(Backend):
    """A context: `count` hosts on one switch, each with a link of `rate_mbit` in each direction.

    Rates are in 10^6 bit/s with headers, enforced by the kernel's `tbf`; None is not limited.
    Entering raises HostsError if `missing()` has reasons or a host does not come up.
    """

    def __init__(
        self,
        count: int = 2,
        *,
        rate_mbit: float | None = 200.0,
        slots: int = 1,
        port: int = MASTER_PORT,
    ) -> None:
        self.names = tuple(f"host{i}" for i in range(count))
        self.rate_mbit, self.slots, self.port = rate_mbit, slots, port
        self.hosts: tuple[Host, ...] = ()
        self.folder = Path()
        self._first: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []

    def __enter__(self) -> EmulatedHosts:
        if reasons := missing():
            why = "each node is a network, process and mount namespace with an sshd"
            remedy = "run as root with these tools, or use a hostfile or loopback"
            problem = Problem("this machine", "; ".join(reasons), why, remedy)
            raise HostsError(problem, headline="nodes cannot be emulated here")
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> None:
        """Kill the hosts and their processes, and wait for their end; idempotent."""
        spaces = {namespace(pid) for pid in self._pids} - {None, namespace(os.getpid())}
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        limit = time.monotonic() + _UP_S
        while self._pids and any(process.poll() is None for process in self._first):
            _collect_adopted(spaces)
            if time.monotonic() > limit:
                found = f"processes that outlive their nodes by {_UP_S:.0f} s"
                remedy = "end what blocks them, then run `ds-ckpt hosts down`"
                raise HostsError(Problem(str(self.folder), found, "they were killed", remedy))
            time.sleep(0.02)
        for process in self._first:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._first.clear()
        self._pids.clear()
        self.hosts = ()
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = Path()

    @property
    def hostfile(self) -> Path:
        """DeepSpeed's hostfile."""
        return self.folder / "hostfile"

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a quick command over ssh from the first host."""
        ssh = ["ssh", "-F", f"{self.folder}/ssh_config", host, shlex.join(argv)]
        return run_quick(self.hosts[0].command(ssh, folder=Path("/")))

    def ended_names(self) -> list[str]:
        """Return hosts whose first process has ended."""
        return [host.name for host in self.hosts if namespace(host.pid) is None]

    def end(self) -> None:
        """Kill the hosts."""
        self.down()

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        """Prepare `argv` to run in the first host; a leading `deepspeed` gets options for all."""
        self.hostfile.write_text("".join(f"{name} slots={self.slots}\n" for name in self.names))
        everywhere = environment(INTERFACE)
        where = [f"--hostfile={self.hostfile}", f"--master_addr={self.hosts[0].address}"]
        where += [f"--master_port={self.port}", "--no_ssh_check", f"--ssh_port={SSH_PORT}"]
        reach = {
            # DeepSpeed adds `-p PORT` itself
            "PDSH_SSH_ARGS_APPEND": f"-F {self.folder}/ssh_config",
            "PDSH_RCMD_TYPE": "ssh",
            "DS_ENV_FILE": exported(everywhere, self.folder),
            "DS_CKPT_HOSTFILE": str(self.hostfile),
        }
        inside = self.hosts[0].command(with_launcher_args(argv, where), folder=folder)
        return Prepared(inside, without_outer_launch() | everywhere | reach)

    def describe(self) -> str:
        """Describe the emulation."""
        return (
            f"{len(self.names)} nodes emulated on one machine (network namespaces, bandwidth "
            f"shaped by the kernel, delay not), {self.slots} ranks each"
        )

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of every link at once."""
        self.rate_mbit = rate_mbit
        for i, pid in enumerate(self._pids[1:]):
            self._shape(_in_network(self._pids[0]), f"port{i}")
            self._shape(_in_network(pid), INTERFACE)

    def _up(self) -> None:
        self.folder = new_set()
        addresses = [f"10.77.0.{i + 1}" for i in range(len(self.names))]
        _write_ssh_files(self.folder, dict(zip(self.names, addresses, strict=True)))
        self._start(["sleep", "infinity"])  # the switch
        for name in self.names:
            first = ["sh", "-c", _FIRST_PROCESS, "sh", str(self.folder), name, str(tool("sshd"))]
            self._start(first, log=self.folder / f"{name}.log")
        self._pids += map(_child_of, self._first)
        inside = _in_network(self._pids[0])
        _call([*inside, "ip", "link", "add", "switch", "type", "bridge"])
        _call([*inside, "ip", "link", "set", "switch", "up"])
        self.hosts = tuple(map(Host, self.names, addresses, self._pids[1:]))
        for i, host in enumerate(self.hosts):
            own, peer = _in_network(host.pid), ["peer", "name", INTERFACE, "netns", str(host.pid)]
            _call([*inside, "ip", "link", "add", f"port{i}", "type", "veth", *peer])
            _call([*inside, "ip", "link", "set", f"port{i}", "master", "switch", "up"])
            _call([*own, "ip", "address", "add", f"{host.address}/24", "dev", INTERFACE])
            _call([*own, "ip", "link", "set", INTERFACE, "up"])
        self.set_rate(self.rate_mbit)
        for host in self.hosts:
            self._wait_for_ssh(host)

    def _shape(self, where: list[str], device: str) -> None:
        queue = ["noqueue"]
        if self.rate_mbit is not None:
            # burst of an idle link: a segment of 64 KiB, or 1 ms of its rate
            burst_bytes = round(max(_SEGMENT_BYTES, self.rate_mbit * 1e6 / 8 * 1e-3))
            queue = ["tbf", "rate", f"{self.rate_mbit}mbit", "burst", f"{burst_bytes}b"]
            queue += ["latency", "100ms"]
        _call([*where, "tc", "qdisc", "replace", "dev", device, "root", *queue])

    def _start(self, argv: list[str], log: Path | None = None) -> None:
        with (log or Path(os.devnull)).open("wb") as sink:
            process = subprocess.Popen(
                ["unshare", *_SPACES, *argv],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._first.append(process)

    def _wait_for_ssh(self, host: Host) -> None:
        ssh = ["ssh", "-F", f"{self.folder}/ssh_config", host.name, "true"]
        limit = time.monotonic() + _UP_S
        while (result := _run(self.hosts[0].command(ssh))).returncode:
            if time.monotonic() > limit:
                log = (self.folder / f"{host.name}.log").read_text().strip()
                found = f"no answer to ssh in {_UP_S:.0f} s: {result.stderr.strip()}"
                why = f"its sshd printed: {log}"
                raise HostsError(Problem(host.name, found, why, "fix what sshd reports"))
            time.sleep(0.1)


def _write_ssh_files(folder: Path, addresses: dict[str, str]) -> None:
    """Write `ssh_config`, each host's `NAME.sshd`, keys, and files mounted over /etc."""
    for key in ("host_key", "user_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ds_ckpt"]
        _call([*keygen, "-f", str(folder / key)])
    host_key = (folder / "host_key.pub").read_text()
    reached = [f"[{name}]:{SSH_PORT}" for name in (*addresses, *addresses.values())]
    (folder / "known_hosts").write_text("".join(f"{r} {host_key}" for r in reached))
    names = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    (folder / "shadow").chmod(0o600)
    (folder / "ssh_config").write_text(
        f"Port {SSH_PORT}\nUser root\nIdentityFile {folder}/user_key\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known_hosts\nStrictHostKeyChecking yes\nBatchMode yes\n"
        "ConnectTimeout 10\nServerAliveInterval 5\nServerAliveCountMax 3\n"
    )
    for name, address in addresses.items():
        (folder / f"{name}.sshd").write_text(
            f"Port {SSH_PORT}\nListenAddress {address}\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {folder}/user_key.pub\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            "UseDNS no\nMaxStartups 100\nPrintMotd no\n"
        )


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=_environment(), capture_output=True, text=True, timeout=_CALL_S)


def _call(argv: Sequence[str]) -> None:
    """Run a tool; HostsError with its output if it fails."""
    result = _run(argv)
    if result.returncode:
        found = f"exit code {result.returncode}: {result.stderr.strip()}"
        remedy = "check that the nodes are up and this kernel supports the command"
        raise HostsError(Problem(" ".join(argv), found, "it makes nodes and their links", remedy))


def _environment() -> dict[str, str]:
    """Return the environment with the system's folders, which a user's PATH may lack."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _in_network(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--"]


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """Return the first process inside of `unshare`'s namespaces, by its pid outside."""
    limit = time.monotonic() + _UP_S
    while time.monotonic() < limit and process.poll() is None:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children()
            if children and namespace(children[0].pid) not in (None, namespace(os.getpid())):
                return int(children[0].pid)
        time.sleep(0.01)
    remedy = "check that this machine lets root make network and process namespaces"
    found = f"no process inside, exit code {process.returncode}"
    raise HostsError(Problem(f"{process.args!r}", found, "it makes the namespaces", remedy))


def _collect_adopted(spaces: set[str | None]) -> None:
    """Reap processes of these namespaces that this process, a subreaper, has inherited."""
    for child in psutil.Process().children():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{child.pid}/ns/pid") in spaces:
                os.waitpid(child.pid, os.WNOHANG)
