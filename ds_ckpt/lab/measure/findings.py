"""Rows, comparisons and intervals from a run's samples. Pure.

Steps of one trial follow each other and share their disturbances; repetitions are apart in time.
Intervals therefore resample repetitions (jackknife): each figure is computed again without each
repetition, for all configurations at once. The effect of a slow repetition on both sides of a
comparison cancels.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from ds_ckpt.lab.measure.figures import (
    DERIVED,
    MEASURED,
    TOLERANCE,
    Comparison,
    Estimate,
    Figure,
    Ratio,
    Row,
    middle_half,
)
from ds_ckpt.lab.measure.samples import PARTS, Memory, Sample, Trial
from ds_ckpt.lab.measure.spec import MIN_REPETITIONS, Configuration, Spec, link, title
from ds_ckpt.lab.report.charts import missing_package_error
from ds_ckpt.telemetry.units import MB, number

Key = TypeVar("Key")
_FIGURES: dict[str, Figure[Any]] = {one.name: one for one in [*list[Any](MEASURED), *DERIVED]}
ComparisonOutcome = Literal["share", "all", "none", "free", "busy", "few"]


@dataclass(frozen=True)
class ComparisonRow:
    """Derived figures of a policy and an exchange at one rate, compared with `dense`."""

    rate_mbit: float | None
    policy: str
    method: str
    values: dict[str, Estimate]
    is_checked: bool = True

    @property
    def outcome(self) -> ComparisonOutcome:
        """Return the result: the part of recomputation's time that compression pays for.

        `share`, `all`, or `none` that is significant. If recomputation's cost is not significant,
        it is `free`: the interval excludes its own work. Else the machine is too `busy`. `few`
        repetitions have no interval.
        """
        cost, work = self.values["cost_s"], self.values["work_s"].value
        if math.isnan(cost.low):
            return "few"
        if math.isnan(self.values["share_paid"].low):
            return "busy" if 0 < work <= cost.high else "free"
        if self.values["shorter_s"].low <= 0:
            return "none"
        return "all" if self.values["change_s"].high < 0 else "share"


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
        estimates = jackknife(numbers, functools.partial(_values, spec, rows_of))
        values = {key: _FIGURES[key[1]].bounded(one) for key, one in estimates.items()}
        found = {
            n: replace(row, step_s=values[n, "step_s"], link_bytes=values[n, "link_bytes"])
            for n, row in rows_of(numbers).items()
        }
        rows += found.values()
        for one in spec.compared:
            mine = {f.name: e for f in DERIVED if (e := values.get((one.name, f.name)))}
            comparison = Comparison.of(found, one)
            checked = comparison.reference.is_checked and comparison.compared.is_checked
            comparisons.append(ComparisonRow(rate, one.policy, one.exchange, mine, checked))
    return Findings(spec, rows, comparisons, missing)


def _rows(
    spec: Spec,
    trials: Mapping[str, Mapping[int, Trial]],
    peaks: Mapping[str, float],
    chosen: Sequence[int],
) -> dict[str, Row]:
    return {name: _row(spec, [mine[n] for n in chosen], peaks) for name, mine in trials.items()}


def _row(spec: Spec, trials: Sequence[Trial], peaks: Mapping[str, float]) -> Row:
    """Return means; of parts over the steps in the middle half, so that they add up."""
    steps = [step for trial in trials for step in trial.steps]
    middle = middle_half(sorted(steps, key=lambda step: step.step_s))
    step_s = statistics.fmean(step.step_s for step in middle)

    def means(values: Sequence[Mapping[str, float]], by: int = 1) -> dict[str, float]:
        return {n: statistics.fmean(one[n] for one in values) / by for n in values[0]}

    name = trials[0].configuration
    far_bytes = means([t.far_bytes for t in trials], spec.nodes)
    link_bytes = sum(far_bytes.values())
    return Row(
        configuration=name,
        rate_mbit=trials[0].rate_mbit,
        tokens=spec.batch * spec.tokens * spec.accumulation * spec.processes,
        step_s=Estimate(step_s, step_s, step_s),
        steps_s=tuple(step.step_s for step in steps),
        parts_s={part: statistics.fmean(s.parts_s[part] for s in middle) for part in PARTS},
        far_bytes=far_bytes,
        link_bytes=Estimate(link_bytes, link_bytes, link_bytes),
        interface_excess=_interface_excess(trials),
        stored_weight_bytes=trials[0].stored_weight_bytes,
        peak_bytes=peaks.get(Configuration.of(name).policy),
    )


def _interface_excess(trials: Sequence[Trial]) -> float | None:
    """Return the share by which interfaces count more than collectives."""
    counted = sum(sum(t.far_bytes.values()) for t in trials)
    passed = statistics.median(sum(t.interface_bytes) for t in trials) * len(trials)
    return None if passed < 0.05 * counted or not counted else passed / counted - 1


def _values(
    spec: Spec, rows_of: Callable[[Sequence[int]], Mapping[str, Row]], chosen: Sequence[int]
) -> dict[tuple[str, str], float | Ratio]:
    """Return every figure that has an interval, by configuration and figure."""
    rows = rows_of(chosen)
    found: dict[tuple[str, str], float | Ratio] = {}
    for name, row in rows.items():
        found[name, "step_s"] = row.step_s.value
        found[name, "link_bytes"] = row.link_bytes.value
    for one in spec.compared:
        comparison = Comparison.of(rows, one)
        for figure in DERIVED:
            if isinstance(value := figure.of(comparison), float | Ratio):
                found[one.name, figure.name] = value
    return found


def jackknife(
    numbers: Sequence[int], figures: Callable[[Sequence[int]], Mapping[Key, float | Ratio]]
) -> dict[Key, Estimate]:
    """Estimate figures from the repetitions `numbers`, each also without one of them.

    The interval is Student's, with the jackknife's variances; a quotient's is Fieller's ("Some
    problems in interval estimation", 1954). Few repetitions have none.
    """
    values, count = figures(numbers), len(numbers)
    try:
        from scipy.stats import t
    except ImportError as error:
        raise missing_package_error("scipy") from error
    enough = count >= MIN_REPETITIONS
    quantile = float(t.ppf(0.975, count - 1)) if enough else math.nan
    others = [figures([n for n in numbers if n != out]) for out in numbers if enough]
    return {
        key: _interval(_ratio(value), [_ratio(other[key]) for other in others], quantile)
        for key, value in values.items()
    }


def _ratio(value: float | Ratio) -> Ratio:
    return value if isinstance(value, Ratio) else Ratio(value, 1.0)


def _interval(value: Ratio, others: Sequence[Ratio], quantile: float) -> Estimate:
    """Return the interval of the quotients r for which numerator - r * denominator may be zero."""
    n, d = value
    if not others:
        return Estimate(n / d if d > 0 else math.nan, math.nan, math.nan)

    def covariance(one: Sequence[float], other: Sequence[float]) -> float:
        return statistics.covariance(one, other) * (len(others) - 1) ** 2 / len(others)

    ns, ds = zip(*others, strict=True)
    var_n, var_d, cov = covariance(ns, ns), covariance(ds, ds), covariance(ns, ds)
    if not d - quantile * math.sqrt(var_d) > 0:
        return Estimate(math.nan, math.nan, math.nan)
    scale = d**2 - quantile**2 * var_d
    middle = (n * d - quantile**2 * cov) / scale
    root = d**2 * var_n - 2 * n * d * cov + n**2 * var_d - quantile**2 * (var_n * var_d - cov**2)
    half = quantile * math.sqrt(max(root, 0.0)) / scale
    return Estimate(n / d, middle - half, middle + half)


def headline(findings: Findings) -> str:
    """Describe the share that compression pays for: first method, first rate."""
    if not findings.comparisons:
        return "No comparison: it needs a policy beside none and a method beside the references."
    one = findings.comparisons[0]
    if one.outcome == "few":
        sentence = (
            f"{_where(one)} there are too few repetitions for an interval, and for the share of "
            f"recomputation that compression pays for: use --repetitions {MIN_REPETITIONS} or more."
        )
        return f"{sentence} {title(one.method)} {freed}." if (freed := _freed(one)) else sentence
    return f"{_cost(one)} {_effect(one)}"


def _where(one: ComparisonRow) -> str:
    return "On a link that is not shaped" if one.rate_mbit is None else f"At {link(one.rate_mbit)}"


def _cost(one: ComparisonRow) -> str:
    cost, work = one.values["cost_s"], one.values["work_s"].value
    where, what = _where(one), "recomputation" + f" ({one.policy})" * (one.policy != "block")
    if one.outcome == "busy":
        return (
            f"{where} the machine is too busy to time {what}: with it a step is {_ends(cost)} "
            f"(95%), and its own work takes {number(work)} s."
        )
    if one.outcome == "free":
        return f"{where} {what} does not lengthen the step measurably (95%: {_ends(cost)})."
    return f"{where} {what} costs {number(cost.value)} s a step."


def _effect(one: ComparisonRow) -> str:
    shorter, share, name = one.values["shorter_s"], one.values["share_paid"], title(one.method)
    freed = f"{name} {freed} and " if (freed := _freed(one)) else f"{name} "
    if shorter.low <= 0 <= shorter.high:
        longer = Estimate(-shorter.value, -shorter.high, -shorter.low)
        found = f"{freed}does not change the step measurably (95%: {_ends(longer)})"
    else:
        changed = f"{'shortens' if shorter.value > 0 else 'lengthens'} the step by"
        found = f"{freed}{changed} {number(abs(shorter.value))} s"
    ends = f"(95%: {100 * share.low:.0f} to {100 * share.high:.0f}%)"
    if one.outcome == "share":
        return f"{found}: it pays for {100 * share.value:.0f}% of the recomputation {ends}."
    change = one.values["change_s"]
    together = (
        f"Both together {'lengthen' if change.value > 0 else 'shorten'} the step by "
        f"{number(abs(change.value))} s (95%: {_ends(change)})."
    )
    pays = {
        "all": ": it pays for all of the recomputation",
        "none": f": it is not shown to pay for any of the recomputation {ends}",
    }
    return f"{found}{pays.get(one.outcome, '')}. {together}"


def _freed(one: ComparisonRow) -> str:
    """Describe the freed link time; bytes if the link has no rate."""
    if not one.is_checked:
        return ""
    if one.rate_mbit is None:
        value, unit, where = one.values["freed_bytes"].value / MB, "MB", "a step and node"
    else:
        value, unit, where = one.values["freed_s"].value, "s", "of the link"
    return f"{'frees' if value >= 0 else 'takes'} {number(abs(value))} {unit} {where}"


def _ends(longer: Estimate) -> str:
    """Describe the interval by which a step becomes longer, without a negative time."""
    low, high = number(abs(longer.low)), number(abs(longer.high))
    if longer.low < 0 < longer.high:
        return f"{low} s shorter to {high} s longer"
    return f"{low} to {high} s longer" if longer.low >= 0 else f"{high} to {low} s shorter"


def byte_notes(findings: Findings) -> list[str]:
    """Describe rates at which interfaces contradict the collectives' bytes, or count none."""
    notes = []
    for rate in findings.rates:
        rows = findings.at(rate)
        wrong = [row for row in rows if not row.is_checked]
        if wrong:
            worst = max((row.interface_excess or 0.0 for row in wrong), key=abs)
            notes.append(
                f"BYTES NOT CONFIRMED at {link(rate)}: the interfaces count {100 * worst:+.0f}% "
                f"({len(wrong)} of {len(rows)} configurations); {TOLERANCE:.0%} are expected. The "
                "headline leaves these bytes out. Other programs on the interface add bytes."
            )
        elif all(row.interface_excess is None for row in rows):
            notes.append(
                f"{link(rate)}: no interface counts these bytes (RDMA, shared memory or another "
                "interface), so they are the collectives' counts, not checked."
            )
    return notes
