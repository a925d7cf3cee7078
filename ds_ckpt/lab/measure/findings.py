"""Rows, comparisons and intervals from a run's samples. Pure.

Steps of one trial follow each other and share their disturbances; repetitions are apart in time.
Intervals are therefore a jackknife over repetitions: each figure is computed again without each
repetition, for all configurations at once. The effect of a slow repetition on both
sides of a comparison cancels.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from ds_ckpt.lab.measure.figures import DERIVED, MEASURED, Comparison, Estimate, Row
from ds_ckpt.lab.measure.parts import PARTS
from ds_ckpt.lab.measure.samples import Memory, Sample, Trial
from ds_ckpt.lab.measure.spec import DENSE, Configuration, Spec, link
from ds_ckpt.lab.report.charts import missing as missing_package
from ds_ckpt.telemetry.units import number

Key = TypeVar("Key")


@dataclass(frozen=True)
class ComparisonRow:
    """Derived figures of a policy and an exchange at one rate, compared with `dense`."""

    rate_mbit: float | None
    policy: str
    method: str
    values: dict[str, Estimate]


@dataclass(frozen=True)
class Findings:
    """Results of a run. `missing` lists what was planned and not measured."""

    spec: Spec
    rows: list[Row]
    comparisons: list[ComparisonRow]
    missing: list[str]

    @property
    def rates(self) -> list[float | None]:
        """Rates with a complete repetition."""
        return list(dict.fromkeys(row.rate_mbit for row in self.rows))

    def at(self, rate: float | None) -> list[Row]:
        """Return the rows of one rate."""
        return [row for row in self.rows if row.rate_mbit == rate]

    def content(self) -> dict[str, Any]:
        """Return the content of report.json."""
        rows = [
            {
                **asdict(Configuration.of(row.configuration)),
                **asdict(row),
                **{one.name: one.of(row) for one in MEASURED},
            }
            for row in self.rows
        ]
        return {"rows": rows, "comparisons": self.comparisons, "missing": self.missing}


def find(spec: Spec, samples: Sequence[Sample]) -> Findings:
    """Evaluate the samples; rates without a complete repetition are left out."""
    peaks = {s.policy: float(s.peak_bytes) for s in samples if isinstance(s, Memory)}
    rows: list[Row] = []
    comparisons: list[ComparisonRow] = []
    missing: list[str] = []
    for rate in spec.rates:
        trials: dict[str, dict[int, Trial]] = {one.name: {} for one in spec.configurations}
        for sample in samples:
            if isinstance(sample, Trial) and sample.rate_mbit == rate:
                trials[sample.configuration][sample.repetition] = sample
        numbers = sorted(set.intersection(*(set(numbered) for numbered in trials.values())))
        if len(numbers) < spec.repetitions:
            missing.append(f"{link(rate)}: {len(numbers)} of {spec.repetitions} repetitions")
        if not numbers:
            continue
        rows_of = functools.partial(_rows, spec, trials, peaks)
        values = estimate(numbers, functools.partial(_values, spec, rows_of))
        rows += [replace(r, step_s=values[n, "step_s"]) for n, r in rows_of(numbers).items()]
        for one in spec.compared:
            mine = {f.name: e for f in DERIVED if (e := values.get((one.name, f.name)))}
            comparisons.append(ComparisonRow(rate, one.policy, one.exchange, mine))
    return Findings(spec, rows, comparisons, missing)


def _rows(
    spec: Spec,
    trials: Mapping[str, Mapping[int, Trial]],
    peaks: Mapping[str, float],
    chosen: Sequence[int],
) -> dict[str, Row]:
    return {name: _row(spec, [mine[n] for n in chosen], peaks) for name, mine in trials.items()}


def _row(spec: Spec, trials: Sequence[Trial], peaks: Mapping[str, float]) -> Row:
    """Return medians of bytes, and means over the steps in the middle half, so parts add up."""
    ordered = sorted((s for t in trials for s in t.steps), key=lambda step: step.step_s)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    step_s = statistics.fmean(step.step_s for step in middle)

    def medians(values: Sequence[Mapping[str, float]], by: int = 1) -> dict[str, float]:
        return {n: statistics.median(one[n] for one in values) / by for n in values[0]}

    name = trials[0].configuration
    return Row(
        configuration=name,
        rate_mbit=trials[0].rate_mbit,
        tokens=spec.step_tokens,
        step_s=Estimate(step_s, step_s, step_s),
        parts_s={part: statistics.fmean(s.parts_s[part] for s in middle) for part in PARTS},
        purpose_bytes=medians([t.purpose_bytes for t in trials]),
        far_bytes=medians([t.far_bytes for t in trials], spec.hosts),
        link_bytes=max(map(statistics.median, zip(*(t.link_bytes for t in trials), strict=True))),
        interface_bytes=statistics.median(t.interface_bytes for t in trials),
        stored_weight_bytes=trials[0].stored_weight_bytes,
        peak_bytes=peaks.get(Configuration.of(name).policy),
    )


def _values(
    spec: Spec, rows_of: Callable[[Sequence[int]], Mapping[str, Row]], chosen: Sequence[int]
) -> dict[tuple[str, str], float]:
    """Return every figure that has an interval, by configuration and figure."""
    rows = rows_of(chosen)
    found: dict[tuple[str, str], float] = {}
    for name, row in rows.items():
        found[name, "step_s"] = row.step_s.value
    for one in spec.compared:
        comparison = Comparison(rows, one.policy, one.exchange)
        for figure in DERIVED:
            if isinstance(value := figure.of(comparison), float):
                found[one.name, figure.name] = value
    return found


def estimate(
    numbers: Sequence[int], figures: Callable[[Sequence[int]], Mapping[Key, float]]
) -> dict[Key, Estimate]:
    """Estimate figures from the repetitions `numbers`, with Student's interval of the jackknife."""
    values, count = figures(numbers), len(numbers)
    if count < 2:
        return {key: Estimate(value, value, value) for key, value in values.items()}
    try:
        from scipy.stats import t
    except ImportError as error:
        raise missing_package("scipy") from error
    quantile = float(t.ppf(0.975, count - 1))
    others = [figures([n for n in numbers if n != left_out]) for left_out in numbers]
    found = {}
    for key, value in values.items():
        mean = statistics.fmean(other[key] for other in others)
        spread = sum((other[key] - mean) ** 2 for other in others) * (count - 1) / count
        half = quantile * math.sqrt(spread)
        found[key] = Estimate(value, value - half, value + half)
    return found


def headline(findings: Findings) -> str:
    """Summarize the run in one sentence: the first method at the first rate."""
    if not findings.comparisons:
        return "No comparison: it needs a policy beside none and a method beside the references."
    one = findings.comparisons[0]
    faster, cost = one.values["faster"], one.values["recompute_s"]
    ratio = f"{number(faster.value)}x ({number(faster.low)} to {number(faster.high)})"
    if faster.low > 1:
        result = f"steps are {ratio} as fast as with {DENSE} gradients"
    elif faster.high < 1:
        result = f"steps are SLOWER, {ratio} as fast as with {DENSE} gradients"
    else:
        result = f"the speedup over {DENSE} gradients, {ratio}, is not significant"
    return (
        f"{link(one.rate_mbit)}, {one.policy} checkpointing, {one.method}: {result}. Compression "
        f"saves {number(one.values['time_freed_s'].value)} s per step, recomputation adds "
        f"{number(cost.value)} s."
    )
