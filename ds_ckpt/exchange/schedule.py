"""What reduces a step's buckets: DeepSpeed in the warm-up, then what the autotuner says.

With gradient accumulation the exchange runs once, at the boundary; earlier micro-steps only add to
the residuals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.exchange.autotune import Autotuner, Way
from ds_ckpt.exchange.exchange import AllToAllExchange

log = logging.getLogger("ds_ckpt")


@dataclass
class Fallback:
    """Whether compression is over for this run. Set between steps, on every process alike; saved
    with a checkpoint.

    Attributes:
        uncompressed: every bucket goes so, with what is owed to it.
        speaks: whether this process tells of it in the log where a checkpoint brings it.
    """

    uncompressed: bool = False
    speaks: bool = False

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"whole": self.uncompressed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a checkpoint does not tell: compression goes on."""
        self.uncompressed = bool(state.get("whole", False))
        if self.uncompressed and self.speaks:
            log.warning(
                "ds_ckpt: the checkpoint is of a run that a guard made fall back: gradients go "
                "uncompressed, now too"
            )


class ScheduledExchange:
    """The `ds_ckpt.zero3.gradient.BucketExchange` of a method.

    Args:
        exchange: what runs after the warm-up.
        feedback: its residuals, committed or rolled back with the step; None without.
        factors: PowerSGD's, likewise.
        warmup_steps: optimizer steps that are plain DeepSpeed.
        current_step: DeepSpeed's count of optimizer steps so far.
        at_boundary: whether this micro-step ends an accumulated step; the others' gradients are
            held back until then. None: every micro-step is exchanged.
        autotuner: None: gradients are always compressed.

    Attributes:
        fallback: see `Fallback`.
    """

    def __init__(
        self,
        exchange: AllToAllExchange,
        feedback: Feedback | None,
        factors: Factors,
        *,
        warmup_steps: int,
        current_step: Callable[[], int],
        at_boundary: Callable[[], bool] | None = None,
        autotuner: Autotuner | None = None,
    ) -> None:
        self._exchange = exchange
        self._transactional = (factors,) if feedback is None else (feedback, factors)
        self._warmup_steps = warmup_steps
        self._current_step = current_step
        self._at_boundary = at_boundary
        self._autotuner = autotuner
        self._nonfinite_before = 0
        self.fallback = Fallback()

    def _way(self, names: Sequence[str] = ()) -> Way:
        """How a bucket of this step travels."""
        if self._warming_up:
            return "deepspeed"
        if self.fallback.uncompressed:
            return "uncompressed"
        return self._autotuner.way_of(names) if self._autotuner is not None else "compressed"

    @property
    def _warming_up(self) -> bool:
        return self._current_step() < self._warmup_steps

    @property
    def compresses(self) -> bool:
        """Whether the step's gradients go compressed."""
        return self._way() == "compressed"

    def inline(self, names: Sequence[str]) -> bool:
        """Where DeepSpeed reduces; see `ds_ckpt.zero3.gradient.BucketExchange`."""
        return self._way(names) == "deepspeed"

    def reduce(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        *,
        loss_scale: float,
        deepspeed_reduce: Callable[[list[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """One bucket; see `ds_ckpt.zero3.gradient.BucketExchange`."""
        if self._warming_up:
            return deepspeed_reduce(tensors)
        if self._at_boundary is not None and not self._at_boundary():
            return self._exchange.hold(names, tensors, loss_scale)
        way = self._way(names)
        if self._autotuner is not None and tensors and not self.fallback.uncompressed:
            self._autotuner.exchanged(names, tensors[0].device)
        if way == "deepspeed":
            return deepspeed_reduce(tensors)
        return self._exchange.average(
            names, tensors, loss_scale, uncompressed=way == "uncompressed"
        )

    def step_ended(self, *, skipped: bool) -> None:
        """A skipped step leaves every residual and factor bit-equal to before (law 4).

        So does a step with a non-finite bucket that DeepSpeed did not skip: every process that this
        one exchanges with was told of it, and a NaN must not live on in a residual.
        """
        nonfinite = self._exchange.nonfinite_buckets > self._nonfinite_before
        self._nonfinite_before = self._exchange.nonfinite_buckets
        self._exchange.step_ended()
        for state in self._transactional:
            if skipped or nonfinite:
                state.rollback()
            else:
                state.commit()
        if self._autotuner is not None:
            self._autotuner.step_ended(skipped=skipped)  # what all processes know alike
