"""What entries count in the optimizer's steps, as far as all processes know it.

An optimizer of Adam's kind divides by the root of its second moment v, so an error e of an entry
counts e^2 / sqrt(v) there. A codec that is given x / w, w = v^(1/4), leaves least of that behind.
v is its owner's alone; but what one row or column of a matrix has of it is a few numbers, and
rows times columns is near it (Shazeer & Stern, "Adafactor", arXiv 1804.04235). Every `EVERY`-th
step from the end of the warm-up all processes take the squares of their gradients, by row and by
column, and one all-reduce adds them up. (Not of what arrived: rows of which nothing is sent would
be taken for rows of nothing, and be sent instead of all others.)

w is a power of two, so dividing by it and multiplying rounds nothing: what is left and what arrives
make up what there was as they do without (law 3). All processes have the same sums, so the same w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.compression.powersgd import matrix_shape
from ds_ckpt.exchange.layout import LocalShard

EVERY = 20
_OLD = 0.5
_LEAST, _MOST = -5, 10
"""Exponents of w, from that of the mean."""
_STEPS = 4
"""Of a logarithm, to 1."""


class StepMetric:
    """Row and column sums of gradients' squares: transactional, and equal on all processes.

    Args:
        add_up: sums an fp32 tensor over all processes, in place.

    Attributes:
        sampling: whether sums are taken in this step.
    """

    def __init__(self, add_up: Callable[[Tensor], None]) -> None:
        self._add_up = add_up
        self._known: dict[str, tuple[Tensor, Tensor]] = {}
        self._taken: dict[str, tuple[Tensor, Tensor]] = {}
        self.sampling = False

    def exchanging(self, step: int) -> None:
        """A bucket is about to travel in the `step`-th step after the warm-up."""
        self.sampling = step % EVERY == 0

    def weights(
        self, name: str, shape: torch.Size, layout: LocalShard, device: torch.device
    ) -> Tensor | None:
        """w of a tensor's entries: fp32 [layout.numel], powers of two, 1 and above; None: nothing
        is known yet."""
        sums = self._known.get(name)
        if sums is None or tuple(map(len, sums)) != matrix_shape(shape):
            return None
        sums = self._known[name] = sums[0].to(device), sums[1].to(device)
        # the mean in fp64: that of fp32 numbers depends on how many threads add them up
        shares = (of / of.double().mean().float() for of in sums)
        rows, columns = (
            of.log2_().mul_(_STEPS).nan_to_num_(0, neginf=-1e6).round_().int() for of in shares
        )
        width, parts = len(columns), list[Tensor]()
        for _, there in _pieces(layout, shape):
            first, last = there.start // width, -(-there.stop // width)
            whole_rows = (rows[first:last].unsqueeze(1) + columns).view(-1)
            parts.append(whole_rows[there.start - first * width : there.stop - first * width])
        exponents = parts[0] if len(parts) == 1 else torch.cat(parts)
        exponents += 2 * _STEPS  # half of what it is divided by
        exponents >>= int(math.log2(4 * _STEPS))
        exponents = exponents.clamp_(_LEAST, _MOST).add_(127 - _LEAST)
        exponents <<= 23
        return exponents.view(torch.float32)

    def given(
        self, name: str, shape: torch.Size, layout: LocalShard, gradient: Tensor, scale: float
    ) -> None:
        """Take this process's gradient of a tensor, in a step that is sampled. Those of several
        micro-steps add up.

        Args:
            gradient: [layout.numel], of any floating dtype, multiplied by `scale`.
        """
        rows, columns = matrix_shape(shape)
        if min(rows, columns) == 1:  # of a vector the sums would be as long as it is
            return
        sums = self._taken.get(name)
        if sums is None:
            both = gradient.new_zeros(rows + columns, dtype=torch.float32).split([rows, columns])
            sums = self._taken[name] = both[0], both[1]
        for here, there in _pieces(layout, shape):
            first, last = there.start // columns, -(-there.stop // columns)
            squares = sums[0].new_zeros((last - first) * columns)
            start = there.start - first * columns
            squares[start : start + there.stop - there.start] = gradient[here].float() / scale
            matrix = squares.square_().view(last - first, columns)
            sums[0][first:last] += matrix.sum(1)
            sums[1].add_(matrix.sum(0))

    def step_ended(self, *, skipped: bool) -> None:
        """The step's verdict. Collective in a step that was sampled, unless it is skipped."""
        taken, self._taken, self.sampling = self._taken, {}, False
        if skipped or not taken:
            return
        names = sorted(taken)
        parts = [part for name in names for part in taken[name]]
        every = torch.cat(parts)
        self._add_up(every)
        if not torch.isfinite(every).all():
            return  # squares may overflow where values do not
        sums = every.split([len(part) for part in parts])
        for name, *new in zip(names, sums[::2], sums[1::2], strict=True):
            old = self._known.get(name, new)
            if [*map(len, old)] != [*map(len, new)]:  # of a checkpoint, and of another shape
                old = new
            rows, columns = (
                torch.lerp(was.to(now.device), now, 1 - _OLD)
                for was, now in zip(old, new, strict=True)
            )
            self._known[name] = rows, columns

    def state_dict(self) -> dict[str, Tensor]:
        """Sums as `rows:name` and `columns:name`, fp32."""
        return {
            f"{what}:{name}": part
            for name, both in self._known.items()
            for what, part in zip(("rows", "columns"), both, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is known until the next step that is sampled where a checkpoint does not tell."""
        self._taken, self.sampling = {}, False
        names = [key.removeprefix("rows:") for key in state if key.startswith("rows:")]
        self._known = {
            name: (state[f"rows:{name}"].clone(), state[f"columns:{name}"].clone())
            for name in names
            if f"columns:{name}" in state
        }


def _pieces(layout: LocalShard, shape: torch.Size) -> list[tuple[slice, slice]]:
    """Where entries of a tensor are in a local shard, and where in the tensor."""
    if layout.numel == shape.numel():
        return [(slice(0, layout.numel), slice(0, layout.numel))]
    return [(layout.shard(m), layout.source(m)) for m in range(len(layout.members))]
