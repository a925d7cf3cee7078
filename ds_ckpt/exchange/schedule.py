"""When compression runs: DeepSpeed's own reduction during the dense warm-up, ours after it.

With gradient accumulation the exchange runs once, at the boundary; earlier micro-steps only add to
the residuals. A run that falls back sends everything whole from then on, what is owed with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_ckpt.compression.error_feedback import Feedback
from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.gate import Gate
from ds_ckpt.exchange.referee import Referee, Way

log = logging.getLogger("ds_ckpt")


@dataclass
class Fallback:
    """Whether compression is over for this run. Set between steps, on every process alike; saved
    with a checkpoint.

    Attributes:
        whole: every bucket goes uncompressed, with what is owed to it.
        speaks: whether this process tells of it in the log where a checkpoint brings it.
    """

    whole: bool = False
    speaks: bool = False

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"whole": self.whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What an older checkpoint does not tell: compression goes on."""
        self.whole = bool(state.get("whole", False))
        if self.whole and self.speaks:
            log.warning(
                "ds_ckpt: the checkpoint is of a run that a guard made fall back: gradients go "
                "whole, now too"
            )


class ScheduledExchange:
    """Hands over to DeepSpeed's reduction before `start_step`, so warm-up is plain DeepSpeed.

    Args:
        exchange: what runs from `start_step` on.
        feedback: its residuals, committed or rolled back with the step; None without.
        factors: PowerSGD's, likewise.
        start_step: optimizer steps of dense warm-up.
        current_step: DeepSpeed's count of optimizer steps so far.
        at_boundary: whether this micro-step ends an accumulated step; the others' gradients are
            held back until then. None: every micro-step is exchanged.
        gate: sends buckets whole where that is faster. None: all are compressed.
        referee: hands over to DeepSpeed's reduction where steps are shorter with it. None: never.

    Attributes:
        fallback: see `Fallback`.
    """

    def __init__(
        self,
        exchange: AllToAllExchange,
        feedback: Feedback | None,
        factors: Factors,
        *,
        start_step: int,
        current_step: Callable[[], int],
        at_boundary: Callable[[], bool] | None = None,
        gate: Gate | None = None,
        referee: Referee | None = None,
    ) -> None:
        self._exchange = exchange
        self._feedback = feedback
        self._factors = factors
        self._start_step = start_step
        self._current_step = current_step
        self._at_boundary = at_boundary
        self._gate, self._referee = gate, referee
        self._nonfinite_before = 0
        self.fallback = Fallback()

    @property
    def warming_up(self) -> bool:
        return self._current_step() < self._start_step

    def inline(self, names: Sequence[str]) -> bool:
        """Where DeepSpeed reduces; see `ds_ckpt.zero3.gradient.BucketExchange`."""
        return self.warming_up or self._way(names) == "stock"

    def _way(self, names: Sequence[str] = ()) -> Way:
        """How a bucket of this step travels."""
        if self.fallback.whole:
            return "whole"
        return self._referee.way_of(names) if self._referee is not None else "gated"

    @property
    def whole_buckets(self) -> int:
        """Buckets that are not compressed because that would take longer."""
        if self._gate is None:
            return 0
        return self._gate.dense_buckets if self._way() == "gated" else len(self._gate.verdicts)

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
        way = self._way(names)
        if self._referee is not None and tensors and not self.fallback.whole:
            self._referee.exchanged(names, tensors[0].device)
        if way == "stock":
            return stock(tensors)
        if way == "whole":
            return self._exchange.average(names, tensors, loss_scale=loss_scale, uncompressed=True)
        if self._gate is None or not tensors or self._exchange.world == 1:
            return self._exchange.average(names, tensors, loss_scale=loss_scale)
        device, start_s = tensors[0].device, time.perf_counter()
        whole = self._gate.sends_whole(names)
        shards = self._exchange.average(names, tensors, loss_scale=loss_scale, uncompressed=whole)
        self._gate.took(names, whole, time.perf_counter() - start_s, device)
        return shards

    def step_ended(self, *, skipped: bool) -> None:
        """A skipped step leaves every residual and factor bit-equal to before (law 4).

        So does a step with a non-finite bucket that DeepSpeed did not skip: every process that this
        one exchanges with was told of it, and a NaN must not live on in a residual. The gate's
        times of such a step count for nothing.
        """
        nonfinite = self._exchange.nonfinite_buckets > self._nonfinite_before
        self._nonfinite_before = self._exchange.nonfinite_buckets
        self._exchange.step_ended()
        for state in (self._feedback, self._factors, self._gate):
            if state is None:
                continue
            if skipped or nonfinite:
                state.rollback()
            else:
                state.commit()
        if self._referee is not None:
            self._referee.step_ended(skipped=skipped)  # what all processes know alike
            if self._referee.begins and self._gate is not None:
                self._gate.recheck()
