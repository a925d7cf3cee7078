"""Watches what compression leaves behind, and acts when validation has not seen the like.

Every so many steps each process measures what its exchange was given and what it left; two numbers
are added up over the processes, so that all of them see the same and act in the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from ds_ckpt.engine.gradients import gradient_norm
from ds_ckpt.exchange.build import Built
from ds_ckpt.telemetry.timings import Errors, ResidualStats

log = logging.getLogger("ds_ckpt")
IN_A_ROW = 2
"""Looks past a limit after which something is done: one batch may be odd."""


class LeftMeter:
    """Measures at every `every_n_steps`-th optimizer step.

    Args:
        tell: called with the step and what was measured, on every process alike. Not called where
            the step compressed nothing or was skipped.
    """

    def __init__(
        self,
        engine: Any,
        built: Built,
        every_n_steps: int,
        tell: Callable[[int, ResidualStats], None],
    ) -> None:
        self._engine, self._every, self._tell = engine, every_n_steps, tell
        self._errors, self._own = built.exchange.all_to_all.errors, Errors()
        self._errors.listeners.append(self._own)
        self._skipped = int(engine.skipped_steps)
        self._sample(int(engine.global_steps))

    def _sample(self, step: int) -> None:
        self._own.sampling = (step + 1) % self._every == 0

    def step_ended(self, step: int) -> None:
        """Collective where the step was sampled, on every process in the same steps."""
        sampled = self._own.sampling
        self._sample(step)
        energies = self._own.take_energies()
        before, self._skipped = self._skipped, int(self._engine.skipped_steps)
        if not sampled or self._skipped != before:
            return
        sums = torch.tensor(energies, dtype=torch.float64, device=self._engine.device)
        torch.distributed.all_reduce(sums, group=self._engine.optimizer.dp_process_group)
        given, remains = sums.tolist()
        norm = gradient_norm(self._engine)
        left = None if norm is None else ResidualStats.of(given, remains, norm)
        if left is not None:
            self._tell(step, left)


class Guard:
    """Holds a run to limits. `look` is what a `LeftMeter` tells.

    Args:
        limits: see `config.verdicts.limits`.
        action: `warn` or `dense`.
        speaks: whether this process writes the log.

    Attributes:
        last: what was seen last; None before.
        fallen_back: whether everything goes whole because of it.
    """

    def __init__(
        self, built: Built, limits: ResidualStats, action: Literal["warn", "dense"], *, speaks: bool
    ) -> None:
        self._fallback = built.exchange.fallback
        self._limits, self._action, self._speaks = limits, action, speaks
        self._past = 0
        self.last: ResidualStats | None = None

    @property
    def fallen_back(self) -> bool:
        """Also after a checkpoint of such a run was loaded."""
        return self._fallback.uncompressed

    def describe(self) -> str:
        """A clause for the line at the start."""
        then = {"warn": "a warning", "dense": "everything whole"}[self._action]
        named = {"error": self._limits.error, "residual norm": self._limits.residual_norm}
        limits = [f"{name} {limit:.3g}" for name, limit in named.items() if math.isfinite(limit)]
        return f"guard: {then} beyond {' or '.join(limits)}"

    def look(self, step: int, left: ResidualStats) -> None:
        """Compare, and act at the second look in a row that is past a limit."""
        self.last = left
        if self._fallback.uncompressed:
            return
        past = [
            f"{name} {value:.3g} where validation saw {limit:.3g} at most"
            for name, value, limit in (
                ("compression error", left.error, self._limits.error),
                ("residual norm", left.residual_norm, self._limits.residual_norm),
            )
            if value > limit
        ]
        self._past = self._past + 1 if past else 0
        if self._past != IN_A_ROW:
            return
        if self._action == "dense":
            self._fallback.uncompressed = True
        if self._speaks:
            then = {
                "warn": 'training goes on as it is (compression.guard.action "dense" would not)',
                "dense": "from the next step on gradients go whole, with what is owed",
            }[self._action]
            log.warning("ds_ckpt: guard: step %d: %s; %s", step, " and ".join(past), then)
