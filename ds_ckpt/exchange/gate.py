"""Never slower by surprise: a bucket goes whole where compressing it takes longer than sending it.

The first `TRIALS` exchanges of a bucket are made whole, the next `TRIALS` compressed, and timed
from the gradients to this process's shard: adding to the residual, selecting, the wire, summing.
The processes then add up their medians, so that all come to the same verdict, and the faster way is
kept. Every `RECHECK` exchanges, or when it is told to, the two are timed anew: links and machines
change. Exchanges of a skipped step count for nothing: one that meets an overflow may be cut short.

A bucket that goes whole takes what is owed to it along; nothing is lost by a verdict.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")

TRIALS = 4
"""Timed exchanges of a bucket each way, one after another, so that each runs as it would run for
good: the first, which takes along what the other way owes or allocates, is not counted."""
RECHECK = 1000
"""Exchanges of a bucket from one comparison to the next."""
MOST_BUCKETS = 1024
"""Of so many the times are kept."""


@dataclass
class Verdict:
    """What is known of one bucket.

    Attributes:
        whole: whether it goes whole; None until the comparison is over.
        compressed_s, whole_s: medians in seconds, means over the processes, of the last comparison.
    """

    whole: bool | None = None
    compressed_s: float = 0.0
    whole_s: float = 0.0
    visits: int = 0
    times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def copy(self) -> Verdict:
        """Another one with the same values."""
        return replace(self, times={whole: [*times] for whole, times in self.times.items()})

    def compares_anew(self) -> None:
        """The next exchange is the first of a comparison."""
        self.visits, self.times = 0, {True: [], False: []}


class Gate:
    """Decides bucket by bucket; equal on all processes that exchange with one another.

    Args:
        add_up: sums a small fp32 tensor over those processes, in place.
        world: how many they are.
        layout: how many exchange with one another and how many there are in all. It is saved: a
            gate of another layout has its buckets compared anew.
        speaks: whether this process tells of verdicts in the log.
        rechecks: time anew every `RECHECK` exchanges; else at `recheck` alone.
    """

    def __init__(
        self,
        add_up: Callable[[Tensor], None],
        *,
        world: int,
        layout: Sequence[int] = (),
        speaks: bool = False,
        rechecks: bool = True,
    ) -> None:
        self._add_up = add_up
        self._world = world
        self._layout = [*layout]
        self._speaks = speaks
        self._rechecks = rechecks
        self._told: tuple[int, int] | None = None
        self.verdicts: dict[str, Verdict] = {}
        self._before: dict[str, Verdict] = {}
        """What this step's exchanges have changed, as it was."""

    def sends_whole(self, names: Sequence[str]) -> bool:
        """How the bucket of these parameters travels this time."""
        key = _key(names)
        if key not in self.verdicts and len(self.verdicts) >= MOST_BUCKETS:
            return False  # buckets that differ from step to step are never seen often enough
        verdict = self.verdicts.setdefault(key, Verdict())
        in_turn = self._in_turn(verdict)
        if in_turn < 2 * TRIALS:
            return in_turn < TRIALS
        return bool(verdict.whole)

    def recheck(self) -> None:
        """Time every bucket anew from its next exchange on; on all processes in the same step."""
        for verdict in self.verdicts.values():
            verdict.compares_anew()

    def _in_turn(self, verdict: Verdict) -> int:
        return verdict.visits % RECHECK if self._rechecks else verdict.visits

    def took(self, names: Sequence[str], whole: bool, seconds: float, device: torch.device) -> None:
        """Note what the exchange took that `sends_whole` has just been asked about.

        Collective at the end of a comparison: all processes that exchange come to it together.
        """
        key = _key(names)
        verdict = self.verdicts.get(key)
        if verdict is None:
            return
        if key not in self._before:
            self._before[key] = verdict.copy()
        in_turn = self._in_turn(verdict)
        verdict.visits += 1
        if in_turn >= 2 * TRIALS:
            return
        if in_turn % TRIALS:
            verdict.times[whole].append(seconds)
        if in_turn == 2 * TRIALS - 1:
            sums = torch.tensor(
                [median(verdict.times[False]), median(verdict.times[True])], device=device
            )
            self._add_up(sums)
            verdict.compressed_s, verdict.whole_s = (float(s) / self._world for s in sums)
            verdict.whole = verdict.compressed_s > verdict.whole_s
            verdict.times = {True: [], False: []}
            self._tell()

    def commit(self) -> None:
        """The step was taken: its times count."""
        self._before.clear()

    def rollback(self) -> None:
        """The step was skipped: it counts for nothing."""
        self.verdicts.update(self._before)
        self._before.clear()

    @property
    def dense_buckets(self) -> int:
        """Buckets that go whole because compressing them would take longer."""
        return sum(bool(v.whole) for v in self.verdicts.values())

    def _tell(self) -> None:
        """Once all buckets are decided, and again when that changes."""
        decided = [v for v in self.verdicts.values() if v.whole is not None]
        counts = self.dense_buckets, len(decided)
        if not self._speaks or len(decided) < len(self.verdicts) or counts == self._told:
            return
        self._told = counts
        log.info(
            "ds_ckpt: gate: %d of %d buckets go whole; compressed they took %.1f ms in all, "
            "whole %.1f ms (compression.exchange.gate: false compresses all)",
            *counts,
            1e3 * sum(v.compressed_s for v in decided),
            1e3 * sum(v.whole_s for v in decided),
        )

    def state_dict(self) -> dict[str, Any]:
        """Verdicts as JSON values, so that a resumed run sends what the first would have sent."""
        verdicts = {
            key: [v.whole, v.compressed_s, v.whole_s, v.visits, v.times[False], v.times[True]]
            for key, v in self.verdicts.items()
        }
        return {"layout": self._layout, **verdicts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all verdicts.

        A gate that compares at other times may have saved a place amid a comparison of this one
        but not its times: such a bucket is compared anew. So is every bucket of another layout.
        An older checkpoint has the number of processes in its place, which is no layout either, or
        neither, and then goes on.
        """
        self._before.clear()
        verdicts = dict(state)
        world = verdicts.pop("world", self._layout)
        layout = verdicts.pop("layout", world)
        self.verdicts = {
            key: Verdict(whole, compressed_s, whole_s, visits, {False: [*slow], True: [*fast]})
            for key, (whole, compressed_s, whole_s, visits, slow, fast) in verdicts.items()
        }
        if layout != self._layout:
            self.recheck()
        for verdict in self.verdicts.values():
            in_turn = self._in_turn(verdict)
            due = {True: min(in_turn, TRIALS) - 1, False: in_turn - TRIALS - 1}
            if in_turn < 2 * TRIALS and any(
                len(verdict.times[whole]) != max(times, 0) for whole, times in due.items()
            ):
                verdict.compares_anew()


def _key(names: Sequence[str]) -> str:
    """A bucket by its parameters."""
    return f"{len(names)}:{zlib.crc32(chr(0).join(names).encode()):08x}"
