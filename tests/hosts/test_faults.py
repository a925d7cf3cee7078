"""A fault on a node ends the run in time; the error names the node, and no process is left."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from ds_ckpt.lab.hosts.backends import INTERFACE, SSH_S
from ds_ckpt.lab.hosts.emulated import EmulatedHosts, namespace
from ds_ckpt.lab.hosts.launcher import HostError, check_hosts
from ds_ckpt.lab.measure.samples import Store
from ds_ckpt.lab.measure.spec import Spec
from ds_ckpt.lab.measure.trials import measure
from tests.hosts.conftest import are_idle
from tests.hosts.test_emulated import system_state

STALL_S = 60.0
CHECK_LIMIT_S = 2 * SSH_S + 5
BOUND_S = STALL_S + CHECK_LIMIT_S + 15
"""From the fault to the error: the silence, asking the hosts, taking them down."""
SHAPE = {"hidden_size": 64, "layers": 2, "intermediate_size": 128, "heads": 2}
SPEC = Spec(rates=(None,), repetitions=500, tokens=32, policies=("none",), methods=(), shape=SHAPE)


@pytest.fixture
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[EmulatedHosts]:
    """Hosts of which nothing may be left when the test is over: process, namespace or queue."""
    queues, own_hosts = system_state()["queues"], request.getfixturevalue(request.param)
    with contextlib.ExitStack() as held:
        # An open file keeps a namespace, so the kernel gives its number to no other test's hosts.
        spaces = set()
        for host in own_hosts.hosts:
            space = held.enter_context(open(f"/proc/{host.pid}/ns/pid"))
            spaces.add(f"pid:[{os.fstat(space.fileno()).st_ino}]")
        yield own_hosts
        own_hosts.end()
        assert not [pid for pid in psutil.pids() if namespace(pid) in spaces]
    assert system_state()["queues"] == queues


def _inside(host: int, hosts: EmulatedHosts, *argv: str) -> None:
    subprocess.run(hosts.hosts[host].command(argv), check=True)


def test_every_host_that_cannot_take_part_is_named_with_what_to_do(can_launch: None) -> None:
    """A fault on each of them; the sixth is well."""
    import transformers

    packages = str(Path(transformers.__file__).parent.parent)
    code = "import socket; s = socket.create_server(('', 29500)); print(1, flush=True); s.accept()"
    with EmulatedHosts(6, rate_mbit=None, pdsh=True) as hosts:
        command = hosts.hosts[0].command([sys.executable, "-c", code])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "1\n"
            # its sshd takes no key any more; an empty folder would be found, as a namespace package
            _inside(1, hosts, "mount", "--bind", "/dev/null", f"{hosts.folder}/user_key.pub")
            _inside(2, hosts, "ip", "link", "set", INTERFACE, "down")
            _inside(3, hosts, "mount", "-t", "tmpfs", "tmpfs", packages)
            python = str(Path(sys.executable).parent)
            _inside(4, hosts, "mount", "-t", "tmpfs", "tmpfs", python)
            started = time.monotonic()
            with pytest.raises(HostError) as caught:
                check_hosts(hosts)
            assert time.monotonic() - started < CHECK_LIMIT_S
            hosts.end()
    found = {problem.where: problem for problem in caught.value.problems}
    assert list(found) == [f"host{i}" for i in range(5)]
    assert "port 29500 is taken" in found["host0"].found
    assert found["host0"].remedy == "name another with --port"
    assert "Permission denied" in found["host1"].found
    assert "make `ssh host1 true` work" in found["host1"].remedy
    assert "ssh" in found["host2"].found
    assert "no module" in found["host3"].found
    assert "transformers" in found["host3"].found
    assert "pip install" in found["host3"].remedy
    assert sys.executable in found["host4"].why
    assert "install this environment there" in found["host4"].remedy


def _fails_in_mid_run(hosts: EmulatedHosts, folder: Path, fault: Callable) -> tuple[str, float]:
    """Return the error of a run with `fault` after its first trial, and seconds since `fault`."""
    store = Store(folder)
    happened: list[float] = []

    def watch() -> None:
        while not any(s.kind == "trial" for s in store.read()):
            time.sleep(0.2)
        fault()
        happened.append(time.monotonic())

    threading.Thread(target=watch, daemon=True).start()
    with pytest.raises(HostError) as caught:
        measure(
            SPEC, folder, backend=hosts, console=Console(quiet=True), stall_s=STALL_S, budget_s=600
        )
    assert happened, caught.value
    return str(caught.value), time.monotonic() - happened[0]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "leaves_nothing",
    ["own_hosts", pytest.param("own_pdsh_hosts", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_host_that_vanishes_in_mid_run(leaves_nothing, tmp_path: Path) -> None:
    """It is killed, or its link is down, which is noticed over ssh."""
    hosts, pid = leaves_nothing, leaves_nothing.hosts[1].pid

    def fault() -> None:
        if hosts.pdsh:
            _inside(1, hosts, "ip", "link", "set", INTERFACE, "down")
        else:
            os.kill(pid, signal.SIGKILL)

    output, took_s = _fails_in_mid_run(hosts, tmp_path / "run", fault)
    assert took_s < BOUND_S
    assert "host1: found no answer" in output
    assert ("the node has ended" in output) == (not hosts.pdsh)
    assert "fix: check the machine and its link" in output
    assert "continues the run" in output
    assert are_idle(hosts)
