"""The system tools that emulated hosts need: whether they are there, and calls of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ds_ckpt.errors import DsCkptError, Problem

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "pdsh": "pdsh",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_SYSTEM_FOLDERS = f"{os.defpath}:/usr/sbin:/sbin:/usr/local/sbin"
# for `unshare`: what each host has of its own, and that it dies with its maker
SPACES = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
_LIMIT_S = 30.0


class HostsError(DsCkptError, RuntimeError):
    """Hosts cannot be emulated here, or one of them did not come up or go down."""

    headline = "the emulated hosts"


def missing() -> list[str]:
    """Why hosts cannot be emulated here, in words; empty if they can."""
    if sys.platform != "linux":
        return ["network namespaces need Linux"]
    reasons = [] if os.geteuid() == 0 else ["network namespaces need root"]
    absent = [name for name in _TOOLS if tool(name) is None]
    if absent:
        packages = " ".join(sorted({_TOOLS[name] for name in absent}))
        reasons.append(f"not found: {', '.join(absent)} (Debian packages: {packages})")
    if not reasons:  # root in a container may still lack the right
        command = [need("unshare"), *SPACES, "true"]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        if tried.returncode:
            reasons.append(f"the kernel refuses new namespaces: {tried.stderr.strip()}")
    return reasons


def call(argv: Sequence[str]) -> None:
    """Run a tool; HostsError with its words if it fails."""
    environment = {**os.environ, "PATH": path()}
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    if result.returncode:
        raise HostsError(
            Problem(
                where=" ".join(argv),
                found=f"exit code {result.returncode}: {result.stderr.strip()}",
                why="the hosts and their links are made with it",
                remedy="look whether this kernel and its tools offer what was asked for",
            )
        )


def path() -> str:
    """PATH with the system's folders, which a plain user's PATH may lack."""
    return f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"


def tool(name: str) -> str | None:
    """Where a tool is, or None."""
    return shutil.which(name, path=path())


def need(name: str) -> str:
    """Where a tool is; HostsError with its Debian package if it is not there."""
    found = tool(name)
    if found is None:
        raise HostsError(
            Problem(
                where=name,
                found="not on the PATH",
                why="emulated hosts are made of it",
                remedy=f"install it (Debian package {_TOOLS[name]})",
            )
        )
    return found
