"""Emulated hosts. Without what they need the tests are skipped, with CI=true they fail."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ds_ckpt.lab.hosts.emulated import EmulatedHosts, Host, emulation_obstacles, namespace
from ds_ckpt.lab.measure.samples import Store, Trial

COMMAND = [sys.executable, "-m", "ds_ckpt.cli"]
FEW = ["--steps=2", "--tokens=32", "--batch=2", "--repetitions=1", "--methods=4bit"]
LARGER = [*FEW, "--shape=hidden_size=256,layers=2,intermediate_size=688,heads=4"]
"""Bytes that nobody counts, those of headers, are less than a hundredth of its messages."""


@pytest.fixture(scope="session")
def can_emulate() -> None:
    """Skip with the reasons where hosts cannot be emulated; fail with them when CI=true."""
    _need(emulation_obstacles())


@pytest.fixture(scope="session")
def can_launch() -> None:
    """Return what `can_emulate` does, for hosts that pdsh reaches."""
    _need(emulation_obstacles(pdsh=True))


def _need(reasons: list[str]) -> None:
    if reasons and os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the tests on emulated hosts: {'; '.join(reasons)}")
    if reasons:
        pytest.skip(f"no emulated hosts here: {'; '.join(reasons)}")


@pytest.fixture(scope="package")
def two_hosts(can_emulate: None) -> Iterator[EmulatedHosts]:
    """Two hosts with links of 200 Mbit/s, for all tests that leave them as they were."""
    with EmulatedHosts(2, rate_mbit=200) as hosts:
        yield hosts


@pytest.fixture(scope="package")
def pdsh_hosts(can_launch: None) -> Iterator[EmulatedHosts]:
    """Two hosts that pdsh reaches, for all tests that leave them as they were."""
    with EmulatedHosts(2, rate_mbit=200, pdsh=True) as hosts:
        yield hosts


@pytest.fixture
def own_hosts(can_emulate: None) -> Iterator[EmulatedHosts]:
    """Two hosts for one test, which may break them."""
    with EmulatedHosts(2, rate_mbit=None) as hosts:
        yield hosts


@pytest.fixture
def own_pdsh_hosts(can_launch: None) -> Iterator[EmulatedHosts]:
    """Two hosts that pdsh reaches, for one test, which may break them."""
    with EmulatedHosts(2, rate_mbit=None, pdsh=True) as hosts:
        yield hosts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/hosts/" in item.path.as_posix():
            item.add_marker(pytest.mark.hosts)


def processes(host: Host) -> list[psutil.Process]:
    """Return the processes of this node, its first one and sshd aside; none if it is gone."""
    own = namespace(host.pid)
    found: list[psutil.Process] = []
    for process in psutil.process_iter() if own else ():
        with contextlib.suppress(psutil.Error):
            other = process.pid == host.pid or process.name() == "sshd"
            dead = process.status() == psutil.STATUS_ZOMBIE
            if not dead and not other and namespace(process.pid) == own:
                found.append(process)
    return found


def are_idle(hosts: EmulatedHosts, limit_s: float = 15.0) -> bool:
    """Return whether no process is left; one that was killed takes a moment to end."""
    limit = time.monotonic() + limit_s
    while (left := any(map(processes, hosts.hosts))) and time.monotonic() < limit:
        time.sleep(0.1)
    return not left


def trials(folder: Path) -> list[Trial]:
    return [s for s in Store(folder).read() if isinstance(s, Trial)]


def far_bytes(trial: Trial, prefix: str = "") -> float:
    """Return what the collectives count to other nodes, the mean over two nodes."""
    return sum(n for purpose, n in trial.far_bytes.items() if purpose.startswith(prefix)) / 2
