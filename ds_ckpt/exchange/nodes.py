"""Which processes share a host, from what the launcher put into the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as torch_dist

_HOST_INDEX = ("CROSS_RANK", "GROUP_RANK")
"""DeepSpeed's launcher; torchrun."""
_LOCAL_INDEX = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


@dataclass(frozen=True)
class Place:
    """Where one process runs.

    Attributes:
        host: name, and the launcher's number of the host where it gives one.
        local: the launcher's number of the process on its host; None where it gives none.
    """

    host: str
    local: int | None


@dataclass(frozen=True)
class Nodes:
    """The world by hosts.

    Attributes:
        hosts: for each host its processes by index in the group, ascending; equally many each.
    """

    hosts: tuple[tuple[int, ...], ...]

    @property
    def local(self) -> int:
        """Processes of a host."""
        return len(self.hosts[0])

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """For each place in a host the processes of all hosts at that place, ascending."""
        return tuple(tuple(sorted(column)) for column in zip(*self.hosts, strict=True))


def here(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place."""
    number = next((environment[k] for k in _HOST_INDEX if environment.get(k)), "")
    local = next((environment[k] for k in _LOCAL_INDEX if environment.get(k)), "")
    return Place(f"{socket.gethostname()}/{number}", int(local) if local.isdigit() else None)


def arrange(places: Sequence[Place]) -> Nodes | str:
    """The layout of a group by its processes' places, or in words why there are no two levels."""
    hosts: dict[str, list[int]] = {}
    for process, place in enumerate(places):
        hosts.setdefault(place.host, []).append(process)
    for host, processes in hosts.items():
        local = [places[p].local for p in processes if places[p].local is not None]
        if len(set(local)) < len(local):
            # network namespaces or containers that share a name, started without host numbers
            return f"two processes of host {host} have the same local number"
    sizes = sorted(len(processes) for processes in hosts.values())
    if len(hosts) == 1:
        return "all processes share one host"
    if sizes[-1] == 1:
        return "every process has a host of its own"
    if sizes[0] != sizes[-1]:
        return f"hosts have unequal numbers of processes ({', '.join(map(str, sizes))})"
    return Nodes(tuple(tuple(processes) for processes in hosts.values()))


def nodes_of(group: Any) -> Nodes | str:
    """`arrange` for a process group. Collective: every process of the group calls it."""
    places: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(places, here(), group=group)
    return arrange(places)
