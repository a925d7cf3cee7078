"""The process groups of an exchange: one level or two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as torch_dist

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.nodes import Nodes, nodes_of
from ds_ckpt.exchange.own_group import discard

Levels = Literal["auto", 1, 2]


@dataclass(frozen=True)
class Groups:
    """Who exchanges with whom.

    Attributes:
        between: the processes that exchange compressed gradients: all, or one of each host.
        inside: the processes of this host; None with one level.
        columns: see `Nodes.columns`; empty with one level.
        why_one: why `auto` chose one level; empty where it did not choose.
    """

    between: Any
    inside: Any = None
    columns: tuple[tuple[int, ...], ...] = ()
    why_one: str = ""

    def discard(self) -> None:
        """End the groups that were made for two levels."""
        if self.inside is not None:
            discard(self.between)
            discard(self.inside)

    @property
    def world(self) -> int:
        """Number of processes that exchange compressed gradients with each other."""
        return torch_dist.get_world_size(self.between)

    @property
    def local(self) -> int:
        """Processes of a host that divide each gradient among them; 1 with one level."""
        return max(len(self.columns), 1)

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
    nodes: Nodes | str = "one level is configured"
    if levels != 1:
        nodes = nodes_of(group)
    if isinstance(nodes, str):
        if levels == 2:
            raise UnsupportedError(
                Problem(
                    where="$.ds_ckpt.compression.exchange.levels",
                    found="2",
                    why=f"{nodes}, and two levels need several processes on each of several hosts, "
                    "equally many",
                    remedy='write "auto" or 1, or give every host of the hostfile the same slots',
                )
            )
        why = nodes if levels == "auto" else ""
        return Groups(group, why_one=why)
    # every process makes every group: made by its members alone, a group is named by its ranks, and
    # a second one of that name finds the addresses of the first
    me, mine = torch_dist.get_rank(group), []
    for sets in (nodes.columns, nodes.hosts):
        made = [torch_dist.new_group(sorted(ranks[p] for p in members)) for members in sets]
        for new, members in zip(made, sets, strict=True):
            if me in members:
                mine.append(new)
    between, inside = mine
    return Groups(between, inside, nodes.columns)
