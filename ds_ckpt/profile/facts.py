"""What findings are drawn from, and sums that they share with the tables. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_ckpt.profile.policies import NONE
from ds_ckpt.profile.records import OUTSIDE, Best, Compiled, Footprint, States


@dataclass(frozen=True)
class Facts:
    """What findings are drawn from.

    Attributes:
        sections: the activation section of each policy; None for the step without one.
        sdpa: the same step with attention "sdpa", where the model stores attention weights.
        trainable_count: elements of parameters that get gradients.
        modules: of a plain model's blocks.
    """

    states: States
    footprints: tuple[Footprint, ...]
    sections: Mapping[str, Mapping[str, Any] | None]
    limit_bytes: int | None
    compiled: Compiled | None
    sdpa: Footprint | None
    trainable_count: int
    modules: Any = None

    @property
    def first(self) -> Footprint:
        """No policy, at the first batch."""
        return next(f for f in self.footprints if f.policy == NONE)

    def at_first(self, policy: str) -> Footprint | None:
        """A policy's step at the first batch; None where it was not compared."""
        wanted = (policy, self.first.batch)
        return next((f for f in self.footprints if (f.policy, f.batch) == wanted), None)

    @property
    def attention(self) -> str:
        """What computes attention."""
        stored, avoided = self.first.score_bytes > 0, self.first.core_avoided_bytes > 0
        return {
            (True, True): "mixed",
            (True, False): "eager",
            (False, True): "core",
            (False, False): "none",
        }[stored, avoided]

    def config(self, policy: str) -> dict[str, Any] | None:
        section = self.sections.get(policy)
        return None if section is None else {"ds_ckpt": {"activation": dict(section)}}


def part_bytes(footprint: Footprint, part: str) -> int:
    """Of one kind of layer over all blocks; "outside": of what is held beside the blocks."""
    if part == "outside":
        return sum(b.total_bytes for b in footprint.blocks if b.name == OUTSIDE)
    found = (b for b in footprint.blocks if b.name != OUTSIDE)
    return sum(int(getattr(b, f"{part}_bytes")) for b in found)


def total_bytes(facts: Facts, footprint: Footprint) -> int:
    """What a process has at the peak: resident states and what the step makes."""
    return facts.states.resident_bytes + footprint.peak.live_bytes


def tokens_per_s(footprint: Footprint) -> float | None:
    if footprint.times is None:
        return None
    return footprint.batch * footprint.tokens / footprint.times.step_s


def best_of(facts: Facts) -> Best | None:
    """The most tokens a second under the limit; the largest batch where nothing was timed."""
    limit = facts.limit_bytes
    fits = [f for f in facts.footprints if limit is None or total_bytes(facts, f) <= limit]
    timed = [f for f in fits if f.times is not None]
    if limit is None and not timed:
        return None
    if timed:
        best = max(timed, key=lambda f: tokens_per_s(f) or 0.0)
    elif fits:
        best = max(fits, key=lambda f: (f.batch, -f.flops))
    else:
        return None
    return Best(best.policy, best.batch, total_bytes(facts, best), tokens_per_s(best))
