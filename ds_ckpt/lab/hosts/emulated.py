"""Hosts emulated on this machine: own network, process and name space each, links with a set rate.

No root is needed: for other users all namespaces belong to a user namespace. Ranks are started in
the namespaces directly. With `pdsh`, which needs root, every host has its own sshd. So
`deepspeed --hostfile` reaches it like a real one.

The namespaces have no names in the system: they exist as long as a host's first process. With it
the kernel kills the host's processes and removes its links and queues. The first processes die with
the Python thread that made them, however that ends. So no process is left over, and several sets of
hosts do not clash. A killed maker leaves its temporary folder.

Bandwidth alone is shaped, not delay. Hosts are down after a launch that had to be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.hosts.backends import (
    INTERFACE,
    MASTER_PORT,
    Backend,
    HostError,
    Prepared,
    environment,
    exported,
    run_quick,
    with_launcher_args,
    without_outer_launch,
)

SSH_PORT = 2222
_TOOLS = ("nsenter", "unshare")
_PDSH_TOOLS = ("ip", "pdsh", "ssh", "ssh-keygen", "sshd")
_PACKAGES = "util-linux iproute2 pdsh openssh-client openssh-server"
_REMEDY = "docs/troubleshooting.md lists the settings that allow them"
_IPROUTE, _RANKS = (Path(__file__).with_name(name) for name in ("iproute.py", "ranks.py"))
_SYSTEM_FOLDERS = f"{os.defpath}:/usr/sbin:/sbin:/usr/local/sbin"
# for `unshare`: own namespaces of each host; it dies with its maker
_SPACES = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
_PR_SET_PDEATHSIG = 1
_CALL_S, _UP_S = 30.0, 15.0
_SEGMENT_BYTES = 72_000  # the kernel's largest segment, with headers
# $1 folder, $2 name, $3 Python. /dev/shm is the host's own because hosts share no memory and
# DeepSpeed leaves segments there. A container may keep its sysfs.
_FIRST_PROCESS = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1/hosts" /etc/hosts
mount -t sysfs sysfs /sys 2>/dev/null || true
"$3" -ISc 'import socket, sys; socket.sethostname(sys.argv[1])' "$2"
: >"$1/$2.up"
"""
# $4 sshd, which insists on /run/sshd. Some machines lock root's password, which makes an sshd
# without PAM refuse root's key too.
_SSHD = """
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount --bind "$1/shadow" /etc/shadow
[ ! -e /etc/ssh/ssh_config ] || mount --bind "$1/ssh_config" /etc/ssh/ssh_config
until ip -4 address show dev eth0 2>/dev/null | grep -q inet; do sleep 0.05; done
exec "$4" -D -e -f "$1/$2.sshd"
"""


def emulation_obstacles(*, pdsh: bool = False) -> list[str]:
    """Return why nodes, or nodes that pdsh reaches, cannot be emulated here; empty if they can."""
    if sys.platform != "linux":
        return ["network namespaces need Linux"]
    reasons = ["sshd needs root"] if pdsh and os.geteuid() != 0 else []
    if absent := [name for name in (*_TOOLS, *_PDSH_TOOLS * pdsh) if tool(name) is None]:
        reasons.append(f"not found: {', '.join(absent)} (Debian packages: {_PACKAGES})")
    elif not _has_iproute() and importlib.util.find_spec("pyroute2") is None:
        reasons.append("not found: ip, tc (Debian package: iproute2) or pyroute2 (extra: hosts)")
    if not reasons and (refusal := _refusal()):  # root in a container may lack the right
        reasons.append(f"the kernel refuses namespaces or links: {refusal}; {_REMEDY}")
    return reasons


@functools.cache
def _refusal() -> str:
    """Bring up one node with its link; return why that fails, or nothing."""
    hosts = EmulatedHosts(1)
    try:
        hosts._up()
    except HostError as error:
        return f"{error.problems[0].where}: {error.problems[0].found}"
    finally:
        hosts.end()
    return ""


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
        inside = _enter(self.pid, "--net", "--mount", "--pid", "--uts")
        # nsenter has no --wdns before util-linux 2.38
        return [*inside, "sh", "-c", 'cd "$0" && exec "$@"', str(folder or Path.cwd()), *argv]


def namespace(pid: int) -> str | None:
    """Identify the process namespace of `pid`; None if it has ended."""
    try:
        os.readlink(f"/proc/{pid}/ns/net")  # a process that waits to be collected has none
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


@dataclass(eq=False)
class EmulatedHosts(Backend):
    """A context: `count` hosts on one switch, each with a link of `rate_mbit` in each direction.

    Rates are in 10^6 bit/s with headers, enforced by the kernel's `tbf`; None is not limited. With
    `pdsh` a leading `deepspeed` starts its ranks over pdsh instead of directly.
    Entering raises HostError if `emulation_obstacles()` has reasons or a host does not come up.
    """

    count: int = 2
    rate_mbit: float | None = 200.0
    slots: int = 1
    port: int = MASTER_PORT
    pdsh: bool = False

    def __post_init__(self) -> None:
        self.names = tuple(f"host{i}" for i in range(self.count))
        self.hosts: tuple[Host, ...] = ()
        self.folder = Path()
        self._first: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []

    def __enter__(self) -> EmulatedHosts:
        if reasons := emulation_obstacles(pdsh=self.pdsh):
            why = "each node is a network, process and mount namespace" + ", with sshd" * self.pdsh
            remedy = "fix the cause above, or use a hostfile or --loopback"
            problem = Problem("this machine", "; ".join(reasons), why, remedy)
            raise HostError(problem, headline="nodes cannot be emulated here")
        try:
            self._up()
        except BaseException:
            with contextlib.suppress(HostError):  # the first error is the cause
                self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the hosts and their processes, and wait for their end; idempotent."""
        spaces = {namespace(pid) for pid in self._pids} - {None, namespace(os.getpid())}
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        limit = time.monotonic() + _UP_S
        while any(process.poll() is None for process in self._first):
            _collect_adopted(spaces)
            if time.monotonic() > limit:
                found = f"processes that outlive their nodes by {_UP_S:.0f} s"
                remedy = "end what blocks them"
                raise HostError(Problem(str(self.folder), found, "they were killed", remedy))
            time.sleep(0.02)
        self._first.clear()
        self._pids.clear()
        self.hosts = ()
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = Path()

    def on(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a quick command in a host, with `pdsh` over ssh from the first one."""
        if not self.pdsh:
            here = self.hosts[self.names.index(host)]
            return run_quick(here.command(argv, folder=Path("/")))
        ssh = ["ssh", "-F", f"{self.folder}/ssh_config", host, shlex.join(argv)]
        return run_quick(self.hosts[0].command(ssh, folder=Path("/")))

    def ended_names(self) -> list[str]:
        """Return hosts whose first process has ended."""
        return [host.name for host in self.hosts if namespace(host.pid) is None]

    def prepare(self, argv: Sequence[str], folder: Path) -> Prepared:
        """Prepare `argv` to run in the first host; a leading `deepspeed` gets options for all."""
        everywhere = environment(INTERFACE)
        if not self.pdsh:
            return Prepared(self._direct(argv, folder), without_outer_launch() | everywhere)
        hostfile = self.folder / "hostfile"
        hostfile.write_text("".join(f"{name} slots={self.slots}\n" for name in self.names))
        where = [f"--hostfile={hostfile}", f"--master_addr={self.hosts[0].address}"]
        where += [f"--master_port={self.port}", "--no_ssh_check", f"--ssh_port={SSH_PORT}"]
        reach = {
            # DeepSpeed adds `-p PORT` itself
            "PDSH_SSH_ARGS_APPEND": f"-F {self.folder}/ssh_config",
            "PDSH_RCMD_TYPE": "ssh",
            "DS_ENV_FILE": exported(everywhere, self.folder),
            "DS_CKPT_HOSTFILE": str(hostfile),
        }
        inside = self.hosts[0].command(with_launcher_args(argv, where), folder=folder)
        return Prepared(inside, without_outer_launch() | everywhere | reach)

    def _direct(self, argv: Sequence[str], folder: Path) -> list[str]:
        """Return the command that starts every rank as DeepSpeed's launcher does on each host."""
        if Path(argv[0]).name != "deepspeed":
            return self.hosts[0].command(argv, folder=folder)
        is_module = argv[1:2] == ["--module"]
        script = list(argv[1 + is_module :])
        if not script or script[0].startswith("-"):
            why = "ranks are started without DeepSpeed's launcher, which has this option"
            remedy = "write `deepspeed SCRIPT` or `deepspeed --module MODULE`, or add --pdsh"
            raise ConfigError(Problem("deepspeed", " ".join(script[:1]), why, remedy))
        world = {"WORLD_SIZE": len(self.hosts) * self.slots, "LOCAL_SIZE": self.slots}
        master = {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": self.port}
        python = [sys.executable, "-u", *["-m"] * is_module, script[0]]
        ranks = []
        for node, host in enumerate(self.hosts):
            for local in range(self.slots):
                own = {**world, **master, "RANK": node * self.slots + local, "LOCAL_RANK": local}
                variables = [f"{name}={value}" for name, value in own.items()]
                program = [*python, f"--local_rank={local}", *script[1:]]
                ranks.append(host.command(["env", *variables, *program], folder=folder))
        commands = self.folder / "ranks.json"  # arguments are limited to 128 KiB
        commands.write_text(json.dumps(ranks))
        return [sys.executable, str(_RANKS), str(commands)]

    def describe(self) -> str:
        """Describe the emulation."""
        return (
            f"{len(self.names)} nodes emulated on one machine (network namespaces, bandwidth "
            f"shaped by the kernel, delay not), {self.slots} rank{'s' * (self.slots > 1)} each"
        )

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of every link at once."""
        self.rate_mbit = rate_mbit
        for i, pid in enumerate(self._pids[1:]):
            self._shape(self._pids[0], f"port{i}")
            self._shape(pid, INTERFACE)

    def _up(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ds_ckpt_hosts_"))
        addresses = [f"10.77.0.{i + 1}" for i in range(len(self.names))]
        names = "".join(f"{a} {name}\n" for a, name in zip(addresses, self.names, strict=True))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        if self.pdsh:
            _write_ssh_files(self.folder, dict(zip(self.names, addresses, strict=True)))
        self._start("switch", [*_unshare(), "sleep", "infinity"])
        switch = self._pids[0]
        script = _FIRST_PROCESS + (_SSHD if self.pdsh else "exec sleep infinity")
        for name in self.names:
            first = ["sh", "-c", script, "sh", str(self.folder), name, sys.executable]
            self._start(name, [*_enter(switch), "unshare", *_SPACES, *first, str(tool("sshd"))])
        self.hosts = tuple(map(Host, self.names, addresses, self._pids[1:]))
        for host in self.hosts:
            self._wait_for(host, ["test", "-e", f"{self.folder}/{host.name}.up"])
        _ip(switch, "link add switch type bridge")
        _ip(switch, "link set switch up")
        for i, host in enumerate(self.hosts):
            _ip(switch, f"link add port{i} type veth peer name {INTERFACE} netns {host.pid}")
            _ip(switch, f"link set port{i} master switch up")
            _ip(host.pid, "link set lo up")
            _ip(host.pid, f"address add {host.address}/24 dev {INTERFACE}")
            _ip(host.pid, f"link set {INTERFACE} up")
        self.set_rate(self.rate_mbit)
        for host in self.hosts * self.pdsh:
            ssh = ["ssh", "-F", f"{self.folder}/ssh_config", host.name, "true"]
            self._wait_for(host, self.hosts[0].command(ssh))

    def _shape(self, pid: int, device: str) -> None:
        queue = "noqueue"
        if self.rate_mbit is not None:
            # burst of an idle link: a segment of 64 KiB, or 1 ms of its rate
            burst_bytes = round(max(_SEGMENT_BYTES, self.rate_mbit * 1e6 / 8 * 1e-3))
            queue = f"tbf rate {self.rate_mbit}mbit burst {burst_bytes} latency 100ms"
        _ip(pid, f"qdisc replace dev {device} root {queue}", tool="tc")

    def _start(self, name: str, argv: list[str]) -> None:
        """Start `unshare` and wait for the first process inside."""
        log, libc = self.folder / f"{name}.log", ctypes.CDLL(None)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        self._first.append(process)
        self._pids.append(process.pid)
        limit = time.monotonic() + _UP_S
        while time.monotonic() < limit and process.poll() is None:
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(process.pid).children()
                if children and namespace(children[0].pid) not in (None, namespace(os.getpid())):
                    self._pids[-1] = children[0].pid
                    return
            time.sleep(0.01)
        found = f"no process inside, exit code {process.returncode}: {log.read_text().strip()}"
        remedy = "check that this machine allows namespaces and mounts in them"
        raise HostError(Problem(shlex.join(argv), found, "it makes the namespaces", remedy))

    def _wait_for(self, host: Host, up: list[str]) -> None:
        limit = time.monotonic() + _UP_S
        while (result := _run(up)).returncode:
            if time.monotonic() > limit or namespace(host.pid) is None:
                log = (self.folder / f"{host.name}.log").read_text().strip()
                found = f"its first process ended or is not up after {_UP_S:.0f} s: {log}"
                why = f"`{shlex.join(up)}` fails: {result.stderr.strip()}"
                raise HostError(Problem(host.name, found, why, "fix what that reports"))
            time.sleep(0.05)


def _write_ssh_files(folder: Path, addresses: dict[str, str]) -> None:
    """Write `ssh_config`, each host's `NAME.sshd`, keys, and a file mounted over /etc/shadow."""
    for key in ("host_key", "user_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ds_ckpt"]
        _call([*keygen, "-f", str(folder / key)])
    host_key = (folder / "host_key.pub").read_text()
    reached = [f"[{name}]:{SSH_PORT}" for name in (*addresses, *addresses.values())]
    (folder / "known_hosts").write_text("".join(f"{r} {host_key}" for r in reached))
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
    """Run a tool; HostError with its output if it fails."""
    result = _run(argv)
    if result.returncode:
        found = f"exit code {result.returncode}: {result.stderr.strip()}"
        remedy = "check that the nodes are up and this kernel supports the command"
        raise HostError(Problem(" ".join(argv), found, "it makes nodes and their links", remedy))


def _environment() -> dict[str, str]:
    """Return the environment with the system's folders, which a user's PATH may lack."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"}


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, *_SPACES]


def _enter(pid: int, *spaces: str) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={pid}", *user, *spaces, "--"]


def _has_iproute() -> bool:
    return tool("ip") is not None and tool("tc") is not None


def _ip(pid: int, arguments: str, *, tool: str = "ip") -> None:
    """Run `ip` or `tc` in a network, or what stands for them without iproute2."""
    other = [] if _has_iproute() else [sys.executable, str(_IPROUTE)]
    _call([*_enter(pid, "--net"), *other, tool, *arguments.split()])


def _collect_adopted(spaces: set[str | None]) -> None:
    """Reap processes of these namespaces that this process, a subreaper, has inherited."""
    for child in psutil.Process().children():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{child.pid}/ns/pid") in spaces:
                os.waitpid(child.pid, os.WNOHANG)
