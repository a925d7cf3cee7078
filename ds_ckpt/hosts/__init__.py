"""Where experiments run: hosts emulated on this machine, those of a hostfile, or this one alone.

`launcher` starts a module on them and ends it, `heartbeat` is how both ends know of each other.
"""

from ds_ckpt.hosts.emulated import EmulatedHosts, Host, missing
from ds_ckpt.hosts.interfaces import INTERFACE
from ds_ckpt.hosts.records import HostsError

__all__ = ["INTERFACE", "EmulatedHosts", "Host", "HostsError", "missing"]
