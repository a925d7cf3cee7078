"""What fails at a host ends in time, names the host and what to do, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from ds_ckpt.harness.experiment.grounds import Emulated
from ds_ckpt.harness.experiment.preflight import LIMIT_S, HostError, check_hosts
from ds_ckpt.harness.hosts import INTERFACE, EmulatedHosts
from ds_ckpt.harness.hosts.host import namespace
from ds_ckpt.measure.records import Store
from ds_ckpt.measure.run import measure
from ds_ckpt.measure.spec import Spec

STALL_S = 20.0
BOUND_S = STALL_S + LIMIT_S + 15
"""From the fault to the error: the silence, asking the hosts, taking them down."""
SHAPE = {"hidden_size": 64, "layers": 2, "intermediate_size": 128, "heads": 2}
SPEC = Spec(
    rates=(None,),
    repetitions=500,
    tokens=32,
    loss_steps=0,
    equal_memory=False,
    policies=("none",),
    methods=(),
    shape=SHAPE,
)


@pytest.fixture
def leaves_nothing(two_hosts: EmulatedHosts) -> Iterator[EmulatedHosts]:
    """Hosts of which nothing may be left when the test is over: process, namespace or queue."""
    spaces = {namespace(host.pid) for host in two_hosts.hosts}
    queues = _queues()
    yield two_hosts
    two_hosts.down()
    assert not [pid for pid in psutil.pids() if namespace(pid) in spaces]
    assert _queues() == queues


def _queues() -> set[str]:
    shown = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True)
    return {line.split("refcnt")[0] for line in shown.stdout.splitlines()}


def _inside(host: int, hosts: EmulatedHosts, *argv: str) -> None:
    subprocess.run(hosts.hosts[host].command(argv), check=True)


def _refused(hosts: EmulatedHosts) -> str:
    started = time.monotonic()
    with pytest.raises(HostError) as caught:
        check_hosts(Emulated(hosts))
    assert time.monotonic() - started < LIMIT_S
    assert len(caught.value.problems) == 1, caught.value
    return str(caught.value)


def test_hosts_that_are_well_are_let_pass(leaves_nothing: EmulatedHosts) -> None:
    check_hosts(Emulated(leaves_nothing))


def test_no_ssh_at_a_host(leaves_nothing: EmulatedHosts) -> None:
    """Its sshd takes no key any more."""
    key = str(leaves_nothing.folder / "user_key.pub")
    _inside(1, leaves_nothing, "mount", "--bind", "/dev/null", key)
    said = _refused(leaves_nothing)
    assert "host1: found no answer to ssh" in said
    assert "Permission denied" in said
    assert "fix: make `ssh host1 true` work" in said


def test_a_host_that_is_not_on_the_network(leaves_nothing: EmulatedHosts) -> None:
    _inside(1, leaves_nothing, "ip", "link", "set", INTERFACE, "down")
    assert "host1: found no answer to ssh" in _refused(leaves_nothing)


def test_no_such_module_at_a_host(leaves_nothing: EmulatedHosts) -> None:
    import transformers

    package = str(Path(transformers.__file__).parent)
    # an empty folder would still be found, as a namespace package
    _inside(1, leaves_nothing, "mount", "-t", "tmpfs", "tmpfs", str(Path(package).parent))
    said = _refused(leaves_nothing)
    assert "host1: found no module" in said
    assert "transformers" in said
    assert "pip install" in said


def test_no_python_at_a_host(leaves_nothing: EmulatedHosts) -> None:
    _inside(1, leaves_nothing, "mount", "-t", "tmpfs", "tmpfs", str(Path(sys.executable).parent))
    said = _refused(leaves_nothing)
    assert f"host1: found {sys.executable} fails there" in said
    assert "fix: install this environment there" in said


def test_the_port_is_taken(leaves_nothing: EmulatedHosts) -> None:
    listen = (
        "import socket; s = socket.create_server(('', 29500)); print(1, flush=True); s.accept()"
    )
    command = leaves_nothing.hosts[0].command([sys.executable, "-c", listen])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "1\n"
        said = _refused(leaves_nothing)
        assert "host0: found port 29500 is taken" in said
        assert "--port" in said
        check_hosts(Emulated(leaves_nothing, port=29501))
        leaves_nothing.down()


def _fails_in_mid_run(
    hosts: EmulatedHosts, folder: Path, fault: Callable[[], None]
) -> tuple[str, float]:
    """What is said of a run in which `fault` happens after the first turn; seconds from it on."""
    store = Store(folder / "samples.jsonl")
    happened: list[float] = []

    def look() -> None:
        if not happened and any(s.kind == "turn" for s in store.read()):
            fault()
            happened.append(time.monotonic())

    with pytest.raises(HostError) as caught:
        measure(
            SPEC,
            folder,
            backend=Emulated(hosts),
            console=Console(quiet=True),
            stall_s=STALL_S,
            limit_s=300,
            look=look,
        )
    assert happened, caught.value
    return str(caught.value), time.monotonic() - happened[0]


@pytest.mark.timeout(400)
def test_a_host_that_vanishes_in_mid_run(leaves_nothing: EmulatedHosts, tmp_path: Path) -> None:
    pid = leaves_nothing.hosts[1].pid
    said, took_s = _fails_in_mid_run(
        leaves_nothing, tmp_path / "run", lambda: os.kill(pid, signal.SIGKILL)
    )
    assert took_s < BOUND_S
    assert "host1: found no answer any more: the host is not there any more" in said
    assert "fix: look at the machine and its link" in said
    assert not any(host.processes() for host in leaves_nothing.hosts)


@pytest.mark.timeout(400)
def test_a_link_that_goes_down_in_mid_run(leaves_nothing: EmulatedHosts, tmp_path: Path) -> None:
    hosts = leaves_nothing
    said, took_s = _fails_in_mid_run(
        hosts, tmp_path / "run", lambda: _inside(1, hosts, "ip", "link", "set", INTERFACE, "down")
    )
    assert took_s < BOUND_S
    assert "host1: found no answer any more" in said
    assert "goes on where this run was" in said
    assert not any(host.processes() for host in hosts.hosts)
