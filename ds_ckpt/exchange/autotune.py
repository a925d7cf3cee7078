"""Which of two ways makes shorter steps: how gradients travel, or where weights are gathered from.

Never slower by surprise: a short exchange does not make a short step, since beside backward it
takes cores that backward needs, and on a fast link DeepSpeed's own reduction, which waits, can give
the shorter step. So after the warm-up `COUNTED` whole steps are timed compressed, then as many the
other way; between the two a step goes uncompressed, so that nothing is owed. The processes add up
their medians and how far these can be trusted, so that all come to the same choice. Where the two
cannot be told apart, another such round is added to the times: steps often scatter more than ways
differ. After `ROUNDS` of them compression has not been shown to make steps shorter, and the other
way has them. Every `RECHECK` steps the two are timed anew. Skipped steps count for nothing.

The other way is DeepSpeed's own reduction; for accumulated steps that are exchanged once it is the
same exchange uncompressed, since DeepSpeed's would run in every micro-step. A parameter that had no
gradient in the uncompressed step goes uncompressed when it next has one.

Resident weights (`session.residence`) are held against DeepSpeed's gathers by the same rules; there
"compressed" is resident, and both others are DeepSpeed's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")

Way = Literal["compressed", "uncompressed", "deepspeed"]


class Words(NamedTuple):
    """For the line in the log: what it is about, its ways, and the setting that decides instead."""

    of: str
    compressed: str
    uncompressed: str
    deepspeed: str
    setting: str


GRADIENTS = Words(
    "gradients go",
    "compressed",
    "uncompressed",
    "by DeepSpeed's own reduction",
    "compression.exchange.autotune: false compresses always",
)
COUNTED = 8
"""Timed steps each way in a round; the first step of each is not counted."""
ROUNDS = 16
"""At most so many in a comparison."""
SURE = 3.0
"""Standard errors by which medians must differ for compression to stay, and for any choice before
the last round. They take steps to scatter independently."""
WIDE = 1.2
"""Ratio of medians from which the first round is enough. Steps in a row are more alike than others;
what that does is not in a standard error, and another round shows it."""
RECHECK = 1000
"""Steps from one comparison to the next."""
SWITCH = 1 + COUNTED
"""The step of a round that goes uncompressed."""
ROUND = SWITCH + 2 + COUNTED
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


class Autotuner:
    """Decides step by step; equal on all processes of the group.

    Args:
        add_up: sums a small fp32 tensor over those processes, in place.
        world: how many they are.
        layout: what else times depend on: how many exchange with one another, how many in all. It
            is saved with `other`; times of another one do not count.
        other: what compression is held against.
        speaks: whether this process tells of choices in the log.
        words: that it tells them in.
        clock: seconds.

    Attributes:
        choice: the last one, "compressed" or `other`; None before the first.
    """

    def __init__(
        self,
        add_up: Callable[[Tensor], None],
        *,
        world: int,
        layout: Sequence[int] = (),
        other: Literal["uncompressed", "deepspeed"] = "deepspeed",
        speaks: bool = False,
        words: Words = GRADIENTS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._add_up, self._world, self._speaks, self._clock = add_up, world, speaks, clock
        self._words = words
        self._layout: list[int | str] = [*layout, other]
        self._other: Way = other
        self.choice: Way | None
        self._steps: int
        self._rounds: int | None
        """Rounds of this comparison that told nothing; None once there is a choice."""
        self._times: tuple[list[float], list[float]]
        """Compressed, and the other way."""
        self._owed: set[str]
        """Parameters that have travelled compressed and not uncompressed since. By what was sent
        and not by residuals: with two levels only some processes may hold one."""
        self._sent: dict[str, Way]
        self._ended_s: float | None
        self._device: torch.device | None
        self.load_state_dict({})

    @property
    def _turn(self) -> int:
        """Where a comparison is; as in its first round in every other."""
        return self._steps % RECHECK - ROUND * (self._rounds or 0)

    @property
    def comparing(self) -> bool:
        """Whether steps are being timed."""
        return self._rounds is not None

    @property
    def way(self) -> Way:
        """How this step's gradients travel."""
        if self._rounds is None:
            return self.choice or "compressed"
        if self._turn == SWITCH:
            return "uncompressed"
        return "compressed" if self._turn < SWITCH else self._other

    def way_of(self, names: Sequence[str]) -> Way:
        """How the bucket of these parameters travels. Changes with `step_ended` only."""
        way = self.way
        owed = way == "deepspeed" and not self._owed.isdisjoint(names)
        return "uncompressed" if owed else way

    def exchanged(self, names: Sequence[str], device: torch.device) -> None:
        """A bucket travels in this step as `way_of` says, on this device."""
        self._device = device
        self._sent.update(dict.fromkeys(names, self.way_of(names)))

    def warmed_up(self, names: Sequence[str]) -> None:
        """A bucket travels in few bits in a warm-up, whose steps are not timed."""
        self._owed.update(names)

    def step_ended(self, *, skipped: bool) -> None:
        """Count the step if anything travelled in it.

        Collective at the end of a round: all processes come to it in the same step.
        """
        sent, self._sent = self._sent, {}
        if not sent:
            return
        before, self._ended_s = self._ended_s, self._clock()
        if skipped:
            return
        self._owed |= {name for name, way in sent.items() if way == "compressed"}
        self._owed -= {name for name, way in sent.items() if way == "uncompressed"}
        if self._rounds is not None:
            turn = self._turn
            if turn not in (0, SWITCH, SWITCH + 1) and before is not None:
                self._times[turn > SWITCH].append(self._ended_s - before)
            if turn == ROUND - 1:
                self._judge()
        self._steps += 1
        if self._steps % RECHECK == 0:
            self._rounds = 0

    def interrupted(self) -> None:
        """What comes between does not count, nor does the next step, which has no beginning."""
        self._ended_s = None

    def _judge(self) -> None:
        """Make a choice, or begin another round.

        Without times, as in a process that was resumed in between, compression stays.
        """
        assert self._rounds is not None
        medians = [middle(times) for times in self._times]
        own = torch.tensor(medians, dtype=torch.float32, device=self._device)
        self._add_up(own)
        (ours_s, ours_variance), (other_s, other_variance) = (own / self._world).tolist()
        error_s = math.sqrt(ours_variance + other_variance)
        gap_s = abs(ours_s - other_s)
        told_apart = not gap_s <= SURE * error_s  # so is NaN from anything, and wide
        wide = not gap_s < (WIDE - 1.0) * min(ours_s, other_s)
        self._rounds += 1
        if self._rounds < (ROUNDS if not told_apart else 1 if wide else 2):
            return
        before = self.choice
        self.choice = self._other if other_s < ours_s or not told_apart else "compressed"
        self._rounds, self._times = None, ([], [])
        if self._speaks and self.choice != before:
            log.info(
                "ds_ckpt: autotune: %s %s: a step takes %.1f ms %s, %.1f ms %s%s (%s)",
                self._words.of,
                getattr(self._words, self.choice),
                1e3 * ours_s,
                self._words.compressed,
                1e3 * other_s,
                getattr(self._words, self._other),
                "" if told_apart else ", which cannot be told apart",
                self._words.setting,
            )

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, so that a resumed run goes on as the first would have gone on."""
        return {
            "layout": self._layout,
            "steps": self._steps,
            "rounds": self._rounds,
            "choice": self.choice,
            "times_s": list(self._times),
            "owed": sorted(self._owed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what is known. Another layout compares anew, and keeps the choice until then."""
        self._owed, self._sent = set(state.get("owed", ())), {}
        self._ended_s = self._device = None
        self.choice = state.get("choice")
        self._steps, self._rounds, self._times = 0, 0, ([], [])
        if state.get("layout") == self._layout:
            ours, other = state["times_s"]
            self._steps, self._rounds = state["steps"], state["rounds"]
            self._times = [*ours], [*other]
