"""Weights in few bits, tracked: what crosses is how far the owner is ahead of what all hosts hold.

EF21-P (Gruntkowska, Tyurin, Richtarik 2022, arXiv 2209.15218): `held += decode(encode(master -
held))`, at the owner and at every receiver alike. What a step rounds off stays in the difference
and travels with a later one, so the error does not add up.

Law: no tensor is held worse than 1.5 times as coarsely as bf16 would hold it; one that would be
travels whole. So do tensors that start at zero, and those that the user writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ckpt.compression.quantize import Quantize
from ds_ckpt.compression.wire import aligned

LIMIT = 1.5
"""Error of a tensor, in errors of its rounding to bf16, above which it travels whole."""
_BLOCK = 64


@dataclass(frozen=True)
class Tracking:
    """How a shard is held after a step.

    Attributes:
        worst: the largest error of a tensor over that of its rounding to bf16 (norms).
        whole: tensors that travelled whole.
    """

    worst: float = 0.0
    whole: int = 0


class Tracked:
    """Even steps of 4 or 3 bits: a code times a bf16 scale is exact in fp32 and one addition
    follows, so owner and receivers get the same bits whatever their hardware is."""

    tracks = True

    def __init__(self, bits: int) -> None:
        self.words = f"as what changed, in {bits} bits"
        self._codec = Quantize.model_validate({"bits": bits, "block": _BLOCK})
        self.last = Tracking()
        """Of the latest `encode`."""

    def encode(self, held: Tensor, master: Tensor, sizes: Sequence[int]) -> Tensor:
        """Move `held` towards `master`, in place.

        Args:
            held: fp32, bf16 or fp16, flat.
            master: fp32 of the same shape and device, finite.
            sizes: elements of each tensor of the shard, which follow one another.

        Returns:
            uint8 on the CPU: a byte a tensor, whether it is whole; few-bit codes of the others;
            the whole ones, in `held`'s dtype.
        """
        goals = master.split(list(sizes))
        before = held.split(list(sizes))
        few = list(range(len(sizes)))
        payload, after, errors = self._pack(before, goals)
        self.last = Tracking()
        if over := [i for i in few if not errors[i] <= LIMIT]:
            few = [i for i in few if errors[i] <= LIMIT]
            payload, after, errors = self._pack([before[i] for i in few], [goals[i] for i in few])
        self.last = Tracking(max(errors, default=0.0), len(over))
        flags = torch.zeros(aligned(len(sizes)), dtype=torch.uint8, device="cpu")
        flags[over] = 1
        whole = [goals[i].to(held.dtype) for i in over]
        for i, values in zip([*few, *over], [*after, *whole], strict=True):
            before[i].copy_(values)
        return torch.cat([flags, payload.cpu(), *(w.view(torch.uint8).cpu() for w in whole)])

    def decode_(self, held: Tensor, payload: Tensor, sizes: Sequence[int]) -> None:
        """Move `held` as the owner's was, in place.

        Args:
            held: what the owner's was before.
            payload: what `encode` returned.
            sizes: as for `encode`.
        """
        start = aligned(len(sizes))
        whole = [bool(flag) for flag in payload[: len(sizes)].tolist()]
        before = held.split(list(sizes))
        few = [tensor for tensor, is_whole in zip(before, whole, strict=True) if not is_whole]
        blocks = _in_blocks(few)
        stop = start + self._codec.packed_bytes(blocks.numel())
        # in memory of its own: views of wider numbers must be aligned
        codes = payload[start:stop].clone().to(held.device)
        after = iter(_out_of_blocks(self._moved(blocks, codes, held.dtype), few))
        rest = payload[stop:].clone().to(held.device).view(held.dtype)
        sent = iter(rest.split([t.numel() for t, w in zip(before, whole, strict=True) if w]))
        for tensor, is_whole in zip(before, whole, strict=True):
            tensor.copy_(next(sent if is_whole else after))

    def _pack(
        self, before: Sequence[Tensor], goals: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[float]]:
        """Codes; what they make of the tensors; errors over those of rounding to bf16."""
        if not before:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), [], []
        blocks, goal = _in_blocks(before), _in_blocks(goals)
        codes = torch.empty(
            self._codec.packed_bytes(blocks.numel()), dtype=torch.uint8, device=blocks.device
        )
        self._codec.pack_rows((goal - blocks)[None], codes[None])
        moved = self._moved(blocks, codes, before[0].dtype)
        error = _energies(goal - moved.float(), goals)
        rounding = _energies(goal - goal.bfloat16().float(), goals)
        ratios = (error / rounding).masked_fill_(error == 0, 0.0).sqrt().cpu().tolist()
        return codes, _out_of_blocks(moved, before), ratios

    def _moved(self, blocks: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
        decoded = torch.zeros_like(blocks)
        self._codec.unpack_add_rows(codes[None], decoded)
        return (blocks + decoded).to(dtype)


def _in_blocks(tensors: Sequence[Tensor]) -> Tensor:
    """fp32: one after the other, each filled up with zeros to whole blocks."""
    padded = [torch.nn.functional.pad(t.float(), (0, -t.numel() % _BLOCK)) for t in tensors]
    return torch.cat(padded) if padded else torch.empty(0, dtype=torch.float32, device="cpu")


def _out_of_blocks(blocks: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = blocks.split([t.numel() + -t.numel() % _BLOCK for t in like]) if like else ()
    return [part[: t.numel()] for part, t in zip(parts, like, strict=True)]


def _energies(blocks: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each tensor: fp32."""
    counts = torch.tensor([-(-t.numel() // _BLOCK) for t in like], dtype=torch.int64, device="cpu")
    numbers = torch.arange(len(like), dtype=torch.int64, device="cpu")
    tensor = numbers.repeat_interleave(counts).to(blocks.device, non_blocking=True)
    of_blocks = blocks.view(-1, _BLOCK).square().sum(1)
    return blocks.new_zeros(len(like)).index_add_(0, tensor, of_blocks)
