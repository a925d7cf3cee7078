"""Samples compression errors, and acts when they exceed what validation has measured.

Every few steps each rank measures what its exchange was given and what it left out. Two numbers are
summed over the ranks, so all of them compare the same and act in the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ds_ckpt.engine.gradients import gradient_norm
from ds_ckpt.engine.step import StepState
from ds_ckpt.telemetry.timings import Errors, ResidualStats

log = logging.getLogger("ds_ckpt")
IN_A_ROW = 2
"""Consecutive samples above a limit before the guard acts: one batch may be an outlier."""
Energies = Mapping[str, tuple[float, float]]
"""Squared norms of what this rank's exchange was given and of what it left out, by method."""


class ErrorSampler:
    """Measures compression errors in the steps that any consumer has subscribed to.

    Attributes:
        latest: of the last step; empty if it was not sampled.
    """

    def __init__(self, engine: Any, errors: Errors) -> None:
        self._engine, self._errors = engine, errors
        self._consumers: list[tuple[int, Callable[[int, Energies], None]]] = []
        self._skipped = int(engine.skipped_steps)
        self.latest: Energies = {}

    def subscribe(
        self, every_n_steps: int, act: Callable[[int, Energies], None] = lambda step, energies: None
    ) -> None:
        """Sample every so many optimizer steps, and call `act` after each that was not skipped."""
        self._consumers.append((every_n_steps, act))
        self._plan(int(self._engine.global_steps))

    def observe(self, every_n_steps: int, act: Callable[[int, ResidualStats], None]) -> None:
        """Call `act` with the statistics of all ranks. Collective: every rank observes the same.

        Steps that were skipped or compressed nothing are left out.
        """

        def sum_and_act(step: int, energies: Energies) -> None:
            own = [sum(part) for part in zip((0.0, 0.0), *energies.values(), strict=True)]
            sums = torch.tensor(own, dtype=torch.float64, device=self._engine.device)
            torch.distributed.all_reduce(sums, group=self._engine.optimizer.dp_process_group)
            given, remains = sums.tolist()
            norm = gradient_norm(self._engine)
            found = None if norm is None else ResidualStats.of(given, remains, norm)
            if found is not None:
                act(step, found)

        self.subscribe(every_n_steps, sum_and_act)

    def _plan(self, step: int) -> None:
        self._errors.sampling = any((step + 1) % every == 0 for every, _ in self._consumers)

    def step_ended(self, step: int) -> None:
        """Deliver the step's energies, and decide about the next step."""
        sampled, self.latest = self._errors.sampling, self._errors.take_sums()
        self._plan(step)
        before, self._skipped = self._skipped, int(self._engine.skipped_steps)
        if not sampled or self._skipped != before:
            return
        for every, act in self._consumers:
            if step % every == 0:
                act(step, self.latest)


class Guard:
    """Compares a run with limits; `check` is given the statistics of all ranks.

    Args:
        step: its compression is disabled by action "dense".
        limits: see `config.verdicts.limits`.
        action: `warn` or `dense`.
        is_logging_rank: whether this rank logs.

    Attributes:
        last: the last statistics; None before the first.
    """

    def __init__(
        self,
        step: StepState,
        limits: ResidualStats,
        action: Literal["warn", "dense"],
        *,
        is_logging_rank: bool,
    ) -> None:
        self._step, self._limits, self._action = step, limits, action
        self._is_logging_rank = is_logging_rank
        self._exceeded = 0
        self.last: ResidualStats | None = None

    @property
    def fallen_back(self) -> bool:
        """Return whether compression is disabled, also by a loaded checkpoint of such a run."""
        return self._step.is_disabled

    def describe(self) -> str:
        """Return a clause for the line at the start."""
        then = {"warn": "a warning", "dense": "everything uncompressed"}[self._action]
        named = {"error": self._limits.error, "residual norm": self._limits.residual_norm}
        limits = [f"{name} {limit:.3g}" for name, limit in named.items() if math.isfinite(limit)]
        return f"guard: {then} above {' or '.join(limits)}"

    def check(self, step: int, found: ResidualStats) -> None:
        """Compare, and act at the second consecutive sample above a limit."""
        self.last = found
        if self.fallen_back:
            return
        above = [
            f"{name} {value:.3g}, expected at most {limit:.3g}"
            for name, value, limit in (
                ("compression error", found.error, self._limits.error),
                ("residual norm", found.residual_norm, self._limits.residual_norm),
            )
            if value > limit
        ]
        self._exceeded = self._exceeded + 1 if above else 0
        if self._exceeded != IN_A_ROW:
            return
        if self._action == "dense":
            self._step.is_disabled = True
        if self._is_logging_rank:
            then = {
                "warn": 'training goes on unchanged (compression.guard.action "dense" would '
                "disable compression)",
                "dense": "from the next step on gradients are sent uncompressed, plus residuals",
            }[self._action]
            log.warning("ds_ckpt: guard: step %d: %s; %s", step, " and ".join(above), then)
