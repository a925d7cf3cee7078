"""Never slower than DeepSpeed by surprise: whole steps are held against each other, too.

The gate times exchanges. A short exchange does not make a short step: beside backward it takes
cores that backward needs, and on a fast link DeepSpeed's own reduction, which waits, can give the
shorter step. So after the gate's comparisons `COUNTED` steps are timed as the gate has them, then
as many with DeepSpeed's reduction; between the two a step goes whole, so that nothing is owed. The
processes add up their medians, so that all come to the same verdict, and keep the faster way. Every
`RECHECK` steps the two are timed anew, after the gate has timed its buckets anew: a verdict of
either must not be taken while the other tries things out. A parameter that had no gradient in the
whole step goes whole when it next has one.

Skipped steps count for nothing. Not for accumulated steps that are exchanged once: DeepSpeed's
reduction would run in every micro-step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from ds_ckpt.exchange.gate import TRIALS

log = logging.getLogger("ds_ckpt")

Way = Literal["gated", "whole", "stock"]
COUNTED = 8
"""Timed steps each way; the first step of each is not counted."""
RECHECK = 1000
"""Steps from one comparison to the next."""
SWITCH = 2 * TRIALS + 1 + COUNTED
"""The step of a comparison that goes whole."""
STEPS = SWITCH + 2 + COUNTED
"""Steps after which the first verdict stands."""


class Referee:
    """Decides step by step; equal on all processes of the group.

    Args:
        add_up: sums a small fp32 tensor over those processes, in place.
        world: how many they are.
        speaks: whether this process tells of verdicts in the log.
        clock: seconds.

    Attributes:
        stock: the last verdict; None before the first.
    """

    def __init__(
        self,
        add_up: Callable[[Tensor], None],
        *,
        world: int,
        speaks: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._add_up, self._world, self._speaks, self._clock = add_up, world, speaks, clock
        self.stock: bool | None = None
        self._steps = 0
        self._times: dict[Way, list[float]] = {"gated": [], "stock": []}
        self._device: torch.device | None = None
        self._ended_s: float | None = None
        self._owed: set[str] = set()
        """Parameters that have travelled as the gate has them and not whole since. By the schedule
        and not by residuals: with two levels only some processes may hold one."""
        self._settled: set[str] = set()

    @property
    def way(self) -> Way:
        """How this step's buckets travel: as the gate has them, all whole, by DeepSpeed."""
        turn = self._steps % RECHECK
        if turn < SWITCH:
            return "gated"
        if turn == SWITCH:
            return "whole"
        return "stock" if turn < STEPS or self.stock else "gated"

    @property
    def begins(self) -> bool:
        """Whether a comparison but the first begins with the next step that sends something."""
        return self._steps > 0 and self._steps % RECHECK == 0

    def way_of(self, names: Sequence[str]) -> Way:
        """How a bucket travels. Changes with `step_ended` only."""
        way = self.way
        return "whole" if way == "stock" and not self._owed.isdisjoint(names) else way

    def exchanged(self, names: Sequence[str], device: torch.device) -> None:
        """A bucket travels in this step as `way_of` says, on this device."""
        self._device = device
        way = self.way_of(names)
        if way == "gated":
            self._owed.update(names)
        elif way == "whole":
            self._settled.update(names)

    def step_ended(self, *, skipped: bool) -> None:
        """Count the step if anything travelled in it.

        Collective at the end of a comparison: all processes come to it in the same step.
        """
        settled, self._settled = self._settled, set()
        if self._device is None:
            return
        device, self._device = self._device, None
        before, self._ended_s = self._ended_s, self._clock()
        if skipped:
            return
        self._owed -= settled
        turn, way = self._steps % RECHECK, self.way
        self._steps += 1
        counts = SWITCH - COUNTED <= turn < SWITCH or STEPS - COUNTED <= turn < STEPS
        if counts and before is not None:
            self._times[way].append(self._ended_s - before)
        if turn == STEPS - 1:
            self._judge(device)

    def _judge(self, device: torch.device) -> None:
        """Without times, as in a process that was resumed in between, the exchange stays."""
        medians = [median(self._times[way] or [math.nan]) for way in ("gated", "stock")]
        sums = torch.tensor(medians, device=device)
        self._add_up(sums)
        gated_s, stock_s = (float(s) / self._world for s in sums)
        stock, before = stock_s < gated_s, self.stock
        self.stock, self._times = stock, {"gated": [], "stock": []}
        if self._speaks and stock != before:
            log.info(
                "ds_ckpt: gate: %s: a step takes %.1f ms with the exchange, %.1f ms with "
                "DeepSpeed's own reduction (compression.exchange.gate: false compresses all)",
                "gradients travel by DeepSpeed's own reduction" if stock else "the exchange stays",
                1e3 * gated_s,
                1e3 * stock_s,
            )

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, so that a resumed run goes on as the first would have gone on."""
        return {
            "steps": self._steps,
            "stock": self.stock,
            "gated_s": self._times["gated"],
            "stock_s": self._times["stock"],
            "owed": sorted(self._owed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what is known; a checkpoint from before there was a referee starts anew."""
        self._steps, self.stock = int(state.get("steps", 0)), state.get("stock")
        self._times = {"gated": [*state.get("gated_s", ())], "stock": [*state.get("stock_s", ())]}
        self._owed, self._settled = set(state.get("owed", ())), set()
        self._ended_s = self._device = None
