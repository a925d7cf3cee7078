"""Hosts emulated on this machine, and `deepspeed` launched on them. Linux, as root."""

from ds_ckpt.hosts.emulated import EmulatedHosts
from ds_ckpt.hosts.host import INTERFACE, Host
from ds_ckpt.hosts.tools import HostsError, missing

__all__ = ["INTERFACE", "EmulatedHosts", "Host", "HostsError", "missing"]
