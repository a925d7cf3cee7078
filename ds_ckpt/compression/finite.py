"""Whether a tensor is free of inf and NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Whether no entry is inf or NaN. One pass unless the sum of finite entries overflows."""
    # A non-finite entry always makes the sum non-finite; the reverse does not hold.
    if math.isfinite(values.sum().item()):
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())
