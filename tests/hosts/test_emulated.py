"""The emulated hosts themselves: separate, shaped, and gone afterwards whatever happens."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.hosts import emulated, probe
from ds_ckpt.lab.hosts.backends import INTERFACE, Hostfile
from ds_ckpt.lab.hosts.emulated import EmulatedHosts, Host, HostError, tool
from ds_ckpt.lab.hosts.launcher import LaunchError, supervise
from ds_ckpt.lab.hosts.probe import Pair
from tests.hosts.conftest import processes

_RECEIVE = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    while peer.recv(1 << 16):
        pass
"""

_ALL_BUT_ONE = 'case "$*" in *" host0 "*) echo not this one; exit 1; esac; exec "$@"'


def system_state() -> dict[str, object]:
    """Return the state that nodes could leave on the machine. Only namespaces of this process's
    descendants count, since browsers and other tests make some, too. Orphans are descendants: see
    `tests/conftest.py`."""
    links, queues = (
        subprocess.run([str(tool(name)), *argv], capture_output=True, text=True, check=True)
        for name, *argv in (("ip", "-o", "link"), ("tc", "qdisc", "show"))
    )
    spaces = set()
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # ended, or waits to be collected
            spaces |= {os.readlink(f"/proc/{one.pid}/ns/{kind}") for kind in ("net", "uts", "pid")}
    devices = sorted(line.split(":")[1] for line in links.stdout.splitlines())
    queues_by_device = sorted(line.split("refcnt")[0] for line in queues.stdout.splitlines())
    return {"devices": devices, "queues": queues_by_device, "spaces": spaces}


def _counted(host: Host, column: int) -> int:
    """Bytes that its interface has received (0) or sent (8), headers included."""
    table = Path(f"/proc/{host.pid}/net/dev").read_text()
    (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    return int(line.partition(":")[2].split()[column])


def test_hosts_are_apart_and_reach_each_other_over_pdsh(pdsh_hosts, tmp_path) -> None:
    first, second = pdsh_hosts.hosts
    assert (first.name, second.name) == ("host0", "host1")
    pdsh = ["pdsh", "-S", "-w", "host0,host1", "hostname; ip -o -4 address show dev eth0"]
    before = _counted(second, 0)
    output = supervise(pdsh_hosts.prepare(pdsh, tmp_path), tmp_path, limit_s=30)
    for host in pdsh_hosts.hosts:
        assert f"{host.name}: {host.name}" in output
        assert f"inet {host.address}/24" in output
    assert _counted(second, 0) > before + 1000
    assert processes(first) == processes(second) == []


def test_nothing_is_left_after_an_error_with_work_going_on(can_emulate: None) -> None:
    before = system_state()
    hosts, others = EmulatedHosts(2), EmulatedHosts(3)
    with pytest.raises(KeyError):
        _work_and_fail(hosts, others)
    assert not hosts.hosts
    assert not others.hosts
    _becomes(before)


def test_no_namespace_is_left_after_the_maker_is_killed(can_emulate: None) -> None:
    before = system_state()
    run = [sys.executable, "-m", "ds_ckpt.cli", "hosts", "run", "--rate=50mbit", "--"]
    shout = ["sh", "-c", "echo up; sleep 600"]
    with (
        EmulatedHosts(1) as alive,
        subprocess.Popen([*run, *shout], stdout=subprocess.PIPE, text=True) as maker,
    ):
        assert maker.stdout is not None
        assert maker.stdout.readline() == "up\n"
        os.kill(maker.pid, signal.SIGKILL)
        maker.wait()
        assert alive.hosts[0].pid in psutil.pids()
    _becomes(before)


@pytest.mark.parametrize(("by", "is_root"), [("iproute2", 1), ("iproute2", 0), ("pyroute2", 0)])
def test_both_ends_of_every_link_have_the_rate_that_was_set(
    by: str, is_root: int, can_emulate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's queues, read with tc; others than root get a user namespace."""
    if by == "pyroute2":
        pytest.importorskip("pyroute2")
    if not is_root:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(emulated, "_has_iproute", lambda: by == "iproute2")
    with EmulatedHosts(2, rate_mbit=30) as hosts:
        first, switch = hosts.hosts[0], Host("switch", "", hosts._pids[0])
        ends = [(host, "eth0") for host in hosts.hosts] + [(switch, "port0"), (switch, "port1")]
        for rate_mbit, shown in ((30, " rate 30Mbit"), (None, "noqueue"), (1000, " rate 1Gbit")):
            if rate_mbit != 30:
                hosts.set_rate(rate_mbit)
            for host, device in ends:
                show = host.command([str(tool("tc")), "qdisc", "show", "dev", device])
                queue = subprocess.run(show, capture_output=True, text=True, check=True).stdout
                assert shown in queue, (host.name, device)
        outside, inside = (os.readlink(f"/proc/{pid}/ns/user") for pid in ("self", first.pid))
        assert (outside == inside) == (os.geteuid() == 0)
        before = _counted(first, 8)
        _send_bytes(hosts, 1_000_000)
        assert 1_000_000 < _counted(first, 8) - before < 1_200_000


def _send_bytes(hosts: EmulatedHosts, count: int) -> None:
    first, second = hosts.hosts
    receive = second.command([sys.executable, "-c", _RECEIVE])
    send = f"import socket; socket.create_connection(('host1', 5000)).sendall(bytes({count}))"
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        subprocess.run(first.command([sys.executable, "-c", send]), check=True)


@pytest.mark.parametrize("pdsh", [False, True])
def test_hosts_share_no_memory_and_the_command_decides_the_exit_code(pdsh, request) -> None:
    request.getfixturevalue("can_launch" if pdsh else "can_emulate")
    marker, shown = f"ds_ckpt_test_{os.getpid()}", "/etc/hosts"
    lines = ["127.0.0.1 localhost\n", *(f"10.77.0.{i + 1} host{i}\n" for i in range(3))]
    if pdsh:
        shown, lines = "$DS_CKPT_HOSTFILE", [f"host{i} slots=2\n" for i in range(3)]
    command = ["sh", "-c", f"touch /dev/shm/{marker}; cat {shown}; exit 3"]
    run = ["hosts", "run", "--hosts=3", "--slots=2", "--rate=unlimited", *["--pdsh"] * pdsh, "--"]
    result = subprocess.run(
        [sys.executable, "-m", "ds_ckpt.cli", *run, *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 3, result.stderr
    assert result.stdout == "".join(lines)
    assert "links not shaped" in result.stderr
    assert not (Path("/dev/shm") / marker).exists()


def test_a_hanging_launch_ends_in_time_and_names_the_place(own_pdsh_hosts, tmp_path) -> None:
    hosts = own_pdsh_hosts
    pdsh = ["pdsh", "-S", "-w", "host0,host1", "echo in the script; sleep 600"]
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"limit of 8 s") as caught:
        supervise(hosts.prepare(pdsh, tmp_path), tmp_path, limit_s=8, backend=hosts)
    assert time.monotonic() - started < 30
    assert "host1: in the script" in str(caught.value)
    assert hosts.hosts == ()


@pytest.mark.parametrize(
    ("pdsh", "absent", "reasons"),
    [
        (True, "pdsh", ["sshd needs root", "not found: pdsh (Debian packages: util-linux"]),
        (False, "unshare", ["not found: unshare (Debian packages: util-linux"]),
        (
            True,
            "tc",
            ["sshd needs root", "not found: ip, tc (Debian package: iproute2) or pyroute2"],
        ),
        (False, "", ["the kernel refuses namespaces or links: sh -c 'echo no; exit 1' sleep"]),
    ],
)
def test_what_is_missing_is_named(pdsh, absent, reasons, monkeypatch) -> None:
    monkeypatch.setattr(emulated, "tool", lambda name: None if name == absent else "/bin/true")
    monkeypatch.setattr(emulated, "_unshare", lambda: ["sh", "-c", "echo no; exit 1"])
    monkeypatch.setattr(emulated, "_refusal", emulated._refusal.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = emulated.emulation_obstacles(pdsh=pdsh)
    assert all(map(str.startswith, found, reasons)), found
    assert len(found) == len(reasons)
    with pytest.raises(HostError, match="nodes cannot be emulated here"):
        EmulatedHosts(2, pdsh=pdsh).__enter__()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("_FIRST_PROCESS", 'echo no tmpfs for "$2"; exit 3\n', "no tmpfs for host"),
        ("_ip", lambda *_, **__: emulated._call(["sh", "-c", "echo no tbf >&2; exit 2"]), "no tbf"),
        ("_enter", lambda *_: ["sh", "-c", _ALL_BUT_ONE, "sh"], "exit code 1: not this one"),
    ],
)
def test_a_node_that_does_not_start_is_the_reason_and_nothing_is_left(
    name: str, value: object, shown: str, can_emulate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = system_state()
    monkeypatch.setattr(emulated, name, value)
    assert re.search(shown, emulated._refusal.__wrapped__(), re.DOTALL)
    monkeypatch.setattr(emulated, "_refusal", str)
    hosts = EmulatedHosts(3)
    with pytest.raises(HostError, match=f"(?s){shown}"):
        hosts.__enter__()
    assert hosts.folder == Path()
    _becomes(before)


def test_many_ranks_are_no_argument_and_end_if_one_does_not_start(tmp_path: Path) -> None:
    hosts = EmulatedHosts(1, slots=400)
    hosts.hosts, hosts.folder = (Host("host0", "10.77.0.1", os.getpid()),), tmp_path
    command = hosts.prepare(["deepspeed", "x.py"], tmp_path).command
    assert max(map(len, command)) < 1000
    assert len(json.loads(Path(command[-1]).read_text())) == 400
    first = ["sleep", f"600.{os.getpid()}"]
    Path(command[-1]).write_text(json.dumps([first, ["/no/such"]]))
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert "/no/such" in result.stderr
    assert first not in [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]


def test_options_of_deepspeeds_launcher_need_it(tmp_path: Path) -> None:
    for argv in (["deepspeed", "--include=a", "x.py"], ["deepspeed"]):
        with pytest.raises(ConfigError, match="or add --pdsh"):
            EmulatedHosts().prepare(argv, tmp_path)


def _work_and_fail(*sets: EmulatedHosts) -> None:
    with contextlib.ExitStack() as stack:
        hosts = [host for each in sets for host in stack.enter_context(each).hosts]
        for host in hosts:
            subprocess.Popen(host.command(["sleep", "600"]))
        while sum(len(processes(host)) for host in hosts) < len(hosts):
            time.sleep(0.05)
        raise KeyError


def _becomes(expected: dict[str, object], limit_s: float = 15.0) -> None:
    """The kernel clears a dead namespace's devices a moment later."""
    limit = time.monotonic() + limit_s
    while (now := system_state()) != expected and time.monotonic() < limit:
        time.sleep(0.2)
    assert now == expected


SET_BYTES_PER_S = 200e6 / 8
PAYLOAD_BYTES_PER_S = SET_BYTES_PER_S * 1448 / 1514
"""Payload rate of full Ethernet frames with TCP time stamps."""


@pytest.mark.timeout(300)
def test_payload_each_way_is_at_the_rate_that_was_set(two_hosts: EmulatedHosts) -> None:
    """The best of a few tries: other work on the machine slows a transfer, nothing speeds it."""
    best = 0.0
    for _ in range(6):
        (pair,) = probe.probe(two_hosts)
        assert (pair.first, pair.second) == ("host0", "host1")
        assert 0 < pair.latency_s < 0.1
        best = max(best, pair.bytes_per_s)
        assert best < 1.05 * PAYLOAD_BYTES_PER_S
        if best > 0.85 * PAYLOAD_BYTES_PER_S:
            return
    pytest.fail(f"far from the rate that was set: {best}")


@pytest.mark.timeout(120)
def test_every_pair_is_measured_and_the_command_writes_json(can_emulate, tmp_path) -> None:
    out = tmp_path / "links.json"
    command = [sys.executable, "-m", "ds_ckpt.cli", "probe", "--hosts=3", "--rate=50mbit"]
    result = subprocess.run(
        [*command, "--seconds=0.3", f"--output={out}"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    pairs = probe.load(out)
    found = [(pair.first, pair.second) for pair in pairs]
    assert found == [("host0", "host1"), ("host0", "host2"), ("host1", "host2")]
    for pair in pairs:
        assert f"{pair.first} - {pair.second}: " in result.stdout
        assert 0 < pair.bytes_per_s < 1.1 * 50e6 / 8


def test_one_node_has_no_link(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("one slots=2\n# two slots=2\n")
    with pytest.raises(UnsupportedError, match="found 1\n"):
        probe.probe(Hostfile(tmp_path / "hostfile"))


def test_a_file_that_is_none_of_the_probe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="does not have the format"):
        probe.load(path)
    pairs = [Pair("a", "b", 1e-5, 3.0)]
    probe.save(pairs, path)
    assert probe.load(path) == pairs
