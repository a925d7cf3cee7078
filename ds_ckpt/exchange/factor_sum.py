"""Sums of low-rank factors over a group, the same bits on every process, in one collective.

A ring's all-reduce sends 8 (W - 1) / W bytes an fp32 entry. Where W is 2 or 3 it is fewer bytes to
send everybody one's own entries in bf16, 2 (W - 1), and to add them up in fp32 there; from 4 on it
is not. Rounding before sending costs nothing in the end: each process knows what it has rounded
away and keeps it as residual. A sum that is rounded on its way, which would allow bf16 in a ring,
leaves errors that no process knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_ckpt.exchange.transport import Transport

_GATHERED_BELOW = 4


def gathers(world: int) -> bool:
    """Whether so many processes send each other bf16 instead of an all-reduce in fp32."""
    return 1 < world < _GATHERED_BELOW


def sent_entry_bytes(world: int) -> int:
    """Bytes an entry of a factor, times (world - 1) / world for what a process sends of it."""
    return 2 * world if gathers(world) else 8


class FactorSum:
    """What sums the factors of one group of processes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._gathers = gathers(transport.world)

    def rounded(self, factor: Tensor) -> Tensor:
        """fp32: what of a factor will arrive. Add this to nothing but itself before `sum`."""
        return factor.bfloat16().float() if self._gathers else factor

    def sum(self, factors: Sequence[Tensor], exact: Sequence[Tensor] = ()) -> list[Tensor]:
        """Sums of both lists, one after the other, fp32 in the shapes given.

        Args:
            factors: fp32, as `rounded` left them; at least one.
            exact: fp32; summed in fp32.
        """
        parts = [*exact, *factors]
        if self._gathers:
            sums = self._gathered(parts, sum(part.numel() for part in exact))
        else:
            sums = torch.cat([part.reshape(-1) for part in parts])
            self._transport.all_reduce(sums)
        pieces = sums.split([part.numel() for part in parts])
        shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        return shaped[len(exact) :] + shaped[: len(exact)]

    def _gathered(self, parts: list[Tensor], exact: int) -> Tensor:
        """The first `exact` entries travel in fp32, the others in bf16."""
        mine = torch.cat([part.reshape(-1) for part in parts])
        packed = torch.cat(
            [mine[:exact].view(torch.uint8), mine[exact:].bfloat16().view(torch.uint8)]
        )
        world, me, size = self._transport.world, self._transport.dp_rank, packed.numel()
        splits = [0 if process == me else size for process in range(world)]
        arrived = packed.new_empty((world - 1) * size)
        self._transport.all_to_all(arrived, packed.repeat(world - 1), splits, splits)
        # Own entries in their turn, so that everybody adds in the same order.
        contributions = [_unpacked(piece, exact) for piece in arrived.split(size)]
        contributions.insert(me, mine)
        total = contributions[0]
        for contribution in contributions[1:]:
            total = total + contribution
        return total


def _unpacked(payload: Tensor, exact: int) -> Tensor:
    # a copy begins where any type may
    wide, narrow = payload.clone().split([4 * exact, payload.numel() - 4 * exact])
    return torch.cat([wide.view(torch.float32), narrow.view(torch.bfloat16).float()])
