"""A fixed rotation of runs of neighbours, after which entries of any distribution look Gaussian.

Random signs, then a Hadamard transform: each entry that comes out is the sum of all that went in,
with signs, over the root of their number (the rotation of DRIVE, Vargaftik et al., NeurIPS 2021,
arXiv 2105.08339, in short runs). Levels made for a Gaussian then fit, and no single large entry
sets the scale of its block. What it costs is that zeros no longer stay zeros.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MAX_RUN = 64
"""A product with a matrix so small runs at the speed of memory; longer runs gain nothing more."""

# The fraction of pi: bits without a pattern, which a linear rule for signs would have.
_SIGNS = 0x243F6A8885A308D3


def rotate(values: Tensor, run: int) -> Tensor:
    """fp32 [n], n a multiple of `run`, a power of two -> fp32 [n], of the same norm.

    A run with an entry so large that sums, here or on the way back, might overflow becomes zeros:
    nothing of it is sent and all of it stays.
    """
    # A run of largest entries grows by sqrt(run) in one of them, at most, and levels may overshoot
    # it by less than a half; the way back may add sqrt(run) again.
    limit = torch.finfo(torch.float32).max / (2 * run)
    runs = values.view(-1, run)
    low, high = torch.aminmax(runs, dim=1, keepdim=True)
    fits = (high <= limit) & (low >= -limit)
    return torch.mm(torch.where(fits, runs, 0.0), _matrix(run, values.device)).view(-1)


def rotate_back(values: Tensor, run: int) -> Tensor:
    """The inverse of `rotate` but for such runs. Equal bits for equal bits on one machine."""
    return torch.mm(values.view(-1, run), _matrix(run, values.device).t()).view(-1)


@lru_cache(maxsize=32)
def _matrix(run: int, device: torch.device) -> Tensor:
    """Orthogonal fp32 [run, run]."""
    hadamard = torch.ones(1, 1)
    while hadamard.shape[0] < run:
        over, under = torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)
        hadamard = torch.cat([over, under])
    signs = [1.0 - 2.0 * (_SIGNS >> entry & 1) for entry in range(run)]
    turned: Tensor = torch.tensor(signs).unsqueeze(1) * hadamard / run**0.5
    return turned.to(device)
