"""Hosts emulated on this machine, and `deepspeed` launched on them. Linux, as root."""

from ds_ckpt.harness.hosts.emulated import EmulatedHosts
from ds_ckpt.harness.hosts.host import INTERFACE, Host
from ds_ckpt.harness.hosts.tools import HostsError, missing

__all__ = ["INTERFACE", "EmulatedHosts", "Host", "HostsError", "missing"]
