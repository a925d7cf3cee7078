"""What compression leaves behind in a step, as the two numbers that validation and guards share."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Left:
    """One step, all processes together.

    Attributes:
        error: norm of what was left over norm of what there was to send, residual of earlier steps
            included: 0 is lossless, 1 sends nothing.
        residual_norm: norm of what was left, over all processes, in norms of the averaged gradient:
            how many steps' worth the weights are owed. Gradients of other models have other sizes;
            this ratio has none.
    """

    error: float
    residual_norm: float

    @classmethod
    def of(cls, before: float, after: float, gradient_norm: float) -> Left | None:
        """From squared norms summed over all processes; None where nothing was compressed, or
        where a number is not finite."""
        numbers = (before, after, gradient_norm)
        if not all(map(math.isfinite, numbers)) or before <= 0 or gradient_norm <= 0:
            return None
        return cls(math.sqrt(after / before), math.sqrt(after) / gradient_norm)
