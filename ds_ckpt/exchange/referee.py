"""Never slower than DeepSpeed by surprise: whole steps are held against each other, too.

The gate times exchanges. A short exchange does not make a short step: beside backward it takes
cores that backward needs, and on a fast link DeepSpeed's own reduction, which waits, can give the
shorter step. So after the gate's comparisons `COUNTED` steps are timed as the gate has them, then
as many with DeepSpeed's reduction; between the two a step goes whole, so that nothing is owed. The
processes add up their medians and how far these can be trusted, so that all come to the same
verdict. Where the two cannot be told apart, another such round is added to the times: steps often
scatter more than ways differ. On a slow link one round does; it takes many where the ways are close
or steps scatter much. After `ROUNDS` of them the exchange has not been shown to make steps shorter,
and DeepSpeed's reduction has them.

Every `RECHECK` steps the two are timed anew, after the gate has timed its buckets anew: a verdict
of either must not be taken while the other tries things out. A parameter that had no gradient in
the whole step goes whole when it next has one.

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
"""Timed steps each way in a round; the first step of each is not counted."""
ROUNDS = 16
"""At most so many in a comparison."""
SURE = 3.0
"""Standard errors by which medians must differ for the exchange to stay, and for any verdict before
the last round. They take steps to scatter independently."""
WIDE = 1.2
"""Ratio of medians from which the first round is enough. Steps in a row are more alike than others;
what that does is not in a standard error, and another round shows it."""
RECHECK = 1000
"""Steps from one comparison to the next."""
SWITCH = 2 * TRIALS + 1 + COUNTED
"""The step of a comparison that goes whole in its first round."""
STEPS = SWITCH + 2 + COUNTED
"""Steps after which the first verdict stands, where one round does."""
ROUND = STEPS - 2 * TRIALS
"""Steps of a round."""


def middle(times: Sequence[float]) -> tuple[float, float]:
    """The median and the variance of its error, for values around it that are about normal.

    The variance is pi / 2 times that of a mean; the spread is taken from the median distance to the
    median, times 1.4826 (Rousseeuw and Croux, JASA 1993), so that a pause does not count. NaN for
    no values.
    """
    if not times:
        return math.nan, math.nan
    at = median(times)
    spread = 1.4826 * median(abs(t - at) for t in times)
    return at, math.pi / 2 * spread**2 / len(times)


class Referee:
    """Decides step by step; equal on all processes of the group.

    Args:
        add_up: sums a small fp32 tensor over those processes, in place.
        world: how many they are.
        layout: see `Gate`; times of another one do not count.
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
        layout: Sequence[int] = (),
        speaks: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._add_up, self._world, self._speaks, self._clock = add_up, world, speaks, clock
        self._layout = [*layout]
        self.stock: bool | None = None
        self._steps = 0
        self._rounds: int | None = 0
        """Rounds of this comparison that told nothing; None once there is a verdict."""
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
        if self._rounds is None:
            return "stock" if self.stock else "gated"
        if self._turn == SWITCH:
            return "whole"
        return "gated" if self._turn < SWITCH else "stock"

    @property
    def _turn(self) -> int:
        """Where a comparison is; as in its first round in every other."""
        return self._steps % RECHECK - ROUND * (self._rounds or 0)

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
        if self._rounds is not None:
            turn = self._turn
            counts = SWITCH - COUNTED <= turn < SWITCH or turn >= STEPS - COUNTED
            if counts and before is not None:
                self._times[self.way].append(self._ended_s - before)
            if turn == STEPS - 1:
                self._judge(device)
        self._steps += 1
        if self.begins:
            self._rounds = 0

    def _judge(self, device: torch.device) -> None:
        """A verdict or another round.

        Without times, as in a process that was resumed in between, the exchange stays.
        """
        assert self._rounds is not None
        own = torch.tensor([middle(self._times[way]) for way in ("gated", "stock")], device=device)
        self._add_up(own)
        (gated_s, gated_variance), (stock_s, stock_variance) = (own / self._world).tolist()
        error_s = math.sqrt(gated_variance + stock_variance)
        gap_s = abs(gated_s - stock_s)
        told_apart = not gap_s <= SURE * error_s  # so is NaN from anything, and wide
        wide = not gap_s < (WIDE - 1.0) * min(gated_s, stock_s)
        self._rounds += 1
        if self._rounds < (ROUNDS if not told_apart else 1 if wide else 2):
            return
        stock, before = stock_s < gated_s or not told_apart, self.stock
        self.stock, self._rounds, self._times = stock, None, {"gated": [], "stock": []}
        if self._speaks and stock != before:
            log.info(
                "ds_ckpt: gate: %s: a step takes %.1f ms with the exchange, %.1f ms with "
                "DeepSpeed's own reduction%s (compression.exchange.gate: false compresses all)",
                "gradients travel by DeepSpeed's own reduction" if stock else "the exchange stays",
                1e3 * gated_s,
                1e3 * stock_s,
                "" if told_apart else ", which cannot be told apart",
            )

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, so that a resumed run goes on as the first would have gone on."""
        return {
            "layout": self._layout,
            "steps": self._steps,
            "rounds": self._rounds,
            "stock": self.stock,
            "gated_s": self._times["gated"],
            "stock_s": self._times["stock"],
            "owed": sorted(self._owed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what is known.

        A checkpoint from before there was a referee starts anew; one from before there were rounds
        had one. Another layout compares anew and keeps the verdict until then; so does one from
        when the number of processes stood in its place.
        """
        self._steps, self.stock = int(state.get("steps", 0)), state.get("stock")
        self._rounds = state.get("rounds", 0 if self._steps % RECHECK < STEPS else None)
        self._times = {"gated": [*state.get("gated_s", ())], "stock": [*state.get("stock_s", ())]}
        self._owed, self._settled = set(state.get("owed", ())), set()
        self._ended_s = self._device = None
        if state.get("layout", state.get("world", self._layout)) != self._layout:
            self._steps = self._rounds = 0
            self._times = {"gated": [], "stock": []}
