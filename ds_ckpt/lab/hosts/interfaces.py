"""What a host's network interfaces have sent, by the kernel's own count."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERFACE = "eth0"
"""The name of every emulated host's network interface."""
_ROUTES = Path("/proc/self/net/route")


@dataclass(frozen=True)
class Sent:
    """Bytes since the machine was started; subtract two."""

    link_bytes: int
    all_bytes: int

    def __sub__(self, earlier: Sent) -> Sent:
        return Sent(self.link_bytes - earlier.link_bytes, self.all_bytes - earlier.all_bytes)


def sent(interface: str | None) -> Sent:
    """By `interface` and by it and loopback together, where processes of a host meet; 0 without."""
    if interface is None:
        return Sent(0, 0)
    link = sent_bytes(interface)
    return Sent(link, link if interface == "lo" else link + sent_bytes("lo"))


def sent_bytes(interface: str) -> int:
    """By one of this process's network. Raises KeyError if there is no such interface."""
    return int(psutil.net_io_counters(pernic=True, nowrap=False)[interface].bytes_sent)


def link_interface(where: str) -> str | None:
    """The interface to the other hosts: what gloo or NCCL are told, or the default route's.

    None where there are no counters to read (not Linux).
    """
    if not _ROUTES.exists():
        return None
    if where == "loopback":
        return "lo"
    if where == "emulated":
        return INTERFACE
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if named := os.environ.get(name, "").split(",")[0].lstrip("="):
            return named
    for line in _ROUTES.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == "00000000":
            return fields[0]
    return None
