"""When compression runs: DeepSpeed's own reduction during the dense warm-up, ours after it.

With gradient accumulation the exchange runs once, at the boundary; earlier micro-steps only add to
the residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_ckpt.compression.feedback import Feedback
from ds_ckpt.exchange.exchange import AllToAllExchange


class ScheduledExchange:
    """Hands over to DeepSpeed's reduction before `start_step`, so warm-up is plain DeepSpeed.

    Args:
        exchange: what runs from `start_step` on.
        feedback: its residuals, committed or rolled back with the step; None without.
        start_step: optimizer steps of dense warm-up.
        current_step: DeepSpeed's count of optimizer steps so far.
        at_boundary: whether this micro-step ends an accumulated step; the others' gradients are
            held back until then. None: every micro-step is exchanged.
    """

    def __init__(
        self,
        exchange: AllToAllExchange,
        feedback: Feedback | None,
        *,
        start_step: int,
        current_step: Callable[[], int],
        at_boundary: Callable[[], bool] | None = None,
    ) -> None:
        self._exchange = exchange
        self._feedback = feedback
        self._start_step = start_step
        self._current_step = current_step
        self._at_boundary = at_boundary
        self._nonfinite_before = 0

    @property
    def warming_up(self) -> bool:
        return self._current_step() < self._start_step

    def reduce(
        self,
        names: Sequence[str],
        tensors: list[torch.Tensor],
        *,
        loss_scale: float,
        stock: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """One bucket; see `ds_ckpt.zero3.gradient.BucketExchange`."""
        if self.warming_up:
            return stock(tensors)
        if self._at_boundary is not None and not self._at_boundary():
            return self._exchange.hold(names, tensors, loss_scale=loss_scale)
        return self._exchange.reduce(names, tensors, loss_scale=loss_scale)

    def step_ended(self, *, skipped: bool) -> None:
        """A skipped step leaves every residual bit-equal to before (law 4).

        So does a step with a non-finite bucket that DeepSpeed did not skip: every process was told
        of it, and a NaN must not live on in a residual.
        """
        nonfinite = self._exchange.nonfinite_buckets > self._nonfinite_before
        self._nonfinite_before = self._exchange.nonfinite_buckets
        if self._feedback is None:
            return
        if skipped or nonfinite:
            self._feedback.rollback()
        else:
            self._feedback.commit()
