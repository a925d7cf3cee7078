"""How one tensor travels: whole, through a codec, or as low-rank factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_ckpt.compression.codec import Codec


@dataclass(frozen=True)
class LowRank:
    """PowerSGD: the tensor as a matrix, of which two factors travel.

    Attributes:
        rank: columns of each factor, lowered to the matrix's smaller side.
        alternate: only one factor travels a step, the two in turns (ACP-SGD): half the bytes and
            one collective less, for an approximation that follows the gradient more slowly.
        remainder: what the factors missed goes through this codec in the same step (hybrid). None:
            all of it stays as residual.
    """

    rank: int
    alternate: bool = False
    remainder: Codec | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")


Treatment = Codec | LowRank | None
"""None: the tensor travels whole, in its own dtype."""

Choose = Callable[[str, torch.Size], Treatment]
"""The treatment of a parameter by name and shape, the same on every process."""
