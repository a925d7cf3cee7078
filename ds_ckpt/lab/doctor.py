"""Checks of `ds-ckpt doctor`: versions, DeepSpeed hooks, launchers, limits.

Every check returns findings and raises nothing: a missing part is a finding with its remedy.
"""

import platform
import resource
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from ds_ckpt import environment
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.telemetry.units import GIB, size

Status = Literal["ok", "warning", "missing", "broken"]
_EXTRAS = {"transformers": "hf", "accelerate": "hf", "mpi4py": "mpi", "scipy": "validation"}
_PROGRAMS = (
    ("c++", "g++", "the operators that DeepSpeed compiles on first use"),
    ("ssh", "openssh-client", "several nodes"),
    ("pdsh", "pdsh", "deepspeed --hostfile with its default launcher"),
    ("mpirun", "openmpi-bin", "deepspeed --launcher openmpi"),
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
    found = [*_versions(), *_accelerator(), *_hooks(), *_programs()]
    return [*found, *_stale_locks(), _pinned_memory()]


def _versions() -> list[Finding]:
    findings = [_version("python", platform.python_version())]
    for name in ("ds_ckpt", "torch", "deepspeed", *_EXTRAS):
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

        tried = compatibility.outside(name, installed)
        if name == "torch":
            compatibility.require_torch(installed)
    except UnsupportedError as error:
        return Finding("versions", name, "broken", _one_line(error), f"install one of {tried}")
    except Exception:  # torch is missing or broken, which is another finding
        tried = ""
    if not tried:
        return Finding("versions", name, "ok", installed)
    detail = f"{installed}; tried with {tried}"
    return Finding("versions", name, "warning", detail, f"install one of {tried}")


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
    changed = [found for found in checked if found.status != "ok"]
    fit = f"{len(checked) - len(changed)} of {len(checked)} symbols fit"
    findings = [Finding(group, "compatibility", "ok", fit)]
    for found in changed:
        status: Status = "broken" if found.status == "broken" else "warning"
        name = found.symbol.rpartition(":")[2]
        findings.append(Finding(group, name, status, found.detail, found.remedy))
    return findings


def _programs() -> list[Finding]:
    findings = []
    for name, package, use in _PROGRAMS:
        remedy = f"for {use}: install it (Debian: apt install {package})"
        lacking = Finding("launchers", name, "missing", "not on the PATH", remedy)
        path = shutil.which(name)
        findings.append(Finding("launchers", name, "ok", path) if path else lacking)
    return findings


def _stale_locks() -> list[Finding]:
    detail = "a killed compilation's lock, for which every start waits"
    return [
        Finding("operators", str(lock), "warning", detail, f"rm {lock} (ds-ckpt exec does it)")
        for lock in environment.stale_locks()
    ]


def _pinned_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail, name = "unlimited" if soft == resource.RLIM_INFINITY else size(soft), "lockable"
    if 0 <= soft < GIB:
        remedy = "for offload: raise it (ulimit -l unlimited), or set pin_memory to false"
        return Finding("memory", name, "warning", detail, remedy)
    return Finding("memory", name, "ok", detail)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
