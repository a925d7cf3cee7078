"""The emulated hosts themselves: separate, shaped, and gone afterwards whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ds_ckpt.lab.hosts import emulated
from ds_ckpt.lab.hosts.backends import INTERFACE
from ds_ckpt.lab.hosts.emulated import EmulatedHosts, Host
from ds_ckpt.lab.hosts.launcher import LaunchError, run
from ds_ckpt.lab.hosts.sets import HostsError
from tests.hosts.conftest import processes, sets_of

_RECEIVE = """
import socket, sys
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    while peer.recv(1 << 16):
        pass
    peer.sendall(b"!")
"""
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as peer:
    started = time.monotonic()
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    print(time.monotonic() - started)
"""


def system_state() -> dict[str, object]:
    """Return the state that nodes could leave on the machine. Only namespaces of this process's
    descendants count, since browsers and other tests make some, too. Orphans are descendants: see
    `tests/conftest.py`."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    queues = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True)
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


def test_hosts_are_apart_and_reach_each_other_over_pdsh(
    two_hosts: EmulatedHosts, tmp_path: Path
) -> None:
    first, second = two_hosts.hosts
    assert (first.name, second.name) == ("host0", "host1")
    pdsh = ["pdsh", "-S", "-w", "host0,host1", "hostname; ip -o -4 address show dev eth0"]
    before = _counted(second, 0)
    output = run(two_hosts.prepare(pdsh, tmp_path), tmp_path, limit_s=30)
    for host in two_hosts.hosts:
        assert f"{host.name}: {host.name}" in output
        assert f"inet {host.address}/24" in output
    assert _counted(second, 0) > before + 1000
    assert processes(first) == processes(second) == []


def test_the_link_has_the_rate_that_was_set_and_bytes_are_counted(can_emulate: None) -> None:
    numel_bytes = 5_000_000
    with EmulatedHosts(2, rate_mbit=40) as hosts:
        sender, receiver = hosts.hosts
        listen = receiver.command([sys.executable, "-c", _RECEIVE])
        with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            send = [sys.executable, "-c", _SEND, receiver.address, str(numel_bytes)]
            took = subprocess.run(
                sender.command(send), capture_output=True, text=True, timeout=30, check=True
            )
        sent, received = _counted(sender, 8), _counted(receiver, 0)
    assert numel_bytes < sent < 1.2 * numel_bytes
    assert received == pytest.approx(sent, rel=0.02)
    sent_s = 8 * numel_bytes / 40e6
    assert 0.8 * sent_s < float(took.stdout) < 2 * sent_s  # other work may slow it, nothing speeds


def test_nothing_is_left_after_an_error_with_work_going_on(can_emulate: None) -> None:
    before = system_state()
    hosts, others = EmulatedHosts(2), EmulatedHosts(3)
    with pytest.raises(KeyError):
        _work_and_fail(hosts, others)
    assert not hosts.hosts
    assert not others.hosts
    _becomes(before)


def test_nothing_is_left_after_the_maker_is_killed_and_down_has_run(can_emulate: None) -> None:
    before = system_state()
    run = [sys.executable, "-m", "ds_ckpt.cli", "hosts", "run", "--rate=50mbit", "--"]
    shout = ["sh", "-c", "echo up; sleep 600"]
    with (
        EmulatedHosts(1) as alive,
        subprocess.Popen([*run, *shout], stdout=subprocess.PIPE, text=True) as maker,
    ):
        assert maker.stdout is not None
        assert maker.stdout.readline() == "up\n"
        (found,) = sets_of(maker.pid)
        os.kill(maker.pid, signal.SIGKILL)
        maker.wait()
        down = [sys.executable, "-m", "ds_ckpt.cli", "hosts", "down"]
        output = subprocess.run(down, capture_output=True, text=True, check=True).stdout
        assert f"taken down: {found.name}\n" in output
        assert alive.folder.name in output.partition("left alone")[2]
        assert not found.exists()
        assert alive.hosts[0].pid in psutil.pids()
    _becomes(before)


def test_the_rate_can_be_changed_while_hosts_are_up(two_hosts: EmulatedHosts) -> None:
    show = two_hosts.hosts[1].command(["tc", "qdisc", "show", "dev", "eth0"])
    shown = []
    for rate_mbit in (30, None, 1000, 200):
        two_hosts.set_rate(rate_mbit)
        shown.append(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    assert "rate 30Mbit" in shown[0]
    assert "noqueue" in shown[1]
    assert "rate 1Gbit" in shown[2]


def test_hosts_share_no_memory_and_the_command_decides_the_exit_code(can_emulate: None) -> None:
    marker = f"ds_ckpt_test_{os.getpid()}"
    command = ["sh", "-c", f"touch /dev/shm/{marker}; cat $DS_CKPT_HOSTFILE; exit 3"]
    run = ["hosts", "run", "--hosts=3", "--slots=2", "--rate=unlimited", "--", *command]
    result = subprocess.run(
        [sys.executable, "-m", "ds_ckpt.cli", *run], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 3, result.stderr
    assert result.stdout == "".join(f"host{i} slots=2\n" for i in range(3))
    assert "links not shaped" in result.stderr
    assert not (Path("/dev/shm") / marker).exists()


def test_a_hanging_launch_ends_in_time_and_names_the_place(
    own_hosts: EmulatedHosts, tmp_path: Path
) -> None:
    pdsh = ["pdsh", "-S", "-w", "host0,host1", "echo in the script; sleep 600"]
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"limit of 8 s") as caught:
        run(own_hosts.prepare(pdsh, tmp_path), tmp_path, limit_s=8, backend=own_hosts)
    assert time.monotonic() - started < 30
    assert "host1: in the script" in str(caught.value)
    assert own_hosts.hosts == ()


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "tool", lambda name: None if name == "pdsh" else "/bin/true")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reasons = emulated.missing()
    assert reasons == [
        "network namespaces need root",
        f"not found: pdsh (Debian packages: {emulated._PACKAGES})",
    ]
    with pytest.raises(HostsError, match="need root; not found: pdsh"):
        EmulatedHosts(2).__enter__()


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
