"""A network of its own for the worker processes, so that byte counters count them alone."""

import ctypes
import fcntl
import os
import socket
import struct

from ds_ckpt.lab.hosts.backends import sent_bytes

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_MARK = "DS_CKPT_TEST_OWN_NETWORK"


def own_network() -> None:
    """Move this process and its children to come into a new network namespace with a loopback.

    Needs root; without it nothing changes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNET) != 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
    os.environ[_MARK] = "1"


def is_isolated() -> bool:
    return os.environ.get(_MARK) == "1"


def loopback_sent_bytes() -> int:
    return sent_bytes("lo")
