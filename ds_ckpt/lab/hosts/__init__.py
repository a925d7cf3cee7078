"""Places to run experiments: emulated nodes, the machines of a hostfile, or this machine alone."""

from typing import Literal

Launcher = Literal["pdsh", "openmpi"]
"""Supported launchers of DeepSpeed."""
