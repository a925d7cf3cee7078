"""Estimate of the optimizer's preconditioner, known to all ranks.

An optimizer of Adam's kind divides by the root of its second moment v. So an error e of an entry
counts e^2 / sqrt(v). A codec that packs x / w, w = v^(1/4), leaves the least error in that metric.
Only the owner has v. But its sums by row and column of a matrix are few numbers. Their outer
product is near v (Shazeer & Stern, "Adafactor", arXiv 1804.04235). In every `EVERY`-th step after
the warm-up all ranks sum the squares of their gradients by row and by column. One all-reduce adds
them up.

w is a power of two, so dividing by it and multiplying rounds nothing. Residuals and delivered
gradients add up as without it. All ranks have the same sums, so the same w. The sums are not saved:
after a load they are measured again.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ds_ckpt.compression.powersgd import matrix_shape
from ds_ckpt.exchange.layout import LocalShard

EVERY = 20
_OLD_SHARE = 0.5
_LEAST, _MOST = -5, 10
"""Exponents of w, relative to that of the mean."""
_STEPS = 4
"""Steps of a logarithm from one power of two to the next."""


class PreconditionerEstimate:
    """Row and column sums of squared gradients: transactional, and equal on all ranks.

    `all_reduce` sums an fp32 tensor over all ranks, in place. Sums are taken while `sampling`.
    """

    def __init__(self, all_reduce: Callable[[Tensor], None]) -> None:
        self._all_reduce = all_reduce
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._taken: dict[str, tuple[Tensor, Tensor]] = {}
        self.sampling = False

    def begin_step(self, step: int) -> None:
        """Decide whether the `step`-th step after the warm-up is sampled."""
        self.sampling = step % EVERY == 0

    def weights(
        self, name: str, shape: torch.Size, layout: LocalShard, device: torch.device
    ) -> Tensor | None:
        """Return w of a local shard, powers of two from 1; None before the first sample."""
        sums = self._sums.get(name)
        if sums is None or tuple(map(len, sums)) != matrix_shape(shape):
            return None
        sums = self._sums[name] = sums[0].to(device), sums[1].to(device)
        # the mean in fp64: in fp32 it would depend on the number of threads
        shares = (each / each.double().mean().float() for each in sums)
        rows, columns = (
            each.log2_().mul_(_STEPS).nan_to_num_(0, neginf=-1e6).round_().int() for each in shares
        )
        width, parts = len(columns), list[Tensor]()
        for _, source in _pieces(layout, shape):
            first, last = source.start // width, -(-source.stop // width)
            whole_rows = (rows[first:last].unsqueeze(1) + columns).view(-1)
            parts.append(whole_rows[source.start - first * width : source.stop - first * width])
        exponents = parts[0] if len(parts) == 1 else torch.cat(parts)
        exponents += 2 * _STEPS  # half of the divisor, to round to nearest
        exponents >>= int(math.log2(4 * _STEPS))
        exponents = exponents.clamp_(_LEAST, _MOST).add_(127 - _LEAST)
        exponents <<= 23
        return exponents.view(torch.float32)

    def add_gradient(
        self, name: str, shape: torch.Size, layout: LocalShard, gradient: Tensor, scale: float
    ) -> None:
        """Add this rank's gradient of a tensor in a sampled step; micro-steps add up.

        `gradient` is [layout.numel] of any floating dtype, multiplied by the loss scale `scale`.
        """
        rows, columns = matrix_shape(shape)
        if min(rows, columns) == 1:  # the sums of a vector would be as long as it is
            return
        sums = self._taken.get(name)
        if sums is None:
            both = gradient.new_zeros(rows + columns, dtype=torch.float32).split([rows, columns])
            sums = self._taken[name] = both[0], both[1]
        for local, source in _pieces(layout, shape):
            first, last = source.start // columns, -(-source.stop // columns)
            squares = sums[0].new_zeros((last - first) * columns)
            start = source.start - first * columns
            squares[start : start + source.stop - source.start] = gradient[local].float() / scale
            matrix = squares.square_().view(last - first, columns)
            sums[0][first:last] += matrix.sum(1)
            sums[1].add_(matrix.sum(0))

    def end_step(self, *, skipped: bool) -> None:
        """Keep the step's sums, or drop those of a skipped step. Collective in a sampled step."""
        taken, self._taken, self.sampling = self._taken, {}, False
        if skipped or not taken:
            return
        names = sorted(taken)
        parts = [part for name in names for part in taken[name]]
        total = torch.cat(parts)
        self._all_reduce(total)
        sums = total.split([len(part) for part in parts])
        # squares may overflow although values do not; by tensor, as slices of others differ
        finite = torch.stack([part.isfinite().all() for part in sums]).view(-1, 2).all(1).tolist()
        for name, *new, is_finite in zip(names, sums[::2], sums[1::2], finite, strict=True):
            if not is_finite:
                continue
            old = self._sums.get(name, new)
            rows, columns = (
                torch.lerp(before.to(now.device), now, 1 - _OLD_SHARE)
                for before, now in zip(old, new, strict=True)
            )
            self._sums[name] = rows, columns

    def reset(self) -> None:
        """Drop all sums: the next sampled step measures again."""
        self._sums, self._taken, self.sampling = {}, {}, False


def _pieces(layout: LocalShard, shape: torch.Size) -> list[tuple[slice, slice]]:
    """Return slices of a local shard, and the slices of the tensor that they are."""
    if layout.numel == shape.numel():
        return [(slice(0, layout.numel), slice(0, layout.numel))]
    return [(layout.shard(m), layout.source(m)) for m in range(len(layout.members))]
