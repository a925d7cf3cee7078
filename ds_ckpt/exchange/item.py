"""What a bucket is made of, and what every bucket of an exchange uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ckpt.compression.factors import Factors
from ds_ckpt.compression.feedback import Feedback
from ds_ckpt.exchange.layout import ColumnLayout
from ds_ckpt.exchange.transport import Transport
from ds_ckpt.exchange.treatment import Treatment
from ds_ckpt.telemetry.timings import Errors, Timings


@dataclass(frozen=True)
class Item:
    """One tensor of a bucket.

    Attributes:
        column: this process's contribution, [layout.numel]: its gradient, or its host's sum.
        dtype: the gradient's, in which shards are answered and whole tensors travel.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    column: Tensor
    layout: ColumnLayout
    treatment: Treatment


@dataclass(frozen=True)
class Tools:
    """What every bucket of an exchange uses."""

    transport: Transport
    feedback: Feedback
    factors: Factors
    order: Callable[[int, int, int, int, int], Iterable[tuple[int, int, Sequence[int]]]]
    timings: Timings
    errors: Errors
    world: int
    """Processes that are averaged over."""
