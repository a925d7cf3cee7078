"""The emulated hosts themselves: separate, shaped, and gone afterwards whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.hosts import tools
from tests.hosts.emulated import EmulatedHosts
from tests.hosts.launch import ROOT, LaunchError, on_hosts

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
    """What hosts could leave behind on the machine."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    queues = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True)
    spaces = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # ended, or waits to be collected
            spaces |= {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "uts", "pid")}
    devices = sorted(line.split(":")[1] for line in links.stdout.splitlines())
    queues_by_device = sorted(line.split("refcnt")[0] for line in queues.stdout.splitlines())
    return {"devices": devices, "queues": queues_by_device, "spaces": spaces}


def test_hosts_are_apart_and_reach_each_other_over_pdsh(two_hosts: EmulatedHosts) -> None:
    first, second = two_hosts.hosts
    assert (first.name, second.name) == ("host0", "host1")
    pdsh = ["pdsh", "-S", "-w", "host0,host1", "hostname; ip -o -4 address show dev eth0"]
    pdsh[1:1] = ["-R", "ssh"]
    environment = {**os.environ, **two_hosts.environment()}
    before = second.rx_bytes()
    result = subprocess.run(
        first.command(pdsh), env=environment, capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 0, result.stderr
    for host in two_hosts.hosts:
        assert f"{host.name}: {host.name}" in result.stdout
        assert f"inet {host.address}/24" in result.stdout
    assert second.rx_bytes() > before + 1000
    assert first.processes() == second.processes() == []


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
    sent = 8 * numel_bytes / 40e6
    assert 0.8 * sent < float(took.stdout) < 2 * sent  # other work may slow it, nothing speeds it


def test_the_counter_counts_what_crosses(two_hosts: EmulatedHosts) -> None:
    first, second = two_hosts.hosts
    before = (first.tx_bytes(), second.rx_bytes())
    ssh = [
        "sh",
        "-c",
        f"head -c 1000000 /dev/zero | ssh -F {two_hosts.folder}/ssh_config host1 cat",
    ]
    subprocess.run(first.command(ssh), stdout=subprocess.DEVNULL, timeout=30, check=True)
    sent, received = first.tx_bytes() - before[0], second.rx_bytes() - before[1]
    assert 1_000_000 < sent < 1_200_000
    assert received == pytest.approx(sent, rel=0.02)


def test_nothing_is_left_after_an_error_with_work_going_on(can_emulate: None) -> None:
    before = system_state()
    hosts, others = EmulatedHosts(2), EmulatedHosts(3)
    with pytest.raises(KeyError):
        _work_and_fail(hosts, others)
    assert not hosts.hosts
    assert not others.hosts
    _becomes(before)


def test_nothing_is_left_after_the_maker_is_killed(can_emulate: None) -> None:
    before = system_state()
    script = (
        "import time; from tests.hosts.emulated import EmulatedHosts; h = EmulatedHosts(2); "
        "h.__enter__(); print(h.folder, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        folder = Path(maker.stdout.readline().strip())
        assert folder.is_absolute()
        assert system_state() != before
        os.kill(maker.pid, signal.SIGKILL)
    shutil.rmtree(folder)  # all that such an end leaves: keys that open nothing any more
    _becomes(before)


def test_a_launch_that_hangs_ends_in_time_and_says_where(
    two_hosts: EmulatedHosts, tmp_path: Path
) -> None:
    (tmp_path / "hang.py").write_text("import time\nprint('in the script')\ntime.sleep(600)\n")
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"took longer than 40 s") as caught:
        on_hosts(two_hosts, [str(tmp_path / "hang.py")], folder=tmp_path, limit_s=40)
    assert time.monotonic() - started < 55
    assert "host1: in the script" in str(caught.value)
    assert two_hosts.hosts == ()


def test_what_is_missing_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "tool", lambda name: None if name == "pdsh" else "/bin/true")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reasons = tools.missing()
    assert reasons == [
        "network namespaces need root",
        "not found: pdsh (Debian packages: pdsh)",
    ]
    with pytest.raises(RuntimeError, match="need root; not found: pdsh"):
        EmulatedHosts(2).__enter__()


def _work_and_fail(*sets: EmulatedHosts) -> None:
    with contextlib.ExitStack() as stack:
        hosts = [host for each in sets for host in stack.enter_context(each).hosts]
        for host in hosts:
            subprocess.Popen(host.command(["sleep", "600"]))
        while sum(len(host.processes()) for host in hosts) < len(hosts):
            time.sleep(0.05)
        raise KeyError


def _becomes(expected: dict[str, object], limit_s: float = 15.0) -> None:
    """The kernel clears a dead namespace's devices a moment later."""
    limit = time.monotonic() + limit_s
    while (now := system_state()) != expected and time.monotonic() < limit:
        time.sleep(0.2)
    assert now == expected
