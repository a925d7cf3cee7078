"""Holds one live bucket against DeepSpeed's own reduction, where DeepSpeed's source has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from ds_ckpt.errors import ContractError, Problem
from ds_ckpt.zero3.dispatcher import Reduce


def check_identity(
    names: Sequence[str], tensors: list[torch.Tensor], ours: Reduce, stock: Reduce, group: Any
) -> bool:
    """Collective: reduce copies of the bucket both ways. Tells whether it was held against it.

    A non-finite gradient leaves nothing to compare; fp16 often begins with some.

    Args:
        names: of the parameters, for the error.
        ours: sends everything.
        stock: DeepSpeed's reduction over `group`.

    Raises:
        ContractError: on every process, where the results differ on one.
    """
    expected = stock([t.clone() for t in tensors])
    got = ours([t.clone() for t in tensors])
    pairs = zip(names, expected, got, strict=True)
    nonfinite = not all(bool(t.isfinite().all()) for t in (*expected, *got))
    differing = [] if nonfinite else [name for name, a, b in pairs if not _same(a, b)]
    # the verdict is the group's: nobody may go on into a collective where another has stopped
    flags = torch.tensor([len(differing), int(nonfinite)], device=tensors[0].device)
    torch_dist.all_reduce(flags, group=group)
    different, unknown = flags.tolist()
    if unknown or not different:
        return not unknown
    where = ", ".join(differing) if differing else "(in other processes)"
    raise ContractError(
        Problem(
            where=f"reduce_scatter_coalesced, parameter {where}",
            found="another result than an exchange that sends everything",
            why="its reduction no longer means what the seam stands in for",
            remedy="install a DeepSpeed that ds-ckpt doctor reports as tested",
        )
    )


def _same(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Equal but for the rounding of another order of summation. Both are finite."""
    if expected.shape != got.shape:
        return False
    tolerance = 8 * torch.finfo(expected.dtype).eps
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(expected, got, rtol=tolerance, atol=tolerance * largest)
