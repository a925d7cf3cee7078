"""Emulated hosts. Without what they need the tests are skipped, with CI=true they fail."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ds_ckpt.lab.hosts.emulated import EmulatedHosts, Host, missing, namespace
from ds_ckpt.lab.hosts.sets import owner_of
from ds_ckpt.lab.measure.samples import Store, Trial

COMMAND = [sys.executable, "-m", "ds_ckpt.cli"]
FEW = ["--steps=2", "--tokens=32", "--batch=2", "--repetitions=1", "--methods=4bit"]
LARGER = [*FEW, "--shape=hidden_size=256,layers=2,intermediate_size=688,heads=4"]
"""Bytes that nobody counts, those of headers, are less than a hundredth of its messages."""


@pytest.fixture(scope="package", autouse=True)
def own_folder() -> Iterator[None]:
    """Records of sets go where nobody else's are: what another run left is not taken down here."""
    own = tempfile.TemporaryDirectory(prefix="own_")
    with own as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)  # for what the tests launch
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def can_emulate() -> None:
    """Skip with the reasons where hosts cannot be emulated; fail with them when CI=true."""
    reasons = missing()
    if reasons and os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the tests on emulated hosts: {'; '.join(reasons)}")
    if reasons:
        pytest.skip(f"no emulated hosts here: {'; '.join(reasons)}")


@pytest.fixture(scope="package")
def two_hosts(can_emulate: None) -> Iterator[EmulatedHosts]:
    """Two hosts with links of 200 Mbit/s, for all tests that leave them as they were."""
    with EmulatedHosts(2, rate_mbit=200) as hosts:
        yield hosts


@pytest.fixture
def own_hosts(can_emulate: None) -> Iterator[EmulatedHosts]:
    """Two hosts for one test, which may break them."""
    with EmulatedHosts(2, rate_mbit=None) as hosts:
        yield hosts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/hosts/" in item.path.as_posix():
            item.add_marker(pytest.mark.hosts)


def sets_of(pid: int) -> list[Path]:
    """Return the folders of the sets that a process has made."""
    folders = Path(tempfile.gettempdir()).glob("ds_ckpt_set_*")
    return [one for one in folders if (owner := owner_of(one)) and owner.pid == pid]


def processes(host: Host) -> list[psutil.Process]:
    """Return the processes of this node without its sshd; none if the node is gone."""
    own = namespace(host.pid)
    found: list[psutil.Process] = []
    for process in psutil.process_iter() if own else ():
        with contextlib.suppress(psutil.Error):
            dead = process.status() == psutil.STATUS_ZOMBIE
            if not dead and process.name() != "sshd" and namespace(process.pid) == own:
                found.append(process)
    return found


def trials(folder: Path) -> list[Trial]:
    """Return the trials of a run of `measure`."""
    return [s for s in Store(folder).read() if isinstance(s, Trial)]


def far_bytes(trial: Trial, prefix: str = "") -> float:
    """Return what the collectives count to other nodes, the mean over two nodes."""
    return sum(n for purpose, n in trial.far_bytes.items() if purpose.startswith(prefix)) / 2
