"""Two levels: ranks by node, and the process groups between and inside nodes."""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as torch_dist

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.method_rules import Levels
from ds_ckpt.exchange.transport import gather_objects

ONE_NODE = "all ranks share one node"
_HOST_INDEX = ("CROSS_RANK", "GROUP_RANK")
"""DeepSpeed's launcher; torchrun."""
_LOCAL_INDEX = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class Place(NamedTuple):
    """Name of a rank's node, with the launcher's number if there is one, and its local rank."""

    host: str
    local: int | None


Hosts = tuple[tuple[int, ...], ...]
"""Ranks of each node by index in the group, ascending; equally many each."""


def here(environment: Mapping[str, str] = os.environ) -> Place:
    """Return this rank's place."""
    number = next((environment[k] for k in _HOST_INDEX if environment.get(k)), "")
    local = next((environment[k] for k in _LOCAL_INDEX if environment.get(k)), "")
    return Place(f"{socket.gethostname()}/{number}", int(local) if local.isdigit() else None)


def hosts_of(group: Any, *, least: int = 2) -> Hosts | str:
    """Apply `arrange` to the groups of all ranks; the result is equal on all of them. Collective.

    With tensor parallelism several groups exchange, each the gradients of one slice. Parameters
    that are not sliced stay equal only if all groups do the same.
    """
    every = gather_objects((_ranks(group), here()))
    found = {
        arrange([every[rank][1] for rank in ranks], least=least) for ranks in {r for r, _ in every}
    }
    return found.pop() if len(found) == 1 else "process groups are divided over nodes unequally"


def _ranks(group: Any) -> tuple[int, ...]:
    """Return the ranks of a group in the program; None is the whole program."""
    group = torch_dist.group.WORLD if group is None else group
    return tuple(torch_dist.get_process_group_ranks(group))


def arrange(places: Sequence[Place], *, least: int = 2) -> Hosts | str:
    """Return the ranks of each node, or in words why nodes do not have equally many.

    `places` are by rank; a node must have `least` ranks.
    """
    hosts: dict[str, list[int]] = {}
    for process, place in enumerate(places):
        hosts.setdefault(place.host, []).append(process)
    for host, processes in hosts.items():
        local = [places[p].local for p in processes if places[p].local is not None]
        if len(set(local)) < len(local):
            # containers that share a name, started without host numbers
            return f"two ranks of node {host} have the same local rank"
    sizes = sorted(len(processes) for processes in hosts.values())
    if len(hosts) == 1:
        return ONE_NODE
    if sizes[-1] < least:
        return "every node has one rank"
    if sizes[0] != sizes[-1]:
        return f"nodes have unequal numbers of ranks ({', '.join(map(str, sizes))})"
    return tuple(tuple(processes) for processes in hosts.values())


@dataclass(frozen=True)
class Groups:
    """Process groups of an exchange.

    Attributes:
        between: ranks that exchange compressed gradients: all, or one of each node.
        inside: ranks of this node; None with one level.
        peers: by local rank, the ranks of all nodes with it, ascending; empty with one level.
    """

    between: Any
    inside: Any = None
    peers: tuple[tuple[int, ...], ...] = ()

    @property
    def made(self) -> tuple[Any, ...]:
        """Groups that were made for two levels."""
        return () if self.inside is None else (self.between, self.inside)

    @property
    def world(self) -> int:
        """Number of ranks that exchange compressed gradients with each other."""
        return torch_dist.get_world_size(self.between)

    @property
    def local(self) -> int:
        """Ranks of a node that divide each gradient among them; 1 with one level."""
        return max(len(self.peers), 1)


def make_groups(group: Any, levels: Levels) -> Groups:
    """Make the groups of 1 or 2 levels, or "auto": 2 if nodes have several ranks, equally many.

    Collective: every rank of the program calls it, with the same `levels`.
    """
    hosts = hosts_of(group) if levels != 1 else ONE_NODE
    if isinstance(hosts, str):
        if levels != 2:
            return Groups(group)
        why = f"{hosts}; two levels need several ranks per node, equally many"
        remedy = 'write "auto" or 1, or give every node of the hostfile the same slots'
        raise UnsupportedError(Problem("$.ds_ckpt.compression.exchange.levels", "2", why, remedy))
    peers = tuple(tuple(sorted(place)) for place in zip(*hosts, strict=True))
    me = torch_dist.get_rank(group)
    between, inside = new_groups(
        group, *(next(m for m in sets if me in m) for sets in (peers, hosts))
    )
    return Groups(between, inside, peers)


def new_groups(group: Any, *wanted: Sequence[int]) -> list[Any]:
    """Make a process group of each sequence of indices in `group`; all include this rank.

    Collective over the program: every rank makes the groups of all, in the same order. If only the
    members made a group, its name would be its ranks. A second group of that name would find the
    addresses of the first.
    """
    ranks = _ranks(group)
    own = [tuple(sorted(ranks[index] for index in members)) for members in wanted]
    every = gather_objects(own)
    made: dict[int, Any] = {}
    for place in range(len(wanted)):
        for members in dict.fromkeys(other[place] for other in every):
            new = torch_dist.new_group(members)
            if torch_dist.get_rank() in members:
                made[place] = new
    for new in made.values():  # NCCL would make the communicator amid a backward
        torch_dist.barrier(group=new)
    return [made[place] for place in range(len(wanted))]


def discard(group: Any) -> None:
    """Destroy a group, unless the program has done so already.

    Not a collective. Another rank that is still in a collective of the group gets an error.
    """
    if torch_dist.is_initialized():
        with contextlib.suppress(ValueError):  # the group does not exist
            torch_dist.destroy_process_group(group)
