"""A run that skips every step says so: else only its loss would tell, by standing still."""

from __future__ import annotations

import logging

log = logging.getLogger("ds_ckpt")
LIMIT = 10
"""Skipped steps in a row, with the loss scale as it is, before a word is said."""


class Skips:
    """Counts them for one engine. A skip that lowers the loss scale is how fp16 finds its scale,
    and does not count.

    Args:
        speaks: whether this process warns (one of the group does).
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._in_a_row = 0

    def step_ended(self, *, skipped: bool, before: float, after: float) -> None:
        """With the loss scale before and after the verdict. Warns once an engine."""
        self._in_a_row = self._in_a_row + 1 if skipped and after >= before else 0
        if self._in_a_row == LIMIT and self._speaks:
            self._speaks = False
            log.warning(
                "ds_ckpt: %d steps in a row were skipped, as gradients were NaN or infinite, and "
                "the loss scale stays at %g: the weights stand still. If the loss is not finite, "
                "weights or data are not: load an earlier checkpoint with a lower learning rate, "
                "or look at the batches. If it is, the loss scale is too high ($.fp16.loss_scale)",
                LIMIT,
                after,
            )
