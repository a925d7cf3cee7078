"""Samples compression errors, and acts when they exceed what validation has measured.

Sums over the ranks are compared, so all of them act in the same step.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_ckpt.deprecation import FormerAttribute
from ds_ckpt.engine.step import StepState
from ds_ckpt.errors import log
from ds_ckpt.telemetry.timings import Errors, ResidualStats

IN_A_ROW = 2
"""Consecutive samples above a limit before the guard acts: one batch may be an outlier."""
Observer = Callable[[int, ResidualStats], None]


def gradient_norm(engine: Any) -> float | None:
    """Return the norm of the last step's averaged gradient, as DeepSpeed's clipping computes it.

    None if it is 0, not finite, or not known yet.
    """
    norm = engine.get_global_grad_norm()
    return float(norm) if norm is not None and math.isfinite(norm) and norm > 0 else None


class ErrorSampler:
    """Measures compression errors every so many optimizer steps.

    By method, `latest` has squared norms of the last step's input and of the part left out, on this
    rank. It is empty if that step was not sampled.
    """

    def __init__(self, engine: Any, errors: Errors) -> None:
        self._engine, self._errors = engine, errors
        self._observers: list[tuple[int, Observer | None]] = []
        self._skipped = int(engine.skipped_steps)
        self.latest: Mapping[str, tuple[float, float]] = {}

    def observe(self, every_n_steps: int, act: Observer | None = None) -> None:
        """Sample every so many steps, and call `act` with the statistics of all ranks.

        Collective: every rank observes the same. Steps that were skipped or compressed nothing are
        left out.
        """
        self._observers.append((every_n_steps, act))
        self._plan(int(self._engine.global_steps))

    def _plan(self, step: int) -> None:
        self._errors.sampling = any((step + 1) % every == 0 for every, _ in self._observers)

    def step_ended(self, step: int) -> None:
        """Call the observers of the step, and decide about the next step."""
        self.latest = self._errors.take_sums()
        self._plan(step)
        before, self._skipped = self._skipped, int(self._engine.skipped_steps)
        acts = [act for every, act in self._observers if act is not None and step % every == 0]
        if not acts or self._skipped != before:
            return
        own = [sum(part) for part in zip((0.0, 0.0), *self.latest.values(), strict=True)]
        sums = torch.tensor(own, dtype=torch.float64, device=self._engine.device)
        torch.distributed.all_reduce(sums)
        given, remains = sums.tolist()
        found = ResidualStats.of(given, remains, gradient_norm(self._engine) or 0.0)
        if found is not None:
            for act in acts:
                act(step, found)


class Guard:
    """Compares a run with limits; `check` is given the statistics of all ranks, kept in `last`.

    If it `acts` it disables the compression of `step`, else it warns.
    """

    fallen_back = FormerAttribute("step.is_disabled", "guard")

    def __init__(self, step: StepState, limits: ResidualStats, *, acts: bool, logs: bool) -> None:
        self.step, self._limits, self._acts, self._logs = step, limits, acts, logs
        self._exceeded = 0
        self.last: ResidualStats | None = None

    def check(self, step: int, found: ResidualStats) -> None:
        """Compare, and act at the second consecutive sample above a limit."""
        self.last, limits = found, self._limits
        is_above = found.error > limits.error or found.residual_norm > limits.residual_norm
        self._exceeded = self._exceeded + 1 if is_above else 0
        if self._exceeded != IN_A_ROW or self.step.is_disabled:
            return
        self.step.is_disabled = self._acts
        if self._logs:
            log.warning(
                "ds_ckpt: guard: step %d: compression error %.3g, expected at most %.3g; residual "
                "norm %.3g, expected at most %.3g; %s",
                *(step, found.error, limits.error, found.residual_norm, limits.residual_norm),
                "gradients are sent uncompressed from the next step on"
                if self._acts
                else 'action "dense" would disable compression',
            )
