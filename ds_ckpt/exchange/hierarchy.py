"""Two levels: who shares a host, the process groups, and the exact sum inside a host.

With two levels process `l` of a host gets, from each process there, the entries that the `l`-th
processes of all hosts own. It adds them up in fp32 or better. Links inside a host are fast, so
uncompressed values travel; what then crosses between hosts, and the residual, is
`1 / processes a host` of the gradient.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_ckpt.compression.wire import aligned, section
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.layout import LocalShard, ShardLayout, local_shard
from ds_ckpt.exchange.rules import Levels
from ds_ckpt.exchange.transport import Packets, Transport

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


Hosts = tuple[tuple[int, ...], ...]
"""For each host its processes by index in the group, ascending; equally many each."""


def here(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place."""
    number = next((environment[k] for k in _HOST_INDEX if environment.get(k)), "")
    local = next((environment[k] for k in _LOCAL_INDEX if environment.get(k)), "")
    return Place(f"{socket.gethostname()}/{number}", int(local) if local.isdigit() else None)


def hosts_of(group: Any, *, least: int = 2) -> Hosts | str:
    """`arrange` for a process group. Collective: every process of it calls this."""
    places: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(places, here(), group=group)
    return arrange(places, least=least)


def arrange(places: Sequence[Place], *, least: int = 2) -> Hosts | str:
    """A group by its processes' places, or in words why it is not hosts of equally many.

    Args:
        least: processes that a host must have.
    """
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
    if sizes[-1] < least:
        return "every process has a host of its own"
    if sizes[0] != sizes[-1]:
        return f"hosts have unequal numbers of processes ({', '.join(map(str, sizes))})"
    return tuple(tuple(processes) for processes in hosts.values())


@dataclass(frozen=True)
class Groups:
    """Who exchanges with whom.

    Attributes:
        between: the processes that exchange compressed gradients: all, or one of each host.
        inside: the processes of this host; None with one level.
        peers: for each place in a host the processes of all hosts at that place, ascending; empty
            with one level.
    """

    between: Any
    inside: Any = None
    peers: tuple[tuple[int, ...], ...] = ()

    @property
    def made(self) -> tuple[Any, ...]:
        """The groups that were made for two levels."""
        return () if self.inside is None else (self.between, self.inside)

    @property
    def world(self) -> int:
        """Number of processes that exchange compressed gradients with each other."""
        return torch_dist.get_world_size(self.between)

    @property
    def local(self) -> int:
        """Processes of a host that divide each gradient among them; 1 with one level."""
        return max(len(self.peers), 1)

    @property
    def levels(self) -> int:
        return 2 if self.inside is not None else 1


def make_groups(group: Any, levels: Levels) -> Groups:
    """Collective: every process of the program calls it, with the same arguments.

    Args:
        group: the data-parallel group.
        levels: 1, 2, or "auto": 2 where hosts have several processes each, equally many.

    Raises:
        UnsupportedError: two levels are asked for and the hosts do not allow them.
    """
    ranks = torch_dist.get_process_group_ranks(
        group if group is not None else torch_dist.group.WORLD
    )
    if levels == 1:
        return Groups(group)
    hosts = hosts_of(group)
    if isinstance(hosts, str):
        if levels == "auto":
            return Groups(group)
        raise UnsupportedError(
            Problem(
                where="$.ds_ckpt.compression.exchange.levels",
                found="2",
                why=f"{hosts}, and two levels need several processes on each of several hosts, "
                "equally many",
                remedy='write "auto" or 1, or give every host of the hostfile the same slots',
            )
        )
    peers = tuple(tuple(sorted(place)) for place in zip(*hosts, strict=True))
    # every process makes every group: made by its members alone, a group is named by its ranks, and
    # a second one of that name finds the addresses of the first
    me, mine = torch_dist.get_rank(group), []
    for sets in (peers, hosts):
        made = [torch_dist.new_group(sorted(ranks[p] for p in members)) for members in sets]
        for new, members in zip(made, sets, strict=True):
            if me in members:
                mine.append(new)
    between, inside = mine
    for new in mine:
        warm(new)
    return Groups(between, inside, peers)


def warm(group: Any) -> None:
    """Have the group's communicator made now: NCCL makes one with the first collective, which would
    be in the middle of backward. Collective."""
    torch_dist.barrier(group=group)


def discard(group: Any) -> None:
    """Give a group up; nothing happens if the program has done so already.

    Not a collective. Another process that is still in a collective of the group gets an error.
    """
    if torch_dist.is_initialized():
        with contextlib.suppress(ValueError):  # what it raises for a group that is not there
            torch_dist.destroy_process_group(group)


class InHostSum:
    """One process's end.

    Args:
        transport: between the processes of this host.
        peers: by local process, the processes of the whole world that share its place.
    """

    def __init__(self, transport: Transport, peers: Sequence[tuple[int, ...]]) -> None:
        assert len(peers) == transport.world
        self._transport = transport
        self._peers = peers

    @property
    def processes(self) -> int:
        """Processes of a host."""
        return self._transport.world

    @property
    def members(self) -> tuple[int, ...]:
        """The processes that this one exchanges with between hosts, itself included."""
        return self._peers[self._transport.dp_rank]

    def sum(self, flats: Sequence[Tensor], shards: Sequence[ShardLayout]) -> list[Tensor]:
        """This process's local shard of each tensor, summed over the host.

        Args:
            flats: [n] each, any floating dtypes, one device.
            shards: ZeRO-3's division of each.

        Returns:
            [its entries] each, in fp32 or the gradient's dtype if that is wider.
        """
        me = self._transport.dp_rank
        layouts = [[local_shard(s, members) for s in shards] for members in self._peers]
        sizes = [
            [aligned(c.numel * f.element_size()) for c, f in zip(cs, flats, strict=True)]
            for cs in layouts
        ]
        entries = [[c.numel for c in cs] for cs in layouts]
        packets = Packets(self._transport, sizes, entries, flats[0].device, header_bytes=0)
        for peers, (_, *payloads) in packets.outgoing:
            for i, (flat, payload) in enumerate(zip(flats, payloads, strict=True)):
                theirs = [layouts[peer][i] for peer in peers]
                _gather(flat, theirs, section(payload, 0, theirs[0].numel, flat.dtype))
        packets.exchange()
        totals: list[Tensor] = []
        for i, (flat, layout) in enumerate(zip(flats, layouts[me], strict=True)):
            arrived = section(packets.incoming[1 + i], 0, layout.numel, flat.dtype)
            own = _gather(flat, [layout], flat.new_empty(1, layout.numel))[0]
            wide = torch.promote_types(flat.dtype, torch.float32)
            totals.append(arrived.sum(0, dtype=wide).add_(own))
        return totals


def _gather(flat: Tensor, layouts: Sequence[LocalShard], out: Tensor) -> Tensor:
    """The local shard of each layout, all as long, as a row of `out`: as few copies as there are
    runs of shards where the layouts are alike and equally far apart."""
    runs = [layout.runs for layout in layouts]
    apart = runs[1][0].source - runs[0][0].source if len(runs) > 1 and runs[0] else 0
    for row, each in enumerate(runs):
        moved = [replace(run, source=run.source + apart * row) for run in runs[0]]
        if each != moved:
            for alone, layout in zip(out, layouts, strict=True):
                _gather(flat, [layout], alone.unsqueeze(0))
            return out
    for run in runs[0]:
        shape, steps = (len(runs), run.count, run.size), (apart, run.step, 1)
        shards = flat.as_strided(shape, steps, flat.storage_offset() + run.source)
        out[:, run.start : run.start + run.count * run.size].view(shape).copy_(shards)
    return out
