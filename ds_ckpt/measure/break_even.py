"""The rates at which compression pays for all recomputation, and above which it costs time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_ckpt.measure.derive import Figures


@dataclass(frozen=True)
class BreakEven:
    """The rate at which compression pays for all recomputation; None: none between two measured."""

    policy: str
    baseline: str
    method: str
    sequences: int
    pays_for_recompute_mbit: float | None
    frees_nothing_mbit: float | None
    """Above it compression costs more time than it saves."""


def break_even(figures: Sequence[Figures]) -> list[BreakEven]:
    """One for each policy, baseline, method and batch that has rates."""
    groups: dict[tuple[str, str, str, int], list[Figures]] = {}
    for one in figures:
        if one.rate_mbit is not None:
            key = (one.policy, one.baseline, one.method, one.sequences)
            groups.setdefault(key, []).append(one)
    found = []
    for key, group in groups.items():
        ordered = sorted(group, key=lambda f: f.rate_mbit or 0.0)
        rates = [f.rate_mbit or 0.0 for f in ordered]
        paid = [f.values["share_paid"].value - 1 for f in ordered]
        freed = [f.values["time_freed_s"].value for f in ordered]
        found.append(BreakEven(*key, crossing(rates, paid), crossing(rates, freed)))
    return found


def crossing(rates: Sequence[float], values: Sequence[float]) -> float | None:
    """The rate at which values fall through 0, on a line over the logarithm of the rate."""
    for (r0, v0), (r1, v1) in zip(
        zip(rates, values, strict=True), list(zip(rates, values, strict=True))[1:], strict=False
    ):
        if v0 >= 0 > v1:
            return float(r0 * (r1 / r0) ** (v0 / (v0 - v1)))
    return None
